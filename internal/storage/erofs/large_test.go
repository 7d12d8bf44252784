package erofs_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// TestLargeFile checks offsets beyond 32 bits, and chunks larger than 4 KiB:
// those of a file of more than 16 GiB, and those of a file of one run.
func TestLargeFile(t *testing.T) {
	for _, c := range []struct {
		name    string
		size    int64
		at      []int64 // where data is
		maxMeta int64
	}{
		{"beyond 4 GiB", 5<<30 + 123, []int64{0, 4<<30 - 5, 4<<30 + 1<<20}, 20 << 20},
		{"beyond 16 GiB", 40<<30 + 1, []int64{4096, 20<<30 + 9, 40<<30 - 3}, 40 << 20},
		{"one hole", 1 << 40, nil, 1 << 16},
		{"aligned", 64 << 30, []int64{8 << 30, 32 << 30}, 40 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			f, err := os.Create(filepath.Join(dir, "f"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for _, off := range c.at {
				if _, err := f.WriteAt(fmt.Appendf(nil, "data at %d", off), off); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.Truncate(c.size); err != nil {
				t.Fatal(err)
			}
			im, res := fromDir(t, dir, erofs.Options{MaxBytes: 2 << 40})
			if res.LogicalBytes != c.size || len(res.Warnings) > 0 {
				t.Errorf("result %+v", *res)
			}
			if res.MetaBytes > c.maxMeta || res.BlobBytes > 1<<20 {
				t.Errorf("images have %d and %d bytes", res.MetaBytes, res.BlobBytes)
			}
			mounted, err := os.Open(im.mount(t) + "/f")
			if err != nil {
				t.Fatal(err)
			}
			defer mounted.Close()
			var own io.ReaderAt
			if err := im.open(t).Walk(func(_ string, e *erofs.Entry) error {
				if e.Mode&unix.S_IFMT == unix.S_IFREG {
					own, err = e.Content()
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			for _, off := range append(c.at, 1<<20, 2<<30, c.size-1000) {
				start := max(0, off-10000)
				want, got := make([]byte, 20000), make([]byte, 20000)
				n, wantErr := f.ReadAt(want, start)
				for name, r := range map[string]io.ReaderAt{"kernel": mounted, "reader": own} {
					m, err := r.ReadAt(got, start)
					if m != n || err != wantErr || !bytes.Equal(want[:n], got[:m]) {
						t.Errorf("%s: %d bytes at %d differ from the %d of the source (%v, %v)", name, m, start, n, err, wantErr)
					}
				}
			}
		})
	}
}

// TestHugeDirectory looks names up in a directory of 100,000.
func TestHugeDirectory(t *testing.T) {
	r, w := io.Pipe()
	const n = 100_000
	go func() {
		buffered := bufio.NewWriterSize(w, 1<<20)
		tw := tar.NewWriter(buffered)
		for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(n) {
			if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("d/name-%d-%s", i, strings.Repeat("x", i%60)), Mode: 0o600}); err != nil {
				w.CloseWithError(err)
				return
			}
		}
		w.CloseWithError(errors.Join(tw.Close(), buffered.Flush()))
	}()
	im, res := fromTar(t, r, erofs.Options{})
	if res.Files != n+1 {
		t.Errorf("%d names", res.Files)
	}
	im.fsck(t)
	root := im.mount(t)
	names, err := os.ReadDir(root + "/d")
	if err != nil {
		t.Fatal(err)
	}
	if len(names) != n {
		t.Errorf("the kernel lists %d names", len(names))
	}
	for i := 0; i < n; i += 37 {
		if _, err := os.Lstat(fmt.Sprintf("%s/d/name-%d-%s", root, i, strings.Repeat("x", i%60))); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(root + "/d/name-100000"); !os.IsNotExist(err) {
		t.Errorf("a name that is not there: %v", err)
	}
}

// TestLongAttributes fills the space that the format has for attributes, which
// no file system at hand does.
func TestLongAttributes(t *testing.T) {
	records := make(map[string]string)
	want := make(map[string]string)
	for i := range 4 {
		value := string(bytes.Repeat([]byte{byte('a' + i)}, 65500-i*1021))
		records[fmt.Sprintf("SCHILY.xattr.user.%d", i)] = value
		want[fmt.Sprintf("user.%d", i)] = value
	}
	content := strings.Repeat("content ", 3000)
	e := file("f", content)
	e.PAXRecords = records
	d := folder("d")
	d.PAXRecords = records
	l := link(tar.TypeSymlink, "l", "target")
	l.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": strings.Repeat("c", 65535)}
	im, _ := fromTar(t, bytes.NewReader(archive(t, e, d, l, file("d/x", "y"))), erofs.Options{})
	im.fsck(t)
	root := im.mount(t)
	for name, value := range want {
		for _, path := range []string{"/f", "/d"} {
			got := make([]byte, 1<<16)
			n, err := unix.Lgetxattr(root+path, name, got)
			if err != nil || string(got[:n]) != value {
				t.Errorf("%s of %s: %d bytes, %v", name, path, n, err)
			}
		}
	}
	if got, err := os.ReadFile(root + "/f"); err != nil || string(got) != content {
		t.Errorf("content behind long attributes: %d bytes, %v", len(got), err)
	}
	if got, err := os.Readlink(root + "/l"); err != nil || got != "target" {
		t.Errorf("link behind a long attribute: %q, %v", got, err)
	}
	if got, err := os.ReadFile(root + "/d/x"); err != nil || string(got) != "y" {
		t.Errorf("directory with long attributes: %q, %v", got, err)
	}
	if got := listing(t, im); !strings.Contains(got, "120777 l -> target security.capability=") {
		t.Errorf("reader: %.200s", got)
	}
}

// TestDeduplication checks how much is stored, and that no hole is.
func TestDeduplication(t *testing.T) {
	random := make([]byte, 1<<20)
	if _, err := rand.NewChaCha8([32]byte{}).Read(random); err != nil {
		t.Fatal(err)
	}
	content := string(random)
	im, res := fromTar(t, bytes.NewReader(archive(t,
		file("a", content), file("b", content), file("tail", content[4096:]), file("twice", content+content),
		file("short", content[:100]), file("same-short", content[:100]), file("zeros", strings.Repeat("\x00", 1<<20+5)),
	)), erofs.Options{})
	if want := int64(1<<20 + 4096); res.BlobBytes != want {
		t.Errorf("the blob has %d bytes, want %d", res.BlobBytes, want)
	}
	if res.MetaBytes > 8192 {
		t.Errorf("metadata image has %d bytes: chunks were not joined", res.MetaBytes)
	}
	im.fsck(t)
	for name, want := range map[string]string{"twice": content + content, "zeros": strings.Repeat("\x00", 1<<20+5), "tail": content[4096:]} {
		if got, err := os.ReadFile(im.mount(t) + "/" + name); err != nil || string(got) != want {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

func TestEmptyTree(t *testing.T) {
	im, res := fromDir(t, t.TempDir(), erofs.Options{})
	if res.BlobBytes != 0 || res.Files != 0 {
		t.Errorf("result %+v", *res)
	}
	im.fsck(t)
	if names, err := os.ReadDir(im.mount(t)); err != nil || len(names) != 0 {
		t.Errorf("%v, %v", names, err)
	}
}

func TestProgress(t *testing.T) {
	var calls []int64
	content := strings.Repeat("x", 10<<20)
	im := newImages(t)
	res, err := erofs.FromTar(context.Background(), bytes.NewReader(archive(t, file("a", content))), im.meta, im.blob,
		erofs.Options{Progress: func(n int64) { calls = append(calls, n) }})
	if err != nil {
		t.Fatal(err)
	}
	if len(calls) < 5 || calls[len(calls)-1] != res.LogicalBytes {
		t.Errorf("progress was %v", calls)
	}
}
