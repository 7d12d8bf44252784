package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// Push copies a layer that this node has to the shared store and, when ref is a
// name, has the name point at it there. What the store has already is not sent again.
func (s *Store) Push(ctx context.Context, project, ref string, progress func(Progress)) (Layer, error) {
	if s.remote == nil {
		return Layer{}, errs.E(errs.Precondition, "this node has no shared store").WithHint("start it with `harena up --store URL`")
	}
	r, err := ParseRef(project, ref)
	if err != nil {
		return Layer{}, err
	}
	defer s.Hold()()
	l, err := s.resolve(ctx, r)
	if err != nil {
		return Layer{}, err
	}
	report := newReporter(progress)
	if r.Digest != "" {
		return l, s.remote.publish(ctx, s, l, report)
	}
	return l, s.point(ctx, r, l, report)
}

// publish makes the shared store have a layer: parents, objects, then the
// manifest. What an interrupted call has sent is not sent again.
func (r *sharedStore) publish(ctx context.Context, s *Store, l Layer, report *reporter) error {
	for _, p := range l.Parents {
		below, err := s.Find(ctx, p)
		if err != nil {
			return err
		}
		if err := r.publish(ctx, s, below, report); err != nil {
			return err
		}
	}
	what := fmt.Sprintf("store layer %s", l.Digest)
	if err := r.confirm(ctx, s); err != nil {
		return r.failed(what, err)
	}
	// As it was read: a newer version may have written more into it than this one knows.
	manifest, err := os.ReadFile(s.manifestPath(l.Digest))
	if err != nil {
		return s.diskError(err)
	}
	// First of all, so that a collection on another node keeps what is found: it learns from the use what the layer needs.
	// One that has not seen it, and may be about to remove what is found, is waited for.
	if err := r.putBytes(ctx, r.useName(l.Digest), manifest); err != nil {
		return r.failed(what, err)
	}
	if err := r.awaitSteps(ctx); err != nil {
		return r.failed(what, err)
	}
	var total int64
	for _, o := range l.Objects() {
		total += o.Size
	}
	if report != nil {
		report.start(PhaseStoring, "sending to the shared store", total)
	}
	for i, o := range l.Objects() {
		part := partIndex
		switch {
		case i == 0:
			part = partMeta
		case i <= 1+len(l.Extra):
			part = partData
		}
		if err := r.putObject(ctx, s, o, part, report, total); err != nil {
			return r.failed(what, err)
		}
	}
	// Also when it is there: that makes it young.
	if err := r.putBytes(ctx, manifestName(l.Digest), manifest); err != nil {
		return r.failed(what, err)
	}
	r.worked()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.missing, l.Digest)
	r.used[l.Digest] = true
	return nil
}

// part is what an object is to its layer.
type part int

const (
	partMeta part = iota
	partData
	partIndex // of chunks
)

const (
	denseFrame = 1 << 20
	// denseSize bounds what is compressed at a tenth of the usual speed.
	denseSize = 64 << 20
)

// putObject makes the store have an object.
func (r *sharedStore) putObject(ctx context.Context, s *Store, o Object, what part, report *reporter, total int64) error {
	name := blobName(o.Digest)
	raw := what == partData && r.o.Direct != ""
	if raw {
		name = rawName(o.Digest)
	}
	info, err := r.store.Stat(ctx, name)
	if err == nil && (!raw || info.Size == o.Size) {
		if report != nil {
			report.add(PhaseStoring, o.Size, total)
		}
		return nil
	}
	if err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}
	f, err := s.local.open(o.Digest)
	if errors.Is(err, fs.ErrNotExist) {
		return errs.E(errs.Precondition, "neither this node nor the shared store has object %s", o.Digest).
			WithHint("import the layer again")
	}
	if err != nil {
		return s.diskError(err)
	}
	defer f.Close()
	in := reported(io.NewSectionReader(f, 0, f.size()), report, total)
	if raw {
		return r.store.Put(ctx, name, in)
	}
	want := blob.Sum(sumOf(o.Digest))
	options := blob.CompressOptions{Want: &want}
	// The metadata is fetched whole by every node, before the layer can be mounted there.
	if what == partMeta && o.Size <= denseSize {
		options.Dense, options.FrameSize = true, denseFrame
	}
	_, err = blob.PutCompressed(ctx, r.store, name, in, options)
	return err
}

// refreshNames makes the copies of a project's shared names what they are now. When
// that fails, the listing shows what is known.
func (s *Store) refreshNames(ctx context.Context, project string) {
	r := s.remote
	if r == nil || r.outage() {
		return
	}
	r.mu.Lock()
	recent := time.Since(r.synced[project]) < tagTTL
	r.mu.Unlock()
	if recent {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, refreshTime)
	defer cancel()
	if err := r.syncNames(ctx, s, project); err != nil {
		return // noted; the listing goes on with what is known
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.synced) >= maxRecent {
		clear(r.synced)
	}
	r.synced[project] = time.Now()
}

// syncNames reads the names that changed. A copy's time of modification is that of the original.
func (r *sharedStore) syncNames(ctx context.Context, s *Store, project string) error {
	there := make(map[string]bool)
	var changed []Ref
	times := make(map[Ref]time.Time)
	err := r.list(ctx, "tags/"+dirName(project)+"/", func(i blob.Info) error {
		ref, ok := refOf(i.Name)
		if !ok || ref.Project != project {
			return nil
		}
		there[ref.String()] = true
		if fi, err := os.Lstat(s.tagPath(sharedTree, ref)); err != nil || !fi.ModTime().Equal(i.Modified) {
			changed = append(changed, ref)
			times[ref] = i.Modified
		}
		return nil
	})
	if err == nil {
		err = r.confirm(ctx, s)
	}
	if err != nil {
		return r.failed("list names", err)
	}
	r.worked()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failures []error
	gate := make(chan struct{}, 16)
	for _, ref := range changed {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			d, err := r.readTag(ctx, s, ref)
			if err == nil {
				if before, berr := s.readTagFile(sharedTree, ref); berr != nil || before != d {
					err = s.writeTag(sharedTree, ref, d)
				}
			}
			if err == nil {
				err = os.Chtimes(s.tagPath(sharedTree, ref), times[ref], times[ref])
			}
			if err != nil && !errs.Is(err, errs.NotFound) {
				mu.Lock()
				defer mu.Unlock()
				failures = append(failures, err)
			}
		})
	}
	wg.Wait()
	gone, err := s.sharedNamesBut(ctx, project, there)
	if err != nil {
		return err
	}
	for _, name := range gone {
		ref, err := parseName(project, name)
		if err != nil {
			return err
		}
		if err := s.removeTag(sharedTree, ref); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// sharedNamesBut lists copies of shared names that are not in keep.
func (s *Store) sharedNamesBut(ctx context.Context, project string, keep map[string]bool) ([]string, error) {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := s.loadIndex(ctx); err != nil {
		return nil, err
	}
	var out []string
	if p := x.projects[project]; p != nil {
		for _, e := range p.order {
			if e.shared != (sum{}) && !keep[e.name] {
				out = append(out, e.name)
			}
		}
	}
	return out, nil
}

// list calls f for every object below a prefix.
func (r *sharedStore) list(ctx context.Context, prefix string, f func(blob.Info) error) error {
	const page = 10_000
	after := ""
	for {
		found, err := r.store.List(ctx, prefix, after, page)
		if err != nil {
			return err
		}
		for _, i := range found {
			if err := f(i); err != nil {
				return err
			}
		}
		if len(found) < page {
			return nil
		}
		after = found[len(found)-1].Name
	}
}

// refOf reads the name of a tag's object; what others put there is none.
func refOf(object string) (Ref, bool) {
	dir, tag := filepath.Split(object)
	dir, name := filepath.Split(filepath.Clean(dir))
	prefix, project := filepath.Split(filepath.Clean(dir))
	r := Ref{Project: pathName(project), Name: pathName(name), Tag: tag}
	ok := prefix == "tags/" && tagPattern.MatchString(r.Tag) && pathPattern.MatchString(r.Name) && pathPattern.MatchString(r.Project)
	return r, ok
}
