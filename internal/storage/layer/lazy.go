package layer

import (
	"context"
	"slices"

	"github.com/harena-dev/harena/internal/errs"
)

// Blobs makes data blobs that lie in the shared store readable as files, whose
// content is fetched as it is read.
type Blobs interface {
	// Attach makes blobs readable for a layer and returns their paths, in the same order. They stay good until Detach,
	// unless Mounts.Lost says otherwise. Attaching a layer again gives what is best now.
	Attach(ctx context.Context, layer Digest, blobs []Object) (paths []string, err error)
	// Detach ends what Attach began. Unknown layers are no error.
	Detach(ctx context.Context, layer Digest) error
}

// images finds the files of a layer: the metadata image, which is fetched whole if
// need be, and for each data blob the local file, the one in a store that is
// mounted directly, or one that Blobs serves; lazy says that Blobs was asked.
func (m *Mounts) images(ctx context.Context, l Layer) (img image, lazy bool, err error) {
	s := m.store
	if s.remote != nil && !s.local.has(l.Meta) {
		// The manifest holds it: what it names is not collected while the layer has an owner.
		if err := s.remote.fetchObject(ctx, s, l.Meta); err != nil {
			return img, false, err
		}
	}
	img.meta = s.local.path(l.Meta.Digest)
	img.blobs = make([]string, 1+len(l.Extra))
	var far []Object
	var slots []int
	for i, b := range l.Blobs() {
		switch {
		case s.remote == nil || s.local.has(b):
			img.blobs[i] = s.local.path(b.Digest)
		case b.Size == 0: // there is nothing to read
			if err := s.emptyObject(ctx, b); err != nil {
				return img, false, err
			}
			img.blobs[i] = s.local.path(b.Digest)
		case s.remote.direct(b.Digest) != "":
			if err := s.remote.checkDirect(ctx, b.Digest); err != nil {
				return img, false, err
			}
			img.blobs[i] = s.remote.direct(b.Digest)
		default:
			far, slots = append(far, b), append(slots, i)
		}
	}
	if len(far) == 0 {
		return img, false, nil
	}
	if m.blobs == nil {
		return img, false, errs.E(errs.Precondition, "layer %s has data in the shared store only, and nothing here reads it", l.Digest).
			On("layer %s", l.Digest).WithHint("start the node with `harena up --store URL`")
	}
	if err := s.remote.use(ctx, l.Digest); err != nil {
		return img, false, err
	}
	paths, err := m.blobs.Attach(ctx, l.Digest, far)
	if err == nil && len(paths) != len(far) {
		err = errs.E(errs.Internal, "%d of %d data blobs of layer %s were attached", len(paths), len(far), l.Digest)
	}
	if err != nil {
		return img, true, err // some may be attached
	}
	for i, p := range paths {
		img.blobs[slots[i]] = p
	}
	return img, true, nil
}

// checkDirect says why a data blob that is to be mounted from the store itself is not there.
func (r *sharedStore) checkDirect(ctx context.Context, d Digest) error {
	_, err := r.store.Stat(ctx, rawName(d))
	if errs.Is(err, errs.NotFound) {
		return errs.E(errs.Precondition, "the shared store does not have data blob %s as it is", d).
			WithHint("import the layer, or `harena layer push` it, on a node with file:///DIR?direct=1; or start this node without direct, if the blob was published so")
	}
	if err != nil {
		return r.failed("mount data from the shared store", err)
	}
	r.worked()
	return nil
}

// Place tells where the content of a layer is: "local", "shared" (also in the
// shared store, as far as this node knows) or "lazy" (data only there).
func (s *Store) Place(l Layer) string {
	if s.remote == nil {
		return "local"
	}
	for _, b := range l.Blobs() {
		if b.Size > 0 && !s.local.has(b) {
			return "lazy"
		}
	}
	if s.remote.knows(l.Digest) {
		return "shared"
	}
	return "local"
}

// knows tells whether the store had a layer when this node looked last.
func (r *sharedStore) knows(d Digest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.used[d]
}

// Renew has layers mounted anew for the next who acquires them, as blobs of theirs have become local files. Overlays so
// far keep what they have.
func (m *Mounts) Renew(layers []Digest) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range layers {
		if e := m.entries[d]; e != nil && e.lazy {
			e.stale = true
		}
	}
}

// renew puts a new mount of a layer in the place of one that works; e.busy is held. When that fails, the old one serves on.
func (m *Mounts) renew(ctx context.Context, d Digest, e *mountEntry) {
	lazy, err := m.mount(ctx, d, true)
	mounted := err == nil || isMounted(m.path(d))
	m.mu.Lock()
	defer m.mu.Unlock()
	e.mounted, e.lazy = mounted, e.lazy || lazy
}

// lose notes an owner whose overlay has a dead mount; Mounts.mu is held.
func (e *mountEntry) lose(owner string) {
	if e.lost == nil {
		e.lost = make(map[string]bool)
	}
	e.lost[owner] = true
}

// Lost says that what is mounted of layers reads EIO for good, as their blobs are
// not served any more. The next Acquire mounts them anew; owners so far keep what
// they have. It returns the owners that are affected.
func (m *Mounts) Lost(layers []Digest) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var owners []string
	for _, d := range layers {
		e := m.entries[d]
		if e == nil || !e.mounted {
			continue
		}
		e.dead = true
		for o := range e.owners {
			e.lose(o)
			owners = append(owners, o)
		}
	}
	slices.Sort(owners)
	return slices.Compact(owners)
}

// Degraded returns the layers of which an owner has a dead mount.
func (m *Mounts) Degraded(owner string) []Digest {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Digest
	for d, e := range m.entries {
		if e.lost[owner] {
			out = append(out, d)
		}
	}
	slices.Sort(out)
	return out
}

// OwnersOf returns who has a layer.
func (m *Mounts) OwnersOf(layers []Digest) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, d := range layers {
		if e := m.entries[d]; e != nil {
			for o := range e.owners {
				out = append(out, o)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Dead returns the layers that have owners with a dead mount.
func (m *Mounts) Dead() []Digest {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Digest
	for d, e := range m.entries {
		if len(e.lost) > 0 {
			out = append(out, d)
		}
	}
	return out
}
