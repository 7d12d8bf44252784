package layer

import (
	"context"
	"fmt"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// Usage is what of a layer's stored content, metadata left out, is its own.
type Usage struct {
	// Unique bytes lie in its data blob and no other layer refers to them: what
	// removing the layer frees, at least once its blob is not referred to at all.
	Unique int64
	// Shared bytes are those of its blob that other layers refer to, and those of
	// other layers' blobs that it refers to.
	Shared int64
}

// maxExact bounds the layers whose metadata Usage reads.
const maxExact = 64

// Usage computes a layer's. exact reads the metadata of the layers that refer to
// its blob, unless they are more than 64; otherwise their references are taken to
// be to different bytes, which may count too much as shared.
func (s *Store) Usage(ctx context.Context, l Layer, exact bool) (Usage, error) {
	var u Usage
	for _, n := range l.ExtraUsed {
		u.Shared += n
	}
	refs, whole, err := s.referrers(ctx, l)
	if err != nil {
		return u, err
	}
	var others int64
	switch {
	case whole:
		others = l.Blob.Size
	case exact && len(refs) <= maxExact:
		if others, err = s.usedBy(ctx, l.Blob.Digest, refs); err != nil {
			return u, err
		}
	default:
		for _, r := range refs {
			others += r.bytes
		}
	}
	others = min(others, l.Blob.Size)
	u.Unique = l.Blob.Size - others
	u.Shared += others
	return u, nil
}

// referrers returns which layers refer to bytes of a layer's data blob; whole says
// that another layer has the same blob as its own.
func (s *Store) referrers(ctx context.Context, l Layer) (refs []reference, whole bool, err error) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := s.loadIndex(ctx); err != nil {
		return nil, false, err
	}
	blob := sumOf(l.Blob.Digest)
	refs = x.extra[blob] // only ever appended to, or replaced
	return refs, x.uses[blob] > 1+len(refs), nil
}

// usedBy returns how many bytes of a blob layers refer to, each counted once.
func (s *Store) usedBy(ctx context.Context, blob Digest, refs []reference) (int64, error) {
	var used erofs.Used
	for _, r := range refs {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		l, err := s.Load(r.layer)
		if errs.Is(err, errs.NotFound) {
			continue // collected meanwhile
		}
		if err == nil {
			err = s.addUsed(&used, l)
		}
		if err != nil {
			return 0, fmt.Errorf("layer %s, which shares content: %w", r.layer, err)
		}
	}
	return used.Bytes(blob.Hex()), nil
}

func (s *Store) addUsed(used *erofs.Used, l Layer) error {
	f, err := s.objects.open(l.Meta.Digest)
	if err != nil {
		return s.diskError(err)
	}
	defer f.Close()
	img, err := erofs.Open(f)
	if err != nil {
		return err
	}
	var names []string
	for _, b := range l.Blobs() {
		names = append(names, b.Digest.Hex())
	}
	return used.Add(img, names)
}
