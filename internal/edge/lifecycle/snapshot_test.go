package lifecycle

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// packerFake makes layers that are nothing but digests. It notes what is not as the life cycle promises.
type packerFake struct {
	w  *world
	mu sync.Mutex
	// fail, if set, is asked before each method's effect.
	fail func(method string) error
	// wait, if set, is called in Capture.
	wait      func(context.Context) error
	open      int
	published []PackOptions
	collected int
	wrong     []string
}

func (p *packerFake) ask(method string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail == nil {
		return nil
	}
	return p.fail(method)
}

func (p *packerFake) Begin(_ context.Context, o PackOptions) (Packing, error) {
	if err := p.ask("begin"); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open++
	return &packingFake{p: p, o: o}, nil
}

func (p *packerFake) Collect(context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.collected++
	return nil
}

// settled fails unless every packing is closed, and nothing was wrong.
func (p *packerFake) settled(published int) {
	p.w.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open != 0 || len(p.published) != published || len(p.wrong) > 0 {
		p.w.t.Errorf("%d layers are begun, %d published (want %d); %q", p.open, len(p.published), published, p.wrong)
	}
}

type packingFake struct {
	p      *packerFake
	o      PackOptions
	closed bool
}

func (k *packingFake) Capture(ctx context.Context, upper string) error {
	if err := k.p.ask("capture"); err != nil {
		return err
	}
	if id := sandbox.ID(k.o.Sandbox); !k.p.w.node.Frozen(id) {
		k.p.mu.Lock()
		k.p.wrong = append(k.p.wrong, "files were captured while the sandbox ran")
		k.p.mu.Unlock()
	}
	if _, err := os.Stat(upper); err != nil {
		return err
	}
	if wait := k.p.wait; wait != nil {
		return wait(ctx)
	}
	return nil
}

func (k *packingFake) Finish(_ context.Context, pin func(Layer) error) (*Packed, error) {
	if err := k.p.ask("finish"); err != nil {
		return nil, err
	}
	b, err := k.p.w.edge.find(sandbox.ID(k.o.Sandbox))
	if err != nil {
		return nil, err
	}
	if k.p.w.node.Frozen(b.id) && b.state() == sandbox.Running {
		k.p.mu.Lock()
		k.p.wrong = append(k.p.wrong, "a layer was packed while the sandbox stood still")
		k.p.mu.Unlock()
	}
	l := Layer{Name: k.o.Name, Digest: fmt.Sprintf("sha256:%064x", rand.Text()[:16]), Kind: "snapshot"}
	if pin != nil {
		if err := pin(l); err != nil {
			return nil, err
		}
	}
	k.p.mu.Lock()
	defer k.p.mu.Unlock()
	k.p.published = append(k.p.published, k.o)
	return &Packed{Layer: l, Added: []string{"/a"}, AddedCount: 1}, nil
}

func (k *packingFake) Close() {
	k.p.mu.Lock()
	defer k.p.mu.Unlock()
	if k.closed {
		k.p.wrong = append(k.p.wrong, "a packing was closed twice")
	}
	k.closed = true
	k.p.open--
}

// newPackingWorld is a node that can take snapshots.
func newPackingWorld(t *testing.T) (*world, *packerFake) {
	w := newWorld(t)
	p := &packerFake{w: w}
	w.config = func(c *Config) { c.Packer = p }
	return w, p
}

// snapshot returns the last message of each sandbox.
func (w *world) snapshot(req *harenav1.SnapshotRequest) map[string]*harenav1.SnapshotResponse {
	w.t.Helper()
	out := map[string]*harenav1.SnapshotResponse{}
	err := w.edge.Snapshot(w.t.Context(), req, func(m *harenav1.SnapshotResponse) error {
		out[m.GetSandboxId()] = m
		return nil
	})
	if err != nil {
		w.t.Fatalf("snapshot: %v", err)
	}
	return out
}

// runs fails unless a sandbox runs, and is not frozen, after a moment at most.
func (w *world) runs(id string) {
	w.t.Helper()
	w.eventually("thawed", func() bool { return !w.node.Frozen(sandbox.ID(id)) })
	w.holds(id, sandbox.Running)
}

// faultAt has one step fail: of the server, of the backend ("backend.freeze"), or of the packer ("packer.begin").
func (w *world) faultAt(p *packerFake) *atomic.Value {
	var at atomic.Value
	at.Store("")
	fail := func(prefix string) func(string) error {
		return func(step string) error {
			if at.Load() == prefix+step {
				return errs.E(errs.Capacity, "fault")
			}
			return nil
		}
	}
	p.fail = fail("packer.")
	w.options.Fail = func(method string, _ sandbox.ID) error { return fail("backend.")(method) }
	w.config = func(c *Config) { c.Packer, c.Faults = p, fail("") }
	return &at
}

// captureSteps are the steps of a snapshot at which something can fail before its layer is made.
var captureSteps = []string{
	"packer.begin", "snapshot.freeze", "backend.freeze", "snapshot.capture", "packer.capture", "snapshot.thaw", "backend.thaw", "packer.finish",
}

// TestSnapshotFailsAtEachStep: the caller is told, there is no layer, nothing is held, and the sandbox goes on.
func TestSnapshotFailsAtEachStep(t *testing.T) {
	w, p := newPackingWorld(t)
	at := w.faultAt(p)
	w.up()
	s := w.create()
	good := 0
	for _, step := range append(slices.Clone(captureSteps), "snapshot.finish") {
		at.Store(step)
		req := &harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: "x", RequestId: step}
		m := w.snapshot(req)[s.GetId()]
		if m.GetPhase() != "failed" || m.GetError().GetKind() != "capacity" {
			t.Errorf("%s: %v", step, m)
		}
		p.settled(good)
		at.Store("")
		w.runs(s.GetId())
		if m = w.snapshot(req)[s.GetId()]; m.GetPhase() != "done" {
			t.Errorf("again after %s: %v", step, m)
		}
		good++
		p.settled(good)
		w.runs(s.GetId())
	}
	w.stop(s.GetId())
	w.empty()
}

// TestForkFailsAtEachStep: all forks are there, or none, and what they were to have in common is collected.
func TestForkFailsAtEachStep(t *testing.T) {
	w, p := newPackingWorld(t)
	at := w.faultAt(p)
	w.up()
	s := w.create()
	for _, step := range append(slices.Clone(captureSteps), "fork.finish", "layers.compose", "record.creating", "dirs", "layers.mount", "backend.create", "running") {
		at.Store(step)
		req := &harenav1.ForkRequest{Id: s.GetId(), Count: 5, RequestId: step}
		if res, err := w.edge.Fork(t.Context(), req); !errs.Is(err, errs.Capacity) {
			t.Errorf("%s: %v, %v", step, res, err)
		}
		at.Store("")
		w.runs(s.GetId())
		if n, held := w.node.Len(), w.layers.held(); n != 1 || held != 1 {
			t.Errorf("%s: %d sandboxes are there, layers have %d owners", step, n, held)
		}
		p.mu.Lock()
		published := len(p.published)
		p.mu.Unlock()
		p.settled(published)
	}
	res, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: s.GetId(), Count: 5, RequestId: "running"})
	if err != nil || len(res.GetSandboxes()) != 5 {
		t.Fatalf("%v, %v", res, err)
	}
	w.stopAll()
	w.empty()
}

// TestForkWithoutRoomForAll: when the node takes some of the forks and has no room for more, or has a fault at one of them, none is
// left of those that were made.
func TestForkWithoutRoomForAll(t *testing.T) {
	w, p := newPackingWorld(t)
	var step atomic.Value
	step.Store("")
	var left atomic.Int64
	fault := func(prefix string) func(string) error {
		return func(s string) error {
			if step.Load() == prefix+s && left.Add(-1) < 0 {
				return errs.OverLimit(errs.Capacity, "room of the test", 1, 2)
			}
			return nil
		}
	}
	w.options.Fail = func(method string, _ sandbox.ID) error { return fault("backend.")(method) }
	w.config = func(c *Config) { c.Packer, c.Faults, c.Limits.Sandboxes = p, fault(""), 16 }
	w.up()
	s := w.create()
	fork := func(count int32, request string) (*harenav1.ForkResponse, error) {
		return w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: s.GetId(), Count: count, RequestId: request})
	}
	alone := func(when string) {
		t.Helper()
		w.runs(s.GetId())
		if n, held, alive, dirs := w.node.Len(), w.layers.held(), w.edge.alive.Load(), len(w.dirs()); n != 1 || held != 1 || alive != 1 || dirs != 1 {
			t.Errorf("%s: %d sandboxes are in the backend, %d count as alive, %d have directories, layers have %d owners", when, n, alive, dirs, held)
		}
	}
	// The node's own limit: 15 fit beside the sandbox.
	if res, err := fork(16, "too many"); !errs.Is(err, errs.Capacity) {
		t.Errorf("16 forks below a limit of 16 sandboxes: %v, %v", res, err)
	}
	alone("at the limit")
	for _, at := range []string{"layers.compose", "record.creating", "dirs", "layers.mount", "backend.create", "running"} {
		for _, good := range []int64{1, 8, 14} {
			left.Store(good)
			step.Store(at)
			what := fmt.Sprintf("%s after %d", at, good)
			if res, err := fork(15, what); !errs.Is(err, errs.Capacity) {
				t.Errorf("%s: %v, %v", what, res, err)
			}
			step.Store("")
			alone(what)
		}
	}
	// All that was given back is there for the next, also under the request ID of one that failed.
	if res, err := fork(15, "running after 14"); err != nil || len(res.GetSandboxes()) != 15 {
		t.Errorf("in the end: %v, %v", res, err)
	}
	w.stopAll()
	w.empty()
}

func (w *world) stopAll() {
	w.t.Helper()
	var all []string
	for _, b := range w.edge.snapshot() {
		all = append(all, string(b.id))
	}
	w.stop(all...)
}

func TestForkInput(t *testing.T) {
	w, p := newPackingWorld(t)
	w.up()
	s, stopped, paused := w.create(), w.create(), w.create()
	w.stop(stopped.GetId())
	w.pause(ids(paused.GetId()))
	for _, bad := range []struct {
		id    string
		count int32
		kind  errs.Kind
	}{
		{s.GetId(), 0, errs.Invalid},
		{s.GetId(), -1, errs.Invalid},
		{s.GetId(), 1001, errs.Invalid},
		{s.GetId(), 1_000_000, errs.Invalid},
		{"", 1, errs.Invalid},
		{"../../etc", 1, errs.Invalid},
		{s.GetId()[:6] + "aaaaaaaaaaaaaa", 1, errs.NotFound},
		{stopped.GetId(), 1, errs.Precondition},
	} {
		if res, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: bad.id, Count: bad.count}); !errs.Is(err, bad.kind) {
			t.Errorf("%q, %d: %v, %v", bad.id, bad.count, res, err)
		}
	}
	p.settled(0)
	// One that is paused is resumed; a fork can be forked when its parent is gone.
	res, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: paused.GetId(), Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	w.holds(paused.GetId(), sandbox.Running)
	w.stop(paused.GetId())
	child := res.GetSandboxes()[0]
	again, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: child.GetId(), Count: 2})
	if err != nil || again.GetSandboxes()[0].GetOrigin() != child.GetId() {
		t.Fatalf("%v, %v", again, err)
	}
	w.stopAll()
	w.empty()
}

// TestStopWinsOverCapture: a stop interrupts it; after the capture the snapshot is completed, and forks are made, without the sandbox.
func TestStopWinsOverCapture(t *testing.T) {
	for _, fork := range []bool{false, true} {
		w, p := newPackingWorld(t)
		captures := make(chan struct{})
		p.wait = func(ctx context.Context) error {
			close(captures)
			<-ctx.Done()
			return context.Cause(ctx)
		}
		w.up()
		s := w.create()
		take := func() error {
			if fork {
				_, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: s.GetId(), Count: 2})
				return err
			}
			if m := w.snapshot(&harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: "x"})[s.GetId()]; m.GetPhase() == "failed" {
				return errs.E(errs.Kind(m.GetError().GetKind()), "%s", m.GetErrorMessage())
			}
			return nil
		}
		failed := make(chan error, 1)
		go func() { failed <- take() }()
		<-captures
		w.stop(s.GetId())
		if err := <-failed; !errs.Is(err, errs.Precondition) {
			t.Errorf("fork %v: %v", fork, err)
		}
		p.settled(0)
		w.empty()

		s = w.create()
		p.wait = nil
		packs, gone := make(chan struct{}), make(chan struct{})
		p.fail = nil
		w.edge.cfg.Faults = func(step string) error {
			if step == "snapshot.finish" || step == "fork.finish" {
				close(packs)
				<-gone
			}
			return nil
		}
		go func() { failed <- take() }()
		<-packs
		w.stop(s.GetId())
		close(gone)
		if err := <-failed; err != nil {
			t.Errorf("fork %v, after the capture: %v", fork, err)
		}
		p.settled(1)
		w.stopAll()
		w.empty()
		w.down()
	}
}

// TestCaptureOfCallerThatGoesAway: the sandbox goes on and there is no layer.
func TestCaptureOfCallerThatGoesAway(t *testing.T) {
	w, p := newPackingWorld(t)
	captures := make(chan struct{})
	p.wait = func(ctx context.Context) error {
		close(captures)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	w.up()
	s := w.create()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.edge.Snapshot(ctx, &harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: "x"}, func(*harenav1.SnapshotResponse) error { return nil })
	}()
	<-captures
	cancel()
	if err := <-done; err == nil {
		t.Error("it succeeded")
	}
	w.eventually("settled", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.open == 0
	})
	w.runs(s.GetId())
	p.settled(0)
}

// TestSnapshotRequestAfterRestart: what the last snapshot came to is remembered, other requests are not taken for it.
func TestSnapshotRequestAfterRestart(t *testing.T) {
	w, p := newPackingWorld(t)
	w.up()
	s := w.create()
	req := &harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: "x", RequestId: "r"}
	first := w.snapshot(req)[s.GetId()]
	w.restart()
	again := w.snapshot(req)[s.GetId()]
	if again.GetLayer().GetDigest() != first.GetLayer().GetDigest() || again.GetAddedCount() != 1 {
		t.Errorf("%v after %v", again, first)
	}
	if m := w.snapshot(&harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: "y", RequestId: "r"})[s.GetId()]; m.GetError().GetKind() != "exists" {
		t.Errorf("another request: %v", m)
	}
	p.settled(1)
	// The next one may refer to what the last one stored.
	w.snapshot(&harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: "z"})
	if o := p.published[1]; !slices.Equal(o.Earlier, []string{first.GetLayer().GetDigest()}) || !o.Clean || !o.Examine {
		t.Errorf("%+v", o)
	}
}

// TestForksAreWholeAfterRestart: of a fork that a kill cut short nothing is left.
func TestForksAreWholeAfterRestart(t *testing.T) {
	w, _ := newPackingWorld(t)
	w.up()
	s := w.create()
	res, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: s.GetId(), Count: 3})
	if err != nil {
		t.Fatal(err)
	}
	unseal := func(boxes []*box) {
		for _, b := range boxes {
			if err := w.edge.commit(b, true, func(r *Record) error {
				mark := *r.Fork
				mark.Sealed = false
				r.Fork = &mark
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	var boxes []*box
	for _, f := range res.GetSandboxes() {
		b, err := w.edge.find(sandbox.ID(f.GetId()))
		if err != nil {
			t.Fatal(err)
		}
		boxes = append(boxes, b)
	}
	unseal(boxes) // all were made, none sealed
	w.restart()
	if n := w.node.Len(); n != 4 {
		t.Errorf("%d sandboxes after a restart, want all 4", n)
	}
	boxes = nil
	for _, b := range w.edge.snapshot() {
		if f := b.record().Fork; f != nil {
			if !f.Sealed {
				t.Errorf("%s is not sealed", b.id)
			}
			boxes = append(boxes, b)
		}
	}
	unseal(boxes)
	w.down()
	if err := os.RemoveAll(filepath.Join(w.path, "sandboxes", string(boxes[0].id))); err != nil { // as if it was not made
		t.Fatal(err)
	}
	w.restart()
	w.eventually("removed", func() bool { return w.node.Len() == 1 })
	if all := w.edge.snapshot(); len(all) != 1 || string(all[0].id) != s.GetId() {
		t.Errorf("left: %v", all)
	}
}

// TestSnapshotsWaitForTheirTurn: snapshots and forks of one sandbox, at once, with pauses in between, all succeed.
func TestSnapshotsWaitForTheirTurn(t *testing.T) {
	w, p := newPackingWorld(t)
	w.up()
	s := w.create()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			switch i % 3 {
			case 0:
				if m := w.snapshot(&harenav1.SnapshotRequest{Selector: ids(s.GetId()), Name: fmt.Sprint("x", i)})[s.GetId()]; m.GetPhase() != "done" {
					t.Errorf("snapshot: %v", m)
				}
			case 1:
				if _, err := w.edge.Fork(t.Context(), &harenav1.ForkRequest{Id: s.GetId(), Count: 2}); err != nil {
					t.Errorf("fork: %v", err)
				}
			default:
				_ = w.pause(ids(s.GetId()))
				time.Sleep(time.Millisecond)
				_ = w.resume(ids(s.GetId()))
			}
		})
	}
	wg.Wait()
	w.good(w.resume(ids(s.GetId())), sandbox.Running)
	w.runs(s.GetId())
	p.settled(8)
	w.stopAll()
	w.empty()
}

// TestCommonLayerOfFailedForkIsCollected: also when not one fork was begun.
func TestCommonLayerOfFailedForkIsCollected(t *testing.T) {
	w, p := newPackingWorld(t)
	e := w.up()
	s := w.create()
	collected := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.collected
	}
	w.eventually("collected at the start", func() bool { return collected() == 1 })
	b, err := e.find(sandbox.ID(s.GetId()))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.commit(b, true, func(r *Record) error {
		r.Spec = spec(func(s *harenav1.SandboxSpec) { s.Runtime = "unknown" })
		r.Spec.Backend = sandbox.BackendContainer
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if res, err := e.Fork(t.Context(), &harenav1.ForkRequest{Id: s.GetId(), Count: 1}); err == nil {
		t.Fatalf("a fork that cannot be made was: %v", res)
	}
	p.settled(1)
	w.eventually("collected", func() bool { return collected() == 2 })
}
