package blob

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"

	"github.com/harena-dev/harena/internal/errs"
)

// Sum is a SHA-256.
type Sum [sha256.Size]byte

// String returns the digits.
func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// ErrDamaged is wrapped by every error that says that bytes of a store are not
// what their index or their name says.
var ErrDamaged = errors.New("damaged")

func damaged(format string, args ...any) error {
	return errs.E(errs.Precondition, format+": %w", append(args, ErrDamaged)...)
}

const (
	magic         = "HRNAZSK1"
	skippable     = 0x184D2A5E // RFC 8878: one of the 16 magics of skippable frames
	skippableSize = 8
	entrySize     = 4 + sha256.Size
	footerSize    = sha256.Size + 8 + 4 + 4 + sha256.Size + len(magic)

	// Bounds of what an index may claim, so that a hostile one costs little memory.
	minFrameSize = 4 << 10
	maxFrameSize = 4 << 20
	maxFrames    = 1 << 21
	maxIndex     = skippableSize + maxFrames*entrySize + footerSize
)

// Frame says where a frame lies in the object and which of the raw bytes it has.
type Frame struct {
	Off    int64 // in the object
	Len    int   // stored
	RawOff int64
	RawLen int
	Sum    Sum // of the raw bytes
}

// Index knows the frames of an object. It is immutable.
type Index struct {
	entries   []byte // as stored, entrySize each
	footer    []byte
	offsets   []int64 // of the frames in the object, and of the end of the last one
	rawSize   int64
	frameSize int
}

// RawSize is how many bytes the frames have together.
func (x *Index) RawSize() int64 { return x.rawSize }

// StoredSize is the size of the object, index included.
func (x *Index) StoredSize() int64 { return x.offsets[x.Frames()] + int64(x.size()) }

// Digest is the SHA-256 of all raw bytes, as the index claims it.
func (x *Index) Digest() Sum { return Sum(x.footer[:sha256.Size]) }

// Root is the SHA-256 of raw size, frame size and all digests of frames. It depends on
// the raw bytes and the frame size only, not on the compressor. Whoever knows it
// can trust every frame of a store that is not trusted, without reading the whole.
func (x *Index) Root() Sum {
	return rootOf(x.rawSize, x.frameSize, x.Frames(), func(i int) []byte { return x.entries[i*entrySize+4 : (i+1)*entrySize] })
}

// Frames is how many frames there are.
func (x *Index) Frames() int { return len(x.offsets) - 1 }

// FrameSize is the raw size of every frame but the last.
func (x *Index) FrameSize() int { return x.frameSize }

// Frame describes frame i, which is in [0, Frames).
func (x *Index) Frame(i int) Frame {
	raw := int64(i) * int64(x.frameSize)
	return Frame{
		Off:    x.offsets[i],
		Len:    int(x.offsets[i+1] - x.offsets[i]),
		RawOff: raw,
		RawLen: int(min(int64(x.frameSize), x.rawSize-raw)),
		Sum:    Sum(x.entries[i*entrySize+4 : (i+1)*entrySize]),
	}
}

// At returns the frame that has the raw byte at off, which is in [0, RawSize).
func (x *Index) At(off int64) int { return int(off / int64(x.frameSize)) }

// Bytes returns the index as it ends the object; ParseIndex reads it back.
func (x *Index) Bytes() []byte {
	b := make([]byte, skippableSize, x.size())
	binary.LittleEndian.PutUint32(b, skippable)
	binary.LittleEndian.PutUint32(b[4:], uint32(x.size()-skippableSize))
	return append(append(b, x.entries...), x.footer...)
}

func (x *Index) size() int { return skippableSize + len(x.entries) + len(x.footer) }

// indexSize is how long the index of an object with that many frames is.
func indexSize(frames int) int { return skippableSize + frames*entrySize + footerSize }

// sealIndex makes the index that belongs to frames that were written.
func sealIndex(entries []byte, frameSize int, rawSize int64, digest Sum) *Index {
	footer := make([]byte, 0, footerSize)
	footer = append(footer, digest[:]...)
	footer = binary.LittleEndian.AppendUint64(footer, uint64(rawSize))
	footer = binary.LittleEndian.AppendUint32(footer, uint32(frameSize))
	footer = binary.LittleEndian.AppendUint32(footer, uint32(len(entries)/entrySize))
	own := ownSum(entries, footer)
	footer = append(append(footer, own[:]...), magic...)
	x := &Index{entries: entries, footer: footer, rawSize: rawSize, frameSize: frameSize}
	x.locate()
	return x
}

func (x *Index) locate() {
	x.offsets = make([]int64, 1, len(x.entries)/entrySize+1)
	var at int64
	for e := x.entries; len(e) > 0; e = e[entrySize:] {
		at += int64(binary.LittleEndian.Uint32(e))
		x.offsets = append(x.offsets, at)
	}
}

func ownSum(entries, footer []byte) Sum {
	h := sha256.New()
	h.Write(entries)
	h.Write(footer)
	return sum(h)
}

// errShort says that more of the object's end is needed: so many bytes in all.
type errShort int

func (e errShort) Error() string { return "the index is longer" }

// ParseIndex reads an index from the last bytes of an object. All of it is
// checked here: its methods need no checks of what a store claims.
func ParseIndex(tail []byte) (*Index, error) {
	x, err := parseIndex(tail)
	if short := errShort(0); errors.As(err, &short) {
		return nil, damaged("an index of %d bytes has only %d", int(short), len(tail))
	}
	return x, err
}

func parseIndex(tail []byte) (*Index, error) {
	if len(tail) < skippableSize+footerSize {
		return nil, damaged("an object of %d bytes is too short for an index", len(tail))
	}
	footer := tail[len(tail)-footerSize:]
	if string(footer[footerSize-len(magic):]) != magic {
		return nil, damaged("the object does not end with an index (it was cut off, or is of another format)")
	}
	rawSize := binary.LittleEndian.Uint64(footer[sha256.Size:])
	frameSize := binary.LittleEndian.Uint32(footer[sha256.Size+8:])
	frames := binary.LittleEndian.Uint32(footer[sha256.Size+12:])
	switch {
	case frameSize < minFrameSize || frameSize > maxFrameSize:
		return nil, damaged("the index claims frames of %d bytes, %d to %d are allowed", frameSize, minFrameSize, maxFrameSize)
	case frames > maxFrames:
		return nil, damaged("the index claims %d frames, %d are allowed", frames, maxFrames)
	case rawSize > uint64(frames)*uint64(frameSize) || rawSize+uint64(frameSize) <= uint64(frames)*uint64(frameSize):
		return nil, damaged("the index claims %d bytes in %d frames of %d", rawSize, frames, frameSize)
	}
	size := indexSize(int(frames))
	if size > len(tail) {
		return nil, errShort(size)
	}
	tail = bytes.Clone(tail[len(tail)-size:])
	footer = tail[size-footerSize:]
	entries := tail[skippableSize : size-footerSize]
	if binary.LittleEndian.Uint32(tail) != skippable || binary.LittleEndian.Uint32(tail[4:]) != uint32(size-skippableSize) {
		return nil, damaged("the index of %d frames does not begin where it should", frames)
	}
	if ownSum(entries, footer[:sha256.Size+16]) != Sum(footer[sha256.Size+16:]) {
		return nil, damaged("the index does not have its own digest")
	}
	x := &Index{entries: entries, footer: footer, rawSize: int64(rawSize), frameSize: int(frameSize)}
	x.locate()
	for i := range x.Frames() {
		if f := x.Frame(i); f.Len == 0 || f.Len > storedBound(f.RawLen) {
			return nil, damaged("the index claims %d stored bytes for the %d of frame %d", f.Len, f.RawLen, i)
		}
	}
	return x, nil
}

func sum(h hash.Hash) (s Sum) {
	h.Sum(s[:0])
	return s
}
