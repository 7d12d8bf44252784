package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

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

	// collect is held for reading while something that was resolved or stored is
	// not yet referred to on disk, and for writing by the collector.
	collect sync.RWMutex

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
func Open(dataDir string, limits Limits) (*Store, error) {
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
		index:     index{names: make(map[string]map[string]Digest)},
		bootstrap: make(chan struct{}, 1),
		blobs:     oci.NewCache(filepath.Join(dataDir, "cache", "blobs"), oci.DefaultCacheBytes),
	}
	for _, d := range []string{"manifests", "objects", "tags", "tmp"} {
		if err := makeDir(filepath.Join(dir, d)); err != nil {
			return nil, diskError(fmt.Errorf("open the layer store: %w", err), dataDir)
		}
	}
	if err := s.emptyTmp(); err != nil {
		return nil, diskError(fmt.Errorf("open the layer store: %w", err), dataDir)
	}
	return s, nil
}

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

// Hold keeps the collector from running until release is called. Who resolves a
// layer holds until what uses it is on record, where the collector's set of
// digests in use sees it. Hold is short: seconds at most.
func (s *Store) Hold() (release func()) {
	s.collect.RLock()
	return s.collect.RUnlock
}

func (s *Store) manifestPath(d Digest) string {
	h := d.Hex()
	return filepath.Join(s.dir, "manifests", h[:2], h+".json")
}

func (s *Store) tagPath(r Ref) string {
	return filepath.Join(s.dir, "tags", dirName(r.Project), dirName(r.Name), r.Tag)
}

// Load returns the layer with a digest. not-found: there is none.
func (s *Store) Load(d Digest) (Layer, error) {
	s.mu.Lock()
	l, ok := s.manifests[d]
	s.mu.Unlock()
	if ok {
		return l, nil
	}
	l, err := s.readManifest(d)
	if errors.Is(err, fs.ErrNotExist) {
		return Layer{}, errs.E(errs.NotFound, "there is no layer %s", d).On("layer %s", d).
			WithHint("`harena layer ls` lists layers")
	}
	if err != nil {
		return Layer{}, err
	}
	s.remember(l)
	return l, nil
}

func (s *Store) readManifest(d Digest) (Layer, error) {
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

// Resolve finds the layer that a name, name:tag or digest means in a project.
// It reads at most two small files, however many layers there are. A digest
// finds a layer whatever the project: who knows it has had the content.
func (s *Store) Resolve(project, ref string) (Layer, error) {
	r, err := ParseRef(project, ref)
	if err != nil {
		return Layer{}, err
	}
	return s.resolve(r)
}

func (s *Store) resolve(r Ref) (Layer, error) {
	d := r.Digest
	if d == "" {
		var err error
		if d, err = s.readTag(r); err != nil {
			return Layer{}, err
		}
	}
	return s.Load(d)
}

// Compose resolves the layers of a sandbox and stacks them; see Compose.
func (s *Store) Compose(project, image, workspace string, toolkits []string) (Composition, error) {
	var in Stack
	var err error
	if in.Image, err = s.named(project, image); err != nil {
		return Composition{}, err
	}
	for _, p := range in.Image.Layer.Parents {
		l, err := s.Load(p)
		if err != nil {
			return Composition{}, err
		}
		in.Parents = append(in.Parents, l)
	}
	if workspace != "" {
		w, err := s.named(project, workspace)
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
		n, err := s.named(project, t)
		if err != nil {
			return Composition{}, err
		}
		in.Toolkits = append(in.Toolkits, n)
	}
	return Compose(in)
}

func (s *Store) named(project, ref string) (Named, error) {
	l, err := s.Resolve(project, ref)
	return Named{Name: ref, Layer: l}, err
}

// eachManifest reads every manifest of the store that can be read.
func (s *Store) eachManifest(ctx context.Context, f func(Layer) error) error {
	return walkFanOut(ctx, filepath.Join(s.dir, "manifests"), ".json", func(d Digest, _ fs.DirEntry) error {
		l, err := s.Load(d)
		// One that is damaged does not hide the others; who names it is told.
		if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Precondition) {
			return nil
		}
		if err != nil {
			return err
		}
		return f(l)
	})
}
