package blobd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/blob"
)

func blobName(o Object) string { return "blobs/" + o.Digest[:2] + "/" + o.Digest }

// A store that is away longer than a read waits: EIO, an event with the layer, and all is well when it is back.
func TestStoreOutage(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.ReadTime = 2 * time.Second })
	img := newImage(t, r, 4, 2<<20)
	dir := img.mount(t, n.attach("the-layer", img.blob)[0].Path)
	r.broken.Store(true)
	if err := img.readAll(dir); !errors.Is(err, unix.EIO) {
		t.Fatalf("read without a store: %v", err)
	}
	for _, kind := range []string{EventOutage, EventFailed} {
		if e := n.event(kind); len(e.Layers) != 1 || e.Layers[0] != "the-layer" {
			t.Errorf("%+v", e)
		}
	}
	if s := n.status(); !s.Store.Out {
		t.Errorf("%+v", s)
	}
	eventually(t, "what the kernel has asked for ahead ends, too", func() bool { return n.status().Waiting == 0 })
	r.broken.Store(false)
	if err := img.readAll(dir); err != nil {
		t.Error(err)
	}
	n.event(EventRecovered)
}

// A store that is a directory goes away while a blob is read, with or without an empty mount point in its place: an outage,
// which ends when it is back. A daemon that starts meanwhile is none the wiser.
func TestStoreDirectoryAway(t *testing.T) {
	r := newRemote(t, 0, 0)
	dir := filepath.Join(t.TempDir(), "store")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	store, err := blob.NewDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := startNode(t, r, func(c *Config) { c.Store = "file://" + dir })
	for i, empty := range []bool{false, true} {
		raw := content(8<<20, uint64(i))
		o := r.put(t, raw)
		if _, err := blob.PutCompressed(t.Context(), store, blobName(o), bytes.NewReader(raw), blob.CompressOptions{}); err != nil {
			t.Fatal(err)
		}
		p := n.attach("layer-"+o.Digest, o)
		f, err := os.Open(p[0].Path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		got := make([]byte, len(raw))
		if _, err := f.ReadAt(got[:4096], 0); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		if empty {
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		rest := make(chan error, 1)
		go func() {
			_, err := f.ReadAt(got[4096:], 4096)
			rest <- err
		}()
		eventually(t, "the outage is noticed while a read waits", func() bool { s := n.status(); return s.Store.Out && s.Waiting > 0 })
		if !empty {
			kill(t, n.status().Pid)
			eventually(t, "the next daemon notices", func() bool { s, err := n.client.Status(t.Context()); return err == nil && s.Store.Out && s.Takeover })
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(dir+".away", dir); err != nil {
			t.Fatal(err)
		}
		if err := <-rest; err != nil {
			t.Errorf("empty %v: %v", empty, err)
		}
		if !bytes.Equal(got, raw) {
			t.Errorf("empty %v: wrong content", empty)
		}
		eventually(t, "it answers", func() bool { return !n.status().Store.Out })
	}
	if e := n.event(EventOutage); len(e.Layers) != 1 {
		t.Errorf("%+v", e)
	}
	n.event(EventRecovered)
	if s := n.status(); s.Cache.FailedRead > 0 || s.Cache.Corrupt > 0 {
		t.Errorf("%+v", s.Cache)
	}
}

// The store dies in the middle of answers, again and again.
func TestStoreCutsOff(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	img := newImage(t, r, 6, 3<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				r.cut.Store(false)
				return
			case <-time.After(20 * time.Millisecond):
				r.cut.Store(!r.cut.Load())
			}
		}
	})
	for range 8 {
		wg.Go(func() {
			if err := img.readAll(dir); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(500 * time.Millisecond)
	close(done)
	wg.Wait()
}

// What is wrong in the store never reaches a reader.
func TestCorruptBlobs(t *testing.T) {
	raw := content(1<<20, 7)
	tests := []struct {
		name  string
		spoil func(t *testing.T, r *remote, o Object)
	}{
		{"a bit of a frame", func(_ *testing.T, r *remote, _ Object) {
			r.spoilWith(func(name string, off int64, p []byte) {
				if strings.HasPrefix(name, "blobs/") && off == 0 {
					p[len(p)/2] ^= 1
				}
			})
		}},
		{"a bit of the index", func(t *testing.T, r *remote, o Object) {
			b, err := blob.ReadAll(t.Context(), r.store, blobName(o), 1<<30)
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)-100] ^= 1
			if err := r.store.Put(t.Context(), blobName(o), bytes.NewReader(b)); err != nil {
				t.Fatal(err)
			}
		}},
		{"cut off at the end", func(t *testing.T, r *remote, o Object) {
			b, err := blob.ReadAll(t.Context(), r.store, blobName(o), 1<<30)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.store.Put(t.Context(), blobName(o), bytes.NewReader(b[:len(b)/2])); err != nil {
				t.Fatal(err)
			}
		}},
		{"other content of the same size", func(t *testing.T, r *remote, o Object) {
			if _, err := blob.PutCompressed(t.Context(), r.store, blobName(o), bytes.NewReader(content(1<<20, 8)), blob.CompressOptions{}); err != nil {
				t.Fatal(err)
			}
		}},
		{"not there", func(t *testing.T, r *remote, o Object) {
			if err := r.store.Delete(t.Context(), blobName(o)); err != nil {
				t.Fatal(err)
			}
		}},
	}
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.ReadTime = 5 * time.Second })
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := r.put(t, append(bytes.Clone(raw), byte(i)))
			tt.spoil(t, r, o)
			defer r.spoilWith(nil)
			p := n.attach("layer-"+tt.name, o)
			if got, err := os.ReadFile(p[0].Path); !errors.Is(err, unix.EIO) {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
		})
	}
	n.event(EventCorrupt)
}

// An index that lies about frames is found out when the whole is there, unless the root is known: then at once.
func TestLyingIndex(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.ReadTime = 5 * time.Second })
	good := content(1<<20, 1)
	o := r.put(t, good)
	x, err := blob.ReadIndex(t.Context(), r.store, blobName(o), o.Size)
	if err != nil {
		t.Fatal(err)
	}
	root := x.Root().String()
	bad := bytes.Clone(good)
	bad[12345] ^= 1
	forge(t, r, o, bad)
	withRoot := o
	withRoot.Root = root
	p := n.attach("with-root", withRoot)
	if b, err := os.ReadFile(p[0].Path); !errors.Is(err, unix.EIO) {
		t.Errorf("%d bytes of a forged blob, %v", len(b), err)
	}
	if n.status().Cache.Fetched != 0 {
		t.Error("frames of an index that is not the layer's were fetched")
	}

	other := content(1<<20, 2)
	o = r.put(t, other)
	bad = bytes.Clone(other)
	bad[12345] ^= 1
	forge(t, r, o, bad)
	p = n.attach("without-root", o)
	_, _ = os.ReadFile(p[0].Path)
	n.event(EventCorrupt)
	eventually(t, "reads fail", func() bool {
		f, err := os.Open(p[0].Path)
		if err != nil {
			return false
		}
		defer f.Close()
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		_, err = f.ReadAt(make([]byte, 4096), 512<<10)
		return errors.Is(err, unix.EIO)
	})
}

// forge puts other bytes under a blob's name, with an index that claims the blob's digest.
func forge(t *testing.T, r *remote, o Object, raw []byte) {
	t.Helper()
	var b bytes.Buffer
	if _, err := blob.Compress(t.Context(), &b, bytes.NewReader(raw), blob.CompressOptions{}); err != nil {
		t.Fatal(err)
	}
	stored := b.Bytes()
	// The footer, as package blob describes it: digest of the whole, sizes, counts; the sum of index and footer; magic.
	const sum, magic = 32, 8
	footer := len(stored) - (32 + 8 + 4 + 4 + sum + magic)
	digest := toSum(o.Digest)
	copy(stored[footer:], digest[:])
	frames := int(binary.LittleEndian.Uint32(stored[footer+44:]))
	fresh := sha256.Sum256(stored[footer-36*frames : footer+48])
	copy(stored[footer+48:], fresh[:])
	if _, err := blob.ParseIndex(stored); err != nil {
		t.Fatal("the forgery is not good enough:", err)
	}
	if err := r.store.Put(t.Context(), blobName(o), bytes.NewReader(stored)); err != nil {
		t.Fatal(err)
	}
}

// A cache disk that is full: everything is read right, from memory.
func TestFullCacheDisk(t *testing.T) {
	r := newRemote(t, 0, 0)
	var dir string
	n := startNode(t, r, func(c *Config) {
		dir = filepath.Join(c.Dir, "cache", "data")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	})
	t.Cleanup(func() { // before the node looks for leaks: the last to be added is the first to run
		_ = n.client.Shutdown(context.Background())
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	img := newImage(t, r, 8, 4<<20)
	mnt := img.mount(t, n.attach("layer", img.blob)[0].Path, "directio")
	for range 2 {
		if err := img.readAll(mnt); err != nil {
			t.Fatal(err)
		}
		_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0)
	}
	if s := n.status(); s.Cache.NotCached == 0 || s.Cache.FailedRead > 0 {
		t.Errorf("%+v", s.Cache)
	}
}

// A bound far below what is read, with readers all over it.
func TestEvictionUnderReaders(t *testing.T) {
	r := newRemote(t, 0, 0)
	const limit = 8 << 20
	n := startNode(t, r, func(c *Config) { c.CacheBytes = limit })
	var images []image
	var dirs []string
	for range 3 {
		img := newImage(t, r, 6, 2<<20)
		images = append(images, img)
		dirs = append(dirs, img.mount(t, n.attach(img.blob.Digest, img.blob)[0].Path, "directio"))
	}
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for range 2 {
				if err := images[i%3].readAll(dirs[i%3]); err != nil {
					t.Error(err)
				}
				_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0)
			}
		})
	}
	wg.Wait()
	eventually(t, "the cache is within its bound", func() bool { return n.status().Cache.Used <= limit })
	s := n.status()
	if s.Cache.Evicted == 0 || s.Cache.FailedRead > 0 {
		t.Errorf("%+v", s.Cache)
	}
	var disk int64
	files, _ := filepath.Glob(filepath.Join(n.launch.cache(), "*", "*"))
	for _, f := range files {
		var st unix.Stat_t
		if unix.Stat(f, &st) == nil {
			disk += st.Blocks * 512
		}
	}
	if disk > limit*5/4 {
		t.Errorf("%d bytes on disk with a bound of %d", disk, limit)
	}
}

// Files of the cache that something else damaged are noticed.
func TestDamagedLocally(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	raw := content(4<<20, 5)
	o := r.put(t, raw)
	p := n.attach("layer", o)
	f, err := os.Open(p[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1<<20)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	partial := filepath.Join(n.launch.cache(), "partial", o.Digest)
	w, err := os.OpenFile(partial, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt([]byte("damage"), 100_000); err != nil {
		t.Fatal(err)
	}
	w.Close()
	kill(t, n.status().Pid) // forgets what it has in memory
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	got, err := os.ReadFile(p[0].Path)
	if err != nil || !bytes.Equal(got, raw) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	n.event(EventComplete)
	if s := n.status(); s.Cache.Corrupt == 0 {
		t.Errorf("%+v", s.Cache)
	}
}

// The second sandbox of a layer on another node gets what the first has read before it asks.
func TestProfile(t *testing.T) {
	r := newRemote(t, 0, 0)
	img := newImage(t, r, 8, 4<<20)
	layer := img.blob.Digest // any 64 digits
	reads := `{"schema":1,"reads":[{"blob":"` + img.blob.Digest + `","off":1048576,"len":2097152}]}`
	if err := r.store.Put(t.Context(), "profiles/"+layer[:2]+"/"+layer, strings.NewReader(reads)); err != nil {
		t.Fatal(err)
	}
	n := startNode(t, r, nil)
	n.attach(layer, img.blob)
	eventually(t, "it is fetched", func() bool { return n.status().Cache.Prefetched == 2<<20 })
	if s := n.status(); s.Cache.Fetched != 2<<20 || s.Cache.Read != 0 {
		t.Errorf("%+v", s.Cache)
	}
}
