package layer

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// index keeps in memory what listings need and would otherwise read thousands of
// files for. The disk stays the truth: resolving never asks the index. Each part
// is read when it is first wanted, and changes under the same lock as the disk.
type index struct {
	mu    sync.Mutex
	names map[string]map[string]Digest // project → name:tag → digest
	uses  map[Digest]int               // object → layers that name it; nil: not read yet
	// extra says which layers refer to a data blob that is not their own; read with uses.
	extra map[Digest][]reference
}

// reference is a layer that refers to bytes of another one's data blob.
type reference struct {
	layer Digest
	bytes int64
}

// setTag writes a tag with write and notes it.
func (x *index) setTag(r Ref, d Digest, write func() error) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := write(); err != nil {
		delete(x.names, r.Project) // what is on disk now is not known: read it again
		return err
	}
	names, ok := x.names[r.Project]
	switch {
	case !ok:
	case d == "":
		delete(names, r.String())
	default:
		names[r.String()] = d
	}
	return nil
}

// addManifest writes a manifest with write, which says whether it is new, and counts its objects.
func (x *index) addManifest(d Digest, m *Manifest, write func() (added bool, err error)) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	added, err := write()
	if err != nil {
		x.uses = nil
		return err
	}
	if added && x.uses != nil {
		x.count(d, m)
	}
	return nil
}

func (x *index) count(d Digest, m *Manifest) {
	for i, o := range m.Extra {
		x.extra[o.Digest] = append(x.extra[o.Digest], reference{d, m.ExtraUsed[i]})
	}
	counted := make(map[Digest]bool) // an empty blob may be a device twice
	for _, o := range m.Objects() {
		if !counted[o.Digest] {
			counted[o.Digest] = true
			x.uses[o.Digest]++
		}
	}
}

// forgetUses has the counts read again, after layers were removed.
func (x *index) forgetUses() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.uses = nil
}

// names returns every name of a project, sorted, grouped by what it points at.
func (s *Store) names(ctx context.Context, project string) (map[Digest][]string, error) {
	probe, err := ParseRef(project, "any")
	if err != nil {
		return nil, err
	}
	project = probe.Project
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	names, ok := x.names[project]
	if !ok {
		names = make(map[string]Digest)
		if err := s.eachTag(ctx, project, func(r Ref, d Digest) { names[r.String()] = d }); err != nil {
			return nil, err
		}
		if len(names) > 0 { // projects that do not exist take no memory
			x.names[project] = names
		}
	}
	out := make(map[Digest][]string, len(names))
	for n, d := range names {
		out[d] = append(out[d], n)
	}
	for _, n := range out {
		slices.Sort(n)
	}
	return out, nil
}

// ObjectUses counts the layers that name each object; one that several name is
// stored once.
func (s *Store) ObjectUses(ctx context.Context) (map[Digest]int, error) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := s.readUses(ctx); err != nil {
		return nil, err
	}
	return maps.Clone(x.uses), nil
}

// readUses reads what layers name, once; index.mu is held.
func (s *Store) readUses(ctx context.Context) error {
	x := &s.index
	if x.uses != nil {
		return nil
	}
	x.uses, x.extra = make(map[Digest]int), make(map[Digest][]reference)
	err := s.eachManifest(ctx, func(l Layer) error {
		x.count(l.Digest, &l.Manifest)
		return nil
	})
	if err != nil {
		x.uses = nil
	}
	return err
}
