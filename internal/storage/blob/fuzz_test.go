package blob_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// reseal gives a changed index the digest that it needs to be looked at at all.
func reseal(index []byte) {
	end := len(index) - 32 - 8
	own := sha256.Sum256(index[8:end])
	copy(index[end:], own[:])
}

// FuzzParseIndex: whatever is accepted can be used without a check, and is
// written back as it was. Resealed, so that the digest does not hide what follows it.
func FuzzParseIndex(f *testing.F) {
	for _, size := range []int{0, 1, 5000, 100_000} {
		_, x := compress(f, mixed(size), blob.CompressOptions{FrameSize: 4 << 10})
		f.Add(x.Bytes(), true)
	}
	f.Fuzz(func(t *testing.T, tail []byte, seal bool) {
		if seal && len(tail) >= 8+88 {
			tail = bytes.Clone(tail)
			reseal(tail)
		}
		x, err := blob.ParseIndex(tail)
		if err != nil {
			if !errors.Is(err, blob.ErrDamaged) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		if !bytes.HasSuffix(tail, x.Bytes()) {
			t.Fatal("the index is written in another way than it was read")
		}
		var off, raw int64
		for i := range x.Frames() {
			g := x.Frame(i)
			if g.Off != off || g.RawOff != raw || g.Len <= 0 || g.RawLen <= 0 || g.RawLen > x.FrameSize() || x.At(raw) != i {
				t.Fatalf("frame %d is %+v at %d, raw %d", i, g, off, raw)
			}
			off += int64(g.Len)
			raw += int64(g.RawLen)
		}
		if raw != x.RawSize() || off+int64(len(x.Bytes())) != x.StoredSize() {
			t.Fatalf("%d raw bytes of %d, %d stored of %d", raw, x.RawSize(), off, x.StoredSize())
		}
	})
}

// FuzzFrame: bytes that a store gives for a frame never become anything but the frame, nor more memory than it has.
func FuzzFrame(f *testing.F) {
	stored, x := compress(f, mixed(40_000), blob.CompressOptions{FrameSize: 16 << 10})
	for i := range x.Frames() {
		g := x.Frame(i)
		f.Add(stored[g.Off:g.Off+int64(g.Len)], uint16(g.RawLen))
	}
	f.Add(binary.LittleEndian.AppendUint32(nil, 0xFD2FB528), uint16(10))
	d, err := blob.NewDecoder(1)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(d.Close)
	f.Fuzz(func(t *testing.T, stored []byte, rawLen uint16) {
		g := blob.Frame{Len: len(stored), RawLen: int(rawLen)}
		before := []byte("kept")
		backing := append(make([]byte, 0, 4+int(rawLen)+16), before...)
		guard := backing[4+int(rawLen) : 4+int(rawLen)+16]
		if raw, err := d.Frame(backing, g, stored); err == nil {
			t.Fatalf("%d bytes were taken for a frame with the digest zero", len(raw))
		} else if !errors.Is(err, blob.ErrDamaged) {
			t.Fatalf("an error of another kind: %v", err)
		}
		if !bytes.Equal(guard, make([]byte, 16)) || string(backing) != "kept" {
			t.Fatal("the decoder wrote outside the frame")
		}
	})
}
