package layer

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// mortal is a store of which a process makes use until it dies: after a number of changes nothing gets through any more.
type mortal struct {
	blob.Store
	mu      sync.Mutex
	left    int
	changes int
	hook    func(name string) // before the first manifest is removed
}

var errDead = errors.New("dead")

func (m *mortal) alive(change bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left == 0 {
		return errDead
	}
	if change {
		m.changes++
		m.left--
	}
	return nil
}

func (m *mortal) Put(ctx context.Context, name string, r io.Reader) error {
	if err := m.alive(true); err != nil {
		return err
	}
	return m.Store.Put(ctx, name, r)
}

func (m *mortal) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	if err := m.alive(false); err != nil {
		return nil, err
	}
	return m.Store.Get(ctx, name, off, n)
}

// Delete dies between any two names.
func (m *mortal) Delete(ctx context.Context, names ...string) error {
	for _, n := range names {
		if m.hook != nil && strings.HasPrefix(n, "manifests/") {
			m.hook(n)
			m.hook = nil
		}
		if err := m.alive(true); err != nil {
			return err
		}
		if err := m.Store.Delete(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// A collector that dies at any point loses nothing that turned out to be in use, parents included; the next one finishes its work.
func TestCollectorDies(t *testing.T) {
	ctx := context.Background()
	step := 1
	if testing.Short() {
		step = 3
	}
	for kill, ended := 0, false; !ended; kill += step {
		root := t.TempDir()
		dir, err := blob.NewDir(root)
		if err != nil {
			t.Fatal(err)
		}
		a := openShared(t, dir, "aaaaaa")
		base := importFiles(t, a, "base", Base, entry{"f", "base", 0}).Layer
		gone := importFiles(t, a, "gone", Base, entry{"f", "gone", 0}).Layer
		used := importFiles(t, a, "used", Base, entry{"f", "used", 0}).Layer
		over := used.Manifest
		over.Kind, over.Parents = Snapshot, []Digest{base.Digest}
		im, err := a.publishAll(ctx, Ref{Project: DefaultProject, Name: "child", Tag: "1"}, []*staged{{dir: "/nonexistent", manifest: over}}, nil) // its objects are there
		if err != nil {
			t.Fatal(err)
		}
		child := im.Layer.Digest
		for _, n := range []string{"base", "gone", "used", "child:1"} {
			if _, err := a.Remove(ctx, "", n); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.remote.unuse(ctx, []Digest{base.Digest, gone.Digest, used.Digest, child}); err != nil {
			t.Fatal(err)
		}
		age(t, root)
		// Another node finds the child at the last moment.
		m := &mortal{Store: dir, left: kill}
		m.hook = func(string) {
			if err := openShared(t, dir, "cccccc").remote.use(ctx, child); err != nil {
				t.Errorf("use: %v", err)
			}
		}
		dies := openShared(t, m, "bbbbbb")
		_, err = dies.CollectShared(ctx, SharedGCOptions{Grace: minGrace})
		ended = err == nil
		if m.hook != nil { // died before it removed anything
			m.hook("")
		}
		// Those who come at once and those who come later.
		later := time.Now().Add(-2 * restoreAfter)
		err = filepath.WalkDir(filepath.Join(root, "removing"), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			return os.Chtimes(path, later, later)
		})
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if kill%2 == 0 { // else the next collector has to do it
			findSound(t, openShared(t, dir, "dddddd"), child, base.Digest)
		}
		next := openShared(t, dir, "eeeeee")
		for range 2 {
			if _, err := next.CollectShared(ctx, SharedGCOptions{Grace: minGrace}); err != nil {
				t.Fatalf("killed at %d: %v", kill, err)
			}
			findSound(t, openShared(t, dir, "ffffff"), child, base.Digest)
			age(t, root)
		}
		// Garbage that was put back goes in the end.
		if _, err := next.CollectShared(ctx, SharedGCOptions{Grace: minGrace}); err != nil {
			t.Fatal(err)
		}
		if _, err := openShared(t, dir, "gggggg").Find(ctx, gone.Digest); !errs.Is(err, errs.NotFound) {
			t.Errorf("killed at %d: garbage: %v", kill, err)
		}
		if left, err := dir.List(ctx, restoredUses, "", 10); err != nil || len(left) > 0 {
			t.Errorf("killed at %d: %v, %v", kill, left, err)
		}
		if t.Failed() {
			t.FailNow()
		}
		if ended && kill < 10 {
			t.Errorf("only %d changes: the test tests nothing", kill)
		}
	}
}

func findSound(t *testing.T, s *Store, layers ...Digest) {
	t.Helper()
	for _, d := range layers {
		if problems, err := s.verifyShared(context.Background(), d); err != nil || len(problems) > 0 {
			t.Errorf("layer %s: %v, %v", d, problems, err)
		}
	}
}
