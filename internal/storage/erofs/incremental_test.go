package erofs_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// written is an image with its own blob as one that others can refer to.
type written struct {
	images
	res   *erofs.Result
	blob  *erofs.Blob
	index []byte
}

// library finds the file of a blob by its name.
type library map[string]*os.File

// write writes an image with fn, which gets o with an index, and enters its blob.
func (lib library) write(t testing.TB, o erofs.Options, fn func(im images, o erofs.Options) (*erofs.Result, error)) *written {
	t.Helper()
	var index bytes.Buffer
	w := &written{images: newImages(t)}
	o.Index = &index
	var err error
	if w.res, err = fn(w.images, o); err != nil {
		t.Fatal(err)
	}
	w.checkSizes(t, w.res)
	for _, b := range w.res.Extra {
		w.extra = append(w.extra, lib[b.Name])
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(w.images.blob, 0, w.res.BlobBytes)); err != nil {
		t.Fatal(err)
	}
	name := hex.EncodeToString(h.Sum(nil))
	lib[name] = w.images.blob
	w.index = index.Bytes()
	x, err := erofs.OpenIndex(bytes.NewReader(w.index), int64(len(w.index)))
	if err != nil {
		t.Fatal(err)
	}
	w.blob = &erofs.Blob{Name: name, Size: w.res.BlobBytes, Index: x, Data: w.images.blob}
	return w
}

func (lib library) fromDir(t testing.TB, dir string, o erofs.Options) *written {
	t.Helper()
	return lib.write(t, o, func(im images, o erofs.Options) (*erofs.Result, error) {
		return erofs.FromDir(context.Background(), dir, im.meta, im.blob, o)
	})
}

// stacked is the image as Merge takes it.
func (w *written) stacked(t testing.TB) erofs.Stacked {
	t.Helper()
	img, err := erofs.Open(w.meta)
	if err != nil {
		t.Fatal(err)
	}
	return erofs.Stacked{Image: img, Blobs: append([]*erofs.Blob{w.blob}, w.res.Extra...)}
}

// check compares an image with a tree: by the kernel, by this package's reader and by erofs-utils.
func (w *written) check(t *testing.T, dir string) {
	t.Helper()
	want := erofstest.ReadTree(t, dir)
	erofstest.CompareTrees(t, want, erofstest.ReadTree(t, w.mount(t)))
	erofstest.CompareTrees(t, want, readImage(t, w.open(t)))
	w.fsck(t)
	w.dump(t)
}

// dump asks erofs-utils for the superblock.
func (w *written) dump(t *testing.T) {
	t.Helper()
	path, err := exec.LookPath("dump.erofs")
	if err != nil {
		t.Log("dump.erofs is not installed: image not checked with it")
		return
	}
	args := []string{"--device=" + w.images.blob.Name()}
	for _, x := range w.extra {
		args = append(args, "--device="+x.Name())
	}
	out, err := exec.Command(path, append(args, "-s", w.meta.Name())...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "device_table") {
		t.Errorf("dump.erofs: %v\n%s", err, out)
	}
}

func randomFile(t testing.TB, path string, r *rand.ChaCha8, n int) []byte {
	t.Helper()
	p := make([]byte, n)
	_, _ = r.Read(p)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, p, 0o644); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestIncremental: an image stores only what the layers it is written against lack.
func TestIncremental(t *testing.T) {
	lib, r := make(library), rand.NewChaCha8([32]byte{1})
	base := t.TempDir()
	big := randomFile(t, base+"/big", r, 5<<20+100)
	randomFile(t, base+"/usr/lib", r, 1<<20)
	randomFile(t, base+"/small", r, 100)
	b := lib.fromDir(t, base, erofs.Options{})
	b.check(t, base)

	next := t.TempDir()
	copy(big[3<<20:], "one line is another one")
	for name, content := range map[string][]byte{"big": big, "moved": big[1<<20:], "new": bytes.Repeat([]byte("new "), 2000)} {
		if err := os.WriteFile(filepath.Join(next, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	other := t.TempDir()
	randomFile(t, other+"/unrelated", r, 1<<20)
	u := lib.fromDir(t, other, erofs.Options{})

	parents := []*erofs.Blob{u.blob, b.blob}
	n := lib.fromDir(t, next, erofs.Options{Parents: parents})
	n.check(t, next)
	// A block of big, the tail of moved is that of big, and two blocks of new.
	if n.res.BlobBytes != 3*4096 || len(n.res.Extra) != 1 || n.res.Extra[0].Name != b.blob.Name {
		t.Errorf("stored %d bytes beside %d blobs", n.res.BlobBytes, len(n.res.Extra))
	}
	if want := int64(5<<20 + 4096 - 4096); n.res.ExtraUsed[0] != want {
		t.Errorf("%d bytes of the parent are in use, want %d", n.res.ExtraUsed[0], want)
	}
	used, err := n.open(t).UsedBytes()
	if err != nil || !slices.Equal(used, []int64{3 * 4096, n.res.ExtraUsed[0]}) {
		t.Errorf("used %v, %v", used, err)
	}
	again := lib.fromDir(t, next, erofs.Options{Parents: parents})
	if n.bytesOf(t) != again.bytesOf(t) || !bytes.Equal(n.index, again.index) {
		t.Error("the same tree against the same parents gave other bytes")
	}

	// A third one, of which nothing is new: an empty blob, two others.
	same := lib.fromDir(t, next, erofs.Options{Parents: []*erofs.Blob{n.blob, b.blob}})
	same.check(t, next)
	if same.res.BlobBytes != 0 || len(same.res.Extra) != 2 {
		t.Errorf("stored %d bytes beside %d blobs", same.res.BlobBytes, len(same.res.Extra))
	}
	x, errX := n.open(t).TreeDigest(n.blob.Name)
	y, errY := same.open(t).TreeDigest(same.blob.Name)
	if errX != nil || errY != nil || x != y {
		t.Errorf("digests of equal trees: %x, %x, %v, %v", x, y, errX, errY)
	}
	if z, err := b.open(t).TreeDigest(b.blob.Name); err != nil || z == x {
		t.Errorf("digests of other trees: %x, %v", z, err)
	}
}

// TestManyDevices: more parents than an image can have devices; those of least use
// are copied, and so are those of too little use.
func TestManyDevices(t *testing.T) {
	lib, r := make(library), rand.NewChaCha8([32]byte{2})
	dir := t.TempDir()
	var parents []*erofs.Blob
	for i := range erofs.MaxDevices + 4 {
		one := t.TempDir()
		p := randomFile(t, one+"/f", r, 4096*(1+(i*7)%20))
		parents = append(parents, lib.fromDir(t, one, erofs.Options{}).blob)
		if err := os.WriteFile(fmt.Sprintf("%s/f%02d", dir, i), p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w := lib.fromDir(t, dir, erofs.Options{Parents: parents})
	w.check(t, dir)
	// Sizes are 1 to 20 blocks, each once.
	if len(w.res.Extra) != erofs.MaxDevices || w.res.BlobBytes != (1+2+3+4)*4096 {
		t.Errorf("%d devices, %d bytes copied", len(w.res.Extra), w.res.BlobBytes)
	}
	for _, p := range parents {
		p.Data = nil
	}
	im := newImages(t)
	if _, err := erofs.FromDir(context.Background(), dir, im.meta, im.blob, erofs.Options{Parents: parents}); !errs.Is(err, errs.Invalid) {
		t.Errorf("with too many devices and nothing to copy from: %v", err)
	}

	p := parents[19]
	p.Data, p.MinUsed = lib[p.Name], p.Size+1
	w = lib.fromDir(t, dir, erofs.Options{Parents: parents[18:]})
	if w.check(t, dir); len(w.res.Extra) != 1 || w.res.Extra[0].Name != parents[18].Name {
		t.Errorf("a blob of little use is a device: %d", len(w.res.Extra))
	}
}

// TestForeignParents: blobs that cannot be what they are said to be.
func TestForeignParents(t *testing.T) {
	lib := make(library)
	dir := t.TempDir()
	randomFile(t, dir+"/f", rand.NewChaCha8([32]byte{3}), 10_000)
	w := lib.fromDir(t, dir, erofs.Options{})
	for what, change := range map[string]func(b *erofs.Blob){
		"a short name":       func(b *erofs.Blob) { b.Name = "abc" },
		"half a block":       func(b *erofs.Blob) { b.Size += 100 },
		"an index of others": func(b *erofs.Blob) { b.Size += 4096 },
		"a negative size":    func(b *erofs.Blob) { b.Size = -4096 },
	} {
		b := *w.blob
		change(&b)
		im := newImages(t)
		if _, err := erofs.FromDir(context.Background(), dir, im.meta, im.blob, erofs.Options{Parents: []*erofs.Blob{&b}}); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	im := newImages(t)
	if _, err := erofs.Merge(context.Background(), nil, []erofs.Stacked{{Image: w.open(t)}}, nil, im.meta, im.blob, erofs.Options{}); !errs.Is(err, errs.Invalid) {
		t.Errorf("an image without its blobs: %v", err)
	}
	only, err := erofs.Open(w.meta)
	if err != nil {
		t.Fatal(err)
	}
	if err := only.Walk(func(_ string, e *erofs.Entry) error {
		if c, err := e.Content(); err == nil {
			if _, err := io.ReadAll(c); !errs.Is(err, errs.Precondition) {
				t.Errorf("content without blobs: %v", err)
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// TestIndexIsOfTheBlob: what the writer makes is what the blob alone gives.
func TestIndexIsOfTheBlob(t *testing.T) {
	lib := make(library)
	dir := t.TempDir()
	erofstest.Torture(t, dir)
	w := lib.fromDir(t, dir, erofs.Options{})
	var b bytes.Buffer
	if err := erofs.WriteIndex(context.Background(), io.NewSectionReader(w.images.blob, 0, w.res.BlobBytes), &b); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), w.index) {
		t.Errorf("index of %d bytes, computed again %d", len(w.index), b.Len())
	}
	// The same tree against itself has nothing to store.
	again := lib.fromDir(t, dir, erofs.Options{Parents: []*erofs.Blob{w.blob}})
	if again.res.BlobBytes != 0 {
		t.Errorf("%d bytes are new", again.res.BlobBytes)
	}
	again.check(t, w.mount(t))
}
