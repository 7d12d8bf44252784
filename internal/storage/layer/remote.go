package layer

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// The shared store holds, for all nodes that use it:
//
//	blobs/<aa>/<sha256>                 an object, as seekable zstd; the name is of the raw bytes
//	raw/<aa>/<sha256>                   a data blob as it is, in a store that is mounted directly
//	manifests/<aa>/<sha256>.json        a layer exists exactly when this does
//	tags/<project>/<name>/<tag>         a digest; "/" in a name is written "+"
//	uses/<node>/<sha256>                a layer that a node makes use of
//	nodes/<node>                        written when the node opens the store, and daily
//	removing/<aa>/<sha256>.json         a manifest about which a collection has yet to decide
//	profiles/<aa>/<sha256>              what sandboxes read first of a layer
//
// An import writes objects, then the manifest, then the name.

const (
	// tagTTL is how long a node takes a name that it looked up for good: what another
	// node does to a name is seen this much later at most.
	tagTTL = 5 * time.Second
	// missTTL is the same for what was not there.
	missTTL = 2 * time.Second
	// hurry bounds a question for which there is an answer of before.
	hurry = 3 * time.Second
	// refreshTime bounds a look at all names of a project.
	refreshTime = 30 * time.Second

	// helloEvery is how often a node says that it is there, at most.
	helloEvery = 24 * time.Hour

	maxManifest = 4 << 20
	maxTagFile  = 256
	maxRecent   = 16384
)

// SharedOptions describe how a node uses the shared store.
type SharedOptions struct {
	// Node is the node's name in the store.
	Node string
	// URL tells one store from another.
	URL string
	// Direct is the directory that the store is, when data blobs are to be kept there
	// as they are and mounted from there. Empty: they are compressed, and read through Blobs.
	Direct string
	// Event, when set, is told of outages and their end.
	Event func(kind, message string)
}

// WithShared puts a catalogue in front of a store that several nodes share.
func WithShared(store blob.Store, o SharedOptions) Option {
	return func(s *Store) {
		if o.Event == nil {
			o.Event = func(string, string) {}
		}
		s.remote = &sharedStore{
			store: store, o: o, tags: make(map[Ref]recentTag), missing: make(map[Digest]time.Time),
			synced: make(map[string]time.Time), used: make(map[Digest]bool),
		}
		s.objects = &sharedObjects{s.local, s.remote}
	}
}

// sharedStore is the shared store behind a node's catalogue.
type sharedStore struct {
	store blob.Store
	o     SharedOptions

	mu      sync.Mutex
	tags    map[Ref]recentTag
	missing map[Digest]time.Time // manifests that were not there
	synced  map[string]time.Time // projects whose names were all looked at
	used    map[Digest]bool      // layers registered as in use
	down    time.Time            // an outage was seen then; zero: none
}

// recentTag is what the store said of a name.
type recentTag struct {
	digest Digest // "": there is no such name
	at     time.Time
}

func fan(prefix string, d Digest, ext string) string {
	h := d.Hex()
	return prefix + "/" + h[:2] + "/" + h + ext
}

func blobName(d Digest) string     { return fan("blobs", d, "") }
func rawName(d Digest) string      { return fan("raw", d, "") }
func manifestName(d Digest) string { return fan("manifests", d, ".json") }
func profileName(d Digest) string  { return fan("profiles", d, "") }

func tagName(r Ref) string {
	return "tags/" + dirName(r.Project) + "/" + dirName(r.Name) + "/" + r.Tag
}

func (r *sharedStore) useName(d Digest) string { return "uses/" + r.o.Node + "/" + d.Hex() }
func (r *sharedStore) nodeName() string        { return "nodes/" + r.o.Node }

// direct returns where a data blob lies that is mounted from the store itself; "" if it does not.
func (r *sharedStore) direct(d Digest) string {
	if r.o.Direct == "" {
		return ""
	}
	return filepath.Join(r.o.Direct, filepath.FromSlash(rawName(d)))
}

// failed notes an outage and says in its place what a caller can use.
func (r *sharedStore) failed(what string, err error) error {
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Cancelled) || errors.Is(err, context.Canceled) {
		return err
	}
	r.mu.Lock()
	first := r.down.IsZero()
	r.down = time.Now()
	r.mu.Unlock()
	if first {
		r.o.Event("store.outage", fmt.Sprintf("the shared store cannot be used: %v", err))
	}
	var e *errs.Error
	if errors.As(err, &e) && (e.Kind != errs.Internal || strings.Contains(e.Message, "shared store")) && e.Hint != "" {
		return fmt.Errorf("%s: %w", what, err)
	}
	return errs.E(errs.Precondition, "%s: the shared store cannot be used: %w", what, err).
		WithHint("layers that this node has go on working; try again when `harena doctor` finds the store reachable")
}

// worked notes that the store answers.
func (r *sharedStore) worked() {
	r.mu.Lock()
	was := !r.down.IsZero()
	r.down = time.Time{}
	r.mu.Unlock()
	if was {
		r.o.Event("store.recovered", "the shared store answers again")
	}
}

// outage tells whether the store did not answer a moment ago.
func (r *sharedStore) outage() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.down.IsZero() && time.Since(r.down) < tagTTL
}

// fetchManifest gets the manifest of a layer that this node does not have.
func (r *sharedStore) fetchManifest(ctx context.Context, s *Store, d Digest) (Layer, error) {
	r.mu.Lock()
	missed := time.Since(r.missing[d]) < missTTL
	r.mu.Unlock()
	if missed {
		return Layer{}, noSuchLayer(string(d))
	}
	b, err := r.readManifest(ctx, d)
	if errs.Is(err, errs.NotFound) {
		if err := r.confirm(ctx, s); err != nil {
			return Layer{}, r.failed(fmt.Sprintf("find layer %s", d), err)
		}
		r.worked()
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.missing) >= maxRecent {
			clear(r.missing)
		}
		r.missing[d] = time.Now()
		return Layer{}, noSuchLayer(string(d))
	}
	if err != nil {
		return Layer{}, r.failed(fmt.Sprintf("find layer %s", d), err)
	}
	r.worked()
	m, err := decodeManifest(d, b)
	if err != nil {
		return Layer{}, fmt.Errorf("shared store: %w", err)
	}
	defer s.Hold()()
	err = s.addManifest(d, m, func() (bool, error) { return true, writeFile(s.tmp(), s.manifestPath(d), b) })
	if err != nil {
		return Layer{}, s.diskError(err)
	}
	return s.Load(d)
}

// lookUp returns what a name points at in the shared store, or pointed at a moment
// ago. While the store does not answer, what the node saw last holds.
func (r *sharedStore) lookUp(ctx context.Context, s *Store, ref Ref) (Digest, error) {
	r.mu.Lock()
	recent, ok := r.tags[ref]
	r.mu.Unlock()
	if ok && recent.digest != "" && time.Since(recent.at) < tagTTL {
		return recent.digest, nil
	}
	if ok && recent.digest == "" && time.Since(recent.at) < missTTL {
		return "", s.noSuchName(ref)
	}
	before, known := s.readTagFile(sharedTree, ref)
	ask := ctx
	if known == nil && r.outage() {
		return before, nil
	}
	if known == nil || r.outage() {
		var cancel context.CancelFunc
		ask, cancel = context.WithTimeout(ctx, hurry)
		defer cancel()
	}
	d, err := r.readTag(ask, s, ref)
	switch {
	case err == nil:
		if d != before {
			err = s.writeTag(sharedTree, ref, d)
		}
		return d, err
	case errs.Is(err, errs.NotFound):
		if known == nil {
			if err := s.removeTag(sharedTree, ref); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return "", s.diskError(err)
			}
		}
		return "", s.noSuchName(ref)
	case known == nil && ctx.Err() == nil:
		return before, nil
	}
	return "", err
}

// readTag asks the store what a name points at.
func (r *sharedStore) readTag(ctx context.Context, s *Store, ref Ref) (Digest, error) {
	b, err := blob.ReadAll(ctx, r.store, tagName(ref), maxTagFile)
	if errs.Is(err, errs.NotFound) {
		if err := r.confirm(ctx, s); err != nil {
			return "", r.failed("look up "+ref.String(), err)
		}
		r.worked()
		r.recent(ref, "")
		return "", noSuchLayer(ref.String())
	}
	if err != nil {
		return "", r.failed("look up "+ref.String(), err)
	}
	r.worked()
	d, err := ParseDigest(strings.TrimSpace(string(b)))
	if err != nil {
		return "", errs.E(errs.Precondition, "the name %s is damaged in the shared store", ref).On("layer %s", ref).
			WithHint("point it at a layer again: `harena layer tag`")
	}
	r.recent(ref, d)
	return d, nil
}

func (r *sharedStore) recent(ref Ref, d Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.tags) >= maxRecent {
		clear(r.tags)
	}
	r.tags[ref] = recentTag{d, time.Now()}
}

func (r *sharedStore) writeTag(ctx context.Context, ref Ref, d Digest) error {
	if err := r.store.Put(ctx, tagName(ref), strings.NewReader(string(d)+"\n")); err != nil {
		return r.failed("point "+ref.String()+" at a layer", err)
	}
	r.worked()
	r.recent(ref, d)
	return nil
}

func (r *sharedStore) removeTag(ctx context.Context, ref Ref) error {
	if err := r.store.Delete(ctx, tagName(ref)); err != nil {
		return r.failed("remove the name "+ref.String(), err)
	}
	r.worked()
	r.recent(ref, "")
	return nil
}

// use registers a layer as one that this node makes use of, so that another node does
// not collect it. not-found: it is being collected.
func (r *sharedStore) use(ctx context.Context, d Digest) error {
	r.mu.Lock()
	known := r.used[d]
	r.mu.Unlock()
	if known {
		return nil
	}
	if err := r.store.Put(ctx, r.useName(d), strings.NewReader("")); err != nil {
		return r.failed("make use of layer "+string(d), err)
	}
	// Only now: a collector that did not see the use has removed the manifest before, or sees it before it removes blobs.
	there, err := r.restore(ctx, d)
	if err != nil {
		return r.failed("make use of layer "+string(d), err)
	}
	if !there {
		return noSuchLayer(string(d))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used[d] = true
	return nil
}

// unuse ends what use began, for layers that this node has no more.
func (r *sharedStore) unuse(ctx context.Context, layers []Digest) error {
	r.mu.Lock()
	for _, d := range layers {
		delete(r.used, d)
	}
	r.mu.Unlock()
	for step := range slices.Chunk(layers, deleteStep) {
		names := make([]string, len(step))
		for i, d := range step {
			names[i] = r.useName(d)
		}
		if err := r.store.Delete(ctx, names...); err != nil {
			return err
		}
	}
	return nil
}

// fetchObject gets an object that this node is to have as a file, whole and verified.
func (r *sharedStore) fetchObject(ctx context.Context, s *Store, o Object) error {
	if s.local.has(o) {
		return nil
	}
	f, err := os.CreateTemp(s.tmp(), "fetch-*")
	if err != nil {
		return s.diskError(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	want := blob.Sum(sumOf(o.Digest))
	if _, err := blob.Copy(ctx, f, r.store, blobName(o.Digest), o.Size, &want); err != nil {
		if errs.Is(err, errs.NotFound) {
			return errs.E(errs.Precondition, "the shared store has lost object %s", o.Digest).
				WithHint("import the layer again, or `harena layer push` it from a node that has it")
		}
		if errors.Is(err, blob.ErrDamaged) {
			return errs.E(errs.Precondition, "object %s is damaged in the shared store: %w", o.Digest, err).
				WithHint("remove it there and import the layer again, or `harena layer push` it from a node that has it")
		}
		return r.failed("fetch the metadata of a layer", s.diskError(err))
	}
	r.worked()
	if err := f.Sync(); err != nil {
		return s.diskError(err)
	}
	return s.diskError(s.local.put(ctx, o.Digest, f.Name()))
}

// sharedObjects are the objects of this node and, behind them, those of the shared store.
type sharedObjects struct {
	*localObjects
	remote *sharedStore
}

func (o *sharedObjects) open(d Digest) (object, error) {
	f, err := o.localObjects.open(d)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	if path := o.remote.direct(d); path != "" {
		if f, err := os.Open(path); err == nil {
			info, err := f.Stat()
			if err != nil {
				f.Close()
				return nil, err
			}
			return &localObject{f, info.Size()}, nil
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	r, err := blob.OpenReader(ctx, o.remote.store, blobName(d), 0)
	if err == nil {
		return &remoteObject{r, cancel}, nil
	}
	cancel()
	if errs.Is(err, errs.NotFound) {
		return nil, fmt.Errorf("object %s: %w", d, fs.ErrNotExist)
	}
	return nil, o.remote.failed("read object "+string(d), err)
}

// remoteObject is an object that is read from the shared store.
type remoteObject struct {
	*blob.Reader
	cancel context.CancelFunc
}

func (o *remoteObject) size() int64 { return o.Reader.Size() }

func (o *remoteObject) Close() error {
	o.cancel()
	o.Reader.Close()
	return nil
}

// greeted begins the names of greetings.
const greeted = "greeted-"

// greeting is the file which says that a node has left something of its own in a store.
func greeting(layers, url string) string {
	return filepath.Join(layers, "shared", greeted+digestOf([]byte(url)).Hex()[:16])
}

// KnowsStores tells whether a node with that data directory has used a store.
func KnowsStores(dir string) bool {
	entries, err := os.ReadDir(filepath.Join(dir, "layers", "shared"))
	return err == nil && slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return strings.HasPrefix(e.Name(), greeted) })
}

// KnowsStore tells whether a node with that data directory has used the store of that URL before.
func KnowsStore(dir, url string) bool {
	_, err := os.Lstat(greeting(filepath.Join(dir, "layers"), url))
	return err == nil
}

// confirm makes sure that what says "there is no such thing" is the store, and not
// the empty directory on which it should be mounted: it must have what this
// node once left there. Each time it finds that, the node is heard of again.
func (r *sharedStore) confirm(ctx context.Context, s *Store) error {
	marker := greeting(s.dir, r.o.URL)
	if _, err := os.Lstat(marker); err == nil {
		info, err := r.store.Stat(ctx, r.nodeName())
		if errs.Is(err, errs.NotFound) {
			return r.failed("look into the shared store", errs.E(errs.Internal, "it has lost what this node left there: is it mounted?"))
		}
		if err != nil || time.Since(info.Modified) < helloEvery {
			return err
		}
	} else if err := r.expected(ctx, s); err != nil {
		return err
	}
	if err := r.store.Put(ctx, r.nodeName(), strings.NewReader(time.Now().UTC().Format(time.RFC3339)+"\n")); err != nil {
		if errs.Is(err, errs.NotFound) { // the store itself is not there
			return errs.E(errs.Internal, "nothing can be written to it: %v", err)
		}
		return err
	}
	return writeFile(s.tmp(), marker, []byte(r.o.URL+"\n"))
}

// expected refuses to begin with an empty store when this node remembers things of a store: a new URL may be that of the
// directory on which the store should be mounted.
func (r *sharedStore) expected(ctx context.Context, s *Store) error {
	dir := filepath.Join(s.dir, "shared")
	remembers := false
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && e.Type().IsRegular() {
			remembers = true
			return fs.SkipAll
		}
		return err
	})
	if err != nil || !remembers {
		return err
	}
	found, err := r.store.List(ctx, "", "", 1)
	if err == nil && len(found) == 0 {
		err = errs.E(errs.Precondition, "the shared store is empty, and this node remembers one that is not: is it mounted?").
			WithHint("mount it; to begin with an empty store, end the node and remove %s, which forgets the names of the store before", dir)
	}
	return err
}

// CheckShared asks the shared store for something; nil without one, or when it answers.
func (s *Store) CheckShared(ctx context.Context) error {
	if s.remote == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, hurry)
	defer cancel()
	if err := s.remote.confirm(ctx, s); err != nil {
		return s.remote.failed("ask the shared store", err)
	}
	s.remote.worked()
	return nil
}

// Shared tells whether there is a shared store.
func (s *Store) Shared() bool { return s.remote != nil }

func decodeHex(s string) (Digest, bool) {
	if _, err := hex.DecodeString(s); err != nil || !hexPattern.MatchString(s) {
		return "", false
	}
	return Digest(digestPrefix + s), true
}

// reported is r, with its progress reported.
func reported(r io.Reader, report *reporter, total int64) io.Reader {
	if report == nil {
		return r
	}
	return readFunc(func(p []byte) (int, error) {
		n, err := r.Read(p)
		report.add(PhaseStoring, int64(n), total)
		return n, err
	})
}

// putBytes stores something small.
func (r *sharedStore) putBytes(ctx context.Context, name string, b []byte) error {
	return r.store.Put(ctx, name, bytes.NewReader(b))
}
