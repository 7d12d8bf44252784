package layer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// copiedBlobs serves blobs as copies, at another place each time.
type copiedBlobs struct {
	store blob.Store
	dir   string

	mu       sync.Mutex
	attached map[Digest]int
	fail     error
}

func (c *copiedBlobs) Attach(ctx context.Context, layer Digest, blobs []Object) (paths []string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return nil, c.fail
	}
	c.attached[layer]++
	for _, b := range blobs {
		path := filepath.Join(c.dir, fmt.Sprintf("%s-%d", b.Digest.Hex(), c.attached[layer]))
		f, err := os.Create(path)
		if err != nil {
			return nil, err
		}
		if _, err := blob.Copy(ctx, f, c.store, blobName(b.Digest), b.Size, nil); err != nil {
			return nil, err
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		paths = append(paths, path)
	}
	return paths, nil
}

func (c *copiedBlobs) Detach(_ context.Context, layer Digest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.attached, layer)
	return nil
}

func mountID(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MNT_ID, &st); err != nil {
		t.Fatal(err)
	}
	return st.Mnt_id
}

// A layer whose blobs have become local is mounted anew for the next owner, and nobody sees anything but a mounted layer meanwhile.
func TestRenew(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	store := blob.NewMemory()
	content := string(make([]byte, 10000)) + "end"
	d := importFiles(t, openShared(t, store, "aaaaaa"), "x:1", Base, entry{"f", content, 0}).Layer.Digest
	s := openShared(t, store, "bbbbbb")
	if _, err := s.Resolve(ctx, "", "x:1"); err != nil {
		t.Fatal(err)
	}
	blobs := &copiedBlobs{store: store, dir: t.TempDir(), attached: map[Digest]int{}}
	m, err := OpenMounts(ctx, s, 4, blobs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmountAll(t, s.mounts) })
	dir, err := m.Acquire(ctx, d, "x")
	if err != nil {
		t.Fatal(err)
	}
	first := mountID(t, dir)
	before, err := os.Open(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()

	// The first attempt fails: the mount that works stays.
	blobs.fail = unix.ENOSPC
	m.Renew([]Digest{d})
	if again, err := m.Acquire(ctx, d, "y"); err != nil || again != dir || mountID(t, dir) != first {
		t.Fatalf("a renewal that failed: %s, %v", again, err)
	}
	blobs.fail = nil

	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != content {
				t.Errorf("while it is mounted anew: %d bytes, %v", len(b), err)
				return
			}
		}
	})
	for range 20 {
		m.Renew([]Digest{d})
		if _, err := m.Acquire(ctx, d, "y"); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	watch.Wait()
	if mountID(t, dir) == first {
		t.Error("the layer is mounted as it was")
	}
	if len(blobs.attached) != 1 {
		t.Errorf("attached: %v", blobs.attached)
	}
	got := make([]byte, len(content))
	if n, err := before.ReadAt(got, 0); n != len(content) || string(got) != content {
		t.Errorf("through the mount before: %d bytes, %v", n, err)
	}
	before.Close()
	for _, owner := range []string{"x", "y"} {
		if err := m.Release(owner); err != nil {
			t.Error(err)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if len(blobs.attached) != 0 {
		t.Errorf("still attached: %v", blobs.attached)
	}
	if left, err := mountsBelow(s.mounts); err != nil || len(left) != 0 {
		t.Errorf("still mounted: %v, %v", left, err)
	}
}
