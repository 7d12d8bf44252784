package erofs_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

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
		{"labels of security modules dropped", []entry{
			withAttr(file("a", ""), "security.selinux", "x"), withAttr(file("b", ""), "security.SMACK64EXEC", "x"), withAttr(file("c", ""), "security.evm", "x"),
			withAttr(file("d", ""), "security.ima", "x"), withAttr(file("e", ""), "security.apparmor", "x"), withAttr(file("f", ""), "security.bpf.x", "x"),
			withAttr(file("g", ""), "security.", "x"),
		}, "040755 .\n100644 a \"\"\n100644 b \"\"\n100644 c \"\"\n100644 d \"\"\n100644 e \"\"\n100644 f \"\"\n100644 g \"\"\n"},
		{"attributes of all kinds of files", []entry{
			withAttr(link(tar.TypeSymlink, "a", "x"), "security.harena", "1"), withAttr(link(tar.TypeFifo, "b", ""), "security.harena", "2"),
			withAttr(link(tar.TypeChar, "c", ""), "security.harena", "3"), withAttr(folder("d"), "security.harena", "4"), link(tar.TypeLink, "e", "a"),
		}, "040755 .\n120777 a -> x links=2 security.harena=\"1\"\n010000 b security.harena=\"2\"\n020000 c 0:0 security.harena=\"3\"\n040750 d security.harena=\"4\"\n120777 e -> x links=2 security.harena=\"1\"\n"},
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
