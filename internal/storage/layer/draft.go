package layer

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"

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
	Merge  int
	Source string
	Config ImageConfig
}

// Draft is a layer in the making. Write fills it from a directory, which may have to stand still meanwhile; everything
// else needs the directory no more. It is not visible before Publish, and Close removes what was not published.
type Draft struct {
	store  *Store
	ref    Ref
	named  bool
	o      SnapshotOptions
	g      *staged
	result *erofs.Result
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
func (x *Draft) Close() { x.g.remove() }

// Prepare opens the parents, which Write does otherwise: what can be done before the directory has to stand still.
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
		if _, err := x.store.Load(d); err == nil {
			ds = append(ds, d)
		}
	}
	x.earlier = len(ds)
	var err error
	if x.g.against, err = x.store.OpenLayers(ctx, append(ds, x.o.Parents...)); err != nil {
		return fmt.Errorf("open the layers below the snapshot: %w", err)
	}
	return nil
}

// Write packs the tree below dir. o's bounds are the store's.
func (x *Draft) Write(ctx context.Context, dir string, o erofs.Options) error {
	if err := x.Prepare(ctx); err != nil {
		return err
	}
	w := x.g.options(x.store.limits)
	w.KeepTrusted, w.Choose, w.Progress = true, o.Choose, o.Progress
	res, err := x.pack(ctx, dir, w)
	if err != nil {
		return x.store.diskError(fmt.Errorf("pack the writable layer: %w", err))
	}
	x.result = res
	x.g.warnings = res.Warnings
	return nil
}

func (x *Draft) pack(ctx context.Context, dir string, o erofs.Options) (*erofs.Result, error) {
	if x.o.Merge == 0 {
		return erofs.FromDir(ctx, dir, x.g.meta, x.g.blob, o)
	}
	n := x.earlier + len(x.o.Parents) - x.o.Merge
	below, err := x.g.against.Images(n)
	if err != nil {
		return nil, err
	}
	stack, err := x.g.against.Stacked(n)
	if err != nil {
		return nil, err
	}
	upper, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer upper.Close()
	return erofs.Merge(ctx, below, stack, upper, x.g.meta, x.g.blob, o)
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

// Publish makes the layer durable and visible and points its name at it. pin, if set, is called before the layer can be
// collected.
func (x *Draft) Publish(ctx context.Context, pin func(Layer) error) (Layer, error) {
	if x.result == nil {
		return Layer{}, errs.E(errs.Internal, "a snapshot was published before it was written")
	}
	l, err := x.publish(ctx, pin)
	if err != nil {
		return Layer{}, x.store.diskError(fmt.Errorf("store the snapshot: %w", err))
	}
	return l, nil
}

func (x *Draft) publish(ctx context.Context, pin func(Layer) error) (Layer, error) {
	m := &x.g.manifest
	*m = Manifest{
		Kind: Snapshot, LogicalBytes: x.result.LogicalBytes, Files: x.result.Files,
		Source: x.o.Source, Config: x.o.Config, Parents: x.o.Parents[:len(x.o.Parents)-x.o.Merge],
	}
	if err := x.store.sealImage(ctx, x.g, x.result, newReporter(nil), 0); err != nil {
		return Layer{}, err
	}
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
