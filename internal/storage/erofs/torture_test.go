package erofs_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// TestTorture uses one tree for all, it takes a while to make.
func TestTorture(t *testing.T) {
	dir := t.TempDir()
	erofstest.Torture(t, dir)
	t.Run("FromDir", func(t *testing.T) { testTortureFromDir(t, dir) })
	// No archive holds a socket, and GNU tar links nothing but files.
	for _, name := range []string{"kinds/socket", "links/fifo"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("FromTar", func(t *testing.T) { testTortureFromTar(t, dir) })
	t.Run("archivers", func(t *testing.T) { testArchivers(t, dir) })
}

func testTortureFromDir(t *testing.T, dir string) {
	im, res := fromDir(t, dir, erofs.Options{KeepTrusted: true})
	if len(res.Warnings) > 0 {
		t.Errorf("warnings: %q", res.Warnings)
	}
	t.Logf("%+v", *res)
	im.fsck(t)
	want := erofstest.ReadTree(t, dir)
	if got := int64(len(want) - 1); got != res.Files {
		t.Errorf("the tree has %d names, the result says %d", got, res.Files)
	}
	t.Run("kernel", func(t *testing.T) {
		erofstest.CompareTrees(t, want, erofstest.ReadTree(t, im.mount(t)))
	})
	t.Run("reader", func(t *testing.T) {
		erofstest.CompareTrees(t, want, readImage(t, im.open(t)))
	})
}

// writeTar archives the tree below dir in sorted order with all that PAX holds;
// sockets cannot be in an archive.
func writeTar(w io.Writer, dir string, tree erofstest.Tree) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		n := tree[rel]
		h := &tar.Header{
			Name: "./" + rel, Mode: int64(n.Mode & 0o7777), Uid: int(n.UID), Gid: int(n.GID),
			ModTime: time.Unix(n.Sec, n.Nsec), Format: tar.FormatPAX, PAXRecords: map[string]string{},
		}
		for k, v := range n.Xattrs {
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if n.Device != "" {
			fmt.Sscanf(n.Device, "%d:%d", &h.Devmajor, &h.Devminor)
		}
		switch n.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			h.Typeflag = tar.TypeDir
			h.Name += "/"
		case unix.S_IFLNK:
			h.Typeflag, h.Linkname = tar.TypeSymlink, n.Link
		case unix.S_IFCHR:
			h.Typeflag = tar.TypeChar
		case unix.S_IFBLK:
			h.Typeflag = tar.TypeBlock
		case unix.S_IFIFO:
			h.Typeflag = tar.TypeFifo
		case unix.S_IFREG:
			h.Typeflag, h.Size = tar.TypeReg, n.Size
		default:
			return nil
		}
		if n.Same != "" && n.Same != rel {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, "./"+n.Same, 0
		}
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("%q: %w", rel, err)
		}
		if h.Typeflag != tar.TypeReg {
			return nil
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(tw, f)
		return err
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func testTortureFromTar(t *testing.T, dir string) {
	want := erofstest.ReadTree(t, dir)
	r, w := io.Pipe()
	go func() { w.CloseWithError(writeTar(w, dir, want)) }()
	im, res := fromTar(t, r, erofs.Options{KeepTrusted: true})
	if len(res.Warnings) > 0 {
		t.Errorf("warnings: %q", res.Warnings)
	}
	im.fsck(t)
	erofstest.CompareTrees(t, want, erofstest.ReadTree(t, im.mount(t)))
	same, sameRes := fromDir(t, dir, erofs.Options{KeepTrusted: true})
	if im.bytesOf(t) != same.bytesOf(t) {
		t.Error("the sorted archive of a directory gives other images than the directory")
	}
	if fmt.Sprint(*res) != fmt.Sprint(*sameRes) {
		t.Errorf("results differ: %+v, %+v", *res, *sameRes)
	}
}

// testArchivers reads what real archivers write, in their own formats.
func testArchivers(t *testing.T, dir string) {
	full := erofstest.ReadTree(t, dir)
	poor := make(erofstest.Tree) // what formats before PAX hold
	for path, n := range full {
		n.Nsec, n.Xattrs = 0, nil
		poor[path] = n
	}
	for _, c := range []struct {
		name string
		argv []string
		want erofstest.Tree
	}{
		{"GNU tar, PAX, sparse 1.0", []string{"tar", "--format=posix", "--xattrs", "--xattrs-include=*", "-S"}, full},
		{"GNU tar, PAX, sparse 0.1", []string{"tar", "--format=posix", "--xattrs", "--xattrs-include=*", "-S", "--sparse-version=0.1"}, full},
		{"GNU tar, GNU, sparse", []string{"tar", "--format=gnu", "-S"}, poor},
		{"bsdtar", []string{"bsdtar", "--format=pax"}, full},
		{"Python", []string{"python3", "-c", "import sys,tarfile\nwith tarfile.open(fileobj=sys.stdout.buffer,mode='w|',format=tarfile.GNU_FORMAT) as t: t.add('.')"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := exec.LookPath(c.argv[0]); err != nil {
				t.Skip(err)
			}
			argv := append(append([]string{}, c.argv[1:]...), "-C", dir, "-cf", "-", ".")
			if c.argv[0] == "python3" {
				argv = c.argv[1:]
			}
			cmd := exec.Command(c.argv[0], argv...)
			cmd.Dir = dir
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			im, res := fromTar(t, out, erofs.Options{KeepTrusted: true})
			if err := cmd.Wait(); err != nil {
				t.Skipf("%v: %.300s", err, stderr.String())
			}
			t.Logf("%.500q", res.Warnings)
			got := readImage(t, im.open(t))
			if c.want == nil {
				return
			}
			for path, n := range got {
				n.Same = c.want[path].Same // archivers do not sort
				if c.want[path].Nsec == 0 {
					n.Nsec = 0
				}
				got[path] = n
			}
			erofstest.CompareTrees(t, c.want, got)
		})
	}
}
