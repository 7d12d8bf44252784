package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/unpack"
)

// Phases of an import.
const (
	PhaseFetching = "fetching"
	PhaseBuilding = "building"
	PhaseStoring  = "storing"
)

// Progress is where an import stands.
type Progress struct {
	Phase   string
	Message string
	Done    int64 // bytes
	Total   int64 // 0: unknown
}

// ImportOptions say what to make of a source.
type ImportOptions struct {
	Project string
	Name    string // name[:tag]
	Kind    Kind   // base, workspace or toolkit
	// Source is kept in the manifest, and so is part of the layer's identity.
	Source string
	Config ImageConfig
	// Collapse is how many bytes of files the layers of a container image may have
	// to be merged into one; 0 means oci.DefaultCollapse. Only bases are ever split.
	Collapse int64
	// Against says which layers' content is referred to instead of stored again:
	// names or digests, separated by commas, or AgainstNone. Empty: what the name
	// points at now, if it points at anything. An import that changes nothing gives
	// that very layer.
	Against string
	// piece of pieces, lowest first, is what is imported of a large base.
	piece, pieces int
	// Progress, when set, is called from the importing goroutine, at most every 100 ms within a phase.
	Progress func(Progress)
}

// Imported is the result of an import.
type Imported struct {
	Layer    Layer
	Warnings []string // things left out, such as sockets and trusted.* attributes
	// Existed says that the store had this very layer already.
	Existed bool
}

// check refuses what cannot be imported before any work is done.
func (o *ImportOptions) check() (Ref, error) {
	r, err := parseName(o.Project, o.Name)
	if err != nil {
		return r, err
	}
	switch o.Kind {
	case Base, Workspace, Toolkit:
		return r, nil
	case Snapshot:
		return r, errs.E(errs.Invalid, "a snapshot cannot be imported").
			WithHint("`harena snapshot` makes one from a sandbox; import as base, workspace or toolkit")
	case VMImage:
		return r, errs.E(errs.Unsupported, "importing vm-image layers is not built yet").
			WithHint("import as base, workspace or toolkit")
	}
	_, err = ParseKind(string(o.Kind))
	return r, err
}

// ImportTar makes a layer from a tar stream, plain or compressed with gzip, zstd
// or bzip2, in constant memory, and points the name at it. invalid: the stream is
// not a whole archive.
func (s *Store) ImportTar(ctx context.Context, r io.Reader, o ImportOptions) (*Imported, error) {
	ref, err := o.check()
	if err != nil {
		return nil, err
	}
	report := newReporter(o.Progress)
	src := &stream{ctx: ctx, r: r, read: func(n int64) { report.add(PhaseBuilding, n, 0) }}
	in, err := unpack.Tar(src)
	if err != nil {
		return nil, src.explain(err)
	}
	defer in.Close()
	return s.build(ctx, ref, o, report, func(meta, blob *os.File, w erofs.Options) (*erofs.Result, error) {
		res, err := erofs.FromTar(ctx, src.watch(in), meta, blob, w)
		return res, src.explain(err)
	})
}

// importDir makes a layer from a directory that this process owns.
func (s *Store) importDir(ctx context.Context, dir string, o ImportOptions, report *reporter) (*Imported, error) {
	ref, err := o.check()
	if err != nil {
		return nil, err
	}
	return s.build(ctx, ref, o, report, func(meta, blob *os.File, w erofs.Options) (*erofs.Result, error) {
		w.Progress = func(n int64) { report.set(PhaseStoring, n, 0) }
		return erofs.FromDir(ctx, dir, meta, blob, w)
	})
}

// build writes an image to temporary files and publishes it: objects first, then
// the manifest, then the name. Before the manifest is there nothing is visible.
func (s *Store) build(ctx context.Context, ref Ref, o ImportOptions, report *reporter, write writer) (*Imported, error) {
	g, err := s.stage(ctx, ref, o, report, write)
	if err != nil {
		return nil, err
	}
	defer g.remove()
	return s.publishAll(ctx, ref, []*staged{g}, report)
}

// stage writes an image to temporary files.
func (s *Store) stage(ctx context.Context, ref Ref, o ImportOptions, report *reporter, write writer) (_ *staged, err error) {
	g, err := s.newStaged("import-*")
	if err != nil {
		return nil, s.diskError(fmt.Errorf("import %s: %w", ref, err))
	}
	defer func() {
		if err != nil {
			g.remove()
		}
	}()
	if g.against, err = s.openAgainst(ctx, ref, o); err != nil {
		return nil, fmt.Errorf("import %s: %w", ref, err)
	}
	res, err := write(g.meta, g.blob, g.options(s.limits))
	if err != nil {
		return nil, s.diskError(fmt.Errorf("import %s: %w", ref, err))
	}
	g.warnings = res.Warnings
	g.manifest = Manifest{Kind: o.Kind, LogicalBytes: res.LogicalBytes, Files: res.Files, Source: o.Source, Config: o.Config}
	total := res.MetaBytes + res.BlobBytes
	report.start(PhaseStoring, "storing "+ref.String(), total)
	if err := s.sealImage(ctx, g, res, report, total); err != nil {
		return nil, s.diskError(fmt.Errorf("store %s: %w", ref, err))
	}
	return g, s.adopt(g)
}

// publishAll makes layers of staged images, the lowest first, and points the name
// at the topmost, which has the others as parents. The collector does not run in between.
func (s *Store) publishAll(ctx context.Context, ref Ref, images []*staged, report *reporter) (*Imported, error) {
	defer s.Hold()()
	im := &Imported{}
	var parents []Digest
	for i, g := range images {
		im.Warnings = append(im.Warnings, g.warnings...)
		if i > 0 && i == len(images)-1 {
			g.manifest.Parents = parents
		}
		var err error
		if im.Layer, im.Existed, err = s.publish(ctx, g); err != nil {
			return nil, s.diskError(fmt.Errorf("store %s: %w", ref, err))
		}
		parents = append(parents, im.Layer.Digest)
	}
	if err := s.point(ctx, ref, im.Layer, report); err != nil {
		return nil, s.diskError(fmt.Errorf("store %s: %w", ref, err))
	}
	return im, nil
}

func (s *Store) publish(ctx context.Context, g *staged) (Layer, bool, error) {
	m := &g.manifest
	b, err := m.encode()
	if err != nil {
		return Layer{}, false, err
	}
	d := digestOf(b)
	existed := true
	err = s.addManifest(d, m, func() (bool, error) {
		_, err := s.readManifest(d)
		if err == nil || !errors.Is(err, fs.ErrNotExist) && !errs.Is(err, errs.Precondition) {
			return false, err
		} // one that is damaged is replaced
		existed = false
		for _, f := range g.sealed {
			if err := s.objects.put(ctx, f.digest, f.path); err != nil {
				return false, err
			}
		}
		return true, writeFile(s.tmp(), s.manifestPath(d), b)
	})
	if err != nil {
		return Layer{}, false, err
	}
	l, err := s.Load(d)
	return l, existed, err
}

// reporter thins progress out.
type reporter struct {
	send  func(Progress)
	phase string
	done  int64
	last  time.Time
}

const reportEvery = 100 * time.Millisecond

func newReporter(send func(Progress)) *reporter {
	if send == nil {
		send = func(Progress) {}
	}
	return &reporter{send: send}
}

// start begins a phase, which is always reported.
func (r *reporter) start(phase, message string, total int64) {
	r.phase, r.done, r.last = phase, 0, time.Now()
	r.send(Progress{Phase: phase, Message: message, Total: total})
}

func (r *reporter) add(phase string, n, total int64) {
	if phase != r.phase {
		r.phase, r.done = phase, 0
	}
	r.set(phase, r.done+n, total)
}

func (r *reporter) set(phase string, done, total int64) {
	r.phase, r.done = phase, done
	if now := time.Now(); now.Sub(r.last) >= reportEvery {
		r.last = now
		r.send(Progress{Phase: phase, Done: done, Total: total})
	}
}

// say reports a message, thinned like the rest unless the phase changes.
func (r *reporter) say(phase, message string) {
	now := time.Now()
	if phase == r.phase && now.Sub(r.last) < reportEvery {
		return
	}
	r.phase, r.last = phase, now
	r.send(Progress{Phase: phase, Message: strings.TrimSpace(message)})
}
