package blobd

import (
	"bytes"
	"os"
	"sync"
	"testing"
	"time"
)

func TestLazyThenLocal(t *testing.T) {
	r := newRemote(t, 0, 0)
	img := newImage(t, r, 8, 3<<20)
	n := startNode(t, r, nil)
	p := n.attach("layer", img.blob)
	if !p[0].Lazy {
		t.Fatalf("a blob that is nowhere is said to be at %+v", p)
	}
	dir := img.mount(t, p[0].Path)
	if err := img.readAll(dir); err != nil {
		t.Fatal(err)
	}
	if e := n.event(EventComplete); e.Blob != img.blob.Digest {
		t.Errorf("complete: %+v", e)
	}
	p = n.attach("other", img.blob)
	if p[0].Lazy {
		t.Fatal("a complete blob is served by the daemon")
	}
	moved := r.moved.Load()
	if err := img.readAll(img.mount(t, p[0].Path)); err != nil {
		t.Fatal(err)
	}
	if err := img.readAll(dir); err != nil {
		t.Fatal(err)
	}
	if r.moved.Load() != moved {
		t.Errorf("%d bytes moved for what is complete", r.moved.Load()-moved)
	}
}

func TestDirectoryOfBlobs(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	raw := content(700_001, 1)
	o := r.put(t, raw)
	p := n.attach("layer", o)
	got, err := os.ReadFile(p[0].Path)
	if err != nil || !bytes.Equal(got, raw) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	names, err := os.ReadDir(n.launch.mountPoint())
	if err != nil || len(names) != 1 || names[0].Name() != o.Digest {
		t.Errorf("%v, %v", names, err)
	}
	if _, err := os.Stat(n.launch.mountPoint() + "/nothing"); !os.IsNotExist(err) {
		t.Errorf("stat of what is not there: %v", err)
	}
	if err := os.WriteFile(p[0].Path, nil, 0); err == nil {
		t.Error("a blob can be written")
	}
}

func TestConcurrentReaders(t *testing.T) {
	r := newRemote(t, time.Millisecond, 0)
	img := newImage(t, r, 6, 2<<20)
	n := startNode(t, r, nil)
	p := n.attach("layer", img.blob)
	dir := img.mount(t, p[0].Path)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if err := img.readAll(dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s := n.status(); s.Cache.Fetched > img.blob.Size {
		t.Errorf("%d bytes fetched for a blob of %d: requests were not coalesced", s.Cache.Fetched, img.blob.Size)
	}
}
