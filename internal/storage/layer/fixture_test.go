package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

type entry struct {
	name, content string
	mode          int64
}

// tarOf makes an archive of regular files; names that end in / are directories.
func tarOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Mode: e.mode, Size: int64(len(e.content)), Typeflag: tar.TypeReg}
		if e.mode == 0 {
			h.Mode = 0o644
		}
		if e.name[len(e.name)-1] == '/' {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// importFiles imports an archive of the entries as name.
func importFiles(t testing.TB, s *Store, name string, kind Kind, entries ...entry) *Imported {
	t.Helper()
	im, err := s.ImportTar(context.Background(), bytes.NewReader(tarOf(t, entries...)), ImportOptions{Name: name, Kind: kind, Source: "upload"})
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
}

// openMounts opens the mounts of a store and takes them down after the test.
func openMounts(t testing.TB, s *Store, idle int) *Mounts {
	t.Helper()
	needRoot(t)
	m, err := OpenMounts(context.Background(), s, idle, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmountAll(t, s.mounts) })
	return m
}

func unmountAll(t testing.TB, dir string) {
	t.Helper()
	below, err := mountsBelow(dir)
	if err != nil {
		t.Error(err)
	}
	for i := len(below) - 1; i >= 0; i-- {
		if err := unix.Unmount(below[i].point, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", below[i].point, err)
		}
	}
}
