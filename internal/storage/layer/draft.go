package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// SnapshotOptions say what a snapshot is taken of.
type SnapshotOptions struct {
	Project string
	// Name is name[:tag]; empty: the layer has no name and stays while it is in use.
	Name string
	// Parents are the layers below, lowest first. Content that they have is not stored again.
	Parents []Digest
	// Earlier are other layers whose content is not stored again, such as earlier snapshots; those that are gone are left out.
	Earlier []Digest
	// Merge is how many of the topmost parents become a part of the snapshot, which then lies upon the others.
	Merge int
	// Rules, if not empty, says by what rules the snapshot is cleaned. Layers cleaned by other rules, or by none, may have
	// what these would clean: their blobs are then neither named nor looked into, unless the layers stay parents.
	Rules string
	// Choose is asked about the names of merged parents, as erofs.Options.Choose is about those of the directory.
	Choose func(path string, st *unix.Stat_t) erofs.Choice
	// Hold is how many bytes of content may be held in memory, so that Write is quick.
	Hold   int64
	Source string
	Config ImageConfig
}

// Draft is a layer in the making. Read reads a directory, which may have to stand still meanwhile; everything
// else needs the directory no more: Write, Image and Seal, in any order or at once, Publish. It is not visible before Publish, and Close removes what was not published.
type Draft struct {
	store  *Store
	ref    Ref
	named  bool
	o      SnapshotOptions
	g      *staged
	tree   *erofs.Tree
	result *erofs.Result
	clones *os.File // what Read cloned; nil: nothing
	sealed bool
	// earlier is how many of the open layers come before the parents.
	earlier int
}

// NewDraft prepares one. invalid: the name is not valid.
func (s *Store) NewDraft(o SnapshotOptions) (_ *Draft, err error) {
	if o.Merge < 0 || o.Merge > len(o.Parents) {
		return nil, errs.E(errs.Internal, "%d of %d layers were to be merged", o.Merge, len(o.Parents))
	}
	x := &Draft{store: s, o: o, named: o.Name != ""}
	if x.named {
		if x.ref, err = parseName(o.Project, o.Name); err != nil {
			return nil, err
		}
	}
	if x.g, err = s.newStaged("snapshot-*"); err != nil {
		return nil, s.diskError(fmt.Errorf("take a snapshot: %w", err))
	}
	return x, nil
}

// Dir is a directory on the store's file system that goes away with the snapshot.
func (x *Draft) Dir() string { return x.g.dir }

// Close removes what was not published.
func (x *Draft) Close() {
	if x.clones != nil {
		x.clones.Close()
	}
	x.g.remove()
}

// Prepare opens the parents, which Read does otherwise: what can be done before the directory has to stand still.
func (x *Draft) Prepare(ctx context.Context) error {
	if x.g.against != nil {
		return nil
	}
	// Held until they are pinned: one that is there now must be there then.
	defer x.store.Hold()()
	var ds []Digest
	for _, d := range x.o.Earlier {
		if slices.Contains(x.o.Parents, d) || slices.Contains(ds, d) {
			continue
		}
		if l, err := x.store.Load(d); err == nil && (x.o.Rules == "" || l.Cleaned == x.o.Rules) {
			ds = append(ds, d)
		}
	}
	x.earlier = len(ds)
	var err error
	if x.g.against, err = x.store.OpenLayers(ctx, append(ds, x.o.Parents...)); err != nil {
		return fmt.Errorf("open the layers below the snapshot: %w", err)
	}
	x.judgeBlobs()
	return nil
}

// judgeBlobs decides which blobs of the open layers the snapshot may refer to. Those of layers that it will lie upon are
// there anyway. Others it would keep, and bring to whoever gets it: not for a small part of them, and only if nothing lies in
// them that was to be cleaned.
func (x *Draft) judgeBlobs() {
	layers := x.g.against.layers
	below := layers[x.earlier : len(layers)-x.o.Merge]
	names := func(l Layer, b *erofs.Blob) bool {
		return slices.ContainsFunc(l.Blobs(), func(o Object) bool { return o.Digest.Hex() == b.Name })
	}
	for _, b := range x.g.against.blobs {
		if slices.ContainsFunc(below, func(l Layer) bool { return names(l, b) }) {
			continue
		}
		b.MinUsed = b.Size / minShare
		b.Copy = x.o.Rules != "" && !slices.ContainsFunc(layers, func(l Layer) bool { return l.Cleaned == x.o.Rules && names(l, b) })
	}
}

// Read reads the tree below dir. o's bounds are the store's.
func (x *Draft) Read(ctx context.Context, dir string, o erofs.Options) error {
	if err := x.Prepare(ctx); err != nil {
		return err
	}
	w := x.g.options(x.store.limits)
	w.KeepTrusted, w.Choose, w.Progress = true, o.Choose, o.Progress
	if x.o.Hold > 0 {
		clones, err := os.OpenFile(x.g.dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
			return x.store.diskError(fmt.Errorf("take a snapshot: %w", err))
		}
		x.clones = clones
		w.Hold = erofs.Hold{Memory: x.o.Hold, Clones: clones}
	}
	f, err := os.Open(dir)
	if err != nil {
		return x.store.diskError(fmt.Errorf("read the writable layer: %w", err))
	}
	defer f.Close()
	if x.tree, err = erofs.ReadTree(ctx, f, x.g.meta, x.g.blob, w); err != nil {
		return x.store.diskError(fmt.Errorf("read the writable layer: %w", err))
	}
	return nil
}

// Write makes the image of what Read read, and of the parents that become a part of it.
func (x *Draft) Write(ctx context.Context) error {
	if x.tree == nil {
		return errs.E(errs.Internal, "a snapshot was written before it was read")
	}
	res, err := x.write(ctx)
	x.tree = nil
	if err != nil {
		return x.store.diskError(fmt.Errorf("pack the writable layer: %w", err))
	}
	x.result = res
	x.g.warnings = res.Warnings
	return nil
}

func (x *Draft) write(ctx context.Context) (*erofs.Result, error) {
	if x.o.Merge == 0 {
		return x.tree.Write(ctx)
	}
	n := x.earlier + len(x.o.Parents) - x.o.Merge
	all, err := x.g.against.Images(n)
	if err != nil {
		return nil, err
	}
	stack, err := x.g.against.Stacked(n)
	if err != nil {
		return nil, err
	}
	for i := range stack {
		stack[i].Choose = x.o.Choose
	}
	return x.tree.WriteMerged(ctx, all[x.earlier:], stack)
}

// Image reads what Write wrote.
func (x *Draft) Image() (*erofs.Image, error) {
	blobs := []io.ReaderAt{x.g.blob}
	if x.result != nil {
		for _, b := range x.result.Extra {
			blobs = append(blobs, b.Data)
		}
	}
	return erofs.Open(x.g.meta, blobs...)
}

// Result is that of Write.
func (x *Draft) Result() *erofs.Result { return x.result }

// Seal makes what Write wrote durable. Publish does it otherwise.
func (x *Draft) Seal(ctx context.Context) error {
	switch {
	case x.sealed:
		return nil
	case x.result == nil:
		return errs.E(errs.Internal, "a snapshot was stored before it was written")
	}
	x.g.manifest = Manifest{
		Kind: Snapshot, LogicalBytes: x.result.LogicalBytes, Files: x.result.Files,
		Source: x.o.Source, Config: x.o.Config, Parents: x.o.Parents[:len(x.o.Parents)-x.o.Merge], Cleaned: x.o.Rules,
	}
	if err := x.store.sealImage(ctx, x.g, x.result, newReporter(nil), 0); err != nil {
		return x.store.diskError(fmt.Errorf("store the snapshot: %w", err))
	}
	x.sealed = true
	return nil
}

// Publish makes the layer durable and visible and points its name at it. pin, if set, is called before the layer can be
// collected.
func (x *Draft) Publish(ctx context.Context, pin func(Layer) error) (Layer, error) {
	if err := x.Seal(ctx); err != nil {
		return Layer{}, err
	}
	l, err := x.publish(ctx, pin)
	if err != nil {
		return Layer{}, x.store.diskError(fmt.Errorf("store the snapshot: %w", err))
	}
	return l, nil
}

func (x *Draft) publish(ctx context.Context, pin func(Layer) error) (Layer, error) {
	defer x.store.Hold()()
	l, _, err := x.store.publish(ctx, x.g)
	if err != nil {
		return Layer{}, err
	}
	if pin != nil {
		if err := pin(l); err != nil {
			return Layer{}, err
		}
	}
	if x.named {
		err = x.store.point(ctx, x.ref, l, nil)
	}
	return l, err
}
