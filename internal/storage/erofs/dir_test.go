package erofs_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// makeFiles makes one tree in an order of creation.
func makeFiles(t *testing.T, dir string, order []int) {
	t.Helper()
	for _, i := range order {
		path := filepath.Join(dir, fmt.Sprintf("d%d/e%d/file-%d", i%7, i%3, i))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, bytes.Repeat([]byte{byte(i)}, i*100), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for i := 0; i < len(order); i += 2 {
		old := filepath.Join(dir, fmt.Sprintf("d%d/e%d/file-%d", i%7, i%3, i))
		if err := os.Link(old, filepath.Join(dir, fmt.Sprintf("link-%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == dir {
			if err := os.Chmod(dir, 0o755); err != nil {
				return err
			}
		}
		return os.Chtimes(path, time.Unix(1, 0), time.Unix(12345, 678))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestDeterminism: neither the order of creation (inode numbers, order of
// directory entries) nor the file system matters.
func TestDeterminism(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	other, err := os.MkdirTemp("/dev/shm", "erofs-test-")
	if err != nil {
		other = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(other) })
	var first string
	for k, dir := range []string{t.TempDir(), t.TempDir(), other} {
		makeFiles(t, dir, r.Perm(300))
		im, _ := fromDir(t, dir, erofs.Options{})
		if k == 0 {
			first = im.bytesOf(t)
		} else if im.bytesOf(t) != first {
			t.Errorf("tree %d gives other images", k)
		}
	}
	// Where the order of an archive does not decide where content lies, it does
	// not matter at all.
	var entries []entry
	for i := range 200 {
		entries = append(entries, folder(fmt.Sprintf("d%d", i)), file(fmt.Sprintf("d%d/f", i), ""))
	}
	im, _ := fromTar(t, bytes.NewReader(archive(t, entries...)), erofs.Options{})
	first = im.bytesOf(t)
	r.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
	if im, _ = fromTar(t, bytes.NewReader(archive(t, entries...)), erofs.Options{}); im.bytesOf(t) != first {
		t.Error("the order of entries without content changes the images")
	}
}

// TestImagesAreTruncated: what was in the files before must not stay.
func TestImagesAreTruncated(t *testing.T) {
	im := newImages(t)
	for _, f := range []*os.File{im.meta, im.blob} {
		if _, err := f.Write(bytes.Repeat([]byte("old"), 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	res, err := erofs.FromDir(context.Background(), t.TempDir(), im.meta, im.blob, erofs.Options{})
	if err != nil {
		t.Fatal(err)
	}
	im.checkSizes(t, res)
	im.fsck(t)
}

// TestFileChanges changes a file while it is read.
func TestFileChanges(t *testing.T) {
	const size = 8 << 20
	for _, c := range []struct {
		name     string
		sparse   bool
		change   func(path string) error
		min, max int64
	}{
		{"shrinks", false, func(p string) error { return os.Truncate(p, 3<<20+5) }, 3<<20 + 5, 3<<20 + 5},
		{"shrinks at once", false, func(p string) error { return os.Truncate(p, 0) }, 1 << 20, 2 << 20},
		{"sparse file shrinks", true, func(p string) error { return os.Truncate(p, 3<<20+5) }, 3<<20 + 5, 3<<20 + 5},
		{"grows", false, func(p string) error { return os.Truncate(p, size*2) }, size, size},
		{"is replaced", false, func(p string) error {
			if err := os.Remove(p); err != nil {
				return err
			}
			return os.Symlink("/etc/passwd", p)
		}, size, size},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "f")
			content := bytes.Repeat([]byte("0123456789abcdef"), size/16)
			if c.sparse {
				content = content[:1<<20]
			}
			if err := os.WriteFile(path, content, 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, size); err != nil {
				t.Fatal(err)
			}
			changed := false
			im := newImages(t)
			res, err := erofs.FromDir(context.Background(), dir, im.meta, im.blob, erofs.Options{Progress: func(int64) {
				if !changed {
					changed = true
					if err := c.change(path); err != nil {
						t.Error(err)
					}
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
			if c.name != "is replaced" && (len(res.Warnings) != 1 || !strings.Contains(res.Warnings[0], "changed while it was read")) {
				t.Errorf("warnings: %q", res.Warnings)
			}
			im.fsck(t)
			got, err := os.ReadFile(im.mount(t) + "/f")
			if err != nil || int64(len(got)) < c.min || int64(len(got)) > c.max {
				t.Fatalf("%d bytes, %v; want %d to %d", len(got), err, c.min, c.max)
			}
			for i, b := range got {
				if b != content[i%16] && (!c.sparse || b != 0) {
					t.Fatalf("byte %d is %d", i, b)
				}
			}
		})
	}
}

// TestMountPoints: what is mounted below the tree stays out.
func TestMountPoints(t *testing.T) {
	dir := t.TempDir()
	point := filepath.Join(dir, "point")
	if err := os.Mkdir(point, 0o711); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", point, "tmpfs", 0, "mode=0711"); err != nil {
		t.Skipf("mounting needs privileges: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(point, unix.MNT_DETACH) })
	if err := os.WriteFile(filepath.Join(point, "inside"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	im, res := fromDir(t, dir, erofs.Options{})
	if len(res.Warnings) != 1 || !strings.Contains(res.Warnings[0], `"point": a mount point`) {
		t.Errorf("warnings: %q", res.Warnings)
	}
	if got := listing(t, im); !strings.HasSuffix(got, "040711 point\n") {
		t.Errorf("got\n%s", got)
	}
}

func TestDirErrors(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("12345"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dir  string
		o    erofs.Options
		kind errs.Kind
		want string
	}{
		{filepath.Join(dir, "missing"), erofs.Options{}, errs.NotFound, "missing"},
		{filepath.Join(dir, "f"), erofs.Options{}, errs.Invalid, "not a directory"},
		{dir, erofs.Options{MaxBytes: 4}, errs.Invalid, `"f": the limit of size of all files of a layer is 4, asked 5`},
	} {
		im := newImages(t)
		_, err := erofs.FromDir(context.Background(), c.dir, im.meta, im.blob, c.o)
		if !errs.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error of kind %q: %v", errs.KindOf(err), err)
		}
	}
}

func TestDiskFull(t *testing.T) {
	small, source := t.TempDir(), t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("mounting needs privileges: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	content := make([]byte, 4<<20)
	if _, err := rand.NewChaCha8([32]byte{1}).Read(content); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(source, "f"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, full := range []string{"meta", "blob"} {
		im := newImages(t)
		f, err := os.Create(filepath.Join(small, full))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if full == "blob" {
			im.blob = f
		} else {
			im.meta = f
			for i := range 3000 {
				if err := os.WriteFile(filepath.Join(source, fmt.Sprintf("%0200d", i)), nil, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		_, err = erofs.FromDir(context.Background(), source, im.meta, im.blob, erofs.Options{})
		if !errs.Is(err, errs.Capacity) {
			t.Errorf("%s on a full disk: %v", full, err)
		}
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTrusted checks which attributes a directory keeps.
func TestTrusted(t *testing.T) {
	dir := t.TempDir()
	for name, value := range map[string]string{
		"trusted.overlay.opaque": "y", "trusted.overlay.origin": "o", "trusted.overlay.impure": "y", "trusted.overlay.uuid": "u",
		"trusted.other": "x", "user.overlay.opaque": "y", "security.ima": "\x04label", "security.other": "value",
	} {
		if err := unix.Setxattr(dir, name, []byte(value), 0); err != nil {
			t.Skipf("cannot set %s here: %v", name, err)
		}
	}
	for _, c := range []struct {
		keep     bool
		want     map[string]string
		warnings int
	}{
		{true, map[string]string{"trusted.overlay.opaque": "y", "user.overlay.opaque": "y", "security.other": "value"}, 2},
		{false, map[string]string{"user.overlay.opaque": "y", "security.other": "value"}, 6},
	} {
		im, res := fromDir(t, dir, erofs.Options{KeepTrusted: c.keep})
		if len(res.Warnings) != c.warnings {
			t.Errorf("keep %v: warnings %q", c.keep, res.Warnings)
		}
		want := erofstest.ReadTree(t, dir)["."]
		want.Xattrs = c.want
		erofstest.CompareTrees(t, erofstest.Tree{".": want}, readImage(t, im.open(t)))
	}
}
