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

// The cost must not grow with the number of layers.
func BenchmarkResolveAndCompose(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		s := openStore(b, b.TempDir())
		manyLayers(b, s, n)
		b.Run(fmt.Sprintf("layers=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				i := rand.Intn(10) * 3
				_, err := s.Compose(context.Background(), "", fmt.Sprintf("n%d", i), fmt.Sprintf("n%d", i+1), []string{fmt.Sprintf("n%d", i+2)})
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkList10000(b *testing.B) {
	s := openStore(b, b.TempDir())
	manyLayers(b, s, 10000)
	if _, _, err := s.List(context.Background(), ListOptions{Limit: 1}); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if page, _, err := s.List(context.Background(), ListOptions{Limit: 1000}); err != nil || len(page) != 1000 {
			b.Fatal(len(page), err)
		}
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
