package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// OpenLayers are layers that another one is written against. They, and the objects
// that they name, are not collected before Close, which is to be called after the
// new layer is published.
type OpenLayers struct {
	store  *Store
	layers []Layer
	blobs  []*erofs.Blob // distinct, those of upper layers first
	index  map[string]Object
	unpin  func()

	mu    sync.Mutex
	files []io.Closer
}

// OpenLayers opens layers, lowest first. not-found: there is no such layer.
func (s *Store) OpenLayers(ctx context.Context, ds []Digest) (_ *OpenLayers, err error) {
	o := &OpenLayers{store: s, index: make(map[string]Object), unpin: func() {}}
	defer func() {
		if err != nil {
			o.Close()
		}
	}()
	// Held, so that what is found is pinned before a collection can begin.
	release := s.Hold()
	for _, d := range ds {
		var l Layer
		if l, err = s.Load(d); err != nil {
			break
		}
		o.layers = append(o.layers, l)
	}
	o.unpin = s.pin(ds)
	release()
	if err != nil {
		return nil, err
	}
	for _, l := range slices.Backward(o.layers) {
		if err = o.add(ctx, l.Blob, l.Index); err != nil {
			return nil, err
		}
		for i, x := range l.Extra {
			if err = o.add(ctx, x, l.ExtraIndex[i]); err != nil {
				return nil, err
			}
		}
	}
	return o, nil
}

// add opens a blob and its chunk index.
func (o *OpenLayers) add(ctx context.Context, blob, index Object) error {
	name := blob.Digest.Hex()
	if o.blob(name) != nil {
		return nil
	}
	b := &erofs.Blob{Name: name, Size: blob.Size, Data: &lateObject{open: func() (object, error) { return o.store.objects.open(blob.Digest) }}}
	o.keep(b.Data.(io.Closer))
	if blob.Size > 0 {
		var err error
		if b.Index, err = o.openIndex(ctx, blob, index); err != nil {
			return o.store.diskError(fmt.Errorf("open the chunk index of data blob %s: %w", blob.Digest, err))
		}
		if b.Index.Blocks()*4096 != blob.Size {
			return errs.E(errs.Precondition, "data blob %s has not the size that its layer's manifest says", blob.Digest).
				WithHint("`harena layer verify` says what is wrong")
		}
	}
	o.index[name] = index
	o.blobs = append(o.blobs, b)
	return nil
}

func (o *OpenLayers) blob(name string) *erofs.Blob {
	i := slices.IndexFunc(o.blobs, func(b *erofs.Blob) bool { return b.Name == name })
	if i < 0 {
		return nil
	}
	return o.blobs[i]
}

func (o *OpenLayers) keep(c io.Closer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.files = append(o.files, c)
}

// openIndex opens the chunk index of a blob: the object or, without one that is
// any good, one that is computed and kept beside the store.
func (o *OpenLayers) openIndex(ctx context.Context, blob, index Object) (*erofs.Index, error) {
	s := o.store
	if index.Digest != "" {
		if f, err := s.objects.open(index.Digest); err == nil {
			if x, err := o.useIndex(f, f.size(), blob); err == nil {
				return x, nil
			}
		}
	}
	if blob.Size < minIndexed {
		return s.smallIndex(ctx, blob)
	}
	path := s.indexPath(blob.Digest)
	for range 2 {
		f, err := os.Open(path)
		if err == nil {
			info, err := f.Stat()
			if err != nil {
				f.Close()
				return nil, err
			}
			if x, err := o.useIndex(f, info.Size(), blob); err == nil {
				return x, nil
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err := s.computeIndex(ctx, blob.Digest, path); err != nil {
			return nil, err
		}
	}
	return nil, errs.E(errs.Precondition, "data blob %s has not the size that its layer's manifest says", blob.Digest).
		WithHint("`harena layer verify` says what is wrong")
}

// smallIndex computes the chunk index of a small blob in memory.
func (s *Store) smallIndex(ctx context.Context, blob Object) (*erofs.Index, error) {
	in, err := s.objects.open(blob.Digest)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	var b bytes.Buffer
	if err := erofs.WriteIndex(ctx, io.NewSectionReader(in, 0, blob.Size), &b); err != nil {
		return nil, err
	}
	return erofs.OpenIndex(bytes.NewReader(b.Bytes()), int64(b.Len()))
}

type readerAtCloser interface {
	io.ReaderAt
	io.Closer
}

// useIndex opens an index that is of the blob, or closes the file.
func (o *OpenLayers) useIndex(f readerAtCloser, size int64, blob Object) (*erofs.Index, error) {
	x, err := erofs.OpenIndex(f, size)
	if err == nil && x.Blocks()*4096 != blob.Size {
		err = errs.E(errs.Invalid, "the chunk index is of another blob")
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	o.keep(f)
	return x, nil
}

// indexPath is where a chunk index lies that was computed for want of an object.
func (s *Store) indexPath(blob Digest) string {
	return filepath.Join(s.cache, "indexes", blob.Hex())
}

// computeIndex makes the chunk index of a blob at path.
func (s *Store) computeIndex(ctx context.Context, blob Digest, path string) error {
	in, err := s.objects.open(blob)
	if err != nil {
		return err
	}
	defer in.Close()
	f, err := os.CreateTemp(s.tmp(), "index-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := erofs.WriteIndex(ctx, io.NewSectionReader(in, 0, in.size()), f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return publish(f.Name(), path)
}

// forgetIndexes removes computed chunk indexes of blobs that are gone.
func (s *Store) forgetIndexes(gone []Object) {
	for _, o := range gone {
		_ = os.Remove(s.indexPath(o.Digest)) // it is a cache
	}
}

// Layers returns the layers, lowest first.
func (o *OpenLayers) Layers() []Layer { return slices.Clone(o.layers) }

// Blobs returns the data blobs of all layers, for erofs.Options.Parents.
func (o *OpenLayers) Blobs() []*erofs.Blob { return slices.Clone(o.blobs) }

// Image opens the metadata of the i-th layer.
func (o *OpenLayers) Image(i int) (*erofs.Image, error) {
	l := o.layers[i]
	f, err := o.store.objects.open(l.Meta.Digest)
	if err != nil {
		return nil, o.store.diskError(fmt.Errorf("open layer %s: %w", l.Digest, err))
	}
	o.keep(f)
	img, err := erofs.Open(f)
	if err != nil {
		return nil, fmt.Errorf("open layer %s: %w", l.Digest, err)
	}
	return img, nil
}

// Images opens the metadata of the first n layers, for the lower side of erofs.Merge.
func (o *OpenLayers) Images(n int) ([]*erofs.Image, error) {
	out := make([]*erofs.Image, n)
	for i := range out {
		var err error
		if out[i], err = o.Image(i); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Stacked opens the layers from the n-th on for erofs.Merge.
func (o *OpenLayers) Stacked(n int) ([]erofs.Stacked, error) {
	var out []erofs.Stacked
	for i := n; i < len(o.layers); i++ {
		img, err := o.Image(i)
		if err != nil {
			return nil, err
		}
		s := erofs.Stacked{Image: img}
		for _, b := range o.layers[i].Blobs() {
			s.Blobs = append(s.Blobs, o.blob(b.Digest.Hex()))
		}
		out = append(out, s)
	}
	return out, nil
}

// Close closes the files and lets the layers be collected.
func (o *OpenLayers) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, f := range o.files {
		f.Close()
	}
	o.files = nil
	o.unpin()
	o.unpin = func() {}
}

// describe notes in a manifest what an image refers to; o may be nil.
func (o *OpenLayers) describe(m *Manifest, res *erofs.Result) {
	m.Schema = schemaPlain
	m.Extra, m.ExtraUsed, m.ExtraIndex = nil, nil, nil
	for i, b := range res.Extra {
		m.Schema = schemaExtra
		m.Extra = append(m.Extra, o.object(b))
		m.ExtraUsed = append(m.ExtraUsed, res.ExtraUsed[i])
		m.ExtraIndex = append(m.ExtraIndex, o.index[b.Name])
	}
}

// object returns a blob as the manifests of the layers name it.
func (o *OpenLayers) object(b *erofs.Blob) Object {
	out := Object{Digest: Digest(digestPrefix + b.Name), Size: b.Size}
	for _, l := range o.layers {
		for _, x := range l.Blobs() {
			if x.Digest == out.Digest && x.Root != "" {
				out.Root = x.Root
			}
		}
	}
	return out
}

// lateObject opens an object when it is first read.
type lateObject struct {
	open func() (object, error)
	mu   sync.Mutex
	o    object
}

// ReadAt implements io.ReaderAt.
func (l *lateObject) ReadAt(p []byte, off int64) (int, error) {
	l.mu.Lock()
	if l.o == nil {
		o, err := l.open()
		if err != nil {
			l.mu.Unlock()
			return 0, err
		}
		l.o = o
	}
	o := l.o
	l.mu.Unlock()
	return o.ReadAt(p, off)
}

// Close implements io.Closer.
func (l *lateObject) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.o == nil {
		return nil
	}
	return l.o.Close()
}

// pin keeps layers from being collected, also when nothing on record names them.
func (s *Store) pin(ds []Digest) (unpin func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		s.pins[d]++
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, d := range ds {
			if s.pins[d]--; s.pins[d] == 0 {
				delete(s.pins, d)
			}
		}
	}
}

// pinned returns the layers that are pinned.
func (s *Store) pinned() []Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Digest
	for d := range s.pins {
		out = append(out, d)
	}
	return out
}
