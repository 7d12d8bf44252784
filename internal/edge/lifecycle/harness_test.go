package lifecycle

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/memory"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// layersFake knows base, ws, tool and broken (cannot be mounted).
type layersFake struct {
	mu     sync.Mutex
	owners map[string][]string
	holds  int
}

func (l *layersFake) Compose(_ context.Context, _ string, spec *harenav1.SandboxSpec) (Composition, error) {
	c := Composition{Config: &harenav1.ImageConfig{Env: []string{"PATH=/bin", "A=image"}, User: "app", WorkingDir: "/srv"}}
	for _, name := range append([]string{spec.GetImage(), spec.GetWorkspace()}, spec.GetToolkits()...) {
		switch name {
		case "":
		case "base", "ws", "tool", "broken":
			c.Layers = append(c.Layers, Layer{Name: name, Digest: fmt.Sprintf("sha256:%064x", name), Kind: "base"})
		default:
			if !strings.HasPrefix(name, "sha256:") {
				return c, errs.E(errs.NotFound, "layer %s does not exist", name).On("layer %s", name)
			}
			c.Layers = append(c.Layers, Layer{Digest: name, Kind: "snapshot"})
		}
	}
	return c, nil
}

func (l *layersFake) Hold() func() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holds++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.holds--
	}
}

func (l *layersFake) Acquire(_ context.Context, owner string, digests []string) ([]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.Contains(digests, fmt.Sprintf("sha256:%064x", "broken")) {
		return nil, errs.E(errs.Internal, "cannot be mounted")
	}
	if l.owners == nil {
		l.owners = map[string][]string{}
	}
	l.owners[owner] = digests
	return slices.Clone(digests), nil
}

func (l *layersFake) Adopt(owner string, digests []string) error {
	_, err := l.Acquire(context.Background(), owner, digests)
	return err
}

func (l *layersFake) Release(owner string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.owners, owner)
	return nil
}

func (l *layersFake) Leaks() ([]backend.Leak, error) { return nil, nil }

func (l *layersFake) Checks(context.Context) []*harenav1.Check {
	return []*harenav1.Check{{Name: "layers", Status: "ok"}}
}

func (l *layersFake) held() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.owners) + l.holds
}

type nodeFake struct {
	mu    sync.Mutex
	snap  admission.Snapshot
	kills int64
}

func newNodeFake() *nodeFake {
	return &nodeFake{snap: admission.Snapshot{
		MemoryTotal: 16 << 30, MemoryAvailable: 12 << 30, DiskTotal: 100 << 30, DiskFree: 50 << 30, InodesFree: -1, Pids: -1, PidsMax: -1, FDs: 10, FDsMax: 1 << 20,
	}}
}

func (n *nodeFake) Snapshot() admission.Snapshot {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.snap
}

func (n *nodeFake) OOMKills() int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.kills
}

func (n *nodeFake) set(change func(*nodeFake)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(n)
}

// clockFake stands still until it is moved.
type clockFake struct {
	mu      sync.Mutex
	now     time.Time
	waiting map[chan time.Time]time.Time
}

func newClockFake() *clockFake {
	return &clockFake{now: time.Unix(1_800_000_000, 0), waiting: map[chan time.Time]time.Time{}}
}

func (c *clockFake) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clockFake) At(t time.Time) (<-chan time.Time, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := make(chan time.Time, 1)
	if !t.After(c.now) {
		ch <- c.now
		return ch, func() {}
	}
	c.waiting[ch] = t
	return ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.waiting, ch)
	}
}

func (c *clockFake) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	for ch, t := range c.waiting {
		if !t.After(c.now) {
			ch <- c.now
			delete(c.waiting, ch)
		}
	}
}

// world is a node on which servers come and go.
type world struct {
	t       testing.TB
	path    string
	slots   string
	layers  *layersFake
	node    *memory.Node
	machine *nodeFake
	clock   *clockFake
	options memory.Options
	handler func(sandbox.ID) http.Handler
	config  func(*Config)
	dir     *datadir.Dir
	edge    *Edge
}

func newWorld(t testing.TB) *world {
	t.Helper()
	// Not t.TempDir alone: its name has that of the test in it.
	root, err := os.MkdirTemp("", "lifecycle")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	w := &world{t: t, path: filepath.Join(root, "data"), slots: t.TempDir(), layers: &layersFake{}, machine: newNodeFake(), clock: newClockFake()}
	w.node, err = memory.NewNode("", func(id sandbox.ID) http.Handler {
		if w.handler != nil {
			return w.handler(id)
		}
		return http.NotFoundHandler()
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.down()
		_ = w.node.Close()
	})
	return w
}

func (w *world) try() error {
	dir, err := datadir.Open(w.path, datadir.Options{Rand: rand.Reader, Slots: w.slots, NoMount: true})
	if err != nil {
		return err
	}
	c := Config{
		Dir: dir, Backends: []backend.Backend{memory.New(w.node, w.options)}, Layers: w.layers, Rand: rand.Reader,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Clock: w.clock, Node: w.machine, Poll: -1, Version: "test",
	}
	if w.config != nil {
		w.config(&c)
	}
	edge, err := Open(w.t.Context(), c)
	if err != nil {
		_ = dir.Close()
		return err
	}
	w.dir, w.edge = dir, edge
	return nil
}

func (w *world) up() *Edge {
	w.t.Helper()
	if err := w.try(); err != nil {
		w.t.Fatalf("open: %v", err)
	}
	return w.edge
}

func (w *world) down() {
	if w.edge == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := w.edge.Shutdown(ctx); err != nil {
		w.t.Errorf("shutdown: %v", err)
	}
	if err := w.dir.Close(); err != nil {
		w.t.Errorf("close: %v", err)
	}
	w.edge = nil
}

func (w *world) restart() *Edge {
	w.t.Helper()
	w.down()
	w.layers.mu.Lock()
	w.layers.owners = nil
	w.layers.mu.Unlock()
	return w.up()
}

func spec(change ...func(*harenav1.SandboxSpec)) *harenav1.SandboxSpec {
	s := &harenav1.SandboxSpec{Image: "base"}
	for _, c := range change {
		c(s)
	}
	return s
}

func (w *world) create(change ...func(*harenav1.SandboxSpec)) *harenav1.Sandbox {
	w.t.Helper()
	resp, err := w.edge.Create(w.t.Context(), &edgev1.CreateRequest{Spec: spec(change...), Project: "lab"})
	if err != nil {
		w.t.Fatalf("create: %v", err)
	}
	return resp.GetSandbox()
}

func (w *world) stop(ids ...string) []*harenav1.Outcome {
	w.t.Helper()
	resp, err := w.edge.Stop(w.t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Ids: ids}})
	if err != nil {
		w.t.Fatalf("stop: %v", err)
	}
	return resp.GetOutcomes()
}

// reach waits until a sandbox is in a state. Nothing is asserted about how long that takes.
func (w *world) reach(id string, state sandbox.State) *harenav1.Sandbox {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 20*time.Second)
	defer cancel()
	var last *harenav1.Sandbox
	found := errors.New("found")
	err := w.edge.Watch(ctx, &harenav1.WatchRequest{Selector: &harenav1.Selector{Ids: []string{id}}}, func(s *harenav1.Sandbox, _ bool) error {
		if s != nil {
			last = s
		}
		if s.GetState() == string(state) {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		w.t.Fatalf("sandbox %s is not %s but %v (%v)", id, state, last, err)
	}
	return last
}

// eventually waits until a condition holds.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			w.t.Fatalf("not %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (w *world) kinds() []string {
	w.t.Helper()
	if err := w.edge.Events().Flush(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	found, _, err := w.edge.Events().List(nil, 0, 100_000)
	if err != nil {
		w.t.Fatal(err)
	}
	kinds := make([]string, len(found))
	for i, ev := range found {
		kinds[i] = ev.GetKind()
	}
	return kinds
}

// empty fails unless nothing at all is left of any sandbox.
func (w *world) empty() {
	w.t.Helper()
	if n := w.node.Len(); n != 0 {
		w.t.Errorf("%d sandboxes are left in the backend", n)
	}
	if n := w.layers.held(); n != 0 {
		w.t.Errorf("%d owners of layers are left", n)
	}
	w.edge.mu.RLock()
	free := w.edge.ranges.Available()
	w.edge.mu.RUnlock()
	if free != 8192 {
		w.t.Errorf("%d ID ranges are free, want 8192", free)
	}
	if n := w.edge.alive.Load(); n != 0 {
		w.t.Errorf("%d sandboxes count as alive", n)
	}
	<-w.edge.trash.wait()
	if names, err := os.ReadDir(filepath.Join(w.path, "trash")); err != nil || len(names) != 0 {
		w.t.Errorf("the trash has %d entries, %v", len(names), err)
	}
	for _, c := range w.edge.Doctor(w.t.Context()).GetChecks() {
		if c.GetStatus() == statusLeaked {
			w.t.Errorf("doctor: %v", c)
		}
	}
}

// dirs are the sandboxes' directories.
func (w *world) dirs() []string {
	w.t.Helper()
	entries, err := os.ReadDir(filepath.Join(w.path, "sandboxes"))
	if err != nil {
		w.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func statusHook(change func(*guestv1.StatusResponse)) func(sandbox.ID, *guestv1.StatusResponse) {
	return func(_ sandbox.ID, s *guestv1.StatusResponse) { change(s) }
}
