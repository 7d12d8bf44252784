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
