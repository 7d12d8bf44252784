package layer

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// Data that is mounted from the store itself: a store that is away, and a blob that is there in another form only, are errors
// that say so.
func TestDirect(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	root := filepath.Join(t.TempDir(), "store")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	store, err := blob.NewDir(root)
	if err != nil {
		t.Fatal(err)
	}
	var events []string
	open := func(node, direct string) *Store {
		s, err := Open(t.TempDir(), Limits{}, WithShared(store, SharedOptions{
			Node: node, URL: "test", Direct: direct, Event: func(kind, _ string) { events = append(events, kind) },
		}))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	content := strings.Repeat("content ", 2000)
	raw := importFiles(t, open("aaaaaa", root), "raw", Base, entry{"f", content, 0}).Layer
	other := importFiles(t, open("bbbbbb", ""), "other", Base, entry{"f", "other " + content, 0}).Layer

	s := open("cccccc", root)
	m := openMounts(t, s, 4)
	for _, l := range []Layer{raw, other} {
		if _, err := s.Find(ctx, l.Digest); err != nil {
			t.Fatal(err)
		}
		if err := s.remote.fetchObject(ctx, s, l.Meta); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.Acquire(ctx, other.Digest, "x"); errs.KindOf(err) != errs.Precondition || !strings.Contains(err.Error(), "as it is") {
		t.Errorf("a blob that is there compressed only: %v", err)
	}
	if err := os.Rename(root, root+".away"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Acquire(ctx, raw.Digest, "x"); errs.KindOf(err) != errs.Precondition || !strings.Contains(err.Error(), "shared store cannot be used") {
		t.Errorf("a store that is away: %v", err)
	}
	if err := os.Rename(root+".away", root); err != nil {
		t.Fatal(err)
	}
	dir, err := m.Acquire(ctx, raw.Digest, "x")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != content {
		t.Errorf("read %d bytes, %v", len(b), err)
	}
	if got := strings.Join(events, " "); got != "store.outage store.recovered" {
		t.Errorf("events: %s", got)
	}
	if err := m.Release("x"); err != nil {
		t.Error(err)
	}
}
