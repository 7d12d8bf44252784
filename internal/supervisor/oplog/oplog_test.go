package oplog

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func open(t *testing.T, dir string, limits Limits) *Log {
	t.Helper()
	l, err := Open(Config{Dir: dir, Header: &harenav1.LogHeader{SandboxId: "x"}, Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func read(t *testing.T, l *Log) (out []*harenav1.LogEntry) {
	t.Helper()
	err := l.Read(context.Background(), &harenav1.LogRequest{}, func(e *harenav1.LogEntry) error {
		out = append(out, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func file(content *harenav1.LogBytes) *harenav1.LogEntry {
	return &harenav1.LogEntry{Event: &harenav1.LogEntry_File{File: &harenav1.LogFile{Operation: "write", Content: content}}}
}

func TestLogOutlivesItsSupervisor(t *testing.T) {
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789"), 100000)
	l := open(t, dir, Limits{})
	l.Append(file(l.Content([]byte("small"))))
	l.Append(file(l.Content(big)))
	l.Sync()
	// It died while it wrote a line.
	f, err := os.OpenFile(l.path(), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"number":"3","fi`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	l = open(t, dir, Limits{})
	l.Append(file(l.Content(big)))
	var got []byte
	numbers := int64(0)
	for _, e := range read(t, l) {
		if c := e.GetContent(); c != nil {
			got = append(got, c.GetData()...)
			continue
		}
		if e.GetNumber() != numbers {
			t.Errorf("number %d, want %d", e.GetNumber(), numbers)
		}
		numbers++
	}
	if numbers != 4 || !bytes.Equal(got, big) {
		t.Errorf("%d entries, %d bytes of content", numbers, len(got))
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestLimits(t *testing.T) {
	l := open(t, t.TempDir(), Limits{Bytes: 4 << 10, One: 8 << 10, Content: 16 << 10})
	if b := l.Content(make([]byte, 9<<10)); !b.GetDropped() || b.GetSha256() == "" || b.GetSize() != 9<<10 {
		t.Errorf("too large: %v", b)
	}
	for i := range 3 {
		if b := l.Content(bytes.Repeat([]byte{byte(i)}, 7<<10)); b.GetDropped() != (i == 2) {
			t.Errorf("content %d: dropped %v", i, b.GetDropped())
		}
	}
	for range 100 {
		l.Append(file(nil))
	}
	all := read(t, l)
	last := all[len(all)-1]
	if !strings.Contains(last.GetStop().GetReason(), "limit") || last.GetNumber() != int64(len(all)-1) || len(all) > 100 {
		t.Errorf("%d entries, the last is %v", len(all), last)
	}
}

// A log that ended at its limit stays so under the next supervisor: nothing is logged after a gap.
func TestLogThatEndedStaysEnded(t *testing.T) {
	dir := t.TempDir()
	limits := Limits{Bytes: 4 << 10}
	l := open(t, dir, limits)
	for range 100 {
		l.Append(file(nil))
	}
	before := read(t, l)
	l = open(t, dir, Limits{})
	l.Append(file(nil))
	after := read(t, l)
	if len(after) != len(before) || after[len(after)-1].GetStop() == nil {
		t.Errorf("%d entries, then %d, the last is %v", len(before), len(after), after[len(after)-1])
	}
}

// Content that is lost or damaged is told as dropped; the rest of the log is told.
func TestLostContent(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Limits{})
	var all []*harenav1.LogBytes
	for i := range 3 {
		all = append(all, l.Content(bytes.Repeat([]byte{byte(i)}, 10000)))
		l.Append(file(all[i]))
	}
	l.Sync()
	if len(l.unsynced) != 0 {
		t.Errorf("not synced: %v", l.unsynced)
	}
	if err := os.Remove(l.contentFile(all[0].GetSha256())); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.contentFile(all[1].GetSha256()), []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	var dropped []bool
	parts := 0
	for _, e := range read(t, open(t, dir, Limits{})) {
		if e.GetFile() != nil {
			dropped = append(dropped, e.GetFile().GetContent().GetDropped())
		}
		if c := e.GetContent(); c != nil && c.GetSha256() == all[2].GetSha256() {
			parts++
		}
	}
	if !slices.Equal(dropped, []bool{true, true, false}) || parts != 1 {
		t.Errorf("dropped %v, %d parts", dropped, parts)
	}
}
