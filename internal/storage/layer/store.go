package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/storage/oci"
)

// maxCached bounds the manifests kept in memory (about 1 KiB each).
const maxCached = 16384

// Store is the catalogue and the content of layers on local disk. Its methods
// may be called concurrently. Errors of the disk are of kind capacity (full) or
// precondition (read-only), and a failed call leaves nothing behind.
type Store struct {
	dir     string // DIR/layers
	cache   string // DIR/cache
	mounts  string // DIR/mounts
	objects objects
	local   *localObjects // the same ones as files, for mounting
	limits  Limits

	collector collector
	// remote is the shared store; nil: there is none.
	remote  *sharedStore
	visible Visibility
	// reads counts names and manifests read from disk.
	reads atomic.Int64

	mu        sync.Mutex
	manifests map[Digest]Layer
	pins      map[Digest]int // layers that one in the making refers to

	index index

	// bootstrap has room for one: debootstrap's package cache is not made for two users at once.
	bootstrap chan struct{}

	// blobs are the layers of container images that registries sent.
	blobs *oci.Cache
}

// Limits bound one import; zero means no bound.
type Limits struct {
	MaxEntries int64
	MaxBytes   int64
}

// Open opens, or makes, the store below the data directory DIR and removes what
// an interrupted import left in it.
func Open(dataDir string, limits Limits, options ...Option) (*Store, error) {
	// Absolute and without symbolic links, as the kernel will show mount points below it.
	dataDir, err := filepath.Abs(dataDir)
	if err != nil {
		return nil, err
	}
	if dataDir, err = filepath.EvalSymlinks(dataDir); err != nil {
		return nil, fmt.Errorf("open the layer store: %w", err)
	}
	dir := filepath.Join(dataDir, "layers")
	local := &localObjects{dir: filepath.Join(dir, "objects"), tmp: filepath.Join(dir, "tmp")}
	s := &Store{
		dir: dir, cache: filepath.Join(dataDir, "cache"), mounts: filepath.Join(dataDir, "mounts"), limits: limits,
		objects: local, local: local,
		manifests: make(map[Digest]Layer), pins: make(map[Digest]int),
		bootstrap: make(chan struct{}, 1),
		blobs:     oci.NewCache(filepath.Join(dataDir, "cache", "blobs"), oci.DefaultCacheBytes),
	}
	for _, set := range options {
		set(s)
	}
	s.index.reset()
	for _, d := range []string{"manifests", "objects", "tags", "tmp"} {
		if err := makeDir(filepath.Join(dir, d)); err != nil {
			return nil, diskError(fmt.Errorf("open the layer store: %w", err), dataDir)
		}
	}
	if err := s.emptyTmp(); err != nil {
		return nil, diskError(fmt.Errorf("open the layer store: %w", err), dataDir)
	}
	if s.index.log, err = openIndexLog(s.catalogPath()); err != nil {
		_ = os.Remove(s.catalogPath()) // read-only disks keep it; it is not used then
	}
	return s, nil
}

// Option changes what Open opens.
type Option func(*Store)

// Visibility decides whether a project may see a layer that it named. It is
// asked at every resolve, after the layer was found. A project finds names of its
// own only, and by digest any layer: who knows a digest has had the content.
type Visibility interface {
	Visible(project string, r Ref, l Layer) bool
}

// WithVisibility has v asked; without it what is found is visible.
func WithVisibility(v Visibility) Option { return func(s *Store) { s.visible = v } }

func (s *Store) tmp() string { return filepath.Join(s.dir, "tmp") }

func (s *Store) emptyTmp() error {
	entries, err := os.ReadDir(s.tmp())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := removeTree(filepath.Join(s.tmp(), e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// diskError is diskError for this store's directory.
func (s *Store) diskError(err error) error { return diskError(err, filepath.Dir(s.dir)) }

// Hold keeps what is resolved or stored until release is called from being
// collected. Who resolves a layer holds until what uses it is on record, where
// the collector's set of digests in use sees it.
func (s *Store) Hold() (release func()) { return s.collector.hold() }

func (s *Store) manifestPath(d Digest) string {
	h := d.Hex()
	return filepath.Join(s.dir, "manifests", h[:2], h+".json")
}

func (s *Store) tagRoot(t tree) string {
	if t == sharedTree {
		return filepath.Join(s.dir, "shared", "tags")
	}
	return filepath.Join(s.dir, "tags")
}

func (s *Store) tagPath(t tree, r Ref) string {
	return filepath.Join(s.tagRoot(t), dirName(r.Project), dirName(r.Name), r.Tag)
}

// Load returns the layer with a digest that this node has. not-found: there is none.
func (s *Store) Load(d Digest) (Layer, error) {
	defer s.collector.look(d)()
	s.mu.Lock()
	l, ok := s.manifests[d]
	s.mu.Unlock()
	if ok {
		return l, nil
	}
	l, err := s.readManifest(d)
	if errors.Is(err, fs.ErrNotExist) {
		return Layer{}, noSuchLayer(string(d))
	}
	if err != nil {
		return Layer{}, err
	}
	s.remember(l)
	return l, nil
}

func (s *Store) readManifest(d Digest) (Layer, error) {
	s.reads.Add(1)
	f, err := os.Open(s.manifestPath(d))
	if err != nil {
		return Layer{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Layer{}, err
	}
	b := make([]byte, info.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		return Layer{}, fmt.Errorf("read manifest %s: %w", d, err)
	}
	m, err := decodeManifest(d, b)
	if err != nil {
		return Layer{}, err
	}
	return Layer{Digest: d, Created: info.ModTime(), Manifest: *m}, nil
}

func (s *Store) remember(l Layer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.manifests) >= maxCached {
		for d := range s.manifests { // any one: reading it again costs 20 µs
			delete(s.manifests, d)
			break
		}
	}
	s.manifests[l.Digest] = l
}

func (s *Store) forget(ds []Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		delete(s.manifests, d)
	}
}

// Find is Load, and fetches the manifest from the shared store when this node does not have it.
func (s *Store) Find(ctx context.Context, d Digest) (Layer, error) {
	l, err := s.Load(d)
	if s.remote == nil || !errs.Is(err, errs.NotFound) {
		return l, err
	}
	return s.remote.fetchManifest(ctx, s, d)
}

// Resolve finds the layer that a name, name:tag or digest means in a project.
// It reads at most two small files, or asks the shared store as often, however many layers there are.
func (s *Store) Resolve(ctx context.Context, project, ref string) (Layer, error) {
	r, err := ParseRef(project, ref)
	if err != nil {
		return Layer{}, err
	}
	return s.resolve(ctx, r)
}

func (s *Store) resolve(ctx context.Context, r Ref) (Layer, error) {
	d := r.Digest
	if d == "" {
		var err error
		if d, err = s.lookUp(ctx, r); err != nil {
			return Layer{}, err
		}
	}
	l, err := s.Find(ctx, d)
	if err == nil && s.visible != nil && !s.visible.Visible(r.Project, r, l) {
		return Layer{}, noSuchLayer(r.String())
	}
	return l, err
}

func noSuchLayer(what string) error {
	return errs.E(errs.NotFound, "there is no layer %s", what).On("layer %s", what).
		WithHint("`harena layer ls` lists layers")
}

// lookUp returns what a name points at: the node's own name or, without one, that of the shared store.
func (s *Store) lookUp(ctx context.Context, r Ref) (Digest, error) {
	d, err := s.readTag(r)
	if s.remote == nil || !errs.Is(err, errs.NotFound) {
		return d, err
	}
	return s.remote.lookUp(ctx, s, r)
}

// Compose resolves the layers of a sandbox and stacks them; see Compose.
func (s *Store) Compose(ctx context.Context, project, image, workspace string, toolkits []string) (Composition, error) {
	var in Stack
	var err error
	if in.Image, err = s.named(ctx, project, image); err != nil {
		return Composition{}, err
	}
	for _, p := range in.Image.Layer.Parents {
		l, err := s.Find(ctx, p)
		if err != nil {
			return Composition{}, err
		}
		in.Parents = append(in.Parents, l)
	}
	if workspace != "" {
		w, err := s.named(ctx, project, workspace)
		if err != nil {
			return Composition{}, err
		}
		in.Workspace = &w
	}
	// Checked before anything is read: the list comes from outside.
	if n := len(toolkits); n > sandbox.MaxLayers {
		return Composition{}, errs.OverLimit(errs.Invalid, "layers of a sandbox", sandbox.MaxLayers, n)
	}
	for _, t := range toolkits {
		n, err := s.named(ctx, project, t)
		if err != nil {
			return Composition{}, err
		}
		in.Toolkits = append(in.Toolkits, n)
	}
	return Compose(in)
}

func (s *Store) named(ctx context.Context, project, ref string) (Named, error) {
	l, err := s.Resolve(ctx, project, ref)
	return Named{Name: ref, Layer: l}, err
}

// walkManifests visits every manifest that this node has, whole or not.
func (s *Store) walkManifests(ctx context.Context, f func(Digest) error) error {
	return walkFanOut(ctx, filepath.Join(s.dir, "manifests"), ".json", func(d Digest, _ fs.DirEntry) error { return f(d) })
}
