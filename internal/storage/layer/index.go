package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
)

// index answers, in memory, what would otherwise take a read of every name and
// manifest: pages of a listing, the names of a layer, who else has its blobs, what
// was made on it. The files stay the truth: resolving and collecting never ask
// the index. It is read when first wanted, from DIR/layers/index (see
// indexlog.go) or, when that is missing or torn, from the names and manifests
// themselves. Changes are made under the same lock as those of the files.
//
// It takes about 500 bytes for a layer with a name.
type index struct {
	mu       sync.Mutex // taken after collector.step
	log      *indexLog  // nil: there is none, the next load writes one
	loaded   bool
	projects map[string]*projectNames
	layers   map[sum]*summary
	uses     map[sum]int         // object → layers that name it
	children map[sum][]sum       // layer → layers that have it as a parent
	extra    map[sum][]reference // blob → layers of others that refer to it
}

// reference is a layer that refers to bytes of another one's data blob.
type reference struct {
	layer Digest
	bytes int64
}

// sum is a digest in 32 bytes.
type sum [sha256.Size]byte

func sumOf(d Digest) (s sum) {
	_, _ = hex.Decode(s[:], []byte(d.Hex())) // digests are checked where they come in
	return s
}

func (s sum) digest() Digest { return sumDigest(s[:]) }

// summary is what the index knows of a layer.
type summary struct {
	kind    Kind // "": its manifest could not be read
	objects []sum
	parents []sum
	extra   []extraUse
}

// extraUse is what a layer uses of another one's blob.
type extraUse struct {
	blob  sum
	bytes int64
}

func summarize(m *Manifest) *summary {
	s := &summary{kind: m.Kind}
	for _, o := range m.Objects() {
		if d := sumOf(o.Digest); !slices.Contains(s.objects, d) { // an empty blob may be a device twice
			s.objects = append(s.objects, d)
		}
	}
	for _, p := range m.Parents {
		s.parents = append(s.parents, sumOf(p))
	}
	for i, b := range m.Extra {
		u := extraUse{sumOf(b.Digest), m.ExtraUsed[i]}
		if b.Digest != m.Blob.Digest && !slices.ContainsFunc(s.extra, func(o extraUse) bool { return o.blob == u.blob }) {
			s.extra = append(s.extra, u)
		}
	}
	return s
}

// A name lies in one of two trees: names that only this node has, and copies of
// those of the shared store. A name of the node's own hides a shared one.
type tree byte

const (
	ownTree    tree = 'o'
	sharedTree tree = 's'
)

// projectNames are the names of one project.
type projectNames struct {
	order    []nameEntry // by name
	byDigest map[sum][]string
}

type nameEntry struct {
	name        string
	own, shared sum // zero: not in that tree
}

func (e *nameEntry) digest() sum {
	if e.own != (sum{}) {
		return e.own
	}
	return e.shared
}

func (e *nameEntry) set(t tree, d sum) {
	if t == ownTree {
		e.own = d
	} else {
		e.shared = d
	}
}

func (p *projectNames) find(name string) (int, bool) {
	return slices.BinarySearchFunc(p.order, name, func(e nameEntry, n string) int { return strings.Compare(e.name, n) })
}

// set makes the name mean d in a tree; zero removes it.
func (p *projectNames) set(t tree, name string, d sum) {
	i, ok := p.find(name)
	if !ok {
		p.order = slices.Insert(p.order, i, nameEntry{name: name})
	}
	e := &p.order[i]
	before := e.digest()
	e.set(t, d)
	after := e.digest()
	if before != after {
		p.unlink(before, name)
		p.link(after, name)
	}
	if after == (sum{}) {
		p.order = slices.Delete(p.order, i, i+1)
	}
}

func (p *projectNames) link(d sum, name string) {
	if d == (sum{}) {
		return
	}
	names := p.byDigest[d]
	if i, ok := slices.BinarySearch(names, name); !ok {
		p.byDigest[d] = slices.Insert(names, i, name)
	}
}

func (p *projectNames) unlink(d sum, name string) {
	names := p.byDigest[d]
	if i, ok := slices.BinarySearch(names, name); ok {
		names = slices.Delete(names, i, i+1)
	}
	if len(names) == 0 {
		delete(p.byDigest, d)
		return
	}
	p.byDigest[d] = names
}

func (x *index) project(name string) *projectNames {
	p := x.projects[name]
	if p == nil {
		p = &projectNames{byDigest: make(map[sum][]string)}
		x.projects[name] = p
	}
	return p
}

func (x *index) reset() {
	x.loaded = false
	x.projects, x.layers = make(map[string]*projectNames), make(map[sum]*summary)
	x.uses, x.children, x.extra = make(map[sum]int), make(map[sum][]sum), make(map[sum][]reference)
}

func (x *index) addLayer(d sum, s *summary) {
	x.removeLayer(d)
	x.layers[d] = s
	for _, o := range s.objects {
		x.uses[o]++
	}
	for _, p := range s.parents {
		x.children[p] = append(x.children[p], d)
	}
	for _, u := range s.extra {
		x.extra[u.blob] = append(x.extra[u.blob], reference{d.digest(), u.bytes})
	}
}

func (x *index) removeLayer(d sum) {
	s := x.layers[d]
	if s == nil {
		return
	}
	delete(x.layers, d)
	for _, o := range s.objects {
		if x.uses[o]--; x.uses[o] <= 0 {
			delete(x.uses, o)
		}
	}
	for _, p := range s.parents {
		left := slices.DeleteFunc(x.children[p], func(c sum) bool { return c == d })
		if len(left) == 0 {
			delete(x.children, p)
		} else {
			x.children[p] = left
		}
	}
	for _, u := range s.extra {
		// Readers may have the old list still.
		left := slices.DeleteFunc(slices.Clone(x.extra[u.blob]), func(r reference) bool { return r.layer == d.digest() })
		if len(left) == 0 {
			delete(x.extra, u.blob)
		} else {
			x.extra[u.blob] = left
		}
	}
}

// setTag changes a name's file with write, and notes it.
func (s *Store) setTag(t tree, r Ref, d Digest, write func() error) error {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	x.note(tagIntent(t, r))
	if err := write(); err != nil {
		x.drop() // what is on disk now is not known: read it again
		return err
	}
	x.note(tagRecord(t, r, d))
	if x.loaded {
		var to sum
		if d != "" {
			to = sumOf(d)
		}
		x.project(r.Project).set(t, r.String(), to)
	}
	return nil
}

// addManifest writes a manifest with write, which says whether it is new, and notes
// it. Nothing that it names is collected meanwhile, and not by a collection under way.
func (s *Store) addManifest(d Digest, m *Manifest, write func() (added bool, err error)) error {
	defer s.collector.look(d, m.Objects()...)()
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	x.note(layerIntent(d))
	added, err := write()
	if err != nil {
		x.drop()
		return err
	}
	sm := summarize(m)
	x.note(layerRecord(sumOf(d), sm))
	if added && x.loaded {
		x.addLayer(sumOf(d), sm)
	}
	return nil
}

// removeManifests has remove take the files of manifests away, and notes it.
func (s *Store) removeManifests(ds []Digest, remove func() error) error {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	intents := make([]string, len(ds))
	gone := make([]string, len(ds))
	for i, d := range ds {
		intents[i], gone[i] = layerIntent(d), layerGone(d)
	}
	x.note(intents...)
	if err := remove(); err != nil {
		x.drop()
		return err
	}
	x.note(gone...)
	if x.loaded {
		for _, d := range ds {
			x.removeLayer(sumOf(d))
		}
	}
	return nil
}

// note writes records of what is about to be, or was, changed. When they cannot be written the index goes: it can be made anew.
func (x *index) note(records ...string) {
	if x.log != nil && x.log.append(records...) != nil {
		x.drop()
	}
}

// drop forgets the index in memory and on disk.
func (x *index) drop() {
	if x.log != nil {
		x.log.remove()
		x.log = nil
	}
	x.reset()
}

// load reads the index if that was not done yet; x.mu is held.
func (s *Store) loadIndex(ctx context.Context) error {
	x := &s.index
	if x.loaded {
		if x.log != nil && x.log.bloated() {
			s.rewriteIndex()
		}
		return nil
	}
	x.reset()
	if x.log != nil {
		if err := s.replay(x); err == nil {
			x.loaded = true
			if x.log.bloated() {
				s.rewriteIndex()
			}
			return nil
		}
		x.drop()
	}
	if err := s.scanAll(ctx, x); err != nil {
		x.reset()
		return err
	}
	x.loaded = true
	s.rewriteIndex()
	return nil
}

// scanAll makes the index from the names and manifests themselves.
func (s *Store) scanAll(ctx context.Context, x *index) error {
	b := newIndexBuilder(x)
	err := s.walkManifests(ctx, func(d Digest) error {
		l, err := s.readManifest(d)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil && ctx.Err() != nil:
			return ctx.Err()
		case err != nil: // one that is damaged does not hide the others; who names it is told
			b.layer(sumOf(d), &summary{})
		default:
			b.layer(sumOf(d), summarize(&l.Manifest))
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, t := range []tree{ownTree, sharedTree} {
		err := s.eachTag(ctx, t, func(r Ref, d Digest, err error) error {
			if err != nil { // damaged: it resolves to nothing
				return nil //nolint:nilerr // resolving it says so
			}
			b.name(t, r.Project, r.String(), sumOf(d))
			return nil
		})
		if err != nil {
			return err
		}
	}
	b.finish()
	return nil
}

// indexBuilder collects everything before it is ordered once.
type indexBuilder struct {
	x     *index
	names map[string]map[string]*nameEntry
}

func newIndexBuilder(x *index) *indexBuilder {
	return &indexBuilder{x: x, names: make(map[string]map[string]*nameEntry)}
}

func (b *indexBuilder) layer(d sum, s *summary) { b.x.addLayer(d, s) }

func (b *indexBuilder) name(t tree, project, name string, d sum) {
	names := b.names[project]
	if names == nil {
		names = make(map[string]*nameEntry)
		b.names[project] = names
	}
	e := names[name]
	if e == nil {
		e = &nameEntry{name: name}
		names[name] = e
	}
	e.set(t, d)
}

func (b *indexBuilder) finish() {
	for project, names := range b.names {
		p := b.x.project(project)
		p.order = make([]nameEntry, 0, len(names))
		for _, e := range names {
			if e.digest() != (sum{}) {
				p.order = append(p.order, *e)
			}
		}
		slices.SortFunc(p.order, func(a, b nameEntry) int { return strings.Compare(a.name, b.name) })
		for _, e := range p.order { // in order, so that each layer's names are
			d := e.digest()
			p.byDigest[d] = append(p.byDigest[d], e.name)
		}
	}
}

// NamesOf returns the names in a project that point at a digest, sorted.
func (s *Store) NamesOf(ctx context.Context, project string, d Digest) ([]string, error) {
	project, err := checkProject(project)
	if err != nil {
		return nil, err
	}
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := s.loadIndex(ctx); err != nil {
		return nil, err
	}
	p := x.projects[project]
	if p == nil {
		return nil, nil
	}
	return slices.Clone(p.byDigest[sumOf(d)]), nil
}

func checkProject(project string) (string, error) {
	r, err := ParseRef(project, "any")
	return r.Project, err
}

// Children returns the layers that have d as a parent.
func (s *Store) Children(ctx context.Context, d Digest) ([]Digest, error) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := s.loadIndex(ctx); err != nil {
		return nil, err
	}
	var out []Digest
	for _, c := range x.children[sumOf(d)] {
		out = append(out, c.digest())
	}
	slices.Sort(out)
	return out, nil
}

// lastKnown returns the parents and objects that a layer had when its manifest could be read.
func (s *Store) lastKnown(ctx context.Context, d Digest) (parents, objects []sum, ok bool) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if s.loadIndex(ctx) != nil {
		return nil, nil, false
	}
	sm := x.layers[sumOf(d)]
	if sm == nil || sm.kind == "" {
		return nil, nil, false
	}
	return sm.parents, sm.objects, true
}

// ListOptions selects part of a listing.
type ListOptions struct {
	Project string
	Kind    Kind // empty: all
	// After is the Cursor of the last layer of the previous page.
	After string
	Limit int
}

// Listed is a layer with the names that point at it in the project.
type Listed struct {
	Layer
	Names []string // sorted, at least one
	// Problem, when not empty, says why the layer cannot be used. Only its digest is known then.
	Problem string
}

// Cursor identifies a place in the order of a listing.
func (l Listed) Cursor() string { return l.Names[0] }

// List returns the named layers of a project in the order of their first names,
// and whether there are more. It reads the manifests of the page and no others.
func (s *Store) List(ctx context.Context, o ListOptions) (page []Listed, _ bool, err error) {
	if o.Project, err = checkProject(o.Project); err != nil {
		return nil, false, err
	}
	s.refreshNames(ctx, o.Project)
	limit := o.Limit
	for {
		found, more, err := s.listPage(ctx, o)
		if err != nil {
			return nil, false, err
		}
		if err := s.describeAll(ctx, found); err != nil {
			return nil, false, err
		}
		for _, l := range found {
			o.After = l.Cursor()
			if o.Kind == "" || l.Kind == o.Kind {
				page = append(page, l)
			}
		}
		if !more || len(page) >= limit {
			return page, more, nil
		}
		o.Limit = limit - len(page)
	}
}

// describeAll reads the manifests of a page. Those of the shared store are fetched, several at once.
func (s *Store) describeAll(ctx context.Context, page []Listed) error {
	gate := make(chan struct{}, 16)
	var wg sync.WaitGroup
	for i := range page {
		l := &page[i]
		found, err := s.Load(l.Digest)
		if err == nil || s.remote == nil || !errs.Is(err, errs.NotFound) {
			l.fill(found, err)
			continue
		}
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			found, err := s.Find(ctx, l.Digest)
			l.fill(found, err)
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

func (l *Listed) fill(found Layer, err error) {
	switch {
	case err == nil:
		l.Layer = found
	case errs.Is(err, errs.NotFound):
		l.Problem = "its manifest is missing"
	default:
		l.Problem = err.Error()
	}
}

func (s *Store) listPage(ctx context.Context, o ListOptions) (page []Listed, more bool, err error) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := s.loadIndex(ctx); err != nil {
		return nil, false, err
	}
	p := x.projects[o.Project]
	if p == nil {
		return nil, false, nil
	}
	i, found := p.find(o.After)
	if found {
		i++
	}
	for _, e := range p.order[i:] {
		d := e.digest()
		names := p.byDigest[d]
		if names[0] != e.name {
			continue // listed where its first name is
		}
		if sm := x.layers[d]; o.Kind != "" && (sm == nil || sm.kind != o.Kind) && !s.kindUnknown(sm) {
			continue
		}
		if len(page) == o.Limit {
			return page, true, nil
		}
		page = append(page, Listed{Layer: Layer{Digest: d.digest()}, Names: slices.Clone(names)})
	}
	return page, false, nil
}

// kindUnknown: a layer of the shared store whose manifest this node has not read
// yet is listed whatever kind is asked for, and left out by List when it turns out to be of another.
func (s *Store) kindUnknown(sm *summary) bool { return sm == nil && s.remote != nil }

func (s *Store) catalogPath() string { return filepath.Join(s.dir, "index") }
