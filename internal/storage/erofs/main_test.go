package erofs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// images is a pair of files that a writer fills, and blobs of other layers.
type images struct {
	meta, blob *os.File
	extra      []*os.File
}

func newImages(t testing.TB) images {
	t.Helper()
	dir := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	return images{meta: open("meta"), blob: open("blob")}
}

func fromDir(t testing.TB, dir string, o erofs.Options) (images, *erofs.Result) {
	t.Helper()
	im := newImages(t)
	res, err := erofs.FromDir(context.Background(), dir, im.meta, im.blob, o)
	if err != nil {
		t.Fatal(err)
	}
	im.checkSizes(t, res)
	return im, res
}

func fromTar(t testing.TB, r io.Reader, o erofs.Options) (images, *erofs.Result) {
	t.Helper()
	im := newImages(t)
	res, err := erofs.FromTar(context.Background(), r, im.meta, im.blob, o)
	if err != nil {
		t.Fatal(err)
	}
	im.checkSizes(t, res)
	return im, res
}

func (im images) checkSizes(t testing.TB, res *erofs.Result) {
	t.Helper()
	for f, want := range map[*os.File]int64{im.meta: res.MetaBytes, im.blob: res.BlobBytes} {
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() != want {
			t.Errorf("%s has %d bytes, the result says %d", filepath.Base(f.Name()), st.Size(), want)
		}
	}
}

// mount mounts the images straight from their files and returns a path to the
// root. The mount is never attached: it ends with its descriptor.
func (im images) mount(t testing.TB) string {
	t.Helper()
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOSYS) {
		t.Skipf("this kernel does not let us mount EROFS: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	options := [][2]string{{"source", im.meta.Name()}, {"device", im.blob.Name()}}
	for _, x := range im.extra {
		options = append(options, [2]string{"device", x.Name()})
	}
	for _, kv := range options {
		if err := unix.FsconfigSetString(fs, kv[0], kv[1]); err != nil {
			t.Fatalf("fsconfig %s: %v", kv[0], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Fatalf("mount image: %v (see the kernel log)", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fmt.Sprintf("/proc/self/fd/%d", fd)
}

// fsck runs erofs-utils' checker.
func (im images) fsck(t testing.TB) {
	t.Helper()
	path, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Log("fsck.erofs is not installed: image not checked with it")
		return
	}
	args := []string{"--device=" + im.blob.Name()}
	for _, x := range im.extra {
		args = append(args, "--device="+x.Name())
	}
	out, err := exec.Command(path, append(args, im.meta.Name())...).CombinedOutput()
	if err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

func (im images) open(t testing.TB) *erofs.Image {
	t.Helper()
	blobs := []io.ReaderAt{im.blob}
	for _, x := range im.extra {
		blobs = append(blobs, x)
	}
	img, err := erofs.Open(im.meta, blobs...)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// readImage reads an image with the package's own reader.
func readImage(t testing.TB, img *erofs.Image) erofstest.Tree {
	t.Helper()
	tree, first := make(erofstest.Tree), make(map[uint64]string)
	err := img.Walk(func(path string, e *erofs.Entry) error {
		n := erofstest.Node{
			Mode: e.Mode, UID: e.UID, GID: e.GID, Size: e.Size, Nlink: uint64(e.Nlink),
			Sec: e.ModTime.Unix(), Nsec: int64(e.ModTime.Nanosecond()), Link: e.Link, Xattrs: e.Xattrs,
		}
		switch e.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			n.Size, n.Nlink = 0, 0
		case unix.S_IFCHR, unix.S_IFBLK:
			n.Device = fmt.Sprintf("%d:%d", e.Major, e.Minor)
		case unix.S_IFREG:
			r, err := e.Content()
			if err != nil {
				return err
			}
			if n.Digest, err = erofstest.Digest(r); err != nil {
				return err
			}
		}
		if n.Nlink > 0 {
			if first[e.NID] == "" {
				first[e.NID] = path
			}
			n.Same = first[e.NID]
		}
		tree[path] = n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// bytesOf returns the content of both images.
func (im images) bytesOf(t testing.TB) string {
	t.Helper()
	var out string
	for _, f := range []*os.File{im.meta, im.blob} {
		p, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		out += string(p)
	}
	return out
}
