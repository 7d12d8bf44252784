package erofs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
)

// TestHold: whatever is held, and whatever happens to the directory once it was read, the image is the same.
func TestHold(t *testing.T) {
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<15)
	for i := range big {
		big[i] ^= byte(i >> 12)
	}
	for name, b := range map[string][]byte{"a": big, "b": []byte("small"), "c": big[:70_000], "e": nil} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	hole, err := os.Create(filepath.Join(dir, "hole"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hole.WriteAt([]byte("end"), 3<<20); err != nil {
		t.Fatal(err)
	}
	hole.Close()
	if err := os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "d")); err != nil {
		t.Fatal(err)
	}
	var want [2][]byte
	for _, memory := range []int64{0, 4096, 100_000, 1 << 20, 1 << 30} {
		var files [4]*os.File // meta, blob, clones, the directory
		for i := range files[:3] {
			if files[i], err = os.Create(filepath.Join(t.TempDir(), "f")); err != nil {
				t.Fatal(err)
			}
			defer files[i].Close()
		}
		if files[3], err = os.Open(dir); err != nil {
			t.Fatal(err)
		}
		defer files[3].Close()
		tree, err := ReadTree(context.Background(), files[3], files[0], files[1], Options{Hold: Hold{Memory: memory, Clones: files[2]}})
		if err != nil {
			t.Fatal(err)
		}
		if memory == 1<<30 { // all of it is held
			if err := os.WriteFile(filepath.Join(dir, "b"), []byte("other"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := tree.Write(context.Background()); err != nil {
			t.Fatal(err)
		}
		for i := range want {
			got, err := os.ReadFile(files[i].Name())
			if err != nil {
				t.Fatal(err)
			}
			if want[i] == nil {
				want[i] = got
			}
			if !bytes.Equal(got, want[i]) {
				t.Errorf("with %d bytes held, file %d of the image differs: %d bytes, want %d", memory, i, len(got), len(want[i]))
			}
		}
	}
}
