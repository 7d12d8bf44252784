package blob

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"runtime"

	"github.com/klauspost/compress/zstd"

	"github.com/harena-dev/harena/internal/errs"
)

// DefaultFrameSize is the raw size of frames. See docs/blobs.md for what other
// sizes cost.
const DefaultFrameSize = 256 << 10

// CompressOptions say how to compress. The zero value is good.
type CompressOptions struct {
	// FrameSize is a multiple of 4096 from 4 KiB to 4 MiB; 0 means DefaultFrameSize.
	FrameSize int
	// Parallel is how many frames are compressed at a time; 0 means one for each
	// processor, up to 8. Memory is about 6 MiB and three frames for each.
	Parallel int
	// Dense takes several times the processor time to get smaller: for small objects that are fetched whole, and often.
	Dense bool
	// Want, when set, is the digest that the raw bytes must have.
	Want *Sum
}

// Compress writes what it reads as seekable zstd, and returns the index. Memory
// is bounded, apart from 36 bytes of index for each frame. After an error dst has a part
// that nothing takes for the whole, as it has no index.
func Compress(ctx context.Context, dst io.Writer, src io.Reader, o CompressOptions) (*Index, error) {
	if o.FrameSize == 0 {
		o.FrameSize = DefaultFrameSize
	}
	if o.FrameSize < minFrameSize || o.FrameSize > maxFrameSize || o.FrameSize%4096 != 0 {
		return nil, errs.E(errs.Invalid, "frames of %d bytes are not possible", o.FrameSize).
			WithHint("use a multiple of 4096 from %d to %d", minFrameSize, maxFrameSize)
	}
	if o.Parallel <= 0 {
		o.Parallel = min(runtime.GOMAXPROCS(0), 8)
	}
	// The default level of the library (about zstd -3) costs the reader nothing more than lower ones.
	level := zstd.SpeedDefault
	if o.Dense {
		level = zstd.SpeedBestCompression
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(o.Parallel), zstd.WithEncoderLevel(level),
		zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(encoderWindow(o.FrameSize)))
	if err != nil {
		return nil, fmt.Errorf("make an encoder: %w", err)
	}
	defer z.Close()
	c := &compression{z: z, dst: dst, whole: sha256.New(), frameSize: o.FrameSize}
	if err := c.run(ctx, src, o.Parallel); err != nil {
		return nil, err
	}
	digest := sum(c.whole)
	if o.Want != nil && *o.Want != digest {
		return nil, damaged("what was read has the digest %s, not %s", digest, *o.Want)
	}
	x := sealIndex(c.entries, c.frameSize, c.rawSize, digest)
	if _, err := dst.Write(x.Bytes()); err != nil {
		return nil, err
	}
	return x, nil
}

// encoderWindow is the least power of two that covers a frame; it bounds the encoder's memory.
func encoderWindow(frame int) int {
	w := zstd.MinWindowSize
	for w < frame {
		w *= 2
	}
	return w
}

type compression struct {
	z         *zstd.Encoder
	dst       io.Writer
	whole     hash.Hash
	frameSize int
	rawSize   int64
	entries   []byte
}

// piece is a frame on its way: read, compressed elsewhere, written in order.
type piece struct {
	raw, stored []byte
	sum         Sum
	done        chan struct{}
}

// run keeps up to parallel frames in compression while it reads the next and
// writes the oldest. All its goroutines have ended when it returns.
func (c *compression) run(ctx context.Context, src io.Reader, parallel int) error {
	var flying, free []*piece
	defer func() {
		for _, p := range flying {
			<-p.done
		}
	}()
	for {
		if err := contextError(ctx); err != nil {
			return err
		}
		if len(flying) > parallel {
			p := flying[0]
			if err := c.write(p); err != nil {
				return err
			}
			flying, free = flying[1:], append(free, p)
		}
		var p *piece
		if len(free) > 0 {
			p, free = free[len(free)-1], free[:len(free)-1]
		} else {
			p = &piece{raw: make([]byte, c.frameSize)}
		}
		n, err := io.ReadFull(src, p.raw[:c.frameSize])
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return err
		}
		last := err != nil
		if n > 0 {
			if len(c.entries)/entrySize+len(flying) >= maxFrames {
				return errs.OverLimit(errs.Invalid, "frames of an object", maxFrames, "more").
					WithHint("use larger frames")
			}
			p.raw, p.done = p.raw[:n], make(chan struct{})
			c.rawSize += int64(n)
			c.whole.Write(p.raw)
			flying = append(flying, p)
			go func() {
				defer close(p.done)
				c.compress(p)
			}()
		}
		if last {
			break
		}
	}
	for len(flying) > 0 {
		if err := c.write(flying[0]); err != nil {
			return err
		}
		flying = flying[1:]
	}
	return nil
}

func (c *compression) compress(p *piece) {
	p.sum = sha256.Sum256(p.raw)
	p.stored = c.z.EncodeAll(p.raw, p.stored[:0])
	// Decoding costs the reader more than a sixteenth less to transfer gains.
	if len(p.stored) > len(p.raw)-len(p.raw)/16 {
		p.stored = appendRaw(p.stored[:0], p.raw)
	}
}

// write waits for a piece and writes it.
func (c *compression) write(p *piece) error {
	<-p.done
	if _, err := c.dst.Write(p.stored); err != nil {
		return err
	}
	c.entries = binary.LittleEndian.AppendUint32(c.entries, uint32(len(p.stored)))
	c.entries = append(c.entries, p.sum[:]...)
	return nil
}

// PutCompressed stores what it reads as seekable zstd under a name. Nothing is
// published when reading fails or the digest is not the wanted one.
func PutCompressed(ctx context.Context, s Store, name string, src io.Reader, o CompressOptions) (*Index, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type outcome struct {
		index *Index
		err   error
	}
	r, w := io.Pipe()
	done := make(chan outcome, 1)
	go func() {
		x, err := Compress(ctx, w, src, o)
		w.CloseWithError(err)
		done <- outcome{x, err}
	}()
	err := s.Put(ctx, name, r)
	r.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // wakes a Compress whose Put gave up
	if err != nil {
		cancel()
	}
	o1 := <-done
	if err == nil {
		err = o1.err
	}
	if err != nil {
		return nil, err
	}
	return o1.index, nil
}
