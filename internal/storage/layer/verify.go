package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// maxProblems bounds what Verify reports of one layer.
const maxProblems = 100

// Verify reads everything that a layer consists of, checks every digest, and
// walks the image so that every file's content is found, in whichever blob. It returns what is
// wrong, nothing for a sound layer; an error says that it could not look.
// progress is called with bytes of hashing and of file content, total in advance.
func (s *Store) Verify(ctx context.Context, d Digest, progress func(done, total int64)) ([]string, error) {
	// The cache would hide a manifest that was damaged since.
	s.forget([]Digest{d})
	l, err := s.Load(d)
	if err != nil {
		return nil, err
	}
	v := &verifier{store: s, layer: l, report: progress}
	for _, o := range l.Objects() {
		v.total += o.Size
	}
	v.total += l.LogicalBytes
	for _, p := range l.Parents {
		if _, err := s.Find(ctx, p); err != nil {
			v.problem("parent %s: %v", p, err)
		}
	}
	meta, err := v.check(ctx, "metadata image", l.Meta)
	if err != nil {
		return nil, err
	}
	defer closeObject(meta)
	whole := meta != nil
	var blobs []io.ReaderAt
	for i, b := range l.Blobs() {
		what := "data blob"
		if i > 0 {
			what = fmt.Sprintf("data blob %d, of another layer,", i+1)
		}
		f, err := v.check(ctx, what, b)
		if err != nil {
			return nil, err
		}
		defer closeObject(f)
		whole = whole && f != nil
		blobs = append(blobs, f)
	}
	if err := v.checkIndexes(ctx); err != nil {
		return nil, err
	}
	if whole {
		if err := v.walk(ctx, meta, blobs); err != nil {
			return nil, err
		}
	}
	return v.problems, nil
}

// checkIndexes checks that each chunk index is that of its blob: a wrong one would
// give layers that are written against it wrong content.
func (v *verifier) checkIndexes(ctx context.Context) error {
	indexes := append([]Object{v.layer.Index}, v.layer.ExtraIndex...)
	for i, b := range v.layer.Blobs() {
		if i >= len(indexes) || indexes[i].Digest == "" {
			continue
		}
		what := fmt.Sprintf("chunk index of data blob %d", i+1)
		x, err := v.check(ctx, what, indexes[i])
		if err != nil {
			return err
		}
		closeObject(x)
		f, err := v.store.objects.open(b.Digest)
		if err != nil {
			continue // told above
		}
		h := sha256.New()
		err = erofs.WriteIndex(ctx, io.NewSectionReader(f, 0, f.size()), h)
		f.Close()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			v.problem("%s: %v", what, err)
		} else if got := sumDigest(h.Sum(nil)); got != indexes[i].Digest {
			v.problem("%s: its digest is %s, that of the blob's index is %s", what, indexes[i].Digest, got)
		}
	}
	return nil
}

func closeObject(o object) {
	if o != nil {
		o.Close()
	}
}

type verifier struct {
	store       *Store
	layer       Layer
	report      func(done, total int64)
	done, total int64
	problems    []string
}

func (v *verifier) problem(format string, args ...any) {
	if len(v.problems) < maxProblems {
		v.problems = append(v.problems, fmt.Sprintf(format, args...))
	}
}

func (v *verifier) add(n int64) {
	v.done += n
	if v.report != nil {
		v.report(v.done, v.total)
	}
}

// check hashes an object and returns it open, or nil when it is missing.
func (v *verifier) check(ctx context.Context, what string, want Object) (object, error) {
	o, err := v.store.objects.open(want.Digest)
	if errors.Is(err, fs.ErrNotExist) {
		v.problem("%s %s is missing", what, want.Digest)
		return nil, nil
	}
	if err != nil {
		return nil, v.store.diskError(err)
	}
	got, err := hashFile(ctx, io.NewSectionReader(o, 0, o.size()), v.add)
	switch {
	case ctx.Err() != nil:
		o.Close()
		return nil, context.Cause(ctx)
	case errors.Is(err, unix.EIO):
		v.problem("%s %s: the disk cannot read it: %v", what, want.Digest, err)
	case err != nil:
		o.Close()
		return nil, v.store.diskError(err)
	case got.Size != want.Size:
		v.problem("%s %s has %d bytes instead of %d", what, want.Digest, got.Size, want.Size)
	case got.Digest != want.Digest:
		v.problem("%s has the digest %s instead of %s", what, got.Digest, want.Digest)
	}
	return o, nil
}

// walk reads every file of the image.
func (v *verifier) walk(ctx context.Context, meta object, blobs []io.ReaderAt) error {
	img, err := erofs.Open(meta, blobs...)
	if err != nil {
		v.problem("image: %v", err)
		return nil
	}
	v.checkDevices(img)
	var files int64
	buf := make([]byte, 1<<20)
	seen := make(map[uint64]bool) // hard links
	err = img.Walk(func(path string, e *erofs.Entry) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if path != "." {
			files++
		}
		if e.Mode&unix.S_IFMT != unix.S_IFREG || seen[e.NID] {
			return nil
		}
		if e.Nlink > 1 {
			seen[e.NID] = true
		}
		content, err := e.Content()
		if err == nil {
			err = v.read(ctx, content, buf)
		}
		if err != nil && ctx.Err() == nil {
			v.problem("file %q: %v", path, err)
		}
		return ctx.Err()
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		v.problem("image: %v", err)
	case files != v.layer.Files:
		v.problem("the image has %d files, the manifest says %d", files, v.layer.Files)
	}
	return nil
}

// checkDevices compares the image's device table with the manifest.
func (v *verifier) checkDevices(img *erofs.Image) {
	for i, d := range img.Devices() {
		b := v.layer.Blobs()[i] // as many, else the image could not be opened
		if size := int64(d.Blocks) * 4096; size != b.Size || i > 0 && d.Tag != b.Digest.Hex() {
			v.problem("device %d of the image is %q with %d bytes, the manifest names %s with %d", i+1, d.Tag, size, b.Digest, b.Size)
		}
	}
	used, err := img.UsedBytes()
	if err != nil {
		return // the walk tells more
	}
	for i, n := range v.layer.ExtraUsed {
		if used[i+1] != n {
			v.problem("the image refers to %d bytes of %s, the manifest says %d", used[i+1], v.layer.Extra[i].Digest, n)
		}
	}
}

func (v *verifier) read(ctx context.Context, r io.Reader, buf []byte) error {
	for {
		n, err := r.Read(buf)
		v.add(int64(n))
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
	}
}
