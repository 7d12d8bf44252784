package harena

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestWriteTreeKeepsEverything(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(at("d/empty"), 0o750))
	must(os.WriteFile(at("d/file"), []byte("content"), 0o640))
	_ = unix.Lchown(at("d/file"), 12, 34) // takes set-ID bits away
	must(os.Chmod(at("d/file"), os.ModeSetuid|0o755))
	must(os.Link(at("d/file"), at("z-link")))
	must(os.Symlink("d/file", at("soft")))
	must(os.Link(at("soft"), at("soft2")))
	must(os.Symlink("/etc/passwd", at("away")))
	must(unix.Mkfifo(at("fifo"), 0o600))
	must(os.WriteFile(at("odd\xff\nname"), nil, 0o600))
	long := strings.Repeat("n", 255)
	must(os.WriteFile(at(long), []byte("long"), 0o600))
	l, err := net.Listen("unix", at("sock"))
	must(err)
	defer l.Close()
	mtime := time.Unix(1_600_000_000, 123_456_789)
	must(os.Chtimes(at("d/file"), mtime, mtime))
	if err := unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil && !errors.Is(err, unix.EPERM) {
		t.Fatal(err)
	}
	xattr := unix.Setxattr(at("d/file"), "user.test", []byte("a\x00b"), 0)

	var out bytes.Buffer
	var warnings []string
	must(WriteTree(t.Context(), &out, dir, TreeOptions{Warn: func(m string) { warnings = append(warnings, m) }}))
	entries := map[string]*tar.Header{}
	content := map[string]string{}
	order := []string{}
	for tr := tar.NewReader(&out); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(err)
		b, err := io.ReadAll(tr)
		must(err)
		entries[h.Name], content[h.Name] = h, string(b)
		order = append(order, h.Name)
	}
	if order[0] != "./" || entries["d/empty/"] == nil || content[long] != "long" || entries["odd\xff\nname"] == nil {
		t.Errorf("names %q", order)
	}
	f := entries["d/file"]
	if f == nil || content["d/file"] != "content" || f.Mode != 0o4755 || !f.ModTime.Equal(mtime) {
		t.Errorf("file: %+v", f)
	}
	if os.Geteuid() == 0 && (f.Uid != 12 || f.Gid != 34) {
		t.Errorf("owner %d:%d", f.Uid, f.Gid)
	}
	if xattr == nil && f.PAXRecords["SCHILY.xattr.user.test"] != "a\x00b" {
		t.Errorf("attributes: %q", f.PAXRecords)
	}
	if h := entries["z-link"]; h == nil || h.Typeflag != tar.TypeLink || h.Linkname != "d/file" {
		t.Errorf("hard link: %+v", h)
	}
	if h := entries["soft2"]; h == nil || h.Typeflag != tar.TypeLink || h.Linkname != "soft" {
		t.Errorf("hard link of a symlink: %+v", h)
	}
	if h := entries["away"]; h == nil || h.Typeflag != tar.TypeSymlink || h.Linkname != "/etc/passwd" {
		t.Errorf("symlink: %+v", h)
	}
	if h := entries["fifo"]; h == nil || h.Typeflag != tar.TypeFifo {
		t.Errorf("fifo: %+v", h)
	}
	if h := entries["null"]; h != nil && (h.Typeflag != tar.TypeChar || h.Devmajor != 1 || h.Devminor != 3) {
		t.Errorf("device: %+v", h)
	}
	if entries["sock"] != nil || len(warnings) != 1 || !strings.Contains(warnings[0], "sock") {
		t.Errorf("socket: %q", warnings)
	}
}

func TestExtractStaysInside(t *testing.T) {
	for name, entries := range map[string][]tar.Header{
		"dot dot":         {{Name: "../evil", Typeflag: tar.TypeReg}},
		"absolute":        {{Name: "/evil", Typeflag: tar.TypeReg}},
		"through symlink": {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "l/evil", Typeflag: tar.TypeReg}},
		"dir through it":  {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "l/evil/", Typeflag: tar.TypeDir}},
		"hard link out":   {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../secret"}},
		"link over link":  {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../evil"}, {Name: "l", Typeflag: tar.TypeReg}},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			if err := os.WriteFile(filepath.Join(base, "secret"), []byte("s"), 0o600); err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, h := range entries {
				h.Mode = 0o644
				if err := w.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			_ = w.Close()
			err := extract(&b, filepath.Join(base, "in"), nil)
			if _, serr := os.Lstat(filepath.Join(base, "evil")); serr == nil {
				t.Errorf("escaped (%v)", err)
			}
			if _, serr := os.Lstat(filepath.Join(base, "in", "h")); serr == nil {
				t.Error("a link to the outside was made")
			}
			if name == "link over link" {
				if fi, lerr := os.Lstat(filepath.Join(base, "in", "l")); err != nil || lerr != nil || !fi.Mode().IsRegular() {
					t.Errorf("a link was not replaced: %v, %v", err, lerr)
				}
			} else if err == nil {
				t.Error("no error")
			}
		})
	}
}
