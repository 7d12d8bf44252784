package lifecycle

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestCreateAndStop(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	resp, err := e.Create(t.Context(), &edgev1.CreateRequest{
		Project: "lab/a", Explain: true,
		Spec: spec(func(s *harenav1.SandboxSpec) {
			s.Workspace, s.Toolkits, s.Job, s.Labels = "ws", []string{"tool"}, "j1", map[string]string{"k": "v"}
			s.Process = &harenav1.ProcessDefaults{Env: map[string]string{"A": "mine"}}
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	s := resp.GetSandbox()
	if s.GetState() != "running" || s.GetProject() != "lab/a" || s.GetJob() != "j1" || s.GetEdge() != string(e.ID()) || len(s.GetLayers()) != 3 {
		t.Errorf("sandbox: %v", s)
	}
	p := s.GetSpec().GetProcess()
	if p.GetUser() != "app" || p.GetCwd() != "/srv" || p.GetEnv()["A"] != "mine" || p.GetEnv()["PATH"] != "/bin" {
		t.Errorf("process defaults: %v", p)
	}
	var steps []string
	for _, step := range resp.GetTimings() {
		steps = append(steps, step.GetStep())
	}
	if !slices.Contains(steps, "backend.start") || !slices.Contains(steps, "layers.mount") || len(resp.GetExplanation()) < 4 {
		t.Errorf("timings %v, explanation %v", steps, resp.GetExplanation())
	}
	upper := filepath.Join(w.path, "sandboxes", s.GetId(), "upper", "data")
	if st, err := os.Stat(upper); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("upper: %v, %v", st, err)
	}
	if out := w.stop(s.GetId()); out[0].GetError() != nil || out[0].GetState() != "stopped" {
		t.Errorf("outcome: %v", out)
	}
	if _, err := os.Stat(upper); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the upper is there after stop: %v", err)
	}
	// Again, and with removal of the record.
	if out := w.stop(s.GetId()); out[0].GetError() != nil || out[0].GetState() != "stopped" {
		t.Errorf("second stop: %v", out)
	}
	if got, err := e.Get(s.GetId()); err != nil || got.GetState() != "stopped" || got.GetEnded() == nil || got.GetReason() != "" {
		t.Errorf("after stop: %v, %v", got, err)
	}
	if _, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Ids: []string{s.GetId()}}, Remove: true}); err != nil {
		t.Error(err)
	}
	if _, err := e.Get(s.GetId()); !errs.Is(err, errs.NotFound) {
		t.Errorf("after removal: %v", err)
	}
	w.empty()
	want := []string{"edge.started", "edge.recovered", "sandbox.created", "sandbox.running", "sandbox.stopped"}
	if got := w.kinds(); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
	if len(w.dirs()) != 0 {
		t.Errorf("directories: %v", w.dirs())
	}
}

func TestCreateRefuses(t *testing.T) {
	w := newWorld(t)
	w.config = func(c *Config) { c.Limits.Sandboxes = 2; c.Limits.MemoryReserve = 1 << 30 }
	e := w.up()
	tests := []struct {
		name   string
		change func(*harenav1.SandboxSpec)
		kind   errs.Kind
	}{
		{"microvm", func(s *harenav1.SandboxSpec) { s.Backend = "microvm" }, errs.Unsupported},
		{"vm", func(s *harenav1.SandboxSpec) { s.Backend = "vm" }, errs.Unsupported},
		{"no such backend", func(s *harenav1.SandboxSpec) { s.Backend = "jail" }, errs.Invalid},
		{"gvisor", func(s *harenav1.SandboxSpec) { s.Runtime = "gvisor" }, errs.Unsupported},
		{"gpus", func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Gpus: 1} }, errs.Unsupported},
		{"network", func(s *harenav1.SandboxSpec) {
			s.Network = &harenav1.NetworkPolicy{Allow: []*harenav1.NetworkRule{{Target: &harenav1.NetworkRule_Service{Service: "pypi"}}}}
		}, errs.Unsupported},
		{"guard", func(s *harenav1.SandboxSpec) {
			s.Guard = &harenav1.GuardPolicy{Rules: []*harenav1.GuardRule{{Path: "/x"}}}
		}, errs.Unsupported},
		{"unknown when idle", func(s *harenav1.SandboxSpec) { s.Lifetime = &harenav1.Lifetime{OnIdle: "sleep"} }, errs.Invalid},
		{"latency sensitive", func(s *harenav1.SandboxSpec) { s.Qos = "ls" }, errs.Unsupported},
		{"no image", func(s *harenav1.SandboxSpec) { s.Image = "" }, errs.Invalid},
		{"unknown image", func(s *harenav1.SandboxSpec) { s.Image = "nope" }, errs.NotFound},
	}
	for _, test := range tests {
		_, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(test.change)})
		if errs.KindOf(err) != test.kind {
			t.Errorf("%s: %v, want %s", test.name, err, test.kind)
		}
	}
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Id: "zzzzzzaaaaaaaaaaaaaa", Spec: spec()}); !errs.Is(err, errs.Invalid) {
		t.Errorf("ID of another edge: %v", err)
	}
	w.empty()
	w.create()
	w.create()
	var limit *errs.Error
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()}); !errors.As(err, &limit) || limit.Kind != errs.Capacity || limit.Limit == nil {
		t.Errorf("third of two: %v", err)
	}
	w.edge.cfg.Limits.Sandboxes = 0
	w.machine.set(func(n *nodeFake) { n.snap.MemoryAvailable = 1 << 30 })
	w.clock.advance(time.Second)
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()}); !errors.As(err, &limit) || limit.Limit == nil || limit.Limit.Name != "available memory of this node" {
		t.Errorf("without memory: %v", err)
	}
}

// TestCreateFailsAtEachStep: whatever step fails, the caller is told and nothing is left.
func TestCreateFailsAtEachStep(t *testing.T) {
	steps := []string{"layers.compose", "record.creating", "dirs", "layers.mount", "backend.create", "record.running", "running"}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			w := newWorld(t)
			broken := errs.E(errs.Capacity, "fault")
			w.config = func(c *Config) {
				c.Faults = func(s string) error {
					if s == step {
						return broken
					}
					return nil
				}
			}
			e := w.up()
			_, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(), RequestId: "r"})
			if _, message := errs.Detail(err); message != "fault" {
				t.Errorf("callers are told %q", message)
			}
			if !errors.Is(err, broken) || !errs.Is(err, errs.Capacity) {
				t.Errorf("error is %v", err)
			}
			if resp, _ := e.List(&harenav1.ListRequest{All: true}); len(resp.GetSandboxes()) != 0 {
				t.Errorf("left: %v", resp)
			}
			w.empty()
			if len(w.dirs()) != 0 {
				t.Errorf("directories: %v", w.dirs())
			}
			if kinds := w.kinds(); kinds[len(kinds)-1] != "sandbox.failed" {
				t.Errorf("events: %v", kinds)
			}
			// The request can be repeated.
			e.cfg.Faults = nil
			if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(), RequestId: "r"}); err != nil {
				t.Errorf("repeated: %v", err)
			}
		})
	}
}

func TestCreateThatCannotBeUndone(t *testing.T) {
	w := newWorld(t)
	fail := true
	var mu sync.Mutex
	w.options.Fail = func(method string, _ sandbox.ID) error {
		mu.Lock()
		defer mu.Unlock()
		if fail && (method == "create" || method == "destroy") {
			return errors.New("stuck in the kernel")
		}
		return nil
	}
	e := w.up()
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()}); !errs.Is(err, errs.Internal) {
		t.Errorf("create: %v", err)
	}
	resp, err := e.List(&harenav1.ListRequest{All: true})
	if err != nil || len(resp.GetSandboxes()) != 1 || resp.GetSandboxes()[0].GetState() != "failed" {
		t.Fatalf("list: %v, %v", resp, err)
	}
	id := resp.GetSandboxes()[0].GetId()
	// It is tried again, first in vain.
	w.clock.advance(retryStop + time.Second)
	w.eventually("tried again", func() bool {
		s, err := e.Get(id)
		return err == nil && s.GetEnded().AsTime().Equal(w.clock.Now())
	})
	mu.Lock()
	fail = false
	mu.Unlock()
	w.clock.advance(retryStop + time.Second)
	if s := w.reach(id, sandbox.Stopped); s.GetReason() != "" {
		t.Errorf("reason %q", s.GetReason())
	}
	w.empty()
}

func TestRequestID(t *testing.T) {
	w := newWorld(t)
	w.options.Delay = 20 * time.Millisecond
	e := w.up()
	call := func(change ...func(*edgev1.CreateRequest)) (*harenav1.Sandbox, error) {
		rq := &edgev1.CreateRequest{Spec: spec(), Project: "lab", RequestId: "r1"}
		for _, c := range change {
			c(rq)
		}
		resp, err := e.Create(t.Context(), rq)
		return resp.GetSandbox(), err
	}
	const callers = 16
	ids := make([]string, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			// Each with an ID of its own, as an apiserver that repeats a call would.
			id, _ := sandbox.NewID(e.ID(), w.edge.cfg.Rand)
			s, err := call(func(rq *edgev1.CreateRequest) { rq.Id = string(id) })
			if err != nil {
				t.Errorf("caller %d: %v", i, err)
			}
			ids[i] = s.GetId()
		})
	}
	wg.Wait()
	if w.node.Len() != 1 || len(slices.Compact(ids)) != 1 {
		t.Fatalf("%d sandboxes, IDs %v", w.node.Len(), ids)
	}
	first := ids[0]
	check := func(when string) {
		t.Helper()
		if s, err := call(); err != nil || s.GetId() != first {
			t.Errorf("%s: repeated request gives %s, %v; want %s", when, s.GetId(), err, first)
		}
		if s, err := call(func(rq *edgev1.CreateRequest) { rq.RequestId, rq.Id = "", first }); err != nil || s.GetId() != first {
			t.Errorf("%s: repeated ID gives %s, %v", when, s.GetId(), err)
		}
		if _, err := call(func(rq *edgev1.CreateRequest) { rq.Spec.Image = "ws" }); !errs.Is(err, errs.Exists) {
			t.Errorf("%s: another request under the same ID: %v", when, err)
		}
	}
	check("running")
	if s, err := call(func(rq *edgev1.CreateRequest) { rq.Project = "other" }); err != nil || s.GetId() == first {
		t.Errorf("the same request ID in another project: %v, %v", s, err)
	}
	e = w.restart()
	check("after a restart")
	w.stop(first)
	check("stopped")
	e = w.restart()
	check("stopped, after a restart")
}

// TestCallersGoAway: a creation that nobody waits for is undone; a caller that comes meanwhile gets a sandbox all the same.
func TestCallersGoAway(t *testing.T) {
	w := newWorld(t)
	entered := make(chan struct{}, 10)
	hold := make(chan struct{})
	w.config = func(c *Config) {
		c.Faults = func(step string) error {
			if step == "backend.create" {
				entered <- struct{}{}
				<-hold
			}
			return nil
		}
	}
	e := w.up()
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := e.Create(ctx, &edgev1.CreateRequest{Spec: spec(), RequestId: "r"})
		gone <- err
	}()
	<-entered
	cancel()
	if err := <-gone; !errs.Is(err, errs.Cancelled) {
		t.Errorf("cancelled create: %v", err)
	}
	again := make(chan error, 1)
	go func() {
		_, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(), RequestId: "r"})
		again <- err
	}()
	close(hold)
	if err := <-again; err != nil {
		t.Errorf("repeated create: %v", err)
	}
	if n := w.node.Len(); n != 1 {
		t.Errorf("%d sandboxes, want 1", n)
	}
}

// TestStopWinsOverCreate stops at each step of a creation.
func TestStopWinsOverCreate(t *testing.T) {
	steps := []string{"layers.compose", "record.creating", "dirs", "layers.mount", "backend.create", "record.running", "running"}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			w := newWorld(t)
			entered, hold := make(chan struct{}), make(chan struct{})
			w.config = func(c *Config) {
				c.Faults = func(s string) error {
					if s == step {
						close(entered)
						<-hold
					}
					return nil
				}
			}
			e := w.up()
			id, _ := sandbox.NewID(e.ID(), e.cfg.Rand)
			created := make(chan error, 1)
			go func() {
				_, err := e.Create(t.Context(), &edgev1.CreateRequest{Id: string(id), Spec: spec()})
				created <- err
			}()
			<-entered
			stopped := make(chan []*harenav1.Outcome, 1)
			go func() { stopped <- w.stop(string(id)) }()
			b, err := e.find(id)
			if err != nil {
				t.Fatal(err)
			}
			w.eventually("asked to stop", b.stopAsked.Load)
			close(hold)
			if out := (<-stopped)[0]; out.GetError() != nil || out.GetState() != "stopped" {
				t.Errorf("outcome %v", out)
			}
			if err := <-created; err != nil && !errs.Is(err, errs.Precondition) {
				t.Errorf("create: %v", err)
			}
			w.empty()
		})
	}
}

func TestStorm(t *testing.T) {
	w := newWorld(t)
	w.config = func(c *Config) { c.Limits = admission.Limits{Sandboxes: 64} }
	e := w.up()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for i := range 25 {
				id, _ := sandbox.NewID(e.ID(), e.cfg.Rand)
				var pair sync.WaitGroup
				pair.Go(func() {
					_, err := e.Create(t.Context(), &edgev1.CreateRequest{Id: string(id), Spec: spec(func(s *harenav1.SandboxSpec) { s.Job = "storm" })})
					if err != nil && !errs.Is(err, errs.Precondition) && !errs.Is(err, errs.Capacity) {
						t.Errorf("create: %v", err)
					}
				})
				if i%3 == 0 {
					pair.Go(func() { w.stop(string(id)) })
				}
				if i%5 == 0 {
					pair.Go(func() { w.node.Kill(id, "") })
				}
				pair.Wait()
				w.stop(string(id))
			}
		})
	}
	wg.Wait()
	if _, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Job: "storm"}, Remove: true}); err != nil {
		t.Fatal(err)
	}
	w.empty()
	if len(w.dirs()) != 0 {
		t.Errorf("directories: %v", w.dirs())
	}
}

func TestGroups(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	for i := range 6 {
		w.create(func(s *harenav1.SandboxSpec) {
			s.Job = []string{"a", "b"}[i%2]
			s.Labels = map[string]string{"n": []string{"x", "y", "z"}[i%3]}
		})
	}
	if _, err := e.Stop(t.Context(), &harenav1.StopRequest{}); !errs.Is(err, errs.Invalid) {
		t.Errorf("empty selector: %v", err)
	}
	if _, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Ids: []string{"x"}, Job: "a"}}); !errs.Is(err, errs.Invalid) {
		t.Errorf("IDs and a job: %v", err)
	}
	resp, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Job: "a", Labels: map[string]string{"n": "x"}}})
	if err != nil || len(resp.GetOutcomes()) != 1 {
		t.Errorf("by job and label: %v, %v", resp, err)
	}
	resp, err = e.Stop(t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Job: "a"}, Grace: durationpb.New(time.Second)})
	if err != nil || len(resp.GetOutcomes()) != 2 {
		t.Errorf("by job: %v, %v", resp, err)
	}
	out := w.stop("bad", string(e.ID())+"aaaaaaaaaaaaaa")
	if len(out) != 2 || out[0].GetError().GetKind() != "invalid" || out[1].GetError().GetKind() != "not-found" {
		t.Errorf("IDs that are none: %v", out)
	}
	list, _ := e.List(&harenav1.ListRequest{})
	if len(list.GetSandboxes()) != 3 {
		t.Errorf("%d left, want 3", len(list.GetSandboxes()))
	}
}
