package layer

import (
	"context"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"testing"
)

// manyLayers fills a store with n layers under names n0…, without importing each.
func manyLayers(b testing.TB, s *Store, n int) {
	b.Helper()
	l := importFiles(b, s, "first", Base, entry{"f", "content", 0}).Layer
	for i := range n {
		m := l.Manifest
		m.Kind, m.Source = []Kind{Base, Workspace, Toolkit}[i%3], fmt.Sprint("bench ", i)
		text, err := m.encode()
		if err != nil {
			b.Fatal(err)
		}
		d := digestOf(text)
		for path, content := range map[string][]byte{
			s.manifestPath(d): text,
			s.tagPath(ownTree, Ref{Project: DefaultProject, Name: fmt.Sprintf("n%d", i), Tag: "latest"}): []byte(d + "\n"),
		} {
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				b.Fatal(err)
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// What it costs to have many layers. Only a collection, which looks at everything, may grow with their number.
func BenchmarkCatalogue(b *testing.B) {
	ctx := context.Background()
	for _, n := range []int{1000, 10_000, 100_000} {
		if n > 1000 && testing.Short() {
			continue
		}
		dir := b.TempDir()
		s := openStore(b, dir)
		manyLayers(b, s, n)
		run := func(what string, f func(i int) error) {
			b.Run(fmt.Sprintf("%s/layers=%d", what, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if err := f(rand.Intn(n/3) * 3); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		list := func(s *Store, o ListOptions, want int) error {
			page, _, err := s.List(ctx, o)
			if err == nil && len(page) != want {
				err = fmt.Errorf("a page of %d", len(page))
			}
			return err
		}
		run("index-rebuilt", func(int) error {
			if err := os.RemoveAll(filepath.Join(s.dir, "index")); err != nil {
				return err
			}
			return list(openStore(b, dir), ListOptions{Limit: 1}, 1)
		})
		run("index-read", func(int) error { return list(openStore(b, dir), ListOptions{Limit: 1}, 1) })
		s = openStore(b, dir)
		if err := list(s, ListOptions{Limit: 1}, 1); err != nil {
			b.Fatal(err)
		}
		run("list-first-100", func(int) error { return list(s, ListOptions{Limit: 100}, 100) })
		run("list-next-100", func(i int) error {
			at := fmt.Sprintf("n%d", i)
			if at > "n8" { // near the end, in the order of names: fewer may follow
				at = "n5"
			}
			return list(s, ListOptions{Limit: 100, After: at}, 100)
		})
		run("resolve", func(i int) error { _, err := s.Resolve(ctx, "", fmt.Sprintf("n%d", i)); return err })
		run("compose", func(i int) error {
			_, err := s.Compose(ctx, "", fmt.Sprintf("n%d", i), fmt.Sprintf("n%d", i+1), []string{fmt.Sprintf("n%d", i+2)})
			return err
		})
		run("tag", func(i int) error { _, err := s.Tag(ctx, "", fmt.Sprintf("n%d", i), "moving"); return err })
		run("gc-dry-run", func(int) error {
			plan, err := s.CollectGarbage(ctx, GCOptions{DryRun: true})
			if err == nil && len(plan.Problems) > 0 {
				err = fmt.Errorf("problems: %v", plan.Problems)
			}
			return err
		})
	}
}

func BenchmarkAcquire(b *testing.B) {
	s := openStore(b, b.TempDir())
	m := openMounts(b, s, 64)
	d := importFiles(b, s, "a", Base, entry{"f", "content", 0}).Layer.Digest
	b.Run("warm", func(b *testing.B) {
		for b.Loop() {
			if _, err := m.Acquire(context.Background(), d, "x"); err != nil {
				b.Fatal(err)
			}
			if err := m.Release("x"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("cold", func(b *testing.B) {
		for b.Loop() {
			if _, err := m.Acquire(context.Background(), d, "x"); err != nil {
				b.Fatal(err)
			}
			if err := m.Release("x"); err != nil {
				b.Fatal(err)
			}
			if err := m.Sweep(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
