package erofs

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"

	"github.com/harena-dev/harena/internal/errs"
)

// maxDedupEntries bounds the memory of the deduplication index.
const maxDedupEntries = 1 << 25

// chunkKey is SHA-256 cut to 128 bits: equal keys are taken as equal chunks.
// Nobody gains from a collision (2^64 work): both chunks would be of one layer,
// from one source.
type chunkKey [16]byte

// blobWriter appends chunks to the blob, each distinct one once.
type blobWriter struct {
	out    *bufio.Writer
	blocks uint32
	seen   map[chunkKey]uint32
	zeros  []byte
}

func newBlobWriter(f *os.File) *blobWriter {
	return &blobWriter{out: bufio.NewWriterSize(f, 1<<20), seen: make(map[chunkKey]uint32), zeros: make([]byte, 1<<18)}
}

// put stores p, whole blocks, and returns its first block; nullBlock for zeros.
func (w *blobWriter) put(p []byte) (uint32, error) {
	if w.isZero(p) {
		return nullBlock, nil
	}
	sum := sha256.Sum256(p)
	key := chunkKey(sum[:])
	if at, ok := w.seen[key]; ok {
		return at, nil
	}
	n := uint32(len(p) / blockSize)
	if w.blocks > maxBlocks-n {
		return 0, errs.OverLimit(errs.Invalid, "data of a layer, in bytes", maxFileSize, int64(w.blocks)*blockSize+int64(len(p)))
	}
	if _, err := w.out.Write(p); err != nil {
		return 0, writeOutput(err)
	}
	at := w.blocks
	w.blocks += n
	if len(w.seen) < maxDedupEntries {
		w.seen[key] = at
	}
	return at, nil
}

func (w *blobWriter) isZero(p []byte) bool {
	for len(p) > 0 {
		n := min(len(p), len(w.zeros))
		if !bytes.Equal(p[:n], w.zeros[:n]) {
			return false
		}
		p = p[n:]
	}
	return true
}

func (w *blobWriter) flush() error { return writeOutput(w.out.Flush()) }

// extent is a run of blocks of a file: contiguous in the blob from block at on,
// or a hole where at is nullBlock.
type extent struct{ at, n uint32 }

// extents map a file from its first block on, without gaps.
type extents []extent

func (x extents) add(at, n uint32) extents {
	if len(x) > 0 {
		last := &x[len(x)-1]
		fits := last.n <= maxBlocks-n
		if fits && (at == nullBlock && last.at == nullBlock || at != nullBlock && last.at != nullBlock && at == last.at+last.n) {
			last.n += n
			return x
		}
	}
	return append(x, extent{at, n})
}

// chunkBits returns the largest size of chunk, as a power of two of blocks, of
// which no chunk straddles two extents. The last chunk may reach past the file.
func (x extents) chunkBits() int {
	b := maxChunkBits
	var at uint64
	for i, e := range x {
		if i > 0 {
			b = min(b, bits.TrailingZeros64(at))
		}
		at += uint64(e.n)
	}
	return min(b, bits.Len64(at-1))
}

// granuleBits returns the chunk size, as a power of two of blocks, at which a
// file of the size, which is not 0, is read and deduplicated.
func granuleBits(size int64) int {
	return max(0, bits.Len64(uint64(size-1)>>blockBits)-maxIndexBits)
}

// readBuffer returns how much of a file of the size to read at once: whole
// granules.
func readBuffer(size int64) int {
	return max(1<<18, blockSize<<granuleBits(size))
}

// store adds p to a file's extents granule by granule. Only the last call for a
// file may have a length that is not a multiple of the granule; p needs room up
// to the end of its last block, which is filled with zeros.
func (w *blobWriter) store(x extents, p []byte, granule int) (extents, error) {
	if tail := len(p) % blockSize; tail != 0 {
		n := len(p)
		p = p[:n+blockSize-tail]
		clear(p[n:])
	}
	for len(p) > 0 {
		n := min(granule, len(p))
		at, err := w.put(p[:n])
		if err != nil {
			return nil, err
		}
		x = x.add(at, uint32(n/blockSize))
		p = p[n:]
	}
	return x, nil
}

// errContent marks errors of reading content from those of writing it.
var errContent = errors.New("read content")

// fromStream stores size bytes of r as the content of ino.
func (b *builder) fromStream(ino *inode, r io.Reader, size int64, buf *[]byte) error {
	if err := b.admit(size); err != nil {
		return err
	}
	if size == 0 {
		return nil
	}
	if n := readBuffer(size); len(*buf) < n {
		*buf = make([]byte, n)
	}
	granule := blockSize << granuleBits(size)
	chunk := len(*buf) / granule * granule
	for done := int64(0); done < size; {
		p := (*buf)[:min(int64(chunk), size-done)]
		if _, err := io.ReadFull(r, p); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("%w: %w", errContent, err)
		}
		var err error
		if ino.data, err = b.blob.store(ino.data, p, granule); err != nil {
			return err
		}
		if err := b.advance(int64(len(p))); err != nil {
			return err
		}
		done += int64(len(p))
	}
	ino.size = size
	return nil
}
