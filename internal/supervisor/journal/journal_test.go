package journal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

func open(t *testing.T, dir string, limit int) *Journal {
	t.Helper()
	j, err := Open(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func take(t *testing.T, j *Journal, id string) *Entry {
	t.Helper()
	e, err := j.Take(id)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// A supervisor may die at every byte that it writes: before the first line is whole the operation never was, until the second is
// its end is not known, and after that it is.
func TestEveryPointOfDeath(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 0)
	if e := take(t, j, "op"); e != nil {
		t.Fatalf("a new journal knows %v", e)
	}
	e := &Entry{OpID: "op", Request: "aa", Command: "c1", Number: 1}
	if err := j.Start(e); err != nil {
		t.Fatal(err)
	}
	begun, err := os.ReadFile(j.file("op"))
	if err != nil {
		t.Fatal(err)
	}
	e.Result, e.Stdout = json.RawMessage(`{"exit_code":3}`), []byte("out")
	if err := j.Finish(e); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(j.file("op"))
	if err != nil || !bytes.HasPrefix(whole, begun) {
		t.Fatalf("%s, %v", whole, err)
	}
	for n := range len(whole) + 1 {
		if err := os.WriteFile(j.file("op"), whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		next := open(t, dir, 0)
		all, err := next.All()
		if err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		got := take(t, next, "op")
		switch {
		case n < len(begun):
			if got != nil || len(all) != 0 {
				t.Errorf("after %d bytes: %v; its effect cannot have begun", n, got)
			}
			if err := next.Start(&Entry{OpID: "op", Request: "bb"}); err != nil { // it is the caller's now
				t.Fatal(err)
			}
			if again, err := next.Load("op"); err != nil || again.Request != "bb" {
				t.Errorf("after %d bytes: %v, %v", n, again, err)
			}
		case n < len(whole):
			if got == nil || got.Result != nil || len(all) != 1 || !errs.Is(got.Indeterminate(), errs.Precondition) || !strings.Contains(got.Indeterminate().Error(), "command c1") {
				t.Errorf("after %d bytes: %v", n, got)
			}
		default:
			if got == nil || string(got.Result) != `{"exit_code":3}` || string(got.Stdout) != "out" || got.Request != "aa" {
				t.Errorf("whole: %v", got)
			}
		}
	}
}

func TestAnIDIsTakenOnce(t *testing.T) {
	j := open(t, t.TempDir(), 0)
	if take(t, j, "a") != nil {
		t.Error("known")
	}
	if _, err := j.Take("a"); !errs.Is(err, errs.Exists) {
		t.Errorf("taken twice: %v", err)
	}
	if err := j.Start(&Entry{OpID: "a", Kind: "write"}); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Take("a"); !errs.Is(err, errs.Exists) {
		t.Errorf("while it runs: %v", err)
	}
	if err := j.Cancel("a"); err != nil {
		t.Fatal(err)
	}
	if take(t, j, "a") != nil {
		t.Error("what was cancelled is known")
	}
	if err := j.Start(&Entry{OpID: "a", Kind: "write"}); err != nil {
		t.Fatal(err)
	}
	j.Leave("a")
	if err := j.Cancel("a"); err != nil { // not held: it stays
		t.Fatal(err)
	}
	if e := take(t, j, "a"); e == nil || !strings.Contains(e.Indeterminate().Error(), "file operation write") {
		t.Errorf("what was left is %v", e)
	}
}

// IDs that were cancelled do not count; those of an earlier supervisor do. Names of files are no IDs.
func TestIDsAreBounded(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 2)
	for i, id := range []string{"../x", strings.Repeat("y", maxID)} {
		if take(t, j, id) != nil {
			t.Error(i)
		}
		if err := j.Start(&Entry{OpID: id}); err != nil {
			t.Fatal(err)
		}
	}
	for _, next := range []*Journal{j, open(t, dir, 2)} {
		if _, err := next.Take("third"); !errs.Is(err, errs.Quota) {
			t.Errorf("beyond the limit: %v", err)
		}
	}
	if err := j.Cancel("../x"); err != nil {
		t.Fatal(err)
	}
	if take(t, j, "third") != nil {
		t.Error("known")
	}
	for id, ok := range map[string]bool{"": true, "a b~": true, strings.Repeat("x", maxID): true, strings.Repeat("x", maxID+1): false, "a\n": false, "é": false, "\x7f": false} {
		if err := CheckID(id); (err == nil) != ok {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// A file that was damaged is an error, never an operation that may be done.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 0)
	take(t, j, "op")
	if err := j.Start(&Entry{OpID: "op"}); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"x\n", "{}\nx\n", "{\"number\":-1}\n", "\x00\x00\n"} {
		if err := os.WriteFile(j.file("op"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if e, err := open(t, dir, 0).Take("op"); err == nil {
			t.Errorf("%q is taken for %v", text, e)
		}
	}
}

func BenchmarkOperation(b *testing.B) {
	j, err := Open(b.TempDir(), b.N+1)
	if err != nil {
		b.Fatal(err)
	}
	for i := range b.N {
		e := &Entry{OpID: fmt.Sprint(i), Request: strings.Repeat("a", 64), Command: "c1", Line: "echo"}
		if _, err := j.Take(e.OpID); err != nil {
			b.Fatal(err)
		}
		if err := j.Start(e); err != nil {
			b.Fatal(err)
		}
		e.Result = json.RawMessage(`{"exit_code":0}`)
		if err := j.Finish(e); err != nil {
			b.Fatal(err)
		}
	}
}
