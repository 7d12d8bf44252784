package blob

import (
	"bytes"
	"context"
	"io"
	"testing"
)

// The root of bytes is that of the index which compressing them makes, however they are written.
func TestRootHash(t *testing.T) {
	for _, size := range []int{0, 1, DefaultFrameSize - 1, DefaultFrameSize, DefaultFrameSize + 1, 3*DefaultFrameSize + 777} {
		raw := bytes.Repeat([]byte{1, 2, 3, 5, 7}, size/5+1)[:size]
		x, err := Compress(context.Background(), io.Discard, bytes.NewReader(raw), CompressOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []int{1000, 100_000, 1 << 20} {
			r := NewRootHash()
			for rest := raw; len(rest) > 0; {
				k := min(step, len(rest))
				if n, err := r.Write(rest[:k]); n != k || err != nil {
					t.Fatal(n, err)
				}
				rest = rest[k:]
			}
			if got := r.Root(); got != x.Root() {
				t.Errorf("%d bytes in steps of %d: %s, want %s", size, step, got, x.Root())
			}
		}
	}
}
