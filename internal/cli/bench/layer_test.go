package bench

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A server that answers each byte n with n KiB.
func answering(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					if _, err := c.Write(bytes.Repeat(b, int(b[0])<<10)); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func TestLink(t *testing.T) {
	k, err := newLink(answering(t), 10*time.Millisecond, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer k.close()
	c, err := net.Dial("tcp", k.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask := func(kib byte) time.Duration {
		start := time.Now()
		if _, err := c.Write([]byte{kib}); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, int(kib)<<10)
		if _, err := io.ReadFull(c, got); err != nil || got[0] != kib {
			t.Fatalf("%v, or another answer", err)
		}
		return time.Since(start)
	}
	// Bounds from below only: a busy machine adds to them.
	if d := ask(1); d < 10*time.Millisecond {
		t.Errorf("an answer after %v", d)
	}
	if d := ask(200); d < 180*time.Millisecond {
		t.Errorf("200 KiB at 1 MiB/s after %v", d)
	}
	if m := k.moved(); m.bytes != 201<<10 || m.requests != 2 {
		t.Errorf("%d bytes in answer to %d requests", m.bytes, m.requests)
	}
	if m := k.moved(); m.bytes != 0 || m.requests != 0 {
		t.Errorf("counters were not reset: %d, %d", m.bytes, m.requests)
	}
	k.close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlived its link")
	}
}

func TestLinkSortsRequests(t *testing.T) {
	for head, want := range map[string]string{
		"GET /b/blobs/ab/aaaa HTTP/1.1\r\nHost: x\r\n\r\n":                      "metadata images",
		"GET /b/blobs/ab/aaaa?a=b HTTP/1.1\r\nrange: bytes=5-\r\n\r\n":          "metadata images",
		"GET /b/blobs/ab/abcd HTTP/1.1\r\nHost: x\r\nRange: bytes=0-99\r\n\r\n": "data",
		"GET /b/blobs/ab/abcd HTTP/1.1\r\nrange: bytes=-99\r\nHost: x\r\n\r\n":  "indexes",
		"HEAD /b/blobs/ab/abcd HTTP/1.1\r\nHost: x\r\n\r\n":                     "names and profiles",
		"GET /b/manifests/ab/abcd.json HTTP/1.1\r\nRange: bytes=0-\r\n\r\n":     "names and profiles",
		"": "names and profiles",
	} {
		if got := storeKind([]byte(head), map[string]bool{"aaaa": true}); got != want {
			t.Errorf("%q: %s, not %s", head, got, want)
		}
	}
	k, err := newLink(answering(t), 0, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	defer k.close()
	k.kind = func(head []byte) string { return map[byte]string{1: "one", 2: "two"}[head[0]] }
	c, err := net.Dial("tcp", k.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, kib := range []byte{1, 2, 1} {
		if _, err := c.Write([]byte{kib}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, int(kib)<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.quiet(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := k.moved(); m.kinds["one"] != 2<<10 || m.kinds["two"] != 2<<10 || m.requests != 3 {
		t.Errorf("%+v", m)
	}
}

func TestTreeIsATar(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tree.tar")
	if err := writeTree(t.Context(), file, 12<<20); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := appendUnique(file, i); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var content int64
	names := map[string]bool{}
	r := tar.NewReader(f)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(io.Discard, r)
		if err != nil {
			t.Fatal(err)
		}
		content += n
		names[h.Name] = true
	}
	if content > 14<<20 || content < 8<<20 {
		t.Errorf("%d bytes of content", content)
	}
	for _, want := range []string{"etc/passwd", "usr/bin/sh", "tmp/", "unique-0", "unique-1"} {
		if !names[want] {
			t.Errorf("%s is missing", want)
		}
	}
}

func TestUsageGrows(t *testing.T) {
	before, err := readUsage()
	if err != nil {
		t.Fatal(err)
	}
	after, err := readUsage()
	if err != nil {
		t.Fatal(err)
	}
	if before.cpu <= 0 || after.cpu < before.cpu || after.written < before.written {
		t.Errorf("%+v, then %+v", before, after)
	}
}
