package lifecycle

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Get returns a sandbox. Its counters are read afresh.
func (e *Edge) Get(id string) (*harenav1.Sandbox, error) {
	parsed, err := sandbox.ParseID(id)
	if err != nil {
		return nil, err
	}
	b, err := e.find(parsed)
	if err != nil {
		return nil, err
	}
	if b.state() == sandbox.Running {
		e.look(b)
	}
	return b.face.Load().view, nil
}

const (
	defaultPage = 1000
	maxPage     = 10_000
)

// List returns a page of the sandboxes that match, oldest first.
func (e *Edge) List(req *harenav1.ListRequest) (*harenav1.ListResponse, error) {
	size := int(req.GetPage().GetSize())
	switch {
	case size == 0:
		size = defaultPage
	case size < 0 || size > maxPage:
		return nil, errs.OverLimit(errs.Invalid, "page size", maxPage, size)
	}
	after, err := decodeToken(req.GetPage().GetToken())
	if err != nil {
		return nil, err
	}
	type item struct {
		key  string
		view *harenav1.Sandbox
	}
	var found []item
	for _, b := range e.snapshot() {
		f := b.face.Load()
		r := f.rec
		if r.State.Ended() && !req.GetAll() || !inProject(r.Project, req.GetProject()) || !matches(r, req.GetJob(), req.GetLabels()) {
			continue
		}
		if key := pageKey(r); key > after {
			found = append(found, item{key, f.view})
		}
	}
	slices.SortFunc(found, func(a, b item) int { return strings.Compare(a.key, b.key) })
	resp := &harenav1.ListResponse{}
	if len(found) > size {
		found = found[:size]
		resp.NextPageToken = base64.RawURLEncoding.EncodeToString([]byte(found[size-1].key))
	}
	for _, f := range found {
		resp.Sandboxes = append(resp.Sandboxes, f.view)
	}
	return resp, nil
}

// pageKey orders by age; the number is as wide as an int64 can be.
func pageKey(r *Record) string { return fmt.Sprintf("%020d/%s", r.Created.UnixNano(), r.ID()) }

func decodeToken(token string) (string, error) {
	key, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || token != "" && len(key) != 20+1+20 {
		return "", errs.E(errs.Invalid, "page token %.80q is not one of this server", token).WithHint("use next_page_token of the previous answer")
	}
	return string(key), nil
}

// SetLifetime changes lifetimes; an empty one renews leases.
func (e *Edge) SetLifetime(ctx context.Context, req *harenav1.SetLifetimeRequest) (*harenav1.SetLifetimeResponse, error) {
	boxes, missing, err := e.selected(req.GetSelector(), sandbox.State.Live)
	if err != nil {
		return nil, err
	}
	outcomes := e.each(ctx, boxes, func(b *box) error { return e.setLifetime(ctx, b, req.GetLifetime()) })
	return &harenav1.SetLifetimeResponse{Outcomes: append(outcomes, missing...)}, nil
}

func (e *Edge) setLifetime(ctx context.Context, b *box, change *harenav1.Lifetime) error {
	select {
	case <-b.made:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	err := e.commit(b, false, func(r *Record) error {
		if !r.State.Live() {
			return notRunning(r)
		}
		spec := proto.Clone(r.Spec).(*harenav1.SandboxSpec)
		spec.Lifetime = mergeLifetime(r.Spec.GetLifetime(), change)
		spec, err := sandbox.Normalize(spec)
		if err != nil {
			return err
		}
		if err := e.supported(spec); err != nil {
			return err
		}
		*r = withLifetime(*r, change, spec, e.clock.Now())
		return r.setSpec(spec)
	})
	if err != nil {
		return err
	}
	e.review(b)
	return nil
}

// Watch calls send with the selected sandboxes as they are, then with synced, then with every change. A reader that is much too
// slow misses states in between, never the last one.
func (e *Edge) Watch(ctx context.Context, req *harenav1.WatchRequest, send func(s *harenav1.Sandbox, synced bool) error) error {
	s := req.GetSelector()
	match := func(r *Record) bool {
		if len(s.GetIds()) > 0 && !slices.Contains(s.GetIds(), string(r.ID())) {
			return false
		}
		return inProject(r.Project, req.GetProject()) && matches(r, s.GetJob(), s.GetLabels())
	}
	w := e.watchers.add()
	defer e.watchers.remove(w)
	sent := map[string]int64{}
	boxes := e.snapshot()
	slices.SortFunc(boxes, byAge)
	for _, b := range boxes {
		f := b.face.Load()
		if !match(f.rec) {
			continue
		}
		sent[f.view.GetId()] = f.version
		if err := send(f.view, false); err != nil {
			return err
		}
	}
	if err := send(nil, true); err != nil {
		return err
	}
	for {
		for _, f := range w.take() {
			// A change may have been queued while the initial states were read, which had it already.
			if !match(f.rec) || f.version <= sent[f.view.GetId()] {
				continue
			}
			delete(sent, f.view.GetId())
			if err := send(f.view, false); err != nil {
				return err
			}
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-e.ctx.Done():
			return nil
		}
	}
}

// watchers are the readers of changes. Telling them never waits.
type watchers struct {
	mu  sync.Mutex
	all map[*watcher]bool
}

type watcher struct {
	wake chan struct{}

	mu    sync.Mutex
	queue []*face
}

// maxQueue bounds what waits for one reader, apart from one state for each sandbox.
const maxQueue = 4096

func (ws *watchers) add() *watcher {
	w := &watcher{wake: make(chan struct{}, 1)}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.all == nil {
		ws.all = map[*watcher]bool{}
	}
	ws.all[w] = true
	return w
}

func (ws *watchers) remove(w *watcher) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	delete(ws.all, w)
}

func (ws *watchers) tell(f *face) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.all {
		w.put(f)
	}
}

func (w *watcher) put(f *face) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, f)
	if n := len(w.queue); n >= maxQueue && n%maxQueue == 0 {
		w.queue = newest(w.queue)
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *watcher) take() []*face {
	w.mu.Lock()
	defer w.mu.Unlock()
	queue := w.queue
	w.queue = nil
	return queue
}

// newest keeps the last state of each sandbox.
func newest(queue []*face) []*face {
	last := make(map[string]int64, len(queue))
	for _, f := range queue {
		last[f.view.GetId()] = f.version
	}
	return slices.DeleteFunc(queue, func(f *face) bool { return last[f.view.GetId()] != f.version })
}
