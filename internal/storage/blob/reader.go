package blob

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
)

// ReadIndex reads the index of an object with one request, when rawSize is what
// the object holds (0: not known) and its frames have the default size; else with two.
func ReadIndex(ctx context.Context, s Store, name string, rawSize int64) (*Index, error) {
	guess := 256 << 10
	if rawSize > 0 {
		guess = indexSize(int(min((rawSize+DefaultFrameSize-1)/DefaultFrameSize, maxFrames)))
	}
	tail, err := readTail(ctx, s, name, guess)
	if err != nil {
		return nil, err
	}
	x, err := parseIndex(tail)
	if short := errShort(0); errors.As(err, &short) {
		if tail, err = readTail(ctx, s, name, int(short)); err != nil {
			return nil, err
		}
		x, err = ParseIndex(tail)
	}
	if err == nil && rawSize > 0 && x.RawSize() != rawSize {
		err = damaged("its index claims %d bytes, not %d", x.RawSize(), rawSize)
	}
	if err != nil {
		return nil, errs.E(errs.KindOf(err), "object %s: %w", name, err).On("object %s", name)
	}
	return x, nil
}

func readTail(ctx context.Context, s Store, name string, n int) ([]byte, error) {
	if n > maxIndex {
		n = maxIndex
	}
	body, err := s.Get(ctx, name, -int64(n), -1)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, int64(n)))
}

// Fetch reads the stored bytes of count frames from first with one request, and
// calls f with the raw bytes of each, in order, verified. f may keep what it gets.
// An error of f ends it and is returned.
func (x *Index) Fetch(ctx context.Context, s Store, name string, d *Decoder, first, count int, f func(frame int, raw []byte) error) error {
	if first < 0 || count <= 0 || first+count > x.Frames() {
		return errs.E(errs.Invalid, "object %s has frames 0 to %d, not %d to %d", name, x.Frames()-1, first, first+count-1)
	}
	begin, end := x.offsets[first], x.offsets[first+count]
	body, err := s.Get(ctx, name, begin, end-begin)
	if err != nil {
		return err
	}
	defer body.Close()
	var stored []byte
	for i := first; i < first+count; i++ {
		frame := x.Frame(i)
		if cap(stored) < frame.Len {
			stored = make([]byte, storedBound(x.frameSize))
		}
		stored = stored[:frame.Len]
		if _, err := io.ReadFull(body, stored); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = damaged("it ends before its frame %d does", i)
			}
			return errs.E(errs.KindOf(err), "object %s: %w", name, err).On("object %s", name)
		}
		raw, err := d.Frame(nil, frame, stored)
		if err != nil {
			return errs.E(errs.KindOf(err), "object %s: %w", name, err).On("object %s", name)
		}
		if err := f(i, raw); err != nil {
			return err
		}
	}
	return nil
}

// Reader reads the raw bytes of one object at any offset, verified. It keeps the last frames it
// decoded. Its methods may be called concurrently.
type Reader struct {
	ctx   context.Context
	store Store
	name  string
	index *Index
	dec   *Decoder

	mu   sync.Mutex
	kept [4]keptFrame // most recently used first
}

type keptFrame struct {
	raw   []byte // nil: empty
	frame int
}

// OpenReader reads the index and returns a reader, which works until ctx ends.
// rawSize is what the object holds, or 0 when that is not known.
func OpenReader(ctx context.Context, s Store, name string, rawSize int64) (*Reader, error) {
	x, err := ReadIndex(ctx, s, name, rawSize)
	if err != nil {
		return nil, err
	}
	d, err := NewDecoder(2)
	if err != nil {
		return nil, fmt.Errorf("make a decoder: %w", err)
	}
	return &Reader{ctx: ctx, store: s, name: name, index: x, dec: d}, nil
}

// Close releases memory. It is not called while other methods run.
func (r *Reader) Close() error {
	r.dec.Close()
	return nil
}

// Index returns the object's index.
func (r *Reader) Index() *Index { return r.index }

// Size is the number of raw bytes.
func (r *Reader) Size() int64 { return r.index.rawSize }

// ReadAt implements io.ReaderAt.
func (r *Reader) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, errs.E(errs.Invalid, "read at offset %d", off)
	}
	n := 0
	for n < len(p) {
		at := off + int64(n)
		if at >= r.index.rawSize {
			return n, io.EOF
		}
		i := r.index.At(at)
		raw, err := r.frame(i)
		if err != nil {
			return n, err
		}
		n += copy(p[n:], raw[at-int64(i)*int64(r.index.frameSize):])
	}
	return n, nil
}

func (r *Reader) frame(i int) ([]byte, error) {
	if raw := r.recall(i); raw != nil {
		return raw, nil
	}
	var got []byte
	err := r.index.Fetch(r.ctx, r.store, r.name, r.dec, i, 1, func(_ int, raw []byte) error {
		got = raw
		return nil
	})
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	copy(r.kept[1:], r.kept[:])
	r.kept[0] = keptFrame{got, i}
	return got, nil
}

func (r *Reader) recall(i int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, f := range r.kept {
		if f.raw != nil && f.frame == i {
			copy(r.kept[1:k+1], r.kept[:k])
			r.kept[0] = f
			return f.raw
		}
	}
	return nil
}

// Copy writes all raw bytes to w, verified frame by frame and against the digest of the whole that the
// caller expects (want; nil: the one of the index), with one request.
func Copy(ctx context.Context, w io.Writer, s Store, name string, rawSize int64, want *Sum) (*Index, error) {
	x, err := ReadIndex(ctx, s, name, rawSize)
	if err != nil {
		return nil, err
	}
	if want != nil && x.Digest() != *want {
		return nil, damagedObject(name, x.Digest(), *want)
	}
	expected := x.Digest()
	h := sha256.New()
	if x.Frames() > 0 {
		d, err := NewDecoder(1)
		if err != nil {
			return nil, fmt.Errorf("make a decoder: %w", err)
		}
		defer d.Close()
		err = x.Fetch(ctx, s, name, d, 0, x.Frames(), func(_ int, raw []byte) error {
			h.Write(raw)
			_, err := w.Write(raw)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if got := sum(h); got != expected {
		return nil, damagedObject(name, got, expected)
	}
	return x, nil
}

func damagedObject(name string, got, want Sum) error {
	err := damaged("its content has the digest %s, not %s", got, want)
	return errs.E(errs.KindOf(err), "object %s: %w", name, err).On("object %s", name)
}
