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
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

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

func TestTortureFromTar(t *testing.T) {
	dir := torture(t)
	if err := os.Remove(filepath.Join(dir, "kinds/socket")); err != nil {
		t.Fatal(err)
	}
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

// TestArchivers reads what real archivers write, in their own formats.
func TestArchivers(t *testing.T) {
	dir := torture(t)
	for _, name := range []string{"kinds/socket", "links/fifo"} { // GNU tar links nothing but files
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
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

// entry is a header and its content.
type entry struct {
	tar.Header
	content string
}

func file(name, content string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}, content}
}

func folder(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o750}}
}

func link(kind byte, name, target string) entry {
	return entry{Header: tar.Header{Typeflag: kind, Name: name, Linkname: target}}
}

func withAttr(e entry, name, value string) entry {
	e.PAXRecords = map[string]string{"SCHILY.xattr." + name: value}
	return e
}

// archive makes a tar of the entries, end marker included.
func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, e := range entries {
		if err := tw.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// listing describes an image in one line a name.
func listing(t testing.TB, im images) string {
	t.Helper()
	var out strings.Builder
	err := im.open(t).Walk(func(path string, e *erofs.Entry) error {
		fmt.Fprintf(&out, "%06o %s", e.Mode, path)
		switch e.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			r, err := e.Content()
			if err != nil {
				return err
			}
			p, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			fmt.Fprintf(&out, " %q", p)
		case unix.S_IFLNK:
			fmt.Fprintf(&out, " -> %s", e.Link)
		case unix.S_IFCHR:
			fmt.Fprintf(&out, " %d:%d", e.Major, e.Minor)
		}
		if e.Mode&unix.S_IFMT != unix.S_IFDIR && e.Nlink != 1 {
			fmt.Fprintf(&out, " links=%d", e.Nlink)
		}
		for k, v := range e.Xattrs {
			fmt.Fprintf(&out, " %s=%q", k, v)
		}
		out.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestTarNames(t *testing.T) {
	for _, c := range []struct {
		name    string
		entries []entry
		want    string
	}{
		{"absolute and dotted", []entry{file("/a", "1"), file("././b//c", "2"), folder("./")}, "040750 .\n100644 a \"1\"\n040755 b\n100644 b/c \"2\"\n"},
		{"missing parents", []entry{file("x/y/z", "")}, "040755 .\n040755 x\n040755 x/y\n100644 x/y/z \"\"\n"},
		{"parent after child", []entry{file("x/y", ""), folder("x")}, "040755 .\n040750 x\n100644 x/y \"\"\n"},
		{"last file wins", []entry{file("a", "old"), file("a", "new")}, "040755 .\n100644 a \"new\"\n"},
		{"file replaces directory", []entry{folder("a"), file("a/b", ""), file("a", "x")}, "040755 .\n100644 a \"x\"\n"},
		{"directory replaces file", []entry{file("a", "x"), folder("a"), file("a/b", "")}, "040755 .\n040750 a\n100644 a/b \"\"\n"},
		{"directory replaces link", []entry{link(tar.TypeSymlink, "a", "/etc"), folder("a"), file("a/b", "")}, "040755 .\n040750 a\n100644 a/b \"\"\n"},
		{"link replaces directory", []entry{folder("a"), link(tar.TypeSymlink, "a", "..")}, "040755 .\n120777 a -> ..\n"},
		{"hard links", []entry{file("a", "x"), link(tar.TypeLink, "d/b", "./a"), link(tar.TypeLink, "c", "/d/b")}, "040755 .\n100644 a \"x\" links=3\n100644 c \"x\" links=3\n040755 d\n100644 d/b \"x\" links=3\n"},
		{"hard link to a link", []entry{link(tar.TypeSymlink, "a", "x"), link(tar.TypeLink, "b", "a")}, "040755 .\n120777 a -> x links=2\n120777 b -> x links=2\n"},
		{"target replaced later", []entry{file("a", "x"), link(tar.TypeLink, "b", "a"), file("a", "y")}, "040755 .\n100644 a \"y\"\n100644 b \"x\"\n"},
		{"hard link to itself", []entry{file("a", "x"), link(tar.TypeLink, "a", "a")}, "040755 .\n100644 a \"x\"\n"},
		{"hard link over its target's directory", []entry{file("d/a", "x"), link(tar.TypeLink, "d", "d/a")}, "040755 .\n100644 d \"x\"\n"},
		{"trusted attributes dropped", []entry{withAttr(folder("d"), "trusted.overlay.redirect", "/secret")}, "040755 .\n040750 d\n"},
		{"user attribute", []entry{withAttr(file("d", ""), "user.x", "a\x00=b")}, "040755 .\n100644 d \"\" user.x=\"a\\x00=b\"\n"},
		{"libarchive's attribute", []entry{{Header: tar.Header{Typeflag: tar.TypeReg, Name: "f", PAXRecords: map[string]string{"LIBARCHIVE.xattr.user.a%20b": "AAH/"}}}}, "040755 .\n100000 f \"\" user.a b=\"\\x00\\x01\\xff\"\n"},
		{"whiteouts are plain files", []entry{file(".wh.a", "")}, "040755 .\n100644 .wh.a \"\"\n"},
		{"global header", []entry{{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}}, file("a", "")}, "040755 .\n100644 a \"\"\n"},
		{"nothing", nil, "040755 .\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			im, _ := fromTar(t, bytes.NewReader(archive(t, c.entries...)), erofs.Options{})
			im.fsck(t)
			if got := listing(t, im); got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
}

func TestWhiteouts(t *testing.T) {
	for _, c := range []struct {
		name    string
		entries []entry
		want    string
	}{
		{"removed name", []entry{file("d/.wh.gone", "")}, "040755 .\n040755 d\n020000 d/gone 0:0\n"},
		{"opaque", []entry{folder("d"), file("d/.wh..wh..opq", ""), file("d/a", "")}, "040755 .\n040750 d trusted.overlay.opaque=\"y\"\n100644 d/a \"\"\n"},
		{"opaque before its directory", []entry{file("d/.wh..wh..opq", ""), folder("d")}, "040755 .\n040750 d trusted.overlay.opaque=\"y\"\n"},
		{"opaque root", []entry{file(".wh..wh..opq", "")}, "040755 . trusted.overlay.opaque=\"y\"\n"},
		{"file beside its whiteout", []entry{file(".wh.a", ""), file("a", "x"), file("b", "y"), file(".wh.b", "")}, "040755 .\n100644 a \"x\"\n100644 b \"y\"\n"},
		{"directory beside its whiteout", []entry{file(".wh.a", ""), folder("a"), folder("b"), file(".wh.b", "")}, "040755 .\n040750 a trusted.overlay.opaque=\"y\"\n040750 b trusted.overlay.opaque=\"y\"\n"},
		{"twice", []entry{file(".wh.a", ""), file(".wh.a", "")}, "040755 .\n020000 a 0:0\n"},
		{"aufs", []entry{file(".wh..wh.plnk", ""), file("a", "")}, "040755 .\n100644 a \"\"\n"},
		{"content is ignored", []entry{file(".wh.a", "data"), file("b", "")}, "040755 .\n020000 a 0:0\n100644 b \"\"\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			im, _ := fromTar(t, bytes.NewReader(archive(t, c.entries...)), erofs.Options{OCIWhiteouts: true})
			im.fsck(t)
			if got := listing(t, im); got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
}
