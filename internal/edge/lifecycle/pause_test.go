package lifecycle

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/memory"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

func ids(list ...string) *harenav1.Selector { return &harenav1.Selector{Ids: list} }

func (w *world) backend() *memory.Backend { return memory.New(w.node, w.options) }

func (w *world) pause(s *harenav1.Selector) []*harenav1.Outcome {
	w.t.Helper()
	resp, err := w.edge.Pause(w.t.Context(), &harenav1.PauseRequest{Selector: s})
	if err != nil {
		w.t.Fatalf("pause: %v", err)
	}
	return resp.GetOutcomes()
}

func (w *world) resume(s *harenav1.Selector) []*harenav1.Outcome {
	w.t.Helper()
	resp, err := w.edge.Resume(w.t.Context(), &harenav1.ResumeRequest{Selector: s})
	if err != nil {
		w.t.Fatalf("resume: %v", err)
	}
	return resp.GetOutcomes()
}

func (w *world) good(outcomes []*harenav1.Outcome, state sandbox.State) {
	w.t.Helper()
	for _, o := range outcomes {
		if o.GetError() != nil || o.GetState() != string(state) {
			w.t.Errorf("outcome %v, want %s", o, state)
		}
	}
}

// holds fails unless a sandbox's state, and what is frozen and held of it, fit.
func (w *world) holds(id string, state sandbox.State) {
	w.t.Helper()
	s, err := w.edge.Get(id)
	if err != nil {
		w.t.Fatal(err)
	}
	paused := state == sandbox.Paused
	if s.GetState() != string(state) || w.node.Frozen(sandbox.ID(id)) != paused || (s.GetPaused() != nil) != paused || (s.GetPause() != nil) != paused {
		w.t.Errorf("%v, frozen %v; want %s", s, w.node.Frozen(sandbox.ID(id)), state)
	}
	if w.node.Held(sandbox.ID(id)) != paused {
		w.t.Errorf("the clocks of commands rest: %v, in %s", w.node.Held(sandbox.ID(id)), state)
	}
}

func TestPauseAndResume(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	s := w.create()
	id := sandbox.ID(s.GetId())
	w.node.SetUsage(id, backend.Usage{MemoryBytes: 100 << 20})
	out := w.pause(ids(s.GetId()))
	w.good(out, sandbox.Paused)
	if p := out[0].GetPause(); p.GetMemoryBefore() != 100<<20 || p.GetSwapped() != 100<<20 || p.GetMemoryAfter() != 0 {
		t.Errorf("report %v", p)
	}
	w.holds(s.GetId(), sandbox.Paused)
	since := e.snapshot()[0].record().Pause.Since
	w.clock.advance(time.Minute)
	w.good(w.pause(ids(s.GetId())), sandbox.Paused)
	if again := e.snapshot()[0].record().Pause.Since; !again.Equal(since) {
		t.Error("a second pause began anew")
	}
	// What does not need it running leaves it alone.
	if _, err := e.SetLifetime(t.Context(), &harenav1.SetLifetimeRequest{Selector: ids(s.GetId())}); err != nil {
		t.Error(err)
	}
	if _, err := e.List(&harenav1.ListRequest{}); err != nil {
		t.Error(err)
	}
	w.holds(s.GetId(), sandbox.Paused)
	w.good(w.resume(ids(s.GetId())), sandbox.Running)
	w.good(w.resume(ids(s.GetId())), sandbox.Running)
	w.holds(s.GetId(), sandbox.Running)
	w.stop(s.GetId())
	for _, o := range append(w.pause(ids(s.GetId())), w.resume(ids(s.GetId()))...) {
		if o.GetError().GetKind() != "precondition" {
			t.Errorf("of a stopped sandbox: %v", o)
		}
	}
	kinds := strings.Join(w.kinds(), " ")
	if n := strings.Count(kinds, "sandbox.paused"); n != 1 {
		t.Errorf("%d events of pauses: %s", n, kinds)
	}
	if n := strings.Count(kinds, "sandbox.resumed"); n != 1 {
		t.Errorf("%d events of resumes: %s", n, kinds)
	}
	w.empty()
}

// TestEnterResumes: many calls at once cause one resume, and keep the sandbox from idling.
func TestEnterResumes(t *testing.T) {
	w := newWorld(t)
	var thaws atomic.Int32
	w.options.Fail = func(method string, _ sandbox.ID) error {
		if method == "thaw" {
			thaws.Add(1)
		}
		return nil
	}
	e := w.up()
	s := w.create()
	w.good(w.pause(ids(s.GetId())), sandbox.Paused)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			use, err := e.Enter(t.Context(), sandbox.ID(s.GetId()), true)
			if err != nil {
				t.Errorf("enter: %v", err)
				return
			}
			use.Leave()
		})
	}
	wg.Wait()
	if n := thaws.Load(); n != 1 {
		t.Errorf("%d thaws", n)
	}
	w.holds(s.GetId(), sandbox.Running)
}

// TestEnterDoesNotWaitForMemory: a call that comes while a pause gives memory back ends that and goes on; so does a stop.
func TestEnterDoesNotWaitForMemory(t *testing.T) {
	w := newWorld(t)
	w.options.ReclaimTakes = time.Hour
	e := w.up()
	for _, next := range []string{"enter", "resume", "stop", "shutdown"} {
		s := w.create()
		done := make(chan []*harenav1.Outcome, 1)
		go func() { done <- w.pause(ids(s.GetId())) }()
		w.reach(s.GetId(), sandbox.Pausing)
		w.eventually("frozen", func() bool { return w.node.Frozen(sandbox.ID(s.GetId())) })
		switch next {
		case "enter":
			use, err := e.Enter(t.Context(), sandbox.ID(s.GetId()), false)
			if err != nil {
				t.Fatal(err)
			}
			use.Leave()
			w.holds(s.GetId(), sandbox.Running)
		case "resume":
			w.good(w.resume(ids(s.GetId())), sandbox.Running)
		case "stop":
			w.good(w.stop(s.GetId()), sandbox.Stopped)
		case "shutdown":
			e = w.restart()
			w.holds(s.GetId(), sandbox.Paused)
		}
		if out := <-done; out[0].GetError() != nil {
			t.Errorf("%s: the pause failed: %v", next, out)
		}
	}
}

func TestPauseWhenIdle(t *testing.T) {
	w := newWorld(t)
	var running atomic.Int32
	w.options.Status = statusHook(func(s *guestv1.StatusResponse) { s.RunningCommands = running.Load() })
	e := w.up()
	s := w.create(func(s *harenav1.SandboxSpec) {
		s.Lifetime = &harenav1.Lifetime{Idle: durationpb.New(10 * time.Minute), OnIdle: "pause", Ttl: durationpb.New(2 * time.Hour)}
	})
	running.Store(1)
	w.clock.advance(10 * time.Minute)
	b, _ := e.find(sandbox.ID(s.GetId()))
	w.eventually("looked at again later", func() bool {
		e.timers.mu.Lock()
		defer e.timers.mu.Unlock()
		return b.slot > 0 && b.due.Equal(w.clock.Now().Add(10*time.Minute))
	})
	w.holds(s.GetId(), sandbox.Running)
	running.Store(0)
	w.clock.advance(10 * time.Minute)
	if got := w.reach(s.GetId(), sandbox.Paused); got.GetReason() != "idle" {
		t.Errorf("reason %q", got.GetReason())
	}
	// It is not stopped for idleness while it is paused; being resumed, it has all its time again.
	w.clock.advance(time.Hour)
	w.holds(s.GetId(), sandbox.Paused)
	use, err := e.Enter(t.Context(), b.id, false)
	if err != nil {
		t.Fatal(err)
	}
	use.Leave()
	if got, _ := e.Get(s.GetId()); got.GetReason() != "" || got.GetState() != "running" {
		t.Errorf("resumed: %v", got)
	}
	w.clock.advance(9 * time.Minute)
	w.holds(s.GetId(), sandbox.Running)
	w.clock.advance(time.Minute)
	w.reach(s.GetId(), sandbox.Paused)
	// The TTL counted all the time.
	w.clock.advance(30 * time.Minute)
	if got := w.reach(s.GetId(), sandbox.Stopped); got.GetReason() != "ttl" {
		t.Errorf("reason %q", got.GetReason())
	}
	w.empty()
}

// TestIdlePauseYields: a call that comes in the last moment keeps the sandbox running.
func TestIdlePauseYields(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	s := w.create()
	b, _ := e.find(sandbox.ID(s.GetId()))
	use, err := e.Enter(t.Context(), b.id, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.pause(t.Context(), b, pauseCall{reason: sandbox.ReasonIdle, idle: true}); err != errInUse { //nolint:errorlint // not wrapped
		t.Errorf("%v, want in use", err)
	}
	w.holds(s.GetId(), sandbox.Running)
	// One that is asked for does not ask.
	w.good(w.pause(ids(s.GetId())), sandbox.Paused)
	use.Leave()
	w.holds(s.GetId(), sandbox.Paused)
}

func TestPauseThatFails(t *testing.T) {
	w := newWorld(t)
	var broken atomic.Value
	broken.Store("")
	w.options.Fail = func(method string, _ sandbox.ID) error {
		if broken.Load() == method {
			return errs.E(errs.Timeout, "a process waits in the kernel")
		}
		return nil
	}
	w.up()
	s := w.create()
	broken.Store("freeze")
	if o := w.pause(ids(s.GetId()))[0]; o.GetError().GetKind() != "timeout" || o.GetState() != "running" {
		t.Errorf("pause that cannot freeze: %v", o)
	}
	w.holds(s.GetId(), sandbox.Running)
	broken.Store("reclaim")
	if o := w.pause(ids(s.GetId()))[0]; o.GetError() != nil || o.GetPause().GetNote() == "" {
		t.Errorf("pause that gives nothing back: %v", o)
	}
	broken.Store("thaw")
	if o := w.resume(ids(s.GetId()))[0]; o.GetError() == nil || o.GetState() != "paused" {
		t.Errorf("resume that cannot thaw: %v", o)
	}
	if _, err := w.edge.Enter(t.Context(), sandbox.ID(s.GetId()), false); err == nil {
		t.Error("a call into it is let through")
	}
	broken.Store("")
	w.good(w.resume(ids(s.GetId())), sandbox.Running)
	w.holds(s.GetId(), sandbox.Running)
}

func TestResumeNeedsRoom(t *testing.T) {
	w := newWorld(t)
	w.config = func(c *Config) { c.Limits = admission.Limits{MemoryReserve: 1 << 30} }
	w.up()
	var all []string
	for range 2 {
		s := w.create()
		w.node.SetUsage(sandbox.ID(s.GetId()), backend.Usage{MemoryBytes: 2 << 30})
		all = append(all, s.GetId())
	}
	w.good(w.pause(ids(all...)), sandbox.Paused)
	w.machine.set(func(n *nodeFake) { n.snap.MemoryAvailable = 4 << 30 })
	w.clock.advance(time.Second)
	w.good(w.resume(ids(all[0])), sandbox.Running)
	// The first one's memory is on its way back, though nobody sees it yet.
	if o := w.resume(ids(all[1]))[0]; o.GetError().GetKind() != "capacity" || o.GetState() != "paused" {
		t.Errorf("a resume without room: %v", o)
	}
	w.clock.advance(comebackTime)
	w.good(w.resume(ids(all[1])), sandbox.Running)
}

// TestPauseOutlivesServers: what is paused stays so; what was on the way there or back runs; and so does what an interrupted
// snapshot left frozen.
func TestPauseOutlivesServers(t *testing.T) {
	for _, test := range []struct{ state, want sandbox.State }{
		{sandbox.Paused, sandbox.Paused}, {sandbox.Pausing, sandbox.Running}, {sandbox.Resuming, sandbox.Running}, {sandbox.Running, sandbox.Running},
	} {
		for _, frozen := range []bool{true, false} {
			w := newWorld(t)
			w.up()
			s := w.create()
			w.good(w.pause(ids(s.GetId())), sandbox.Paused)
			w.down()
			path := filepath.Join(w.path, "sandboxes", s.GetId(), recordName)
			record, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			changed := strings.Replace(string(record), `"state":"paused"`, fmt.Sprintf(`"state":%q`, test.state), 1)
			if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
				t.Fatal(err)
			}
			if !frozen {
				if err := w.backend().Thaw(t.Context(), sandbox.ID(s.GetId())); err != nil {
					t.Fatal(err)
				}
			}
			w.up()
			if got, _ := w.edge.Get(s.GetId()); got.GetState() != string(test.want) {
				t.Errorf("%s, frozen %v: %v", test.state, frozen, got)
			}
			if is := w.node.Frozen(sandbox.ID(s.GetId())); is != (test.want == sandbox.Paused) {
				t.Errorf("%s, frozen %v: frozen is %v", test.state, frozen, is)
			}
			w.good(w.resume(ids(s.GetId())), sandbox.Running)
			w.stop(s.GetId())
			w.empty()
		}
	}
}

// TestPauseDies: a paused sandbox whose supervisor dies has failed, as one that runs.
func TestPauseDies(t *testing.T) {
	w := newWorld(t)
	w.up()
	s := w.create()
	w.good(w.pause(ids(s.GetId())), sandbox.Paused)
	w.node.Kill(sandbox.ID(s.GetId()), "")
	if got := w.reach(s.GetId(), sandbox.Failed); got.GetPaused() != nil {
		t.Errorf("%v is still paused", got)
	}
	w.stop(s.GetId())
	w.empty()
}

func TestStopOfPaused(t *testing.T) {
	w := newWorld(t)
	w.up()
	for _, grace := range []time.Duration{0, time.Second} {
		s := w.create()
		w.good(w.pause(ids(s.GetId())), sandbox.Paused)
		resp, err := w.edge.Stop(t.Context(), &harenav1.StopRequest{Selector: ids(s.GetId()), Grace: durationpb.New(grace)})
		if err != nil {
			t.Fatal(err)
		}
		w.good(resp.GetOutcomes(), sandbox.Stopped)
	}
	// Why it was paused is not why it was stopped.
	s := w.create()
	b, _ := w.edge.find(sandbox.ID(s.GetId()))
	if err := w.edge.pause(t.Context(), b, pauseCall{reason: sandbox.ReasonIdle}); err != nil {
		t.Fatal(err)
	}
	w.good(w.stop(s.GetId()), sandbox.Stopped)
	if got, err := w.edge.Get(s.GetId()); err != nil || got.GetReason() != "" {
		t.Errorf("stopped by its owner: %v, %v", got, err)
	}
	w.empty()
}

// TestPauseStress: everything at once ends in a state that somebody asked for, and leaves nothing.
func TestPauseStress(t *testing.T) {
	w := newWorld(t)
	w.options.ReclaimTakes = 2 * time.Millisecond
	e := w.up()
	var all []string
	for range 4 {
		all = append(all, w.create(func(s *harenav1.SandboxSpec) { s.Job = "j" }).GetId())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	work := func(f func(id string)) {
		for _, id := range all {
			wg.Go(func() {
				for ctx.Err() == nil {
					f(id)
				}
			})
		}
	}
	job := &harenav1.Selector{Job: "j"}
	var calls atomic.Int64
	work(func(id string) {
		use, err := e.Enter(t.Context(), sandbox.ID(id), false)
		if err != nil {
			t.Errorf("enter: %v", err)
			return
		}
		calls.Add(1)
		use.Leave()
	})
	work(func(id string) {
		for _, o := range w.pause(ids(id)) {
			if o.GetError() != nil {
				t.Errorf("pause: %v", o)
			}
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			for _, o := range w.resume(job) {
				if o.GetError() != nil {
					t.Errorf("resume: %v", o)
				}
			}
			b, _ := e.find(sandbox.ID(all[0]))
			if err := e.pause(t.Context(), b, pauseCall{reason: sandbox.ReasonIdle, idle: true}); err != nil && err != errInUse { //nolint:errorlint // not wrapped
				t.Errorf("pause when idle: %v", err)
			}
		}
	})
	wg.Wait()
	if calls.Load() == 0 {
		t.Error("no call got through")
	}
	w.good(w.pause(job), sandbox.Paused)
	for _, id := range all {
		w.holds(id, sandbox.Paused)
	}
	resp, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: job})
	if err != nil || len(resp.GetOutcomes()) != len(all) {
		t.Errorf("stop: %v, %v", resp, err)
	}
	w.empty()
}
