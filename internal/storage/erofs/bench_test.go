package erofs_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// benchTrees makes one tree of many small files and one of a single large one.
func benchTrees(b *testing.B) map[string]string {
	b.Helper()
	r := rand.NewChaCha8([32]byte{'b'})
	random := func(n int) []byte {
		p := make([]byte, n)
		if _, err := r.Read(p); err != nil {
			b.Fatal(err)
		}
		return p
	}
	write := func(path string, p []byte) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(path, p, 0o644); err != nil {
			b.Fatal(err)
		}
	}
	small, large := b.TempDir(), b.TempDir()
	sizes := rand.New(r)
	for i := range 5000 { // sizes as in /usr: most of a few KiB, some large
		n := 200 + sizes.IntN(8000)
		if i%50 == 0 {
			n = sizes.IntN(400_000)
		}
		write(fmt.Sprintf("%s/d%d/e%d/f%d", small, i%20, i%77, i), random(n))
	}
	write(large+"/f", random(256<<20))
	return map[string]string{"5000 files": small, "256 MiB file": large}
}

// BenchmarkWrite compares with mkfs.erofs: one image, and one with the same split
// into chunks and a blob.
func BenchmarkWrite(b *testing.B) {
	for name, dir := range benchTrees(b) {
		tree := erofstest.ReadTree(b, dir)
		var total int64
		for _, n := range tree {
			total += n.Size
		}
		var archive bytes.Buffer
		if err := writeTar(&archive, dir, tree); err != nil {
			b.Fatal(err)
		}
		run := func(kind string, f func(im images) error) {
			b.Run(kind+"/"+name, func(b *testing.B) {
				im := newImages(b)
				b.SetBytes(total)
				for b.Loop() {
					if err := f(im); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		run("FromDir", func(im images) error {
			_, err := erofs.FromDir(context.Background(), dir, im.meta, im.blob, erofs.Options{})
			return err
		})
		run("FromTar", func(im images) error {
			_, err := erofs.FromTar(context.Background(), bytes.NewReader(archive.Bytes()), im.meta, im.blob, erofs.Options{})
			return err
		})
		mkfs, err := exec.LookPath("mkfs.erofs")
		if err != nil {
			b.Logf("not compared: %v", err)
			continue
		}
		run("mkfs.erofs", func(im images) error {
			return exec.Command(mkfs, "--quiet", "-d0", im.meta.Name(), dir).Run()
		})
		run("mkfs.erofs-chunks", func(im images) error {
			return exec.Command(mkfs, "--quiet", "-d0", "--chunksize=4096", "--blobdev="+im.blob.Name(), im.meta.Name(), dir).Run()
		})
	}
}

// BenchmarkUpper writes what a sandbox changed, 10 MB in 400 files, against a base
// of 300 MB and eight smaller layers. In half of it blocks of the base come back.
func BenchmarkUpper(b *testing.B) {
	lib, r := make(library), rand.NewChaCha8([32]byte{'u'})
	var parents []*erofs.Blob
	var base []byte
	for i, size := range []int{300 << 20, 20 << 20, 10 << 20, 5 << 20, 5 << 20, 1 << 20, 1 << 20, 1 << 20, 100 << 10} {
		dir := b.TempDir()
		p := randomFile(b, dir+"/f", r, size)
		if i == 0 {
			base = p
		}
		w := lib.fromDir(b, dir, erofs.Options{})
		// As in a store: the index is a file.
		path := filepath.Join(dir, "index")
		if err := os.WriteFile(path, w.index, 0o600); err != nil {
			b.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { f.Close() })
		if w.blob.Index, err = erofs.OpenIndex(f, int64(len(w.index))); err != nil {
			b.Fatal(err)
		}
		parents = append(parents, w.blob)
	}
	upper := b.TempDir()
	for i := range 400 {
		p := randomFile(b, fmt.Sprintf("%s/d%d/f%d", upper, i%20, i), r, 25_000)
		if i%2 == 0 {
			if err := os.WriteFile(fmt.Sprintf("%s/d%d/f%d", upper, i%20, i), base[i<<18:][:len(p)], 0o644); err != nil {
				b.Fatal(err)
			}
		}
	}
	run := func(name string, f func(im images) error) {
		b.Run(name, func(b *testing.B) {
			im := newImages(b)
			b.SetBytes(400 * 25_000)
			for b.Loop() {
				if err := f(im); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	for name, p := range map[string][]*erofs.Blob{"alone": nil, "against 9": parents} {
		run(name, func(im images) error {
			_, err := erofs.FromDir(context.Background(), upper, im.meta, im.blob, erofs.Options{KeepTrusted: true, Parents: p})
			return err
		})
	}
	run("cp -a", func(im images) error {
		to := im.meta.Name() + ".d"
		defer os.RemoveAll(to)
		return exec.Command("cp", "-a", upper, to).Run()
	})
	if mkfs, err := exec.LookPath("mkfs.erofs"); err == nil {
		run("mkfs.erofs", func(im images) error {
			return exec.Command(mkfs, "--quiet", "-d0", im.meta.Name(), upper).Run()
		})
	}
}
