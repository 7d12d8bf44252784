package disk_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/disk"
)

// Layers that may grow larger than the volume leave room for what the node writes, and an erased layer's space is there soon.
func TestLayersLeaveRoom(t *testing.T) {
	root := mounted(t, 700<<20, "", "mkfs.btrfs", "-q", "--mixed", "-m", "single", "-d", "single")
	d, err := disk.Open(root, true)
	if err != nil {
		t.Fatal(err)
	}
	const leave = 64 << 20
	if all, err := d.Pool(leave); err != nil || all < leave {
		t.Fatalf("pool: %v, %v", all, err)
	}
	a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
	if err := errors.Join(d.Make(a, 10<<30), d.Make(b, 10<<30)); err != nil {
		t.Fatal(err)
	}
	// fill writes so many bytes of noise, unless something ends it.
	fill := func(path string, size int) (int, error) {
		f, err := os.Create(path)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		block := make([]byte, 1<<20)
		for n := 0; n < size; n += len(block) {
			if _, err := f.Write(block); err != nil {
				return n, err
			}
			if n%(32<<20) == 0 {
				if err := errors.Join(f.Sync(), d.Balance()); err != nil {
					return n, err
				}
			}
		}
		return size, f.Sync()
	}
	n, err := fill(filepath.Join(a, "hog"), 2<<30)
	if !errors.Is(err, unix.EDQUOT) || n < 200<<20 {
		t.Fatalf("a layer larger than the volume: %d bytes, %v", n, err)
	}
	if n, err := fill(filepath.Join(b, "f"), 64<<20); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("another layer beside it: %d bytes, %v", n, err)
	}
	if n, err := fill(filepath.Join(root, "records"), leave/2); err != nil {
		t.Errorf("the node's own files: %d bytes, %v", n, err)
	}
	parent, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	if !disk.Erase(int(parent.Fd()), "a") {
		t.Fatal("the layer is still there")
	}
	if err := d.Settle(t.Context(), 300<<20, 30*time.Second); err != nil {
		t.Fatal(err)
	}
	if n, err := fill(filepath.Join(b, "f"), 100<<20); err != nil {
		t.Errorf("after the hog was erased: %d bytes, %v", n, err)
	}
}
