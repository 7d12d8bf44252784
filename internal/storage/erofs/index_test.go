package erofs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

// blobOf makes a blob of n distinct blocks, every seventh twice.
func blobOf(n int) []byte {
	r := rand.NewChaCha8([32]byte{byte(n)})
	var out []byte
	block := make([]byte, blockSize)
	for i := range n {
		_, _ = r.Read(block)
		out = append(out, block...)
		if i%7 == 0 {
			out = append(out, block...)
		}
	}
	return out
}

func indexOf(t testing.TB, blob []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := WriteIndex(context.Background(), bytes.NewReader(blob), &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestIndexFindsEveryBlock, in an index that is held and in one that is read, with
// every number of fan-out bits that the sizes give.
func TestIndexFindsEveryBlock(t *testing.T) {
	for _, n := range []int{0, 1, 31, 32, 100, 1000, 5000} {
		blob := blobOf(n)
		enc := indexOf(t, blob)
		for _, held := range []bool{true, false} {
			x, err := OpenIndex(bytes.NewReader(enc), int64(len(enc)))
			if err != nil {
				t.Fatal(err)
			}
			if !held {
				x.held = nil
			}
			first := make(map[chunkKey]uint32)
			var buf []byte
			for at := 0; at*blockSize < len(blob); at++ {
				key := keyOf(blob[at*blockSize:][:blockSize])
				if _, ok := first[key]; !ok {
					first[key] = uint32(at)
				}
				got, ok, err := x.lookup(&key, &buf)
				if err != nil || !ok || got != first[key] {
					t.Fatalf("%d blocks: block %d is found at %d, %v, %v", n, at, got, ok, err)
				}
			}
			if len(first) != n {
				t.Fatalf("%d distinct blocks, want %d", len(first), n)
			}
			for i := range 1000 {
				sum := sha256.Sum256([]byte{byte(i), byte(i >> 8)})
				if at, ok, err := x.lookup((*chunkKey)(sum[:24]), &buf); ok || err != nil {
					t.Fatalf("a key of nothing is found at %d, %v", at, err)
				}
			}
		}
	}
}

// TestLargeGroups: as in a huge index, where the keys of a group are searched rather than read.
func TestLargeGroups(t *testing.T) {
	var table chunkTable
	const n = 100_000
	key := func(i uint32) *chunkKey {
		sum := sha256.Sum256(le.AppendUint32(nil, i))
		return (*chunkKey)(sum[:24])
	}
	for i := range uint32(n) {
		table.add(key(i))
	}
	var b bytes.Buffer
	if err := table.writeIndex(&b, n); err != nil {
		t.Fatal(err)
	}
	counted := &countingReaderAt{r: bytes.NewReader(b.Bytes())}
	x, err := OpenIndex(counted, int64(b.Len()))
	if err != nil {
		t.Fatal(err)
	}
	if counted.bytes > 1<<17 {
		t.Errorf("opening read %d bytes of %d", counted.bytes, b.Len())
	}
	for _, f := range []int{x.fanBits, 0} {
		if f == 0 {
			x.fanBits, x.fan = 0, []uint32{n}
		}
		counted.bytes = 0
		var buf []byte
		const lookups = 1000
		for i := range uint32(lookups) {
			at := i * 8191 % n
			if got, ok, err := x.lookup(key(at), &buf); err != nil || !ok || got != at {
				t.Fatalf("key %d is found at %d, %v, %v", at, got, ok, err)
			}
			if _, ok, err := x.lookup(key(n+i), &buf); ok || err != nil {
				t.Fatalf("a key of nothing is found, %v", err)
			}
		}
		if per := counted.bytes / (2 * lookups); per > 4096 {
			t.Errorf("with %d bits of fan-out a lookup reads %d bytes", f, per)
		}
	}
}

type countingReaderAt struct {
	r     io.ReaderAt
	bytes int
}

func (c *countingReaderAt) ReadAt(p []byte, off int64) (int, error) {
	n, err := c.r.ReadAt(p, off)
	c.bytes += n
	return n, err
}

// TestDamagedIndex: a header or fan-out that does not fit is refused.
func TestDamagedIndex(t *testing.T) {
	sound := indexOf(t, blobOf(200))
	for what, change := range map[string]func(b []byte) []byte{
		"empty":            func([]byte) []byte { return nil },
		"cut":              func(b []byte) []byte { return b[:len(b)-1] },
		"longer":           func(b []byte) []byte { return append(b, 0) },
		"magic":            func(b []byte) []byte { b[0]++; return b },
		"version":          func(b []byte) []byte { b[8]++; return b },
		"fan-out bits":     func(b []byte) []byte { b[12] = 40; return b },
		"records":          func(b []byte) []byte { le.PutUint32(b[16:], 1<<31); return b },
		"fewer blocks":     func(b []byte) []byte { le.PutUint32(b[20:], 3); return b },
		"reserved":         func(b []byte) []byte { b[24] = 1; return b },
		"fan-out":          func(b []byte) []byte { le.PutUint32(b[32:], 1<<30); return b },
		"end of fan-out":   func(b []byte) []byte { b[32+4*(1<<fanBits(200))-4]++; return b },
		"nothing but zero": func(b []byte) []byte { clear(b); return b },
	} {
		b := change(bytes.Clone(sound))
		if _, err := OpenIndex(bytes.NewReader(b), int64(len(b))); !errs.Is(err, errs.Invalid) && !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := WriteIndex(context.Background(), strings.NewReader("half a block"), io.Discard); !errs.Is(err, errs.Invalid) {
		t.Errorf("half a block: %v", err)
	}
}

// FuzzIndex: whatever bytes an index has, a lookup ends, within the blob.
func FuzzIndex(f *testing.F) {
	blob := blobOf(100)
	sound := indexOf(f, blob)
	f.Add(sound, blob[:blockSize])
	f.Add(indexOf(f, nil), blob[:1])
	f.Fuzz(func(t *testing.T, enc, content []byte) {
		x, err := OpenIndex(bytes.NewReader(enc), int64(len(enc)))
		if err != nil {
			if !errs.Is(err, errs.Invalid) && !errs.Is(err, errs.Unsupported) {
				t.Fatalf("error of kind %q: %v", errs.KindOf(err), err)
			}
			return
		}
		key := keyOf(content)
		var buf []byte
		for _, held := range [][]byte{x.held, nil} {
			x.held = held
			at, ok, err := x.findRun([]chunkKey{key, key}, &buf)
			if err != nil && !errs.Is(err, errs.Invalid) {
				t.Fatalf("error of kind %q: %v", errs.KindOf(err), err)
			}
			if ok && int64(at) >= x.Blocks() {
				t.Fatalf("block %d of %d", at, x.Blocks())
			}
		}
	})
}
