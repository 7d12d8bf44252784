package erofs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"

	"github.com/harena-dev/harena/internal/errs"
)

// place is where a run of blocks lies: in the image's own blob (device 0 here), in
// a blob of another layer (from 1 on), or nowhere, a hole (nullBlock).
type place struct {
	device uint16
	at     uint32
}

// blobWriter appends content to the blob, each distinct chunk once, and leaves out
// what other blobs have.
type blobWriter struct {
	out     *bufio.Writer
	blocks  uint32
	table   chunkTable
	others  []*Blob // devices 1…
	looked  []*Blob // those of others that content is looked up in
	keys    []chunkKey
	records []byte
	zeros   []byte
}

func newBlobWriter(f *os.File) *blobWriter {
	return &blobWriter{out: bufio.NewWriterSize(f, 1<<20), zeros: make([]byte, 1<<18)}
}

// put stores p, whole blocks.
func (w *blobWriter) put(p []byte) (place, error) {
	if w.isZero(p) {
		return place{at: nullBlock}, nil
	}
	w.keys = w.keys[:0]
	for off := 0; off < len(p); off += blockSize {
		w.keys = append(w.keys, keyOf(p[off:off+blockSize]))
	}
	if at, ok := w.table.findRun(w.keys); ok {
		return place{at: at}, nil
	}
	for i, b := range w.looked {
		if b.Index == nil {
			continue
		}
		at, ok, err := b.Index.findRun(w.keys, &w.records)
		if err != nil {
			return place{}, fmt.Errorf("look content up in data blob %s: %w", b.Name, err)
		}
		if ok && int64(at)+int64(len(w.keys)) <= b.Size/blockSize {
			return place{uint16(i + 1), at}, nil
		}
	}
	n := uint32(len(w.keys))
	if w.blocks > maxBlocks-n {
		return place{}, errs.OverLimit(errs.Invalid, "data of a layer, in bytes", maxFileSize, int64(w.blocks)*blockSize+int64(len(p)))
	}
	if _, err := w.out.Write(p); err != nil {
		return place{}, writeOutput(err)
	}
	at := w.blocks
	w.blocks += n
	for i := range w.keys {
		w.table.add(&w.keys[i])
	}
	return place{at: at}, nil
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

// extent is a run of blocks of a file: contiguous from its place on, or a hole.
type extent struct {
	place
	n uint32
}

// extents map a file from its first block on, without gaps.
type extents []extent

func (x extents) add(p place, n uint32) extents {
	if len(x) > 0 {
		last := &x[len(x)-1]
		fits := last.n <= maxBlocks-n
		if fits && (p.at == nullBlock && last.at == nullBlock ||
			p.at != nullBlock && last.at != nullBlock && p.device == last.device && p.at == last.at+last.n) {
			last.n += n
			return x
		}
	}
	return append(x, extent{p, n})
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
		to, err := w.put(p[:n])
		if err != nil {
			return nil, err
		}
		x = x.add(to, uint32(n/blockSize))
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
