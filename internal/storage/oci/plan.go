package oci

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/unpack"
)

// Bounds used where Options leaves them 0.
const (
	DefaultCollapse   = 3_000_000_000
	DefaultMaxBytes   = 64 << 30
	DefaultMaxEntries = 2_000_000

	maxNames    = 512 << 20 // bytes of the paths of all layers
	maxPath     = 4096
	maxOverhead = 8 << 30 // bytes of tar that are no content: headers, padding
	// maxGroups keeps room in an overlay for what is put upon the image.
	maxGroups = 16
)

// Options bound a plan.
type Options struct {
	// Collapse is how many bytes of files may be merged into one group; 0 means
	// DefaultCollapse, less than 0 everything.
	Collapse int64
	// MaxBytes bounds the file sizes of all layers together, MaxEntries their entries.
	MaxBytes, MaxEntries int64
	// Progress, if set, is told the bytes of layers read, of what total.
	Progress func(message string, done, total int64)
}

// Plan says what of an image's layers remains, group by group, lowest first.
type Plan struct {
	img    *Image
	o      Options
	groups []*tree
	total  int64 // bytes of the layers as stored
}

// NewPlan reads the headers of all layers and checks their digests. Errors of the image are of kind invalid.
func NewPlan(ctx context.Context, img *Image, o Options) (*Plan, error) {
	if o.Collapse == 0 {
		o.Collapse = DefaultCollapse
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	if o.MaxEntries <= 0 {
		o.MaxEntries = DefaultMaxEntries
	}
	if o.Progress == nil {
		o.Progress = func(string, int64, int64) {}
	}
	p := &Plan{img: img, o: o}
	for _, l := range img.Layers {
		p.total += l.Size
	}
	s := &scanner{plan: p}
	var group int64
	for i := range img.Layers {
		l, err := s.scan(ctx, i)
		if err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(img.Layers), err)
		}
		over := o.Collapse >= 0 && group > 0 && group+l.bytes > o.Collapse && len(p.groups) < maxGroups
		if len(p.groups) == 0 || over {
			var lower *tree
			if n := len(p.groups); n > 0 {
				lower = p.groups[n-1]
			}
			p.groups, group = append(p.groups, newTree(lower)), 0
		}
		group += l.bytes
		if err := l.apply(p.groups[len(p.groups)-1], o.MaxEntries); err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(img.Layers), err)
		}
	}
	if len(p.groups) == 0 { // FROM scratch
		p.groups = []*tree{newTree(nil)}
	}
	return p, nil
}

// Groups returns how many groups the layers make.
func (p *Plan) Groups() int { return len(p.groups) }

// scanned holds the names of one layer.
type scanned struct {
	layer   int32
	bytes   int64
	entries []record
}

// record keeps paths whole: split, one of 4 KB can take 50.
type record struct {
	path   string
	target string // of a hard link
	what   what
	src    source
}

// split is the reverse of joining what cleanPath returns.
func split(path string) []string {
	if path == "" {
		return nil
	}
	return strings.Split(path, "/")
}

// join makes a string of its own, or the name of the entry would keep the whole header alive.
func join(parts []string) string { return strings.Clone(strings.Join(parts, "/")) }

type what uint8

const (
	isDir what = iota
	isFile
	isLink
	isHide
	isOpaque
)

// scanner reads layers and counts what it has read.
type scanner struct {
	plan                  *Plan
	read                  int64 // bytes as stored
	bytes, entries, names int64
}

// scan reads the headers of a layer.
func (s *scanner) scan(ctx context.Context, i int) (*scanned, error) {
	out := &scanned{layer: int32(i)}
	message := fmt.Sprintf("reading layer %d of %d", i+1, len(s.plan.img.Layers))
	done := s.read
	r, err := openLayer(ctx, &s.plan.img.Layers[i], s.plan.o.MaxBytes+maxOverhead, func(n int64) {
		s.read = done + n
		s.plan.o.Progress(message, s.read, s.plan.total)
	})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for n := int32(0); ; n++ {
		h, err := r.next()
		if errors.Is(err, io.EOF) {
			return out, r.finish()
		}
		if err != nil {
			return nil, err
		}
		if err := s.add(out, h, n); err != nil {
			return nil, fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
}

func (s *scanner) add(out *scanned, h *tar.Header, n int32) error {
	if s.entries++; s.entries > s.plan.o.MaxEntries {
		return errs.OverLimit(errs.Invalid, "entries of the layers of an image", s.plan.o.MaxEntries, s.entries)
	}
	if s.names += int64(len(h.Name) + len(h.Linkname)); s.names > maxNames {
		return errs.OverLimit(errs.Invalid, "bytes of names of an image", maxNames, s.names)
	}
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := cleanPath(h.Name)
	if err != nil {
		return err
	}
	rec := record{path: join(parts), src: source{entryID: entryID{out.layer, n}}}
	name := ""
	if len(parts) > 0 {
		name = parts[len(parts)-1]
	}
	switch {
	case name == opaqueName:
		rec.what, rec.path = isOpaque, join(parts[:len(parts)-1])
	case strings.HasPrefix(name, whiteoutMeta):
		return nil // what aufs kept for itself, and so everything below it
	case strings.HasPrefix(name, whiteoutPrefix):
		hidden := name[len(whiteoutPrefix):]
		if hidden == "" || hidden == "." || hidden == ".." {
			return errs.E(errs.Invalid, "a whiteout without a name")
		}
		rec.what, rec.path = isHide, join(append(slices.Clone(parts[:len(parts)-1]), hidden))
	case h.Typeflag == tar.TypeDir:
		rec.what = isDir
	case h.Typeflag == tar.TypeLink:
		rec.what = isLink
		target, err := cleanPath(h.Linkname)
		if err != nil {
			return err
		}
		rec.target = join(target)
	default:
		rec.what = isFile
		if h.Size < 0 || h.Size > s.plan.o.MaxBytes-s.bytes {
			return errs.OverLimit(errs.Invalid, "bytes of files in the layers of an image", s.plan.o.MaxBytes, s.bytes+h.Size)
		}
		s.bytes += h.Size
		out.bytes += h.Size
		rec.src.size = h.Size
	}
	for _, p := range parts[:max(len(parts)-1, 0)] {
		if strings.HasPrefix(p, whiteoutMeta) {
			return nil
		}
		if strings.HasPrefix(p, whiteoutPrefix) {
			return errs.E(errs.Invalid, "it lies below a whiteout")
		}
	}
	out.entries = append(out.entries, rec)
	return nil
}

// apply lays the layer over a tree, which may have a number of directories that no entry names. Its whiteouts come first: they
// concern lower layers only.
func (l *scanned) apply(t *tree, most int64) error {
	for i := range l.entries {
		switch e := &l.entries[i]; e.what {
		case isHide:
			t.hide(split(e.path))
		case isOpaque:
			t.clear(split(e.path))
		default:
		}
		if *t.made > most {
			return tooManyMade(most, *t.made)
		}
	}
	for i := range l.entries {
		var err error
		switch e := &l.entries[i]; e.what {
		case isDir:
			err = t.dir(split(e.path), &source{e.src.entryID, 0})
		case isFile:
			err = t.file(split(e.path), l.layer, &source{e.src.entryID, e.src.size})
		case isLink:
			if e.path != e.target {
				err = t.link(split(e.path), split(e.target), l.layer)
			}
		default:
		}
		if err == nil && *t.made > most {
			err = tooManyMade(most, *t.made)
		}
		if err != nil {
			return fmt.Errorf("entry %.200q: %w", l.entries[i].path, err)
		}
	}
	return nil
}

func tooManyMade(most, made int64) error {
	return errs.OverLimit(errs.Invalid, "directories of an image that paths imply", most, made)
}

const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	opaqueName     = ".wh..wh..opq"
)

// cleanPath turns the name of an entry into components below the root; ".." is refused.
func cleanPath(name string) ([]string, error) {
	if len(name) > maxPath {
		return nil, errs.OverLimit(errs.Invalid, "length of a path", maxPath, len(name))
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, errs.E(errs.Invalid, "a name contains a NUL byte")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch part {
		case "", ".":
		case "..":
			return nil, errs.E(errs.Invalid, "a path with %q leaves the image", "..")
		default:
			// A copy, or every name keeps the whole header alive.
			parts = append(parts, strings.Clone(part))
		}
	}
	return parts, nil
}

// layerReader reads the tar of a layer and checks its digests at the end.
type layerReader struct {
	layer  *Layer
	stored io.ReadCloser
	plain  io.ReadCloser
	tar    *tar.Reader
	in     *countReader
	sums   [2]hash.Hash // of what is stored and of the tar; nil: not wanted
	full   io.Reader    // the tar, with hash and bound
}

type countReader struct {
	ctx  context.Context
	r    io.Reader
	n    int64
	each func(n int64)
	sum  hash.Hash
	err  error
}

func (c *countReader) Read(p []byte) (int, error) {
	if c.err = c.ctx.Err(); c.err != nil {
		return 0, c.err
	}
	n, err := c.r.Read(p)
	c.n += int64(n)
	if c.sum != nil {
		c.sum.Write(p[:n])
	}
	if c.each != nil {
		c.each(c.n)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}

// openLayer opens a layer; the tar in it may have at most a number of bytes. With
// each, which is told the bytes read, its digests are computed.
func openLayer(ctx context.Context, l *Layer, most int64, each func(n int64)) (*layerReader, error) {
	stored, err := l.Open()
	if err != nil {
		return nil, err
	}
	r := &layerReader{layer: l, stored: stored, in: &countReader{ctx: ctx, r: stored, each: each}}
	if each != nil && l.Digest != "" {
		r.sums[0] = sha256.New()
		r.in.sum = r.sums[0]
	}
	if r.plain, err = unpack.Tar(r.in); err != nil {
		stored.Close()
		return nil, r.explain(err)
	}
	if each != nil && l.DiffID != "" {
		r.sums[1] = sha256.New()
	}
	r.full = &bounded{r: r.plain, left: most, most: most, sum: r.sums[1]}
	r.tar = tar.NewReader(r.full)
	return r, nil
}

// bounded stops a decompression bomb.
type bounded struct {
	r          io.Reader
	left, most int64
	sum        hash.Hash
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errs.OverLimit(errs.Invalid, "bytes of an unpacked layer", b.most, b.most-b.left)
	}
	if b.sum != nil {
		b.sum.Write(p[:n])
	}
	return n, err
}

func (r *layerReader) next() (*tar.Header, error) {
	h, err := r.tar.Next()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, r.explain(err)
	}
	return h, err
}

// finish reads to the end and compares the digests.
func (r *layerReader) finish() error {
	if _, err := io.Copy(io.Discard, r.full); err != nil {
		return r.explain(err)
	}
	if _, err := io.Copy(io.Discard, r.in); err != nil { // behind the end of the compressed stream
		return r.explain(err)
	}
	for i, want := range []string{r.layer.Digest, r.layer.DiffID} {
		if h := r.sums[i]; h != nil {
			if got := "sha256:" + hex.EncodeToString(h.Sum(nil)); got != want {
				return badDigest(want, got)
			}
		}
	}
	return nil
}

// explain gives an error of reading its kind.
func (r *layerReader) explain(err error) error {
	var known *errs.Error
	switch {
	case r.in.ctx.Err() != nil:
		return context.Cause(r.in.ctx)
	case r.in.err != nil:
		return fmt.Errorf("read: %w", r.in.err)
	case errors.As(err, &known):
		return err
	}
	return errs.E(errs.Invalid, "it is damaged or cut off: %w", err).WithHint("make or fetch the image again")
}

// Close releases the layer.
func (r *layerReader) Close() error { return errors.Join(r.plain.Close(), r.stored.Close()) }
