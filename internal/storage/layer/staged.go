package layer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// writer writes an image into empty files, with the options that it is given.
type writer func(meta, blob *os.File, o erofs.Options) (*erofs.Result, error)

// staged is an image in temporary files that is not published yet.
type staged struct {
	dir               string
	meta, blob, index *os.File
	against           *OpenLayers // nil: none
	manifest          Manifest
	sealed            []sealedFile
	warnings          []string
}

// sealedFile is a complete file that becomes an object.
type sealedFile struct {
	digest Digest
	path   string
}

// newStaged makes the files, in a directory of the store's file system.
func (s *Store) newStaged(pattern string) (_ *staged, err error) {
	g := &staged{}
	defer func() {
		if err != nil {
			g.remove()
		}
	}()
	if g.dir, err = os.MkdirTemp(s.tmp(), pattern); err != nil {
		return nil, err
	}
	for _, f := range []struct {
		file **os.File
		name string
	}{{&g.meta, "meta"}, {&g.blob, "blob"}, {&g.index, "index"}} {
		if *f.file, err = os.Create(filepath.Join(g.dir, f.name)); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// remove removes what is left of it; the next start empties tmp in any case.
func (g *staged) remove() {
	for _, f := range []*os.File{g.meta, g.blob, g.index} {
		if f != nil {
			f.Close()
		}
	}
	if g.against != nil {
		g.against.Close()
	}
	if g.dir != "" {
		_ = removeTree(g.dir)
	}
}

// options returns how the image is to be written.
func (g *staged) options(l Limits) erofs.Options {
	o := erofs.Options{MaxEntries: l.MaxEntries, MaxBytes: l.MaxBytes, Index: g.index}
	if g.against != nil {
		o.Parents = g.against.Blobs()
	}
	return o
}

// sealImage makes the files durable and enters them in the manifest.
func (s *Store) sealImage(ctx context.Context, g *staged, res *erofs.Result, report *reporter, total int64) error {
	m := &g.manifest
	g.against.describe(m, res)
	files := []struct {
		file *os.File
		as   *Object
	}{{g.meta, &m.Meta}, {g.blob, &m.Blob}}
	if res.BlobBytes >= minIndexed {
		files = append(files, struct {
			file *os.File
			as   *Object
		}{g.index, &m.Index})
	}
	// Side by side, as the disk can make one flush of them.
	var wg sync.WaitGroup
	synced := make([]error, len(files))
	for i, f := range files {
		wg.Go(func() { synced[i] = f.file.Sync() })
	}
	defer wg.Wait()
	for _, f := range files {
		var err error
		hash := hashFile
		if f.as == &m.Blob {
			hash = hashBlob
		}
		if *f.as, err = hash(ctx, f.file, func(n int64) { report.add(PhaseStoring, n, total) }); err != nil {
			return err
		}
		g.sealed = append(g.sealed, sealedFile{f.as.Digest, f.file.Name()})
	}
	wg.Wait()
	return errors.Join(synced...)
}

// AgainstNone as ImportOptions.Against has all content stored.
const AgainstNone = "none"

// minShare is the part of another layer's blob, as a divisor, that an import must
// have a use for to refer to it: the blob may be kept for this alone.
const minShare = 4

// openAgainst opens the layers that an import is written against; nil if none.
func (s *Store) openAgainst(ctx context.Context, ref Ref, o ImportOptions) (*OpenLayers, error) {
	if o.Against == AgainstNone {
		return nil, nil
	}
	var ds []Digest
	add := func(l Layer) { ds = append(append(ds, l.Parents...), l.Digest) }
	if o.Against == "" {
		l, err := s.resolve(ctx, ref)
		if err != nil {
			return nil, nil //nolint:nilerr // nothing there, or nothing usable: a new layer stands by itself
		}
		add(l)
		// Content that several pieces have is referred to where it was before: then a piece that did not change is the very
		// same layer. The last of ds is looked in first.
		if o.pieces == len(ds) {
			was := ds[o.piece]
			ds = append(slices.Delete(ds, o.piece, o.piece+1), was)
		}
	}
	for name := range strings.SplitSeq(o.Against, ",") {
		if o.Against == "" {
			break
		}
		l, err := s.Resolve(ctx, o.Project, strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		add(l)
	}
	if n := len(ds); n > maxAgainst {
		return nil, errs.OverLimit(errs.Invalid, "layers to import against", maxAgainst, n)
	}
	open, err := s.OpenLayers(ctx, ds)
	if err != nil {
		if o.Against == "" && ctx.Err() == nil {
			return nil, nil // as above: an import must be possible over a damaged layer
		}
		return nil, err
	}
	for _, b := range open.blobs {
		b.MinUsed = b.Size / minShare
	}
	return open, nil
}

const maxAgainst = 64

// minIndexed is the size from which on the chunk index of a blob is an object:
// those of smaller blobs are computed in less time than it takes to store them.
const minIndexed = 1 << 20

// adopt gives a staged image the objects of a layer that it is written against if
// their trees are the same in everything, so that importing a tree again adds
// nothing; with an equal kind, source and configuration it is the very layer.
func (s *Store) adopt(g *staged) error {
	m := &g.manifest
	if g.against == nil || m.Blob.Size > 0 {
		return nil
	}
	img, err := erofs.Open(g.meta)
	if err != nil {
		return err
	}
	mine, err := img.TreeDigest(m.Blob.Digest.Hex())
	if err != nil {
		return err
	}
	for i, l := range g.against.layers {
		if l.Files != m.Files || l.LogicalBytes != m.LogicalBytes {
			continue
		}
		img, err := g.against.Image(i)
		if err != nil {
			continue // a damaged one is like none
		}
		if theirs, err := img.TreeDigest(l.Blob.Digest.Hex()); err != nil || theirs != mine {
			continue
		}
		m.Schema, m.Meta, m.Blob, m.Index = l.Schema, l.Meta, l.Blob, l.Index
		m.Extra, m.ExtraUsed, m.ExtraIndex = l.Extra, l.ExtraUsed, l.ExtraIndex
		g.sealed = nil // the store has them, and keeps them for g.against
		return nil
	}
	return nil
}
