package erofs

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"math/bits"
	"slices"
	"sort"

	"github.com/harena-dev/harena/internal/errs"
)

// The chunk index of a blob is a pure function of its bytes:
//
//	 0  "harenaCI"
//	 8  uint32 version, 1
//	12  uint32 fan-out bits f
//	16  uint32 records n
//	20  uint32 blocks of the blob
//	24  8 bytes of zero
//	32  2^f × uint32: how many records have a key whose first f bits are at most i
//	..  n × (24 bytes key, uint32 block), sorted by key
//
// Numbers are little-endian. Of blocks with equal content only the first has a
// record; blocks past maxIndexed have none. f is chosen so that about 32 records
// share their first bits: a lookup is one read of less than 1 KiB.
const (
	indexMagic      = "harenaCI"
	indexVersion    = 1
	indexHeaderSize = 32
	indexRecordSize = 28
	maxFanBits      = 16
	indexBucket     = 32
	// indexInMemory is the size up to which an index is read whole when it is opened.
	indexInMemory = 1 << 20
	// maxIndexSize is that of an index of maxIndexed records.
	maxIndexSize = indexHeaderSize + 4<<maxFanBits + int64(maxIndexed)*indexRecordSize
)

// fanBits returns the fan-out of an index of n records.
func fanBits(n uint32) int {
	return min(maxFanBits, bits.Len32(n/indexBucket))
}

// fanOf returns the first f bits of a key.
func fanOf(key *chunkKey, f int) uint32 {
	return (uint32(key[0])<<8 | uint32(key[1])) >> (16 - f)
}

// writeIndex writes the index of a blob of so many blocks.
func (t *chunkTable) writeIndex(w io.Writer, blobBlocks uint32) error {
	var n uint32
	for _, at := range t.slots {
		if at != 0 {
			n++
		}
	}
	f := fanBits(n)
	// A counting sort by the first bits, then each group by itself.
	ends := make([]uint32, 1<<f)
	for _, at := range t.slots {
		if at != 0 {
			ends[fanOf(t.key(at-1), f)]++
		}
	}
	next := make([]uint32, len(ends)) // the start of each group, then its end
	var sum uint32
	for i, count := range ends {
		next[i] = sum
		sum += count
		ends[i] = sum
	}
	order := make([]uint32, n)
	for _, at := range t.slots {
		if at != 0 {
			g := fanOf(t.key(at-1), f)
			order[next[g]] = at - 1
			next[g]++
		}
	}
	var start uint32
	for _, end := range ends {
		slices.SortFunc(order[start:end], func(a, b uint32) int { return bytes.Compare(t.key(a)[:], t.key(b)[:]) })
		start = end
	}

	out := bufio.NewWriterSize(w, 1<<16)
	head := append(make([]byte, 0, indexHeaderSize), indexMagic...)
	for _, v := range []uint32{indexVersion, uint32(f), n, blobBlocks, 0, 0} {
		head = le.AppendUint32(head, v)
	}
	_, err := out.Write(head)
	var b [indexRecordSize]byte
	for _, end := range ends {
		if err == nil {
			le.PutUint32(b[:], end)
			_, err = out.Write(b[:4])
		}
	}
	for _, at := range order {
		if err == nil {
			copy(b[:], t.key(at)[:])
			le.PutUint32(b[len(chunkKey{}):], at)
			_, err = out.Write(b[:])
		}
	}
	if err == nil {
		err = out.Flush()
	}
	return writeOutput(err)
}

// WriteIndex computes the chunk index of a blob from its bytes: what Options.Index
// gets when the blob is written.
func WriteIndex(ctx context.Context, blob io.Reader, w io.Writer) error {
	var t chunkTable
	in := bufio.NewReaderSize(blob, 1<<20)
	block := make([]byte, blockSize)
	for blocks := uint32(0); ; blocks++ {
		if blocks%256 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		_, err := io.ReadFull(in, block)
		switch {
		case err == io.EOF:
			return t.writeIndex(w, blocks)
		case err == io.ErrUnexpectedEOF || err == nil && blocks == maxBlocks:
			return damaged("the data blob is not whole blocks")
		case err != nil:
			return errs.E(errs.Internal, "read data blob: %w", err)
		}
		key := keyOf(block)
		t.add(&key)
	}
}

// Index is an open chunk index. Small ones are held in memory; of larger ones
// 256 KiB are, however large the blob is. Its bytes are not trusted: a damaged
// index finds nothing or gives errors. That it belongs to its blob is for the
// caller to know (by digest): one that does not would lead to other content.
// Methods may be used concurrently if the reader may.
type Index struct {
	r       io.ReaderAt
	fanBits int
	fan     []uint32
	records uint32
	blocks  uint32 // of the blob
	base    int64  // offset of the records
	held    []byte // the records, of a small index
}

// OpenIndex opens a chunk index of size bytes.
func OpenIndex(r io.ReaderAt, size int64) (*Index, error) {
	var head [indexHeaderSize]byte
	if size < indexHeaderSize || size > maxIndexSize {
		return nil, damaged("a chunk index has %d bytes", size)
	}
	if err := readAt(r, head[:], 0, "chunk index"); err != nil {
		return nil, err
	}
	if string(head[:8]) != indexMagic {
		return nil, errs.E(errs.Invalid, "not a chunk index")
	}
	if v := le.Uint32(head[8:]); v != indexVersion {
		return nil, errs.E(errs.Unsupported, "chunk index has version %d", v).WithHint("use the version of harena that made it, or a newer one")
	}
	x := &Index{r: r, records: le.Uint32(head[16:]), blocks: le.Uint32(head[20:])}
	f := le.Uint32(head[12:])
	if x.records > maxIndexed || x.records > x.blocks || f != uint32(fanBits(x.records)) || le.Uint64(head[24:]) != 0 {
		return nil, damaged("the header of a chunk index is not valid")
	}
	x.fanBits = int(f)
	x.base = indexHeaderSize + 4<<f
	if want := x.base + int64(x.records)*indexRecordSize; size != want {
		return nil, damaged("a chunk index has %d bytes instead of %d", size, want)
	}
	return x, x.load(size)
}

// load reads the fan-out and, if they are few, the records.
func (x *Index) load(size int64) error {
	p := make([]byte, x.base-indexHeaderSize)
	if size <= indexInMemory {
		p = make([]byte, size-indexHeaderSize)
	}
	if err := readAt(x.r, p, indexHeaderSize, "chunk index"); err != nil {
		return err
	}
	x.fan = make([]uint32, 1<<x.fanBits)
	last := uint32(0)
	for i := range x.fan {
		x.fan[i] = le.Uint32(p[4*i:])
		if x.fan[i] < last {
			return damaged("the fan-out of a chunk index is not sorted")
		}
		last = x.fan[i]
	}
	if last != x.records {
		return damaged("the fan-out of a chunk index counts %d of %d records", last, x.records)
	}
	if size <= indexInMemory {
		x.held = p[4*len(x.fan):]
	}
	return nil
}

// Blocks returns how many blocks the index says that its blob has.
func (x *Index) Blocks() int64 { return int64(x.blocks) }

// lookup returns the first block whose content has the key. buf is used for reading.
func (x *Index) lookup(key *chunkKey, buf *[]byte) (uint32, bool, error) {
	if x.records == 0 {
		return 0, false, nil
	}
	g := fanOf(key, x.fanBits)
	lo, hi := uint32(0), x.fan[g]
	if g > 0 {
		lo = x.fan[g-1]
	}
	// A group is far larger than indexBucket in a huge index, or a forged one.
	const most = 128
	for hi-lo > most {
		mid := lo + (hi-lo)/2
		p, err := x.read(mid, mid+1, buf)
		if err != nil {
			return 0, false, err
		}
		if bytes.Compare(p[:len(key)], key[:]) <= 0 {
			lo = mid
		} else {
			hi = mid
		}
	}
	p, err := x.read(lo, hi, buf)
	if err != nil {
		return 0, false, err
	}
	n := int(hi - lo)
	i, ok := sort.Find(n, func(i int) int { return bytes.Compare(key[:], p[i*indexRecordSize:][:len(key)]) })
	if !ok {
		return 0, false, nil
	}
	at := le.Uint32(p[i*indexRecordSize+len(key):])
	if at >= x.blocks {
		return 0, false, damaged("a chunk index leads to block %d of %d", at, x.blocks)
	}
	return at, true, nil
}

// read returns records from lo up to hi.
func (x *Index) read(lo, hi uint32, buf *[]byte) ([]byte, error) {
	from, n := int64(lo)*indexRecordSize, int(hi-lo)*indexRecordSize
	if x.held != nil {
		return x.held[from:][:n], nil
	}
	if cap(*buf) < n {
		*buf = make([]byte, n)
	}
	p := (*buf)[:n]
	return p, readAt(x.r, p, x.base+from, "chunk index")
}

// findRun returns the first of consecutive blocks with the keys.
func (x *Index) findRun(keys []chunkKey, buf *[]byte) (uint32, bool, error) {
	first, ok, err := x.lookup(&keys[0], buf)
	for i := 1; ok && i < len(keys); i++ {
		var at uint32
		at, ok, err = x.lookup(&keys[i], buf)
		ok = ok && uint64(at) == uint64(first)+uint64(i)
	}
	return first, ok && err == nil, err
}
