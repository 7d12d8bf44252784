package blob_test

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// A store whose directory is away, or the empty mount point of which is there, says nothing about its objects.
func TestDirAway(t *testing.T) {
	ctx := context.Background()
	for _, empty := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "store")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		s, err := blob.NewDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Stat(ctx, "a/b"); !errs.Is(err, errs.NotFound) {
			t.Errorf("a new store: %v", err)
		}
		if err := s.Put(ctx, "a/b", strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		if empty {
			if err := os.MkdirAll(filepath.Join(dir, "lost+found"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		known, err := blob.Open(ctx, "file://"+dir, blob.Options{Known: true, Retry: &blob.RetryPolicy{}})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []blob.Store{s, known} {
			_, getErr := s.Get(ctx, "a/b", 0, -1)
			_, statErr := s.Stat(ctx, "a/b")
			_, listErr := s.List(ctx, "", "", 10)
			for call, err := range map[string]error{
				"get": getErr, "stat": statErr, "list": listErr, "delete": s.Delete(ctx, "a/b"), "put": s.Put(ctx, "a/c", strings.NewReader("y")),
			} {
				if !blob.Transient(err) || !strings.Contains(err.Error(), "away") {
					t.Errorf("empty %v: %s: %v", empty, call, err)
				}
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(dir+".away", dir); err != nil {
			t.Fatal(err)
		}
		for _, s := range []blob.Store{s, known} {
			if _, err := s.Stat(ctx, "a/c"); !errs.Is(err, errs.NotFound) {
				t.Errorf("what was never there: %v", err)
			}
			b, err := s.Get(ctx, "a/b", 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(b); err != nil || string(got) != "x" {
				t.Errorf("after it is back: %q, %v", got, err)
			}
			b.Close()
		}
	}
	// The first use of a store is no outage, but a mistake.
	if _, err := blob.Open(ctx, "file:///nowhere/at/all", blob.Options{}); !errs.Is(err, errs.NotFound) {
		t.Errorf("a directory that never was: %v", err)
	}
}
