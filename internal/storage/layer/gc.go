package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Phases of a collection.
const (
	PhaseMarking    = "marking"
	PhaseCollecting = "collecting"
)

// GCOptions say how to collect.
type GCOptions struct {
	// InUse returns the layers that are in use by what is on no name: sandboxes, whether they run, are paused or have
	// failed and still have files. It is asked again before every step.
	InUse func() map[Digest]bool
	// Only, if set, has no other layers removed than those that it chooses.
	Only func(Layer) bool
	// DryRun only plans.
	DryRun bool
	// Progress, when set, is called with the phase and how many things it has looked at.
	Progress func(phase string, seen int64)
}

// GCPlan is what a collection removes, or would.
type GCPlan struct {
	Layers  []Digest // in order of digest
	Objects []Object // that no remaining layer names
	Bytes   int64    // freed on disk, manifests left out
	// Problems say what could not be judged, and was kept for that reason.
	Problems []string
}

// gcStep is how many things are removed before others get their turn.
const gcStep = 256

// CollectGarbage removes the layers that no name of any project reaches, that are
// not in use and that no such layer has as a parent; and the objects that only
// they name. Imports, creations and everything else go on meanwhile: what they
// look at is kept. Memory is about 150 bytes for each layer and for each object
// that a layer names.
//
// A name or a manifest that is damaged is reported. Of a layer in use whose
// manifest cannot be read, what the index remembers is kept; when it
// remembers nothing, nothing at all is removed, as anything might belong to it.
func (s *Store) CollectGarbage(ctx context.Context, o GCOptions) (*GCPlan, error) {
	plan, err := s.collectGarbage(ctx, o)
	if err != nil {
		return nil, s.diskError(fmt.Errorf("collect garbage: %w", err))
	}
	return plan, nil
}

func (s *Store) collectGarbage(ctx context.Context, o GCOptions) (*GCPlan, error) {
	if o.Progress == nil {
		o.Progress = func(string, int64) {}
	}
	lower, err := s.collector.raise(ctx)
	if err != nil {
		return nil, err
	}
	defer lower()
	g := &gcRun{s: s, o: o, plan: &GCPlan{}, keep: make(map[sum]bool), named: make(map[sum]bool)}
	if err := g.markRoots(ctx); err != nil {
		return nil, err
	}
	var garbage []Digest
	err = s.walkManifests(ctx, func(d Digest) error {
		if !g.keep[sumOf(d)] {
			garbage = append(garbage, d)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if o.Only != nil {
		for _, d := range garbage {
			if l, err := s.readManifest(d); err != nil || !o.Only(l) {
				g.mark(ctx, d)
			}
		}
	}
	if g.blind {
		g.plan.Problems = append(g.plan.Problems, "nothing was removed: what the damaged layers need is not known")
		return g.plan, nil
	}
	if err := g.sweepLayers(ctx, garbage); err != nil {
		return nil, err
	}
	if err := g.sweepObjects(ctx); err != nil {
		return nil, err
	}
	slices.Sort(g.plan.Layers)
	if s.remote != nil && !o.DryRun {
		if err := s.remote.unuse(ctx, g.plan.Layers); err != nil {
			g.problem("the shared store still counts what was removed here as in use: %v", err)
		}
	}
	return g.plan, nil
}

// gcRun is one collection.
type gcRun struct {
	s     *Store
	o     GCOptions
	plan  *GCPlan
	keep  map[sum]bool // layers
	named map[sum]bool // objects of layers that are kept
	blind bool         // a layer to keep needs nobody knows what
	seen  int64
}

func (g *gcRun) problem(format string, args ...any) {
	if len(g.plan.Problems) < maxProblems {
		g.plan.Problems = append(g.plan.Problems, fmt.Sprintf(format, args...))
	}
}

// markRoots marks all that names and users reach.
func (g *gcRun) markRoots(ctx context.Context) error {
	g.markUsed(ctx)
	for _, t := range []tree{ownTree, sharedTree} {
		err := g.s.eachTag(ctx, t, func(r Ref, d Digest, err error) error {
			g.seen++
			if g.seen%gcStep == 0 {
				g.o.Progress(PhaseMarking, g.seen)
			}
			if err == nil {
				g.mark(ctx, d)
				return nil
			}
			g.problem("project %s: %v", r.Project, err)
			if known, ok := g.s.nameLastKnown(ctx, t, r); ok {
				g.mark(ctx, known)
			} else {
				g.blind = true // it may be the only one that keeps a layer
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// markUsed marks what is in use, is being made use of, or was looked at since the collection began.
func (g *gcRun) markUsed(ctx context.Context) {
	if g.o.InUse != nil {
		for d := range g.o.InUse() {
			g.mark(ctx, d)
		}
	}
	for _, d := range g.s.pinned() {
		g.mark(ctx, d)
	}
	layers, objects := g.s.collector.noted()
	for _, d := range layers {
		g.mark(ctx, d)
	}
	for d := range objects {
		g.named[sumOf(d)] = true
	}
}

// mark marks a layer, its parents and the objects that they name. It reads files, as the index is no proof.
func (g *gcRun) mark(ctx context.Context, d Digest) {
	if g.keep[sumOf(d)] {
		return
	}
	g.keep[sumOf(d)] = true
	l, err := g.s.readManifest(d)
	switch {
	case err == nil:
		for _, o := range l.Objects() {
			g.named[sumOf(o.Digest)] = true
		}
		for _, p := range l.Parents {
			g.mark(ctx, p)
		}
	case errors.Is(err, fs.ErrNotExist): // in the shared store only, or gone
	default:
		g.problem("layer %s: %v", d, err)
		parents, objects, ok := g.s.lastKnown(ctx, d)
		if !ok {
			g.blind = true
			return
		}
		for _, o := range objects {
			g.named[o] = true
		}
		for _, p := range parents {
			g.mark(ctx, p.digest())
		}
	}
}

// sweepLayers removes manifests, so that a crash leaves objects without a layer, never a layer without objects.
func (g *gcRun) sweepLayers(ctx context.Context, garbage []Digest) error {
	dirs := make(map[string]bool)
	for step := range slices.Chunk(garbage, gcStep) {
		if err := ctx.Err(); err != nil {
			return err
		}
		gone, err := g.stepLayers(ctx, step)
		if err != nil {
			return err
		}
		for _, d := range gone {
			dirs[filepath.Dir(g.s.manifestPath(d))] = true
		}
		g.plan.Layers = append(g.plan.Layers, gone...)
		g.o.Progress(PhaseCollecting, int64(len(g.plan.Layers)))
	}
	if g.o.DryRun {
		return nil
	}
	for dir := range dirs {
		if err := syncDir(dir); err != nil {
			return err
		}
	}
	return nil
}

func (g *gcRun) stepLayers(ctx context.Context, step []Digest) ([]Digest, error) {
	s := g.s
	s.collector.step.Lock()
	defer s.collector.step.Unlock()
	g.markUsed(ctx)
	gone := slices.DeleteFunc(slices.Clone(step), func(d Digest) bool { return g.keep[sumOf(d)] })
	if g.blind || len(gone) == 0 {
		return nil, nil
	}
	if g.o.DryRun {
		return gone, nil
	}
	s.forget(gone)
	return gone, s.removeManifests(gone, func() error {
		for _, d := range gone {
			if err := os.Remove(s.manifestPath(d)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return nil
	})
}

// sweepObjects removes objects that no layer names.
func (g *gcRun) sweepObjects(ctx context.Context) error {
	var step []Object
	flush := func() error {
		gone, err := g.stepObjects(ctx, step)
		step = step[:0]
		for _, o := range gone {
			g.plan.Objects = append(g.plan.Objects, o)
			g.plan.Bytes += o.Size
		}
		g.o.Progress(PhaseCollecting, int64(len(g.plan.Layers)+len(g.plan.Objects)))
		return err
	}
	err := g.s.local.list(ctx, func(d Digest) bool { return g.named[sumOf(d)] }, func(d Digest, size int64, _ time.Time) error {
		if step = append(step, Object{Digest: d, Size: size}); len(step) < gcStep {
			return nil
		}
		return flush()
	})
	if err != nil {
		return err
	}
	return flush()
}

// stepObjects makes objects invisible and then frees their space, which may take long.
func (g *gcRun) stepObjects(ctx context.Context, step []Object) ([]Object, error) {
	s := g.s
	s.collector.step.Lock()
	g.markUsed(ctx)
	gone := slices.DeleteFunc(slices.Clone(step), func(o Object) bool { return g.named[sumOf(o.Digest)] })
	if g.blind {
		gone = nil
	}
	if g.o.DryRun || len(gone) == 0 {
		s.collector.step.Unlock()
		return gone, nil
	}
	ds := make([]Digest, len(gone))
	for i, o := range gone {
		ds[i] = o.Digest
	}
	finish, err := s.local.remove(ctx, ds)
	s.collector.step.Unlock()
	s.forgetIndexes(gone)
	return gone, errors.Join(err, finish())
}

// nameLastKnown returns what a name pointed at when its file could be read.
func (s *Store) nameLastKnown(ctx context.Context, t tree, r Ref) (Digest, bool) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if s.loadIndex(ctx) != nil || x.projects[r.Project] == nil {
		return "", false
	}
	p := x.projects[r.Project]
	i, ok := p.find(r.String())
	if !ok {
		return "", false
	}
	d := p.order[i].own
	if t == sharedTree {
		d = p.order[i].shared
	}
	if d == (sum{}) {
		return "", false
	}
	return d.digest(), true
}
