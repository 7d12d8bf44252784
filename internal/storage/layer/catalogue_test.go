package layer

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

// What a store of many layers reads does not depend on how many there are.
func TestReadsDoNotGrow(t *testing.T) {
	ctx := context.Background()
	for _, n := range []int{30, 3000} {
		s := openStore(t, t.TempDir())
		manyLayers(t, s, n)
		if _, _, err := s.List(ctx, ListOptions{Limit: 10}); err != nil { // makes the index
			t.Fatal(err)
		}
		s = openStore(t, strings.TrimSuffix(s.dir, "/layers")) // nothing in memory
		for what, c := range map[string]struct {
			do   func() error
			most int64
		}{
			"list":    {func() error { _, _, err := s.List(ctx, ListOptions{Limit: 10, After: "n2"}); return err }, 10},
			"compose": {func() error { _, err := s.Compose(ctx, "", "n0", "n1", []string{"n2"}); return err }, 6},
			"tag":     {func() error { _, err := s.Tag(ctx, "", "n3", "moved"); return err }, 4},
			"names":   {func() error { _, err := s.NamesOf(ctx, "", "sha256:"+Digest(strings.Repeat("0", 64))); return err }, 0},
		} {
			before := s.reads.Load()
			if err := c.do(); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if reads := s.reads.Load() - before; reads > c.most {
				t.Errorf("%s of %d layers reads %d files, more than %d", what, n, reads, c.most)
			}
		}
	}
}

// The index on disk says what the files say, also after changes, damage and an end in between.
func TestIndexFollowsTheFiles(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	s := openStore(t, dir)
	importFiles(t, s, "a", Base, entry{"f", "a", 0})
	b := importFiles(t, s, "b", Toolkit, entry{"f", "b", 0}).Layer
	list := func(s *Store) string {
		page, _, err := s.List(ctx, ListOptions{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, l := range page {
			out = append(out, fmt.Sprint(l.Names, l.Kind, l.Problem))
		}
		return strings.Join(out, ";")
	}
	check := func(what string) {
		t.Helper()
		kept := list(openStore(t, dir))
		if err := os.Remove(s.catalogPath()); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if scanned := list(openStore(t, dir)); kept != scanned {
			t.Errorf("%s: the index says %s, the files %s", what, kept, scanned)
		}
		s = openStore(t, dir)
		list(s)
	}
	list(s)
	check("as imported")
	if _, err := s.Tag(ctx, "", "a", "c"); err != nil {
		t.Fatal(err)
	}
	check("tagged")
	if _, err := s.Remove(ctx, "", "b"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CollectGarbage(ctx, GCOptions{}); err != nil {
		t.Fatal(err)
	}
	check("collected")
	// A change that was announced and made, and whose outcome was not written.
	s.index.log.append(tagIntent(ownTree, Ref{Project: DefaultProject, Name: "late", Tag: "latest"}), layerIntent(b.Digest))
	if err := os.MkdirAll(s.tagRoot(ownTree)+"/default/late", 0o700); err != nil {
		t.Fatal(err)
	}
	a, err := s.Resolve(ctx, "", "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.tagPath(ownTree, Ref{Project: DefaultProject, Name: "late", Tag: "latest"}), []byte(a.Digest), 0o600); err != nil {
		t.Fatal(err)
	}
	check("an end in between")
	whole, err := os.ReadFile(s.catalogPath())
	if err != nil {
		t.Fatal(err)
	}
	for _, cut := range []int{0, 1, len(whole) / 2, len(whole) - 1} {
		if err := os.WriteFile(s.catalogPath(), whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		check(fmt.Sprint("cut to ", cut))
	}
	for at := 0; at < len(whole); at += 37 {
		bad := slices.Clone(whole)
		bad[at] ^= 1
		if err := os.WriteFile(s.catalogPath(), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		check(fmt.Sprint("damaged at ", at))
	}
}

// A damaged manifest or name ends neither listings nor collections, is reported, and costs nothing that it may need.
func TestDamageAndCollection(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	torn := importFiles(t, s, "torn", Base, entry{"f", "torn", 0}).Layer
	importFiles(t, s, "fine", Base, entry{"f", "fine", 0})
	gone := importFiles(t, s, "gone", Base, entry{"f", "gone", 0}).Layer
	if _, err := s.Remove(ctx, "", "gone"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.manifestPath(torn.Digest), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	blind := openStore(t, strings.TrimSuffix(s.dir, "/layers")) // its index is made from what is there now
	plan, err := blind.CollectGarbage(ctx, GCOptions{})
	if err != nil || len(plan.Layers)+len(plan.Objects) != 0 || len(plan.Problems) == 0 {
		t.Errorf("without an index: %+v, %v", plan, err)
	}
	page, _, err := blind.List(ctx, ListOptions{Limit: 10})
	if err != nil || len(page) != 2 || page[1].Problem == "" || page[0].Problem != "" {
		t.Errorf("listed %+v, %v", page, err)
	}
	if _, err := blind.Resolve(ctx, "", "torn"); !errs.Is(err, errs.Precondition) {
		t.Errorf("resolve: %v", err)
	}
	// Imported again it is whole again.
	again := importFiles(t, blind, "torn", Base, entry{"f", "torn", 0})
	if problems, err := blind.Verify(ctx, torn.Digest, nil); again.Layer.Digest != torn.Digest || err != nil || len(problems) > 0 {
		t.Errorf("imported again: %v, %v", problems, err)
	}
	if _, _, err := blind.List(ctx, ListOptions{Limit: 10}); err != nil {
		t.Fatal(err)
	}
	// With an index that remembers it, what it needs stays and the rest goes.
	if err := os.WriteFile(s.manifestPath(torn.Digest), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	plan, err = blind.CollectGarbage(ctx, GCOptions{})
	if err != nil || !slices.Equal(plan.Layers, []Digest{gone.Digest}) || len(plan.Problems) == 0 {
		t.Errorf("with an index: %+v, %v", plan, err)
	}
	if !blind.local.has(torn.Blob) || !blind.local.has(torn.Meta) || blind.local.has(gone.Blob) {
		t.Error("the wrong objects went")
	}
}

// Imports, names that move, removals and creations go on while garbage is collected: nothing that they got hold of is lost.
func TestNothingIsLostToCollection(t *testing.T) {
	s := openStore(t, t.TempDir())
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	running := make(map[Digest]int) // as sandboxes on record
	inUse := func() map[Digest]bool {
		mu.Lock()
		defer mu.Unlock()
		out := make(map[Digest]bool)
		for d := range running {
			out[d] = true
		}
		return out
	}
	var collector, users sync.WaitGroup
	collector.Go(func() {
		for ctx.Err() == nil {
			if _, err := s.CollectGarbage(context.Background(), GCOptions{InUse: inUse}); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for u := range 3 {
		users.Go(func() {
			for i := range 40 {
				name := fmt.Sprintf("n%d", (u+i)%4)
				importFiles(t, s, name, Base, entry{"f", fmt.Sprint(i % 3), 0})
				// A creation: resolved, on record, used, ended.
				release := s.Hold()
				l, err := s.Resolve(ctx, "", name)
				if errs.Is(err, errs.NotFound) { // another one removed the name
					release()
					continue
				}
				if err != nil {
					t.Error(err)
					release()
					return
				}
				mu.Lock()
				running[l.Digest]++
				mu.Unlock()
				release()
				_, _ = s.Remove(ctx, "", name)
				if problems, err := s.Verify(ctx, l.Digest, nil); err != nil || len(problems) > 0 {
					t.Errorf("a layer in use: %v, %v", problems, err)
				}
				mu.Lock()
				if running[l.Digest]--; running[l.Digest] == 0 {
					delete(running, l.Digest)
				}
				mu.Unlock()
			}
		})
	}
	users.Wait()
	cancel()
	collector.Wait()
	page, _, err := s.List(context.Background(), ListOptions{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range page {
		if l.Problem != "" {
			t.Errorf("%v: %s", l.Names, l.Problem)
		}
	}
}
