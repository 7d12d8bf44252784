package erofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Bounds used where Options leaves them 0.
const (
	DefaultMaxEntries = 2_000_000
	DefaultMaxBytes   = 1 << 40

	// maxTreeBytes bounds names, link targets and extended attributes together,
	// as they are in the input: they are kept in memory.
	maxTreeBytes = 1 << 30
	maxWarnings  = 100
)

// Options says how a tree is turned into an image.
type Options struct {
	// KeepTrusted keeps trusted.overlay.opaque as it is (for snapshots); otherwise
	// all trusted.* attributes are dropped with a warning: they would let an archive
	// steer overlayfs. What names the inodes of the upper layer it came from
	// (origin, impure, nlink, uuid …) is always dropped. A file that is metadata only
	// (metacopy) and a directory with its content elsewhere (redirect) are refused:
	// overlays that are mounted metacopy=off,redirect_dir=nofollow make none, and
	// follow none.
	KeepTrusted bool
	// OCIWhiteouts translates .wh.NAME and .wh..wh..opq of tars into overlay
	// whiteouts (character device 0:0) and opaque directories; off for plain tars.
	OCIWhiteouts bool
	// MaxEntries bounds the names of the tree (implied directories and whiteouts
	// count); MaxBytes the sum of the file sizes read, holes included. 0 means
	// DefaultMaxEntries and DefaultMaxBytes.
	MaxEntries, MaxBytes int64
	// Choose, if set, decides which names of a directory are taken; it is asked
	// about every name below the root, directories before what is in them, from the
	// goroutine that calls FromDir. What it drops is not read.
	Choose func(path string, st *unix.Stat_t) Choice
	// Parents are data blobs of other layers: content that one of them has is
	// referred to instead of stored, the first that has it wins. Those that are
	// referred to become extra devices of the image; see Result.Extra.
	Parents []*Blob
	// Hold is what may be kept of the content of a directory until the image is written; by default it is stored as it is read.
	Hold Hold
	// Index, if set, gets the chunk index of the blob that is written.
	Index io.Writer
	// Progress, if set, is told the bytes of file content read so far, holes
	// included, about once a MiB.
	Progress func(doneBytes int64)
}

// Choice is what becomes of a name.
type Choice int

// The choices.
const (
	Take Choice = iota
	// Drop leaves the name out, with everything below it.
	Drop
	// TakeIfNotEmpty leaves a directory out if nothing of what is in it is taken and
	// it hides nothing of the layers below (an opaque one does).
	TakeIfNotEmpty
)

// Result describes the images written.
type Result struct {
	MetaBytes    int64 // size of the metadata image, a multiple of 4096
	BlobBytes    int64 // size of the data blob, a multiple of 4096, may be 0
	LogicalBytes int64 // sum of the sizes of the regular files, each counted once
	Files        int64 // names in the tree, the root not counted
	// Extra are the blobs of other layers that the image refers to, in the order of
	// its device slots from 2 on; ExtraUsed the bytes of each, every block counted once.
	Extra     []*Blob
	ExtraUsed []int64
	Warnings  []string // what was left out or changed; at most 101
}

// writeOutput makes an error of writing an image; a full disk gets its own.
func writeOutput(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.E(errs.Capacity, "write layer image: %w", err).WithHint("free space on the disk of the data directory")
	}
	return fmt.Errorf("write layer image: %w", err)
}

// builder collects a tree and writes it.
type builder struct {
	ctx        context.Context
	o          Options
	meta       *os.File
	blob       *blobWriter
	root       *inode
	entries    int64
	read       int64 // bytes of content
	reported   int64
	treeBytes  int64
	attrs      map[string]string // interned encodings of extended attributes
	warnings   []string
	suppressed int
	dropped    map[string]dropped // by name of attribute
}

// dropped counts the files that lost an attribute.
type dropped struct {
	first string
	files int
}

func newBuilder(ctx context.Context, meta, blob *os.File, o Options) (*builder, error) {
	if o.MaxEntries <= 0 {
		o.MaxEntries = DefaultMaxEntries
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	for _, f := range []*os.File{meta, blob} {
		if err := f.Truncate(0); err != nil {
			return nil, writeOutput(err)
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, writeOutput(err)
		}
	}
	w := newBlobWriter(blob)
	if err := w.lookIn(o.Parents); err != nil {
		return nil, err
	}
	root := &inode{mode: modeDir | 0o755, dir: &directory{}}
	return &builder{ctx: ctx, o: o, meta: meta, blob: w, root: root, attrs: make(map[string]string), dropped: make(map[string]dropped)}, nil
}

func (b *builder) warn(format string, args ...any) {
	if len(b.warnings) == maxWarnings {
		b.suppressed++
		return
	}
	b.warnings = append(b.warnings, fmt.Sprintf(format, args...))
}

// warnDropped notes that a file loses an extended attribute; one warning is
// made for all files that lose it.
func (b *builder) warnDropped(path, name string) {
	const longest = 300 // an archive can have names of a megabyte
	if len(name) > longest {
		name = strings.Clone(name[:longest])
	}
	d, ok := b.dropped[name]
	if !ok && len(b.dropped) == maxWarnings {
		b.suppressed++
		return
	}
	if !ok {
		d.first = strings.Clone(path)
	}
	d.files++
	b.dropped[name] = d
}

// allWarnings returns at most maxWarnings warnings and a count of the others.
func (b *builder) allWarnings() []string {
	out := b.warnings
	for _, name := range slices.Sorted(maps.Keys(b.dropped)) {
		d := b.dropped[name]
		out = append(out, fmt.Sprintf("extended attribute %s dropped from %d files, such as %s", quote(name), d.files, quote(d.first)))
	}
	kept := out[:min(len(out), maxWarnings)]
	if hidden := b.suppressed + len(out) - len(kept); hidden > 0 {
		kept = append(kept, fmt.Sprintf("%d more warnings not shown", hidden))
	}
	return kept
}

// grow accounts for n bytes of names, links or attributes.
func (b *builder) grow(n int) error {
	if b.treeBytes += int64(n); b.treeBytes > maxTreeBytes {
		return errs.OverLimit(errs.Invalid, "names, links and extended attributes of a layer, in bytes", int64(maxTreeBytes), b.treeBytes)
	}
	return nil
}

// admit checks a file's size before its content is read.
func (b *builder) admit(size int64) error {
	if size < 0 || size > maxFileSize {
		return errs.OverLimit(errs.Invalid, "size of a file in a layer", maxFileSize, size)
	}
	if size > b.o.MaxBytes-b.read {
		return errs.OverLimit(errs.Invalid, "size of all files of a layer", b.o.MaxBytes, b.read+size).WithHint("holes of sparse files count")
	}
	return nil
}

// advance accounts for n bytes of content, n within what admit allowed.
func (b *builder) advance(n int64) error {
	b.read += n
	if b.o.Progress != nil && b.read-b.reported >= 1<<20 {
		b.reported = b.read
		b.o.Progress(b.read)
	}
	return b.ctx.Err()
}

func (b *builder) finish() (*Result, error) {
	l, err := collectLayout(b.root)
	if err != nil {
		return nil, err
	}
	extra, used, err := b.settle(l.order)
	if err != nil {
		return nil, err
	}
	if err := b.blob.flush(); err != nil {
		return nil, err
	}
	l.super.devices = []Device{{Tag: deviceTag, Blocks: b.blob.blocks}}
	for _, e := range extra {
		l.super.devices = append(l.super.devices, Device{Tag: e.Name, Blocks: uint32(e.Size / blockSize)})
	}
	if b.o.Index != nil {
		if err := b.blob.table.writeIndex(b.o.Index, b.blob.blocks); err != nil {
			return nil, err
		}
	}
	b.blob.table = chunkTable{} // its memory is for the layout
	if err := l.placeAll(); err != nil {
		return nil, err
	}
	if err := l.write(b.ctx, b.meta); err != nil {
		return nil, err
	}
	if b.o.Progress != nil {
		b.o.Progress(b.read)
	}
	return &Result{
		MetaBytes:    int64(l.super.blocks) * blockSize,
		BlobBytes:    int64(b.blob.blocks) * blockSize,
		LogicalBytes: l.logical,
		Files:        l.names,
		Extra:        extra,
		ExtraUsed:    used,
		Warnings:     b.allWarnings(),
	}, nil
}
