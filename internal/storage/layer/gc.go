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

// GCPlan is what a collection would remove.
type GCPlan struct {
	Layers  []Digest // in order of digest
	Objects []Object // that no remaining layer names
	Bytes   int64    // freed on disk, manifests left out
}

// PlanGC finds the layers that no name of any project reaches, that are not in
// use and that no such layer has as a parent; and the objects that only they
// name. It changes nothing.
func (s *Store) PlanGC(ctx context.Context, inUse map[Digest]bool) (*GCPlan, error) {
	keep := make(map[Digest]bool)
	var mark func(d Digest)
	mark = func(d Digest) {
		if keep[d] {
			return
		}
		keep[d] = true
		if l, err := s.Load(d); err == nil {
			for _, p := range l.Parents {
				mark(p)
			}
		}
	}
	for d := range inUse {
		mark(d)
	}
	for _, d := range s.pinned() {
		mark(d)
	}
	projects, err := readDirIfAny(filepath.Join(s.dir, "tags"))
	if err != nil {
		return nil, err
	}
	for _, p := range projects {
		// An error here must end the plan: a name that cannot be read may be the only one that keeps a layer.
		if err := s.eachTag(ctx, pathName(p.Name()), func(_ Ref, d Digest) { mark(d) }); err != nil {
			return nil, err
		}
	}
	plan := &GCPlan{}
	named := make(map[Digest]bool)
	err = walkFanOut(ctx, filepath.Join(s.dir, "manifests"), ".json", func(d Digest, _ fs.DirEntry) error {
		if !keep[d] {
			plan.Layers = append(plan.Layers, d)
			return nil
		}
		// A manifest to keep that cannot be read ends the plan: its objects are not known.
		l, err := s.Load(d)
		for _, o := range l.Objects() {
			named[o.Digest] = true
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	err = s.objects.list(ctx, func(d Digest, size int64, _ time.Time) error {
		if !named[d] {
			plan.Objects = append(plan.Objects, Object{d, size})
			plan.Bytes += size
		}
		return nil
	})
	slices.Sort(plan.Layers)
	return plan, err
}

// CollectGarbage plans and executes. inUse is asked again while nothing can be
// imported, named or resolved under Hold, so what it does not list is free.
func (s *Store) CollectGarbage(ctx context.Context, inUse func() map[Digest]bool) (*GCPlan, error) {
	plan, finish, err := s.unlinkGarbage(ctx, inUse)
	if finish != nil {
		err = errors.Join(err, finish())
	}
	if err != nil {
		return nil, s.diskError(fmt.Errorf("collect garbage: %w", err))
	}
	return plan, nil
}

func (s *Store) unlinkGarbage(ctx context.Context, inUse func() map[Digest]bool) (*GCPlan, func() error, error) {
	s.collect.Lock()
	defer s.collect.Unlock()
	plan, err := s.PlanGC(ctx, inUse())
	if err != nil {
		return nil, nil, err
	}
	// Manifests go first, so that a crash leaves objects without a layer, never a layer without objects.
	s.forget(plan.Layers)
	defer s.index.forgetUses()
	for _, d := range plan.Layers {
		if err := os.Remove(s.manifestPath(d)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, err
		}
		if err := syncDir(filepath.Dir(s.manifestPath(d))); err != nil {
			return nil, nil, err
		}
	}
	ds := make([]Digest, len(plan.Objects))
	for i, o := range plan.Objects {
		ds[i] = o.Digest
	}
	finish, err := s.objects.remove(ctx, ds)
	s.forgetIndexes(plan.Objects)
	return plan, finish, err
}
