package erofs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

// seedArchive holds every kind of entry.
func seedArchive(t testing.TB, format tar.Format) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range []tar.Header{
		{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
		{Typeflag: tar.TypeDir, Name: "dir/", Mode: 0o1777},
		{Typeflag: tar.TypeReg, Name: "dir/file", Size: 5000},
		{Typeflag: tar.TypeReg, Name: "dir/" + strings.Repeat("n", 150), Size: 1},
		{Typeflag: tar.TypeLink, Name: "hard", Linkname: "dir/file"},
		{Typeflag: tar.TypeSymlink, Name: "soft", Linkname: "dir"},
		{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1, Devminor: 300},
		{Typeflag: tar.TypeFifo, Name: "fifo"},
		{Typeflag: tar.TypeReg, Name: "dir/.wh.gone"},
		{Typeflag: tar.TypeReg, Name: "dir/.wh..wh..opq"},
	} {
		if format == tar.FormatPAX {
			h.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "value", "SCHILY.xattr.trusted.overlay.opaque": "y"}
		}
		h.Format = format
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// FuzzFromTar: whatever an archive holds, the answer is an error that blames it
// or an image that reads back.
func FuzzFromTar(f *testing.F) {
	for _, format := range []tar.Format{tar.FormatPAX, tar.FormatGNU} {
		f.Add(seedArchive(f, format), true, true)
		f.Add(seedArchive(f, format), false, false)
	}
	meta, blob := tempFile(f, "meta"), tempFile(f, "blob")
	f.Fuzz(func(t *testing.T, archive []byte, oci, keep bool) {
		res, err := FromTar(context.Background(), bytes.NewReader(archive), meta, blob,
			Options{OCIWhiteouts: oci, KeepTrusted: keep, MaxEntries: 1000, MaxBytes: 1 << 20})
		if err != nil {
			if !errs.Is(err, errs.Invalid) {
				t.Fatalf("error of kind %q: %v", errs.KindOf(err), err)
			}
			return
		}
		img, err := Open(meta, blob)
		if err != nil {
			t.Fatal(err)
		}
		names := int64(-1)
		if err := readAll(img, &names); err != nil {
			t.Fatal(err)
		}
		if names != res.Files {
			t.Fatalf("%d names were written, %d are read", res.Files, names)
		}
	})
}

// FuzzOpen: whatever bytes an image has, reading it ends, with an error that
// blames it where it is wrong.
func FuzzOpen(f *testing.F) {
	meta, blob := tempFile(f, "meta"), tempFile(f, "blob")
	if _, err := FromTar(context.Background(), bytes.NewReader(seedArchive(f, tar.FormatPAX)), meta, blob, Options{OCIWhiteouts: true, KeepTrusted: true}); err != nil {
		f.Fatal(err)
	}
	m, err := os.ReadFile(meta.Name())
	if err != nil {
		f.Fatal(err)
	}
	b, err := os.ReadFile(blob.Name())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(m, b)
	out := []*os.File{tempFile(f, "merged"), tempFile(f, "merged-blob")}
	f.Fuzz(func(t *testing.T, meta, blob []byte) {
		if len(meta) >= blockSize { // the checksum would keep the fuzzer out
			meta = bytes.Clone(meta)
			le.PutUint32(meta[superOffset+4:], superChecksum(meta[:blockSize]))
		}
		img, err := Open(bytes.NewReader(meta), bytes.NewReader(blob))
		if err == nil {
			var names int64
			err = readAll(img, &names)
		}
		if err == nil {
			// What can be read can be counted, told apart and merged.
			if _, err := img.UsedBytes(); err != nil && !errs.Is(err, errs.Invalid) {
				t.Fatal(err)
			}
			if _, err := img.TreeDigest("own"); err != nil && !errs.Is(err, errs.Invalid) {
				t.Fatal(err)
			}
			err = mergeAlone(img, out[0], out[1])
		}
		if err != nil && !errs.Is(err, errs.Invalid) && !errs.Is(err, errs.Unsupported) {
			t.Fatalf("error of kind %q: %v", errs.KindOf(err), err)
		}
	})
}

// mergeAlone merges an image with itself, and upon itself.
func mergeAlone(img *Image, meta, blob *os.File) error {
	s := Stacked{Image: img}
	for i, d := range img.Devices() {
		name := d.Tag
		if i == 0 {
			name = strings.Repeat("0", maxTagLen)
		}
		s.Blobs = append(s.Blobs, &Blob{Name: name, Size: int64(d.Blocks) * blockSize})
	}
	_, err := Merge(context.Background(), []*Image{img}, []Stacked{s, s}, nil, meta, blob, Options{MaxEntries: 10_000})
	return err
}

// readAll walks an image and reads up to 1 MiB of each file.
func readAll(img *Image, names *int64) error {
	return img.Walk(func(_ string, e *Entry) error {
		*names++
		if e.Mode&modeFmt != modeReg {
			return nil
		}
		r, err := e.Content()
		if err != nil {
			return err
		}
		if _, err = io.CopyN(io.Discard, r, 1<<20); errors.Is(err, io.EOF) {
			return nil
		}
		return err
	})
}

func tempFile(t testing.TB, name string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}
