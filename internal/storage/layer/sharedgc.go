package layer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

const (
	// DefaultGrace is how old something in the shared store must be to be collected:
	// an import that takes longer than this may fail.
	DefaultGrace = 24 * time.Hour
	minGrace     = time.Hour
	// nodeTime is how long the uses of a node count after it was heard of last.
	nodeTime = 30 * 24 * time.Hour
	// deleteStep is how many objects are removed with one call.
	deleteStep = 500
)

// SharedGCOptions say how to collect in the shared store.
type SharedGCOptions struct {
	// Grace: what is younger is kept. Zero means DefaultGrace; less than an hour is refused.
	Grace    time.Duration
	DryRun   bool
	Progress func(phase string, seen int64)
}

// CollectShared removes from the shared store the layers that no name there
// reaches, that no node makes use of, and that no such layer has as a parent, and
// then the objects that only they name; all of it only when it is older than the
// grace period, as another node may be about to refer to what is young.
//
// A manifest goes before its objects. Uses are read again in between: a node
// that registers one looks for the manifest afterwards, so either it finds it
// gone or the use is seen here, and the manifest is put back; by another, when this one dies, see restore. Objects go in steps, see sharedStore.step.
func (s *Store) CollectShared(ctx context.Context, o SharedGCOptions) (*GCPlan, error) {
	if s.remote == nil {
		return nil, errs.E(errs.Precondition, "this node has no shared store").WithHint("start it with `harena up --store URL`")
	}
	if o.Grace == 0 {
		o.Grace = DefaultGrace
	}
	if o.Grace < minGrace {
		return nil, errs.E(errs.Invalid, "a grace period of %s is too short", o.Grace).WithHint("imports of other nodes need %s at least", minGrace)
	}
	if o.Progress == nil {
		o.Progress = func(string, int64) {}
	}
	g := &sharedGC{s: s, r: s.remote, o: o, before: time.Now().Add(-o.Grace), plan: &GCPlan{}, keep: make(map[Digest]bool), read: make(map[Digest]bool), named: make(map[Digest]bool)}
	if err := g.run(ctx); err != nil {
		return nil, s.remote.failed("collect in the shared store", err)
	}
	return g.plan, nil
}

type sharedGC struct {
	s      *Store
	r      *sharedStore
	o      SharedGCOptions
	before time.Time // what was modified later is young
	plan   *GCPlan
	keep   map[Digest]bool
	read   map[Digest]bool // of keep: those whose objects are in named
	named  map[Digest]bool
	blind  bool
	seen   int64
}

func (g *sharedGC) run(ctx context.Context) error {
	if err := g.r.confirm(ctx, g.s); err != nil {
		return err
	}
	if !g.o.DryRun {
		if err := g.restoreAll(ctx); err != nil {
			return err
		}
	}
	if err := g.markNames(ctx); err != nil {
		return err
	}
	if err := g.markUses(ctx); err != nil {
		return err
	}
	var garbage []Digest
	err := g.r.list(ctx, "manifests/", func(i blob.Info) error {
		d, ok := decodeHex(strings.TrimSuffix(filepath.Base(i.Name), ".json"))
		if !ok || i.Name != manifestName(d) || g.keep[d] {
			return nil
		}
		if i.Modified.After(g.before) {
			g.mark(ctx, d)
		} else {
			garbage = append(garbage, d)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if g.blind {
		g.plan.Problems = append(g.plan.Problems, "nothing was removed: what the damaged layers need is not known")
		return nil
	}
	if err := g.sweepLayers(ctx, garbage); err != nil {
		return err
	}
	for _, prefix := range []string{"blobs/", "raw/"} {
		if err := g.sweepObjects(ctx, prefix); err != nil {
			return err
		}
	}
	if g.o.DryRun {
		return nil
	}
	_, err = blob.Sweep(ctx, g.r.store, g.before)
	return err
}

func (g *sharedGC) look() {
	if g.seen++; g.seen%100 == 0 {
		g.o.Progress(PhaseMarking, g.seen)
	}
}

func (g *sharedGC) markNames(ctx context.Context) error {
	return g.r.list(ctx, "tags/", func(i blob.Info) error {
		g.look()
		b, err := blob.ReadAll(ctx, g.r.store, i.Name, maxTagFile)
		if errs.Is(err, errs.NotFound) {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		d, err := ParseDigest(strings.TrimSpace(string(b)))
		if err != nil {
			g.problem("%s is damaged: %v", i.Name, err)
			g.blind = true // it may be the only one that keeps a layer
			return nil
		}
		g.mark(ctx, d)
		return nil
	})
}

func (g *sharedGC) problem(format string, args ...any) {
	if len(g.plan.Problems) < maxProblems {
		g.plan.Problems = append(g.plan.Problems, fmt.Sprintf(format, args...))
	}
}

// markUses marks what nodes make use of.
func (g *sharedGC) markUses(ctx context.Context) error {
	gone := make(map[string]bool)
	err := g.r.list(ctx, "nodes/", func(i blob.Info) error {
		if time.Since(i.Modified) > nodeTime {
			gone[filepath.Base(i.Name)] = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	for node := range gone {
		g.problem("node %s was not heard of for %d days: what it uses is not kept", node, int(nodeTime.Hours()/24))
	}
	return g.r.list(ctx, "uses/", func(i blob.Info) error {
		node, hex := filepath.Split(strings.TrimPrefix(i.Name, "uses/"))
		d, ok := decodeHex(hex)
		if ok && !gone[strings.TrimSuffix(node, "/")] {
			g.mark(ctx, d)
			g.markPending(ctx, i.Name, d)
		}
		return nil
	})
}

// markPending marks what a layer needs of which there is a use, but no manifest yet: it is being published.
func (g *sharedGC) markPending(ctx context.Context, use string, d Digest) {
	if g.read[d] {
		return
	}
	b, err := blob.ReadAll(ctx, g.r.store, use, maxManifest)
	if errs.Is(err, errs.NotFound) || err == nil && len(b) == 0 { // ended; of who found the manifest, which is put back
		return
	}
	var m *Manifest
	if err == nil {
		m, err = decodeManifest(d, b)
	}
	if err != nil {
		g.problem("%s: %v", use, err)
		g.blind = true
		return
	}
	for _, o := range m.Objects() {
		g.named[o.Digest] = true
	}
}

// mark marks a layer, its parents and the objects that they name.
func (g *sharedGC) mark(ctx context.Context, d Digest) {
	if g.read[d] {
		return
	}
	g.keep[d] = true
	m, err := g.manifest(ctx, d)
	if errs.Is(err, errs.NotFound) {
		return
	}
	if err != nil {
		g.problem("layer %s: %v", d, err)
		g.blind = true
		return
	}
	g.read[d] = true
	for _, o := range m.Objects() {
		g.named[o.Digest] = true
	}
	for _, p := range m.Parents {
		g.mark(ctx, p)
	}
}

// manifest reads a manifest, here if the node has it.
func (g *sharedGC) manifest(ctx context.Context, d Digest) (*Manifest, error) {
	g.look()
	if l, err := g.s.Load(d); err == nil {
		return &l.Manifest, nil
	}
	b, err := blob.ReadAll(ctx, g.r.store, manifestName(d), maxManifest)
	if err != nil {
		return nil, err
	}
	return decodeManifest(d, b)
}

// sweepLayers removes manifests, and puts those back that turn out to be in use.
func (g *sharedGC) sweepLayers(ctx context.Context, garbage []Digest) error {
	if g.o.DryRun {
		g.plan.Layers = garbage
		return nil
	}
	v := &removal{g: g, content: make(map[Digest][]byte, len(garbage))}
	if err := v.begin(ctx, garbage); err != nil {
		return err
	}
	err := v.delete(ctx, manifestName)
	if derr := v.decide(ctx); err != nil || derr != nil {
		return errors.Join(err, derr)
	}
	for d := range v.content {
		if g.keep[d] {
			delete(v.content, d)
			continue
		}
		g.plan.Layers = append(g.plan.Layers, d)
	}
	slices.Sort(g.plan.Layers)
	g.o.Progress(PhaseCollecting, int64(len(g.plan.Layers)))
	return v.delete(ctx, profileName)
}

// sweepObjects removes old objects that no layer names.
func (g *sharedGC) sweepObjects(ctx context.Context, prefix string) error {
	var found []blob.Info
	flush := func() error {
		step := found
		found = nil
		if len(step) == 0 {
			return nil
		}
		if g.o.DryRun {
			g.planned(step)
			return nil
		}
		return g.r.step(ctx, func(ctx context.Context) error {
			if err := g.markUses(ctx); err != nil {
				return err
			}
			if g.blind {
				return errs.E(errs.Precondition, "something was damaged while objects were collected").WithHint("run the collection again")
			}
			step = slices.DeleteFunc(step, func(i blob.Info) bool {
				d, _ := decodeHex(filepath.Base(i.Name))
				return g.named[d]
			})
			names := make([]string, 0, len(step))
			for _, i := range step {
				names = append(names, i.Name)
			}
			if err := g.r.store.Delete(ctx, names...); err != nil {
				return err
			}
			g.planned(step)
			return nil
		})
	}
	err := g.r.list(ctx, prefix, func(i blob.Info) error {
		d, ok := decodeHex(filepath.Base(i.Name))
		if !ok || g.named[d] || i.Modified.After(g.before) {
			return nil
		}
		if found = append(found, i); len(found) < objectStep {
			return nil
		}
		return flush()
	})
	if err != nil {
		return err
	}
	return flush()
}

// planned notes objects that are, or would be, removed.
func (g *sharedGC) planned(objects []blob.Info) {
	for _, i := range objects {
		d, _ := decodeHex(filepath.Base(i.Name))
		g.plan.Objects = append(g.plan.Objects, Object{Digest: d, Size: i.Size})
		g.plan.Bytes += i.Size
	}
	g.o.Progress(PhaseCollecting, int64(len(g.plan.Layers)+len(g.plan.Objects)))
}

const (
	// stepsPrefix has one object for each step of a collection that is under way.
	stepsPrefix = "collecting/"
	// objectStep is how many objects go in one step, which reads all uses first.
	objectStep = 2000
	// stepTime bounds a step. One that seems to be there for twice as long is of a collector that died.
	stepTime = 5 * time.Minute
	stepPoll = 100 * time.Millisecond
)

// step has f read uses and remove what they do not need. That it is under way can be seen from before the first until after
// the second. Who publishes registers a use, then waits for the steps that it sees: those may not have seen the use, all
// later ones have. What it finds or sends after that is not removed.
func (r *sharedStore) step(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	name := stepsPrefix + rand.Text()
	if err := r.putBytes(ctx, name, nil); err != nil {
		return err
	}
	err := f(ctx)
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), hurry)
	defer stop()
	return errors.Join(err, r.store.Delete(end, name))
}

// awaitSteps returns when the steps that are under way now have ended.
func (r *sharedStore) awaitSteps(ctx context.Context) error {
	var seen map[string]bool
	for {
		now := make(map[string]bool)
		err := r.list(ctx, stepsPrefix, func(i blob.Info) error {
			if time.Since(i.Modified) < 2*stepTime && (seen == nil || seen[i.Name]) {
				now[i.Name] = true
			}
			return nil
		})
		if err != nil || len(now) == 0 {
			return err
		}
		seen = now
		select {
		case <-time.After(stepPoll):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
