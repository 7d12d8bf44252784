package blob

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"github.com/klauspost/compress/zstd"
)

// RFC 8878, section 3.1.1: a frame that has one segment and an 8-byte content size, and
// blocks of at most 128 KiB with 3-byte headers.
const (
	zstdMagic    = 0xFD2FB528
	frameHeader  = 4 + 1 + 8
	maxBlock     = 128 << 10
	blockHeader  = 3
	singleSizes8 = 0xE0 // Frame_Content_Size_flag 3, Single_Segment_flag
)

// storedBound is the most that a frame of raw bytes may take.
func storedBound(raw int) int {
	return frameHeader + raw + blockHeader*((raw+maxBlock-1)/maxBlock)
}

// appendRaw appends a zstd frame of raw blocks.
func appendRaw(dst, raw []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, zstdMagic)
	dst = append(dst, singleSizes8)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(len(raw)))
	for len(raw) > 0 {
		block := raw[:min(len(raw), maxBlock)]
		raw = raw[len(block):]
		header := uint32(len(block)) << 3 // type 0: raw
		if len(raw) == 0 {
			header |= 1 // last
		}
		dst = append(dst, byte(header), byte(header>>8), byte(header>>16))
		dst = append(dst, block...)
	}
	return dst
}

// Decoder decodes frames. It may be used by several goroutines at once.
type Decoder struct{ z *zstd.Decoder }

// NewDecoder returns a decoder for at most that many frames at a time.
func NewDecoder(parallel int) (*Decoder, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(parallel), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(maxFrameSize), zstd.WithDecoderMaxWindow(maxFrameSize), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		return nil, err
	}
	return &Decoder{z}, nil
}

// Close releases the decoder's memory.
func (d *Decoder) Close() { d.z.Close() }

// Frame appends to dst the raw bytes of a frame, checked against its digest. Never are more
// than f.RawLen bytes written, whatever the stored ones say. dst is not grown when it
// has room. Anything but the frame is an error that wraps ErrDamaged.
func (d *Decoder) Frame(dst []byte, f Frame, stored []byte) ([]byte, error) {
	if len(stored) != f.Len {
		return nil, damaged("the frame at %d has %d stored bytes, not %d", f.RawOff, len(stored), f.Len)
	}
	if cap(dst)-len(dst) < f.RawLen {
		dst = append(make([]byte, 0, len(dst)+f.RawLen), dst...)
	}
	begin := len(dst)
	// The decoder fills no more than the capacity.
	raw, err := d.z.DecodeAll(stored, dst[begin:begin:begin+f.RawLen])
	switch {
	case errors.Is(err, zstd.ErrDecoderClosed):
		return nil, err
	case err != nil:
		return nil, damaged("the frame at %d cannot be decoded (%v)", f.RawOff, err)
	case len(raw) != f.RawLen:
		return nil, damaged("the frame at %d has %d bytes, not %d", f.RawOff, len(raw), f.RawLen)
	case sha256.Sum256(raw) != f.Sum:
		return nil, damaged("the frame at %d does not have its digest", f.RawOff)
	}
	return dst[:begin+f.RawLen], nil
}
