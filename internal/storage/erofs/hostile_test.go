package erofs_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

func TestHostileArchives(t *testing.T) {
	device := entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1 << 12}}
	owner := file("f", "")
	owner.Uid = 1<<32 - 1
	oci := erofs.Options{OCIWhiteouts: true}
	cut := archive(t, file("first", "x"), file("second", strings.Repeat("y", 5000)))
	damaged := bytes.Clone(cut)
	copy(damaged[1024:], "not a header")
	for _, c := range []struct {
		name string
		tar  []byte
		o    erofs.Options
		want string // part of the message
	}{
		{"dot-dot", archive(t, file("a/../../etc/passwd", "")), erofs.Options{}, `"a/../../etc/passwd"`},
		{"dot-dot inside", archive(t, file("a/../b", "")), erofs.Options{}, `"a/../b"`},
		{"dot-dot link target", archive(t, file("a", ""), link(tar.TypeLink, "b", "../a")), erofs.Options{}, `"b"`},
		{"through a link", archive(t, link(tar.TypeSymlink, "etc", "/etc"), file("etc/passwd", "")), erofs.Options{}, `"etc/passwd": its parent "etc" is a symbolic link`},
		{"link target through a link", archive(t, folder("d"), file("d/a", ""), link(tar.TypeSymlink, "l", "d"), link(tar.TypeLink, "b", "l/a")), erofs.Options{}, `"b": its parent "l" is a symbolic link`},
		{"below a file", archive(t, file("a", ""), file("a/b", "")), erofs.Options{}, `"a/b": its parent "a" is not a directory`},
		{"missing target", archive(t, link(tar.TypeLink, "b", "a")), erofs.Options{}, `"b": the target "a"`},
		{"forward target", archive(t, link(tar.TypeLink, "b", "a"), file("a", "")), erofs.Options{}, `"b": the target "a"`},
		{"link to a directory", archive(t, folder("a"), link(tar.TypeLink, "b", "a")), erofs.Options{}, `"b"`},
		{"link to the root", archive(t, link(tar.TypeLink, "b", "/")), erofs.Options{}, `"b"`},
		{"root is a file", archive(t, file("./.", "x")), erofs.Options{}, "root"},
		{"root is a link", archive(t, link(tar.TypeSymlink, "/", "/etc")), erofs.Options{}, "root"},
		{"long name", archive(t, file(strings.Repeat("n", 256), "")), erofs.Options{}, "file name is 255"},
		{"long path", archive(t, file(strings.Repeat("n/", 2048)+"n", "")), erofs.Options{}, "path is 4095"},
		{"long target", archive(t, link(tar.TypeSymlink, "l", strings.Repeat("n", 4096))), erofs.Options{}, `"l"`},
		{"empty target", archive(t, link(tar.TypeSymlink, "l", "")), erofs.Options{}, `"l"`},
		{"device number", archive(t, device), erofs.Options{}, `"dev"`},
		{"owner", archive(t, owner), erofs.Options{}, `"f": owner 4294967295:0`},
		{"long attribute", archive(t, withAttr(file("f", ""), "user.x", strings.Repeat("v", 65536))), erofs.Options{}, `"f"`},
		{"attribute name", archive(t, withAttr(file("f", ""), "user."+strings.Repeat("n", 251), "")), erofs.Options{}, `"f"`},
		{"metacopy", archive(t, withAttr(file("f", ""), "trusted.overlay.metacopy", "")), erofs.Options{KeepTrusted: true}, `"f"`},
		{"unknown type", archive(t, entry{Header: tar.Header{Typeflag: 'V', Name: "volume"}}), erofs.Options{}, `"volume": entries of type 'V'`},
		{"nameless whiteout", archive(t, file("d/.wh.", "")), oci, `"d/.wh."`},
		{"whiteout of dot-dot", archive(t, file("d/.wh...", "")), oci, `"d/.wh..."`},
		{"too many entries", archive(t, file("a/b/c/d", "")), erofs.Options{MaxEntries: 3}, "entries of a layer is 3"},
		{"too many whiteouts", archive(t, file(".wh.a", ""), file(".wh.b", "")), erofs.Options{MaxEntries: 1, OCIWhiteouts: true}, " is 1, asked 2"},
		{"too large", archive(t, file("a", "12345"), file("b", "123456")), erofs.Options{MaxBytes: 10}, `"b": the limit of size of all files of a layer is 10, asked 11`},
		{"sparse bomb", sparseBomb(), erofs.Options{}, `"bomb": the limit of size of a file in a layer is 17592186036224`},
		{"cut in a header", cut[:1024+100], erofs.Options{}, `cut off in or after entry "first"`},
		{"cut in content", cut[:1024+512+4097], erofs.Options{}, `cut off in entry "second"`},
		{"cut between entries", cut[:1024], erofs.Options{}, `cut off in or after entry "first"`},
		{"cut before the end marker", cut[:len(cut)-1024], erofs.Options{}, `cut off in or after entry "second"`},
		{"zeros before the cut", archive(t, file("z", strings.Repeat("\x00", 4096)))[:512+4096], erofs.Options{}, `cut off in or after entry "z"`},
		{"empty", nil, erofs.Options{}, "cut off at its start"},
		{"damaged header", damaged, erofs.Options{}, `damaged in or after entry "first"`},
		{"not a tar", bytes.Repeat([]byte("hello "), 1000), erofs.Options{}, "damaged at its start"},
	} {
		t.Run(c.name, func(t *testing.T) {
			im := newImages(t)
			_, err := erofs.FromTar(context.Background(), bytes.NewReader(c.tar), im.meta, im.blob, c.o)
			if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error of kind %q: %v\nwant one with %s", errs.KindOf(err), err, c.want)
			}
		})
	}
}

// sparseBomb is a PAX sparse file of 2^60 bytes without data.
func sparseBomb() []byte {
	record := func(k, v string) string {
		for n := len(k) + len(v) + 4; ; n++ {
			if s := fmt.Sprintf("%d %s=%s\n", n, k, v); len(s) == n {
				return s
			}
		}
	}
	pax := record("GNU.sparse.major", "0") + record("GNU.sparse.minor", "1") + record("GNU.sparse.name", "bomb") +
		record("GNU.sparse.size", "1152921504606846976") + record("GNU.sparse.numblocks", "0") + record("GNU.sparse.map", "")
	var buf bytes.Buffer
	block := func(kind byte, name string, size int) {
		b := make([]byte, 512)
		copy(b, name)
		copy(b[100:], "0000644\x000000000\x000000000\x00")
		copy(b[124:], fmt.Sprintf("%011o\x00%011o\x00", size, 0))
		b[156] = kind
		copy(b[257:], "ustar\x0000")
		copy(b[148:], "        ")
		sum := 0
		for _, c := range b {
			sum += int(c)
		}
		copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
		buf.Write(b)
	}
	block('x', "pax", len(pax))
	buf.WriteString(pax)
	buf.Write(make([]byte, (512-len(pax)%512)%512))
	block('0', "bomb", 0)
	buf.Write(make([]byte, 1024))
	return buf.Bytes()
}

func TestSourceErrors(t *testing.T) {
	whole := archive(t, file("a", strings.Repeat("x", 1<<20)))
	boom := errors.New("boom")
	for _, at := range []int{0, 600, 1 << 19, len(whole) - 600, len(whole)} {
		im := newImages(t)
		r := io.MultiReader(bytes.NewReader(whole[:at]), iotest.ErrReader(boom))
		_, err := erofs.FromTar(context.Background(), r, im.meta, im.blob, erofs.Options{})
		if !errors.Is(err, boom) || errs.Is(err, errs.Invalid) {
			t.Errorf("source fails at %d: %v", at, err)
		}
	}
	im := newImages(t)
	quota := errs.E(errs.Quota, "enough")
	_, err := erofs.FromTar(context.Background(), io.MultiReader(bytes.NewReader(whole[:4096]), iotest.ErrReader(quota)), im.meta, im.blob, erofs.Options{})
	if !errs.Is(err, errs.Quota) {
		t.Errorf("the kind of the source's error is lost: %v", err)
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	whole := archive(t, file("a", strings.Repeat("x", 8<<20)), file("b", ""))
	im := newImages(t)
	_, err := erofs.FromTar(ctx, bytes.NewReader(whole), im.meta, im.blob, erofs.Options{Progress: func(int64) { cancel() }})
	if !errs.Is(err, errs.Cancelled) {
		t.Errorf("FromTar: %v", err)
	}
	dir := t.TempDir()
	if _, err := erofs.FromDir(ctx, dir, im.meta, im.blob, erofs.Options{}); err != nil {
		// An empty directory may be done before anybody looks.
		if !errs.Is(err, errs.Cancelled) {
			t.Errorf("FromDir: %v", err)
		}
	}
}

// TestReadsToTheEnd: a decompressor checks its sum at its end only.
func TestReadsToTheEnd(t *testing.T) {
	whole := archive(t, file("a", "x"))
	src := bytes.NewReader(append(whole, make([]byte, 1<<20)...))
	fromTar(t, src, erofs.Options{})
	if src.Len() != 0 {
		t.Errorf("%d bytes were not read", src.Len())
	}
}
