package blob

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
)

// RootHash computes, of what is written to it, the Root that an index with frames of
// DefaultFrameSize has. Its memory is 32 bytes a frame.
type RootHash struct {
	frame hash.Hash
	in    int // bytes of the frame so far
	size  int64
	sums  []byte
}

// NewRootHash returns a RootHash of nothing.
func NewRootHash() *RootHash { return &RootHash{frame: sha256.New()} }

// Write never fails.
func (r *RootHash) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		k := min(len(p), DefaultFrameSize-r.in)
		r.frame.Write(p[:k])
		r.in, r.size, p = r.in+k, r.size+int64(k), p[k:]
		if r.in == DefaultFrameSize {
			r.end()
		}
	}
	return n, nil
}

func (r *RootHash) end() {
	r.sums = r.frame.Sum(r.sums)
	r.frame.Reset()
	r.in = 0
}

// Root ends the last frame; nothing may be written after it.
func (r *RootHash) Root() Sum {
	if r.in > 0 {
		r.end()
	}
	return rootOf(r.size, DefaultFrameSize, len(r.sums)/sha256.Size, func(i int) []byte { return r.sums[i*sha256.Size : (i+1)*sha256.Size] })
}

func rootOf(rawSize int64, frameSize, frames int, digest func(int) []byte) Sum {
	h := sha256.New()
	var b [12]byte
	binary.LittleEndian.PutUint64(b[:], uint64(rawSize))
	binary.LittleEndian.PutUint32(b[8:], uint32(frameSize))
	h.Write(b[:])
	for i := range frames {
		h.Write(digest(i))
	}
	return sum(h)
}
