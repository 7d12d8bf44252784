package layer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

func openShared(t *testing.T, store blob.Store, node string) *Store {
	t.Helper()
	s, err := Open(t.TempDir(), Limits{}, WithShared(store, SharedOptions{Node: node, URL: "test"}))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *Store) forgetRecent() {
	s.remote.mu.Lock()
	defer s.remote.mu.Unlock()
	clear(s.remote.tags)
	clear(s.remote.missing)
	clear(s.remote.synced)
	s.remote.down = time.Time{}
}

// What one node imports, another one finds, lists and reads back whole; a name moves for both.
func TestSharedBetweenNodes(t *testing.T) {
	ctx := context.Background()
	store := blob.NewMemory()
	a, b := openShared(t, store, "aaaaaa"), openShared(t, store, "bbbbbb")
	one := importFiles(t, a, "x:1", Base, entry{"f", "one", 0}).Layer
	got, err := b.Resolve(ctx, "", "x:1")
	if err != nil || got.Digest != one.Digest || b.Place(got) != "lazy" || a.Place(one) != "shared" {
		t.Fatalf("%v, %v", got.Digest, err)
	}
	page, _, err := b.List(ctx, ListOptions{Limit: 10})
	if err != nil || len(page) != 1 || !slices.Equal(page[0].Names, []string{"x:1"}) {
		t.Errorf("listed %v, %v", page, err)
	}
	if problems, err := b.Verify(ctx, one.Digest, nil); err != nil || len(problems) > 0 {
		t.Errorf("verify: %v, %v", problems, err)
	}
	two := importFiles(t, a, "x:1", Base, entry{"f", "two", 0}).Layer
	b.forgetRecent()
	if got, err := b.Resolve(ctx, "", "x:1"); err != nil || got.Digest != two.Digest {
		t.Errorf("after the name moved: %v, %v", got.Digest, err)
	}
	if _, err := b.Remove(ctx, "", "x:1"); err != nil {
		t.Fatal(err)
	}
	a.forgetRecent()
	if _, err := a.Resolve(ctx, "", "x:1"); !errs.Is(err, errs.NotFound) {
		t.Errorf("a name that another node removed: %v", err)
	}
}

// A store that is away, or an empty directory in its place, takes nothing from a node.
func TestSharedStoreAway(t *testing.T) {
	ctx := context.Background()
	root := filepath.Join(t.TempDir(), "store")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	store, err := blob.NewDir(root)
	if err != nil {
		t.Fatal(err)
	}
	s := openShared(t, store, "aaaaaa")
	l := importFiles(t, s, "x:1", Base, entry{"f", "one", 0}).Layer
	if err := os.Rename(root, root+".away"); err != nil {
		t.Fatal(err)
	}
	for _, empty := range []bool{false, true} {
		if empty {
			if err := os.Mkdir(root, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		s.forgetRecent()
		if got, err := s.Resolve(ctx, "", "x:1"); err != nil || got.Digest != l.Digest {
			t.Errorf("empty %v: %v, %v", empty, got.Digest, err)
		}
		s.forgetRecent()
		if page, _, err := s.List(ctx, ListOptions{Limit: 10}); err != nil || len(page) != 1 {
			t.Errorf("empty %v: listed %v, %v", empty, page, err)
		}
		s.forgetRecent()
		if _, err := s.Resolve(ctx, "", "other"); errs.KindOf(err) != errs.Precondition {
			t.Errorf("empty %v: a name that is not known: %v", empty, err)
		}
		if _, err := s.CollectShared(ctx, SharedGCOptions{}); err == nil {
			t.Errorf("empty %v: collected", empty)
		}
		in := bytes.NewReader(tarOf(t, entry{"f", "new", 0}))
		if _, err := s.ImportTar(ctx, in, ImportOptions{Name: "y", Kind: Base}); errs.KindOf(err) != errs.Precondition {
			t.Errorf("empty %v: import: %v", empty, err)
		}
	}
	if err := os.RemoveAll(root); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(root+".away", root); err != nil {
		t.Fatal(err)
	}
	s.forgetRecent()
	importFiles(t, s, "y", Base, entry{"f", "new", 0})
}

// A node that remembers a store does not begin anew with an empty directory in its place, under whatever URL.
func TestSharedStoreEmptyAtFirst(t *testing.T) {
	ctx := context.Background()
	data := t.TempDir()
	open := func(store blob.Store, url string) *Store {
		s, err := Open(data, Limits{}, WithShared(store, SharedOptions{Node: "aaaaaa", URL: url}))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	full, empty := blob.NewMemory(), blob.NewMemory()
	if KnowsStore(data, "test") {
		t.Error("a store that nobody used is known")
	}
	s := open(full, "test")
	l := importFiles(t, s, "x:1", Base, entry{"f", "one", 0}).Layer
	if !KnowsStore(data, "test") || KnowsStore(data, "other") {
		t.Error("it is not known which store was used")
	}
	alone, err := Open(data, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	var e *errs.Error
	if _, err := alone.Resolve(ctx, "", "x:1"); !errors.As(err, &e) || e.Kind != errs.NotFound || !strings.Contains(e.Hint, "--store") || !strings.Contains(e.Hint, string(l.Digest)) {
		t.Errorf("a shared name on a node that has no store: %v", err)
	}
	if !KnowsStores(data) || KnowsStores(t.TempDir()) {
		t.Error("it is not known that a store was used")
	}
	s = open(empty, "other")
	if err := s.CheckShared(ctx); errs.KindOf(err) != errs.Precondition {
		t.Errorf("an empty store: %v", err)
	}
	in := bytes.NewReader(tarOf(t, entry{"f", "new", 0}))
	if _, err := s.ImportTar(ctx, in, ImportOptions{Name: "y", Kind: Base}); errs.KindOf(err) != errs.Precondition {
		t.Errorf("import into it: %v", err)
	}
	if got, err := s.Resolve(ctx, "", "x:1"); err != nil || got.Digest != l.Digest {
		t.Errorf("what is known: %v, %v", got.Digest, err)
	}
	if found, err := empty.List(ctx, "", "", 10); err != nil || len(found) > 0 {
		t.Errorf("it is not empty any more: %v, %v", found, err)
	}
	// The same store by another way.
	if err := open(full, "other").CheckShared(ctx); err != nil {
		t.Error(err)
	}
}

// Collection in the shared store keeps what names and nodes reach, and what is young.
func TestCollectShared(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	store, err := blob.NewDir(root)
	if err != nil {
		t.Fatal(err)
	}
	a, b := openShared(t, store, "aaaaaa"), openShared(t, store, "bbbbbb")
	named := importFiles(t, a, "named", Base, entry{"f", "named", 0}).Layer
	used := importFiles(t, a, "used", Base, entry{"f", "used", 0}).Layer
	gone := importFiles(t, a, "gone", Base, entry{"f", "gone", 0}).Layer
	if err := b.remote.use(ctx, used.Digest); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"used", "gone"} {
		if _, err := a.Remove(ctx, "", n); err != nil {
			t.Fatal(err)
		}
	}
	// The importing node's own uses end with its copies.
	for _, l := range []Layer{named, used, gone} {
		if err := store.Delete(ctx, a.remote.useName(l.Digest)); err != nil {
			t.Fatal(err)
		}
	}
	if plan, err := b.CollectShared(ctx, SharedGCOptions{}); err != nil || len(plan.Layers)+len(plan.Objects) != 0 {
		t.Errorf("young: %+v, %v", plan, err)
	}
	old := time.Now().Add(-48 * time.Hour)
	for _, dir := range []string{"blobs", "manifests"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			return os.Chtimes(path, old, old)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	dry, err := b.CollectShared(ctx, SharedGCOptions{DryRun: true})
	if err != nil || !slices.Equal(dry.Layers, []Digest{gone.Digest}) {
		t.Errorf("dry run: %+v, %v", dry, err)
	}
	plan, err := b.CollectShared(ctx, SharedGCOptions{})
	if err != nil || !slices.Equal(plan.Layers, []Digest{gone.Digest}) || len(plan.Objects) == 0 {
		t.Errorf("collected %+v, %v", plan, err)
	}
	c := openShared(t, store, "cccccc")
	for _, l := range []Layer{named, used} {
		if problems, err := c.verifyShared(ctx, l.Digest); err != nil || len(problems) > 0 {
			t.Errorf("%s: %v, %v", l.Digest, problems, err)
		}
	}
	if _, err := c.Find(ctx, gone.Digest); !errs.Is(err, errs.NotFound) {
		t.Errorf("what was collected: %v", err)
	}
	if _, err := b.CollectShared(ctx, SharedGCOptions{Grace: time.Minute}); !errs.Is(err, errs.Invalid) {
		t.Errorf("a short grace period: %v", err)
	}
}

func (s *Store) verifyShared(ctx context.Context, d Digest) ([]string, error) {
	if _, err := s.Find(ctx, d); err != nil {
		return nil, err
	}
	return s.Verify(ctx, d, nil)
}
