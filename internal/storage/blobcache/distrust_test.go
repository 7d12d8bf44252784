package blobcache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// stored returns a blob of a memory store, and what it holds.
func stored(t *testing.T) (*blob.Memory, Object, []byte) {
	t.Helper()
	raw := bytes.Repeat([]byte("some content that repeats. "), 100_000)
	o := Object{Digest: sha256.Sum256(raw), Size: int64(len(raw))}
	s := blob.NewMemory()
	if _, err := blob.PutCompressed(t.Context(), s, blobName(o.Digest), bytes.NewReader(raw), blob.CompressOptions{}); err != nil {
		t.Fatal(err)
	}
	return s, o, raw
}

// attached attaches a blob, reads all of it, and returns where its file is, if it is complete.
func attached(t *testing.T, c *Cache, o Object, raw []byte) string {
	t.Helper()
	places, err := c.Attach("l", []Object{o})
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, len(raw))
	if err := c.ReadAt(t.Context(), o.Digest, p, 0); err != nil || !bytes.Equal(p, raw) {
		t.Fatalf("read: wrong, or %v", err)
	}
	if places[0].Path != "" {
		if b, err := os.ReadFile(places[0].Path); err != nil || !bytes.Equal(b, raw) {
			t.Fatalf("the complete file has %d bytes that are wrong, or %v", len(b), err)
		}
	}
	return places[0].Path
}

func completed(t *testing.T, c *Cache, d blob.Sum) string {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); c.Stats().Complete == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not completed")
		}
	}
	return c.completePath(d)
}

// Complete files that something writes to or cuts off, while a cache has them or between two, are not read.
func TestCompleteFileChanged(t *testing.T) {
	write := func(t *testing.T, path string, off int64) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("damage"), off); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	for name, change := range map[string]func(t *testing.T, path string, size int64){
		"written": func(t *testing.T, path string, _ int64) { write(t, path, 12345) },
		"cut off": func(t *testing.T, path string, size int64) { _ = os.Truncate(path, size/2) },
		"emptied": func(t *testing.T, path string, _ int64) { _ = os.Truncate(path, 0) },
		"longer":  func(t *testing.T, path string, size int64) { write(t, path, size) },
		"replaced": func(t *testing.T, path string, size int64) {
			_ = os.Remove(path)
			_ = os.WriteFile(path, make([]byte, size), 0o400)
		},
		"gone": func(t *testing.T, path string, _ int64) { _ = os.Remove(path) },
		"cut, aged": func(t *testing.T, path string, size int64) {
			fi, _ := os.Stat(path)
			_ = os.Truncate(path, size/2)
			_ = os.Chtimes(path, fi.ModTime(), fi.ModTime())
		},
	} {
		for _, again := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				s, o, raw := stored(t)
				dir := t.TempDir()
				c := open(t, dir, s)
				attached(t, c, o, raw)
				path := completed(t, c, o.Digest)
				c.Detach("l")
				if again {
					c.Close()
				}
				change(t, path, o.Size)
				if again {
					c = open(t, dir, s)
				}
				if path := attached(t, c, o, raw); path != "" {
					t.Errorf("trusted: %s", path)
				}
				completed(t, c, o.Digest)
				c.Detach("l")
				if attached(t, c, o, raw) == "" {
					t.Error("not attached by path when it was whole again")
				}
			})
		}
	}
}

// stuckStore answers nothing until the caller gives up.
type stuckStore struct{ blob.Store }

func (stuckStore) Get(ctx context.Context, _ string, _, _ int64) (io.ReadCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// Reads under way end with the cache.
func TestCloseEndsReads(t *testing.T) {
	s, o, raw := stored(t)
	dir := t.TempDir()
	c := open(t, dir, s)
	if _, err := c.Attach("l", []Object{o}); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, len(raw))
	if err := c.ReadAt(t.Context(), o.Digest, p[:1], 0); err != nil { // the index is known from here on
		t.Fatal(err)
	}
	c.Close()
	c, err := Open(Config{Dir: dir, Store: stuckStore{s}, Limit: 64 << 20, ReadTime: time.Hour, Log: c.cfg.Log})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Attach("l", []Object{o}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.ReadAt(context.Background(), o.Digest, p, 0) }()
	for end := time.Now().Add(20 * time.Second); c.Stats().Requests == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nothing is asked of the store")
		}
	}
	c.Close()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("read: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("a read goes on after the end of its cache")
	}
}

// A blob whose frames are all there, but which could not be made complete, is made so later.
func TestCompletedLater(t *testing.T) {
	s, o, raw := stored(t)
	c := open(t, t.TempDir(), s)
	blocked := c.completePath(o.Digest)[:len(c.cfg.Dir)+3]
	if err := os.WriteFile(blocked, nil, 0o600); err != nil { // where its directory would be
		t.Fatal(err)
	}
	attached(t, c, o, raw)
	e := c.find(o.Digest)
	tried := func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.missing == 0 && !e.sealing
	}
	for end := time.Now().Add(20 * time.Second); !tried(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not tried")
		}
	}
	if err := os.Remove(blocked); err != nil {
		t.Fatal(err)
	}
	attached(t, c, o, raw)
	completed(t, c, o.Digest)
}
