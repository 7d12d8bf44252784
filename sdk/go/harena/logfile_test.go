package harena

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"testing"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const logHeader = `{"header":{"version":1,"spec":{"image":"debian:12"}}}`

// hostileLogs are logs, and what is wrong with each; nothing for those that are read.
func hostileLogs() [][2]string {
	data := strings.Repeat("content", 1000)
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(data)))
	part := func(sum, s string) string {
		return fmt.Sprintf(`{"number":"1","content":{"sha256":"%s","data":"%s"}}`, sum, base64.StdEncoding.EncodeToString([]byte(s)))
	}
	start := `{"number":"1","start":{"command_id":"c1","command":{"shell":"true"}}}`
	end := `{"number":"2","end":{"command_id":"c1","result":{"stdout":{"total":"1","recorded":"1"},"duration":"1s"}}}`
	write := fmt.Sprintf(`{"number":"1","file":{"operation":"write","path":"L3Q=","content":{"size":"%d","sha256":"%s"}}}`, len(data), sum)
	log := func(lines ...string) string { return logHeader + "\n" + strings.Join(lines, "\n") + "\n" }
	return [][2]string{
		{log(start, end), ""},
		{log(), ""},
		{log(start, end[:30]) + end[:30], "line 3 is not of an operation log"},
		{strings.TrimSuffix(log(start, end[:30]), "\n"), ""}, // cut off
		{strings.TrimSuffix(log(start, end), "\n"), ""},
		{log(part(sum, data[:100]), part(sum, data[100:]), write), ""},
		{log(write), ""}, // without its content
		{log(part(sum, data[:100]), write), "not what its digest says"},
		{log(part(sum, data[:100])), "not what its digest says"},
		{log(part(sum, data[:100])) + part(sum, data)[:90], ""}, // cut off
		{log(part("../../x", data)), "not a digest"},
		{log(part(strings.ToUpper(sum), data)), "not a digest"},
		{"", "no header"},
		{start + "\n" + logHeader, "does not begin with a header"},
		{log(logHeader), "entry 0 comes after entry 0"},
		{log(`{"number":"1","header":{"version":1}}`), "two headers"},
		{`{"header":{"version":2}}`, "version is 2"},
		{log(end, start), "ends, and does not run"},
		{log(start, strings.Replace(start, `"1"`, `"2"`, 1)), "starts a second time"},
		{log(start, end, strings.Replace(end, `"2"`, `"3"`, 1)), "ends, and does not run"},
		{log(strings.Replace(start, `"1"`, `"5"`, 1), end), "entry 2 comes after entry 5"},
		{log(start, strings.Replace(end, `"recorded":"1"`, `"recorded":"-5"`, 1)), "it has -5"},
		{log(start, strings.Replace(end, `"recorded":"1"`, `"recorded":"9223372036854775807"`, 1)), "of 1 bytes"},
		{log(start, strings.Replace(end, `"recorded":"1"`, `"recorded":"9223372036854775808"`, 1)), "not of an operation log"},
		{log(strings.Replace(write, `"size":"7000"`, `"size":"-1"`, 1)), "says -1"},
		{log(`{"number":"1","file":{"content":{"size":"9","inline":"AA=="}}}`), "says 9"},
		{log("[]"), "line 2 is not of an operation log"},
		{log(`{"number":"1","future":{}}`), ""},
	}
}

func TestReadLog(t *testing.T) {
	for _, c := range hostileLogs() {
		l, err := ReadLog(strings.NewReader(c[0]))
		switch {
		case c[1] == "" && err != nil:
			t.Errorf("%.300s: %v", c[0], err)
		case c[1] != "" && (err == nil || !strings.Contains(err.Error(), c[1])):
			t.Errorf("%.300s: error %v, want %q", c[0], err, c[1])
		case c[1] != "" && !IsKind(err, KindInvalid):
			t.Errorf("%.300s: %v", c[0], err)
		}
		if err == nil {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	cut, err := ReadLog(strings.NewReader(logHeader + "\n{\"num"))
	if err != nil {
		t.Fatal(err)
	}
	if !cut.CutOff {
		t.Error("a line that is cut off is not told")
	}
	if err := cut.Close(); err != nil {
		t.Error(err)
	}
}

func FuzzReadLog(f *testing.F) {
	for _, c := range hostileLogs() {
		f.Add(c[0])
	}
	f.Fuzz(func(t *testing.T, text string) {
		l, err := ReadLog(strings.NewReader(text))
		if err != nil {
			return
		}
		defer func() { _ = l.Close() }()
		if l.Header == nil {
			t.Fatal("no header")
		}
		p := &player{log: l, running: map[string]*played{}}
		for _, e := range l.Entries {
			_ = DescribeEntry(e)
			if st := e.GetStart(); st != nil {
				_, _ = p.command(st)
			}
			for _, b := range []*harenav1.LogBytes{e.GetInput().GetData(), e.GetFile().GetContent()} {
				if r, err := l.open(b); err == nil {
					n, _ := io.Copy(io.Discard, r)
					if r.Close(); n != b.GetSize() {
						t.Fatalf("%d bytes of %d", n, b.GetSize())
					}
				}
			}
			if end := e.GetEnd(); end != nil {
				r := &played{out: newDigest(end.GetResult().GetStdout()), outErr: newDigest(end.GetResult().GetStderr())}
				_, _ = r.out.Write([]byte(text))
				_ = compare(end, &Result{}, r)
			}
		}
	})
}
