package blob_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// mixed is content of which some frames get smaller and others do not.
func mixed(n int) []byte {
	random := rand.NewChaCha8([32]byte{1})
	b := make([]byte, n)
	for i := 0; i < n; i += 20_000 {
		part := b[i:min(i+20_000, n)]
		switch i / 20_000 % 3 {
		case 0:
			random.Read(part)
		case 1:
			copy(part, bytes.Repeat([]byte("compressible text, "), 20_000/19+1))
		}
	}
	return b
}

func compress(t testing.TB, raw []byte, o blob.CompressOptions) ([]byte, *blob.Index) {
	t.Helper()
	var stored bytes.Buffer
	x, err := blob.Compress(context.Background(), &stored, bytes.NewReader(raw), o)
	if err != nil {
		t.Fatal(err)
	}
	return stored.Bytes(), x
}

func TestSeekableRoundTrip(t *testing.T) {
	ctx := context.Background()
	for _, frame := range []int{4 << 10, 128 << 10, 256 << 10, 4 << 20} {
		for _, size := range []int{0, 1, frame - 1, frame, frame + 1, 3*frame + 17} {
			t.Run(fmt.Sprintf("%d in %d", size, frame), func(t *testing.T) {
				raw := mixed(size)
				stored, x := compress(t, raw, blob.CompressOptions{FrameSize: frame})
				if x.RawSize() != int64(size) || x.StoredSize() != int64(len(stored)) || x.Digest() != sha256.Sum256(raw) {
					t.Errorf("index says %d raw, %d stored; want %d and %d", x.RawSize(), x.StoredSize(), size, len(stored))
				}
				s := blob.NewMemory()
				if err := s.Put(ctx, "o", bytes.NewReader(stored)); err != nil {
					t.Fatal(err)
				}
				for _, known := range []int64{0, int64(size)} {
					got, err := blob.ReadIndex(ctx, s, "o", known)
					if err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(got.Bytes(), x.Bytes()) || got.Root() != x.Root() {
						t.Error("the index read is not the one written")
					}
				}
				var copied bytes.Buffer
				if _, err := blob.Copy(ctx, &copied, s, "o", 0, nil); err != nil || !bytes.Equal(copied.Bytes(), raw) {
					t.Errorf("Copy: %v, equal %v", err, bytes.Equal(copied.Bytes(), raw))
				}
				// Any zstd reads it.
				z, err := zstd.NewReader(bytes.NewReader(stored))
				if err != nil {
					t.Fatal(err)
				}
				defer z.Close()
				plain, err := io.ReadAll(z)
				if err != nil || !bytes.Equal(plain, raw) {
					t.Errorf("as plain zstd: %v, equal %v", err, bytes.Equal(plain, raw))
				}
				r, err := blob.OpenReader(ctx, s, "o", int64(size))
				if err != nil {
					t.Fatal(err)
				}
				defer r.Close()
				random := rand.New(rand.NewPCG(1, 2))
				for range 20 {
					if size == 0 {
						break
					}
					off := random.IntN(size)
					n := random.IntN(2*frame) + 1
					p := make([]byte, n)
					got, err := r.ReadAt(p, int64(off))
					want := raw[off:min(off+n, size)]
					if !bytes.Equal(p[:got], want) || (err != nil) != (got < n) || (err != nil && !errors.Is(err, io.EOF)) {
						t.Fatalf("ReadAt %d+%d: %d bytes, %v", off, n, got, err)
					}
				}
			})
		}
	}
}

func TestCompressDoesNotGrow(t *testing.T) {
	raw := make([]byte, 10<<20)
	rand.NewChaCha8([32]byte{2}).Read(raw)
	stored, x := compress(t, raw, blob.CompressOptions{})
	if extra := len(stored) - len(raw); extra > x.Frames()*(36+13+6)+100 {
		t.Errorf("random bytes grew by %d", extra)
	}
}

func TestRootDependsOnContentOnly(t *testing.T) {
	raw := mixed(1 << 20)
	_, a := compress(t, raw, blob.CompressOptions{Parallel: 1})
	_, b := compress(t, raw, blob.CompressOptions{Parallel: 7})
	if a.Root() != b.Root() {
		t.Error("the root depends on how it was compressed")
	}
	raw[len(raw)-1] ^= 1
	if _, c := compress(t, raw, blob.CompressOptions{}); c.Root() == a.Root() {
		t.Error("the root does not depend on the content")
	}
}

func TestPutCompressedPublishesNothingWrong(t *testing.T) {
	ctx := context.Background()
	raw := mixed(3 << 20)
	right := blob.Sum(sha256.Sum256(raw))
	broken := errors.New("source broke")
	for _, test := range []struct {
		name string
		src  io.Reader
		want blob.Sum
		err  error
	}{
		{"source", io.MultiReader(bytes.NewReader(raw), failing{broken}), right, broken},
		{"digest", bytes.NewReader(raw[1:]), right, blob.ErrDamaged},
	} {
		s := blob.NewMemory()
		if _, err := blob.PutCompressed(ctx, s, "o", test.src, blob.CompressOptions{Want: &test.want}); !errors.Is(err, test.err) {
			t.Errorf("%s: %v", test.name, err)
		}
		if _, err := s.Stat(ctx, "o"); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: it was published (%v)", test.name, err)
		}
	}
	s := blob.NewMemory()
	if _, err := blob.PutCompressed(ctx, s, "o", bytes.NewReader(raw), blob.CompressOptions{Want: &right}); err != nil {
		t.Error(err)
	}
	if _, err := blob.PutCompressed(ctx, s, "../o", bytes.NewReader(raw), blob.CompressOptions{}); !errs.Is(err, errs.Invalid) {
		t.Errorf("a bad name: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// Every single damaged byte is found by reading the whole, and none gives wrong bytes.
func TestEveryFlippedByteIsFound(t *testing.T) {
	ctx := context.Background()
	raw := mixed(24_000)
	stored, _ := compress(t, raw, blob.CompressOptions{FrameSize: 8 << 10})
	for i := range stored {
		for _, bit := range []byte{0x41} {
			bad := bytes.Clone(stored)
			bad[i] ^= bit
			s := blob.NewMemory()
			if err := s.Put(ctx, "o", bytes.NewReader(bad)); err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			_, err := blob.Copy(ctx, &got, s, "o", int64(len(raw)), nil)
			// Bits that zstd does not use may change without harm.
			if err == nil && !bytes.Equal(got.Bytes(), raw) {
				t.Fatalf("byte %d changed: wrong bytes were taken for right", i)
			}
			if err != nil && !errors.Is(err, blob.ErrDamaged) {
				t.Fatalf("byte %d changed: %v", i, err)
			}
			if !bytes.HasPrefix(raw, got.Bytes()) {
				t.Fatalf("byte %d changed: wrong bytes were delivered before the error", i)
			}
		}
	}
	for n := range stored {
		s := blob.NewMemory()
		if err := s.Put(ctx, "o", bytes.NewReader(stored[:n])); err != nil {
			t.Fatal(err)
		}
		if _, err := blob.Copy(ctx, io.Discard, s, "o", int64(len(raw)), nil); !errors.Is(err, blob.ErrDamaged) {
			t.Fatalf("cut off at %d: %v", n, err)
		}
	}
}
