package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/blobd"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// storeConfig says which store a node shares with others.
type storeConfig struct {
	url   string
	cache int64 // bytes of DIR/cache/data; 0: the default
}

// blobdMemory of blobd is not reclaimed for sandboxes, which all wait for it: its program, heap and frames in memory (64 MiB).
const blobdMemory = 128 << 20

// shared is a node's side of a store that it shares with others.
type shared struct {
	option layer.Option
	client *blobd.Client // nil: data blobs are mounted from the store itself
	happen happenings
}

// openShared opens the store and has a blobd serve what is lazy.
func openShared(ctx context.Context, c storeConfig, dir *datadir.Dir, log *slog.Logger) (*shared, error) {
	plainURL, direct, err := parseStore(c.url)
	if err != nil {
		return nil, err
	}
	store, err := openStore(ctx, plainURL, dir.Path())
	if err != nil {
		return nil, err
	}
	s := &shared{}
	s.option = layer.WithShared(store, layer.SharedOptions{
		Node: string(dir.Edge()), URL: plainURL, Direct: direct,
		Event: func(kind, message string) { s.happen.add(happening{kind: kind, message: message}) },
	})
	if direct != "" {
		return s, nil
	}
	root, err := cgroup.Open("harena-" + string(dir.Edge()))
	if err != nil {
		return nil, err
	}
	group, err := root.Service(blobdMemory)
	if err != nil {
		return nil, err
	}
	launch, err := blobdLaunch(blobd.Config{Dir: dir.Path(), Store: plainURL, CacheBytes: c.cache}, group, log.With("part", "blobd"), s.blobdEvent)
	if err != nil {
		return nil, err
	}
	if s.client, err = blobd.Start(ctx, launch); err != nil {
		return nil, err
	}
	return s, nil
}

// openStore opens a store for the node that has its data in dir. A store that answered it before may be away for the moment; the
// first time that is a mistake in the URL or the credentials.
func openStore(ctx context.Context, url, dir string) (blob.Store, error) {
	known := layer.KnowsStore(dir, url)
	store, err := blob.Open(ctx, url, blob.Options{CredentialsFile: filepath.Join(dir, storeCredentials), Known: known})
	if err != nil || known {
		return store, err
	}
	if _, err := store.List(ctx, "", "", 1); err != nil {
		return nil, err
	}
	return store, nil
}

// parseStore takes our own parameter out of a store's URL.
func parseStore(raw string) (plainURL, direct string, err error) {
	u, err := url.Parse(raw)
	if err != nil {
		return "", "", errs.E(errs.Invalid, "the store %.200q is no URL", raw).WithHint("use file:///DIR[?direct=1] or s3://BUCKET[/PREFIX][?endpoint=…&region=…]")
	}
	q := u.Query()
	if !q.Has("direct") {
		return raw, "", nil
	}
	if u.Scheme != "file" {
		return "", "", errs.E(errs.Invalid, "direct is for stores that are directories").WithHint("use it with file:///DIR only")
	}
	if v := q.Get("direct"); v == "1" {
		direct = filepath.Clean(u.Path)
	} else if v != "0" {
		return "", "", errs.E(errs.Invalid, "direct=%.20s is neither 0 nor 1", v).WithHint("use file:///DIR?direct=1")
	}
	q.Del("direct")
	u.RawQuery = q.Encode()
	return u.String(), direct, nil
}

// close leaves blobd running.
func (s *shared) close() {
	if s != nil && s.client != nil {
		s.client.Close()
	}
}

// blobs returns what serves lazy blobs; nil when nothing does.
func (s *shared) blobs() layer.Blobs {
	if s == nil || s.client == nil {
		return nil
	}
	return lazyBlobs{s.client}
}

// lazyBlobs has blobd serve data blobs.
type lazyBlobs struct{ client *blobd.Client }

// Attach implements layer.Blobs.
func (l lazyBlobs) Attach(ctx context.Context, d layer.Digest, blobs []layer.Object) ([]string, error) {
	in := make([]blobd.Object, len(blobs))
	for i, b := range blobs {
		in[i] = blobd.Object{Digest: b.Digest.Hex(), Size: b.Size, Root: b.Root}
	}
	found, err := l.client.Attach(ctx, d.Hex(), in)
	if err != nil {
		return nil, err
	}
	paths := make([]string, len(found))
	for i, p := range found {
		paths[i] = p.Path
	}
	return paths, nil
}

// Detach implements layer.Blobs.
func (l lazyBlobs) Detach(ctx context.Context, d layer.Digest) error {
	return l.client.Detach(ctx, d.Hex())
}

// happening is something that the edge's events tell, and maybe degrades sandboxes.
type happening struct {
	kind, message string
	layers        []layer.Digest
	blob          string
}

// happenings wait until there is an edge to tell.
type happenings struct {
	mu      sync.Mutex
	tell    func(happening)
	waiting []happening
}

const maxWaiting = 1000

func (h *happenings) add(e happening) {
	h.mu.Lock()
	tell := h.tell
	if tell == nil && len(h.waiting) < maxWaiting {
		h.waiting = append(h.waiting, e)
	}
	h.mu.Unlock()
	if tell != nil {
		tell(e)
	}
}

func (h *happenings) to(tell func(happening)) {
	h.mu.Lock()
	h.tell = tell
	waiting := h.waiting
	h.waiting = nil
	h.mu.Unlock()
	for _, e := range waiting {
		tell(e)
	}
}

func (s *shared) blobdEvent(e blobd.Event) {
	s.happen.add(happening{kind: e.Kind, message: e.Message, layers: digestsOf(e.Layers), blob: e.Blob})
}

func digestsOf(names []string) []layer.Digest {
	var out []layer.Digest
	for _, n := range names {
		if d, err := layer.ParseDigest("sha256:" + n); err == nil {
			out = append(out, d)
		}
	}
	return out
}

// lostSince tells the mounts which layers were lost while no server ran.
func (s *shared) lostSince(ctx context.Context, mounts *layer.Mounts) error {
	if s == nil || s.client == nil {
		return nil
	}
	st, err := s.client.Status(ctx)
	if err != nil {
		return err
	}
	var lost []string
	for _, l := range st.Layers {
		if l.Degraded {
			lost = append(lost, l.Layer)
		}
	}
	mounts.Lost(digestsOf(lost))
	return nil
}

// report passes happenings on to the edge from now on.
func (s *shared) report(edge *lifecycle.Edge, mounts *layer.Mounts) {
	if s == nil {
		return
	}
	s.happen.to(func(e happening) {
		attrs := map[string]string{}
		if e.blob != "" {
			attrs["blob"] = e.blob
		}
		if len(e.layers) > 0 {
			names := make([]string, 0, len(e.layers))
			for _, d := range e.layers[:min(len(e.layers), 16)] {
				names = append(names, string(d))
			}
			attrs["layer"] = strings.Join(names, " ")
		}
		var hit []string
		switch e.kind {
		case blobd.EventDegraded:
			hit = mounts.Lost(e.layers)
		case blobd.EventComplete:
			mounts.Renew(e.layers)
		}
		edge.Events().Append(&harenav1.Event{Kind: e.kind, Message: e.message, Attributes: attrs})
		for _, id := range hit {
			edge.SetDegraded(id, degradedText(mounts, id))
		}
	})
	for _, id := range mounts.OwnersOf(mounts.Dead()) {
		edge.SetDegraded(id, degradedText(mounts, id))
	}
}

func degradedText(mounts *layer.Mounts, owner string) []string {
	var out []string
	for _, d := range mounts.Degraded(owner) {
		out = append(out, "reads of layer "+string(d)+" that are not cached fail: its data was not served for too long")
	}
	return out
}

// checks reports on the store and blobd.
func (s *shared) checks(ctx context.Context, store *layer.Store) []*harenav1.Check {
	if s == nil {
		return nil
	}
	reach := &harenav1.Check{Name: "store", Status: "ok", Detail: "the shared store answers"}
	if err := store.CheckShared(ctx); err != nil {
		reach.Status, reach.Detail, reach.Hint = "degraded", err.Error(), "layers that are here whole go on working"
	}
	out := []*harenav1.Check{reach}
	if s.client == nil {
		return out
	}
	c := &harenav1.Check{Name: "blobd", Status: "ok"}
	st, err := s.client.Status(ctx)
	if err != nil {
		c.Status, c.Detail, c.Hint = "degraded", "blobd does not answer: "+err.Error(), "it is started again by itself; DIR/blobd/log says why it ended"
		return append(out, c)
	}
	lazy, broken := 0, 0
	for _, l := range st.Layers {
		lazy += l.Lazy
		if l.Degraded {
			broken++
		}
	}
	c.Detail = fmt.Sprintf("pid %d serves %d blobs of %d layers, %d reads wait for the store; its cache has %d of %d MiB",
		st.Pid, lazy, len(st.Layers), st.Waiting, st.Cache.Used>>20, st.Cache.Limit>>20)
	if st.Store.Out {
		c.Status, c.Hint = "degraded", "reads of what is not cached wait, then fail, until the store is back"
		c.Detail += fmt.Sprintf("; the store has not answered since %s: %s", st.Store.Since.Format(time.RFC3339), st.Store.Error)
	}
	if st.HolderPid == 0 {
		c.Status, c.Detail = "degraded", c.Detail+"; nobody holds its connection, so its death would be seen"
	}
	if broken > 0 {
		c.Status, c.Detail = "degraded", fmt.Sprintf("%s; %d layers were lost and are mounted anew for new sandboxes", c.Detail, broken)
	}
	return append(out, c)
}
