package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

func TestDecide(t *testing.T) {
	t0 := time.Unix(1_000_000, 0)
	min := func(n int) time.Time { return t0.Add(time.Duration(n) * time.Minute) }
	life := func(ttl, idle, lease int) *harenav1.Lifetime {
		l := &harenav1.Lifetime{Idle: durationpb.New(time.Duration(idle) * time.Minute)}
		if ttl > 0 {
			l.Ttl = durationpb.New(time.Duration(ttl) * time.Minute)
		}
		if lease > 0 {
			l.Lease = durationpb.New(time.Duration(lease) * time.Minute)
		}
		return l
	}
	tests := []struct {
		name   string
		state  sandbox.State
		life   *harenav1.Lifetime
		m      moment
		reason sandbox.Reason
		want   step
	}{
		{"nothing ever", "running", life(0, 0, 0), moment{now: min(99), lastUse: t0}, "", step{}},
		{"creating", "creating", life(1, 1, 1), moment{now: min(99)}, "", step{}},
		{"ttl ahead", "running", life(10, 0, 0), moment{now: min(3), lastUse: t0}, "", step{next: min(10)}},
		{"ttl", "running", life(10, 0, 0), moment{now: min(10), lastUse: min(10), busy: true}, "", step{do: stop, reason: "ttl"}},
		{"lease", "running", life(10, 30, 2), moment{now: min(2), lastUse: min(2)}, "", step{do: stop, reason: "lease"}},
		{"the soonest of all", "running", life(10, 5, 20), moment{now: min(1), lastUse: min(1)}, "", step{next: min(6)}},
		{"idle: ask first", "running", life(0, 5, 0), moment{now: min(5), lastUse: t0}, "", step{do: ask}},
		{"idle: asked", "running", life(0, 5, 0), moment{now: min(5), lastUse: t0, asked: true}, "", step{do: stop, reason: "idle"}},
		{"idle: asked, used since", "running", life(0, 5, 0), moment{now: min(5), lastUse: min(4), asked: true}, "", step{next: min(9)}},
		{"idle: busy", "running", life(0, 5, 0), moment{now: min(5), lastUse: t0, busy: true, asked: true}, "", step{next: min(10)}},
		{"ttl before idle answer", "running", life(6, 5, 0), moment{now: min(5), lastUse: t0, busy: true}, "", step{next: min(6)}},
		{"paused: no idle clock", "paused", life(0, 5, 0), moment{now: min(99), lastUse: t0}, "idle", step{}},
		{"paused: ttl", "paused", life(10, 5, 0), moment{now: min(10), lastUse: t0}, "idle", step{do: stop, reason: "ttl"}},
		{"paused: ttl ahead", "paused", life(10, 5, 20), moment{now: min(9), lastUse: t0}, "", step{next: min(10)}},
		{"paused: lease", "paused", life(10, 5, 2), moment{now: min(2), lastUse: t0}, "", step{do: stop, reason: "lease"}},
		{"pausing", "pausing", life(1, 1, 1), moment{now: min(9), lastUse: t0}, "", step{}},
		{"resuming", "resuming", life(1, 1, 1), moment{now: min(9), lastUse: t0}, "", step{}},
		{"stopped", "stopped", life(1, 1, 1), moment{now: min(10)}, "", step{next: min(60)}},
		{"stopped long ago", "stopped", life(1, 1, 1), moment{now: min(60)}, "", step{do: forget}},
		{"failed", "failed", life(1, 1, 1), moment{now: min(10)}, "oom", step{next: min(24 * 60)}},
		{"failed long ago", "failed", life(1, 1, 1), moment{now: min(24 * 60)}, "oom", step{do: forget}},
		{"failed, files in use", "failed", life(1, 1, 1), moment{now: min(10), lastUse: t0, files: true, busy: true}, "oom", step{next: min(24 * 60)}},
		{"failed, files unused", "failed", life(1, 1, 1), moment{now: min(10), lastUse: min(9), files: true}, "oom", step{do: endFiles}},
		{"failed, files unused soon", "failed", life(1, 1, 1), moment{now: min(10), lastUse: min(10), files: true}, "oom", step{next: min(11)}},
		{"failed, holds something", "failed", life(1, 1, 1), moment{now: t0}, "oom", step{next: t0.Add(30 * time.Second)}},
		{"failed, holds something still", "failed", life(1, 1, 1), moment{now: min(1)}, "oom", step{do: settleAgain}},
		{"failed, holds a supervisor for files", "failed", life(1, 1, 1), moment{now: min(9), lastUse: min(9), files: true}, "oom", step{next: min(10)}},
		{"stop failed", "failed", life(1, 1, 1), moment{now: t0.Add(29 * time.Second)}, reasonStopFailed, step{next: t0.Add(30 * time.Second)}},
		{"stop failed, again", "failed", life(1, 1, 1), moment{now: min(1)}, reasonStopFailed, step{do: stopAgain}},
	}
	for _, test := range tests {
		base := uint32(0)
		if strings.HasPrefix(test.name, "failed, holds") {
			base = 1 << 29
		}
		test.m.record = &Record{Config: backend.Config{IDBase: base}, State: test.state, Reason: test.reason, Spec: &harenav1.SandboxSpec{Lifetime: test.life}, Created: t0, TTLFrom: t0, LeaseFrom: t0, Ended: t0}
		if got := decide(test.m); got.do != test.want.do || got.reason != test.want.reason || !got.next.Equal(test.want.next) {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
}

func TestTTL(t *testing.T) {
	w := newWorld(t)
	w.up()
	s := w.create(func(s *harenav1.SandboxSpec) { s.Lifetime = &harenav1.Lifetime{Ttl: durationpb.New(time.Minute)} })
	other := w.create()
	w.clock.advance(59 * time.Second)
	e := w.restart() // the clock goes on
	if got, err := e.Get(s.GetId()); err != nil || got.GetState() != "running" {
		t.Fatalf("before its time: %v, %v", got, err)
	}
	w.clock.advance(2 * time.Second)
	if got := w.reach(s.GetId(), sandbox.Stopped); got.GetReason() != "ttl" {
		t.Errorf("reason %q", got.GetReason())
	}
	w.clock.advance(keepStopped)
	w.eventually("forgotten", func() bool {
		_, err := e.Get(s.GetId())
		return errs.Is(err, errs.NotFound)
	})
	w.stop(other.GetId())
	w.empty()
}

func TestLeaseIsRenewed(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	s := w.create(func(s *harenav1.SandboxSpec) {
		s.Lifetime = &harenav1.Lifetime{Lease: durationpb.New(time.Minute), Idle: durationpb.New(0), Ttl: durationpb.New(10 * time.Minute)}
	})
	renew := func(l *harenav1.Lifetime) error {
		resp, err := e.SetLifetime(t.Context(), &harenav1.SetLifetimeRequest{Selector: &harenav1.Selector{Ids: []string{s.GetId()}}, Lifetime: l})
		if err != nil {
			return err
		}
		return errs.FromDetail(resp.GetOutcomes()[0].GetError(), resp.GetOutcomes()[0].GetErrorMessage())
	}
	for range 5 {
		w.clock.advance(50 * time.Second)
		if err := renew(nil); err != nil {
			t.Fatalf("renew: %v", err)
		}
	}
	b, err := e.find(sandbox.ID(s.GetId()))
	if err != nil {
		t.Fatal(err)
	}
	if r := b.record(); !r.TTLFrom.Equal(r.Created) || r.LeaseFrom.Equal(r.Created) {
		t.Errorf("a renewal started the TTL anew, or not the lease: %v", r)
	}
	for name, l := range map[string]*harenav1.Lifetime{
		"sleep":        {OnIdle: "sleep"},
		"negative TTL": {Ttl: durationpb.New(-1)},
	} {
		if err := renew(l); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	if err := renew(&harenav1.Lifetime{Ttl: durationpb.New(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if r := b.record(); r.TTLFrom.Equal(r.Created) || r.Spec.GetLifetime().GetTtl().AsDuration() != time.Hour {
		t.Errorf("a new TTL did not start anew: %v", r)
	}
	w.clock.advance(61 * time.Second)
	if got := w.reach(s.GetId(), sandbox.Stopped); got.GetReason() != "lease" {
		t.Errorf("reason %q", got.GetReason())
	}
	if err := renew(nil); !errs.Is(err, errs.Precondition) {
		t.Errorf("renewal of a stopped sandbox: %v", err)
	}
}

func TestIdle(t *testing.T) {
	w := newWorld(t)
	var running atomic.Int32
	var last atomic.Int64
	var polls atomic.Int32
	w.options.Status = statusHook(func(s *guestv1.StatusResponse) {
		polls.Add(1)
		s.RunningCommands, s.LastActivityNanos = running.Load(), last.Load()
	})
	e := w.up()
	s := w.create(func(s *harenav1.SandboxSpec) { s.Lifetime = &harenav1.Lifetime{Idle: durationpb.New(10 * time.Minute)} })
	id := sandbox.ID(s.GetId())
	b, err := e.find(id)
	if err != nil {
		t.Fatal(err)
	}
	scheduled := func(at time.Time) func() bool {
		return func() bool {
			e.timers.mu.Lock()
			defer e.timers.mu.Unlock()
			return b.slot > 0 && b.due.Equal(at)
		}
	}
	start := w.clock.Now()
	// A detached command keeps it alive, without polling.
	running.Store(1)
	w.clock.advance(10 * time.Minute)
	w.eventually("looked at again later", scheduled(start.Add(20*time.Minute)))
	if n := polls.Load(); n != 1 {
		t.Errorf("%d polls, want 1", n)
	}
	// It ended meanwhile: idle from then on.
	running.Store(0)
	last.Store(start.Add(13 * time.Minute).UnixNano())
	w.clock.advance(10 * time.Minute)
	w.eventually("looked at when it is idle", scheduled(start.Add(23*time.Minute)))
	// A call that is under way counts, and so does its end.
	use, err := e.Enter(t.Context(), id, false)
	if err != nil {
		t.Fatal(err)
	}
	w.clock.advance(5 * time.Minute)
	w.eventually("kept by a call", scheduled(start.Add(35*time.Minute)))
	use.Leave()
	w.clock.advance(5 * time.Minute)
	if b.state() != sandbox.Running {
		t.Error("stopped too early")
	}
	w.clock.advance(5 * time.Minute)
	if got := w.reach(s.GetId(), sandbox.Stopped); got.GetReason() != "idle" {
		t.Errorf("reason %q", got.GetReason())
	}
	w.empty()
}

func TestExits(t *testing.T) {
	tests := []struct {
		name    string
		says    string // "": the supervisor is gone too
		kills   int64
		reason  string
		oomSeen int64
	}{
		{"supervisor killed", "", 0, "supervisor-lost", 0},
		{"supervisor killed for want of memory", "", 1, "oom", 1},
		{"first process killed for want of memory", "oom", 0, "oom", 0},
		{"first process gone, with a kill", "init", 2, "oom", 2},
		{"something else", "zygote died", 0, "supervisor-lost", 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			e := w.up()
			s := w.create()
			id := sandbox.ID(s.GetId())
			w.node.SetUsage(id, backend.Usage{OOMKills: test.kills})
			w.node.Kill(id, test.says)
			got := w.reach(s.GetId(), sandbox.Failed)
			if got.GetReason() != test.reason || got.GetMessage() == "" || got.GetOomKills() != test.oomSeen {
				t.Errorf("failed as %v", got)
			}
			w.eventually("cleared", func() bool { return w.node.Len() == 0 })
			if w.layers.held() != 1 {
				t.Error("the layers of a failed sandbox can be collected")
			}
			if _, err := e.Enter(t.Context(), id, false); !errs.Is(err, errs.Precondition) {
				t.Errorf("exec on a failed sandbox: %v", err)
			}
			// What it left survives a restart, and goes with stop.
			e = w.restart()
			if again, err := e.Get(s.GetId()); err != nil || again.GetState() != "failed" || again.GetReason() != test.reason || w.layers.held() != 1 {
				t.Errorf("after a restart: %v, %v", again, err)
			}
			w.stop(s.GetId())
			w.empty()
		})
	}
}

// TestExitAfterAKillThatWasSeen: the kill that ends a sandbox is often counted before the supervisor is gone.
func TestExitAfterAKillThatWasSeen(t *testing.T) {
	for wait, reason := range map[time.Duration]string{time.Second: "oom", time.Minute: "supervisor-lost"} {
		w := newWorld(t)
		w.config = func(c *Config) { c.Poll = time.Millisecond }
		e := w.up()
		s := w.create()
		id := sandbox.ID(s.GetId())
		w.node.SetUsage(id, backend.Usage{OOMKills: 1})
		w.machine.set(func(n *nodeFake) { n.kills++ })
		w.eventually("the kill is recorded", func() bool {
			got, err := e.Get(s.GetId())
			return err == nil && got.GetOomKills() == 1
		})
		w.clock.advance(wait)
		w.node.Kill(id, "")
		if got := w.reach(s.GetId(), sandbox.Failed); got.GetReason() != reason {
			t.Errorf("%v after the kill: failed as %v", wait, got)
		}
		w.stop(s.GetId())
		w.empty()
	}
}

// TestExitThatCannotBeCleared: what of a failed sandbox could not be ended is ended later.
func TestExitThatCannotBeCleared(t *testing.T) {
	w := newWorld(t)
	var stuck atomic.Bool
	stuck.Store(true)
	w.options.Fail = func(method string, _ sandbox.ID) error {
		if method == "destroy" && stuck.Load() {
			return errors.New("stuck in the kernel")
		}
		return nil
	}
	e := w.up()
	s := w.create()
	b, err := e.find(sandbox.ID(s.GetId()))
	if err != nil {
		t.Fatal(err)
	}
	w.node.Kill(b.id, "")
	w.reach(s.GetId(), sandbox.Failed)
	w.eventually("tried again later", func() bool {
		e.timers.mu.Lock()
		defer e.timers.mu.Unlock()
		return b.slot > 0 && b.due.Equal(b.record().Ended.Add(retryStop))
	})
	if w.node.Len() != 1 || b.record().Config.IDBase == 0 {
		t.Error("its range was given back while something runs")
	}
	stuck.Store(false)
	w.clock.advance(retryStop)
	w.eventually("cleared", func() bool { return w.node.Len() == 0 && b.record().Config.IDBase == 0 })
	w.stop(s.GetId())
	w.empty()
}

func TestFilesOfFailed(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	s := w.create()
	id := sandbox.ID(s.GetId())
	w.node.Kill(id, "")
	w.reach(s.GetId(), sandbox.Failed)
	w.eventually("cleared", func() bool { return w.node.Len() == 0 })
	first, err := e.Enter(t.Context(), id, true)
	if err != nil {
		t.Fatal(err)
	}
	second, err := e.Enter(t.Context(), id, true)
	if err != nil {
		t.Fatal(err)
	}
	b, err := e.find(id)
	if err != nil {
		t.Fatal(err)
	}
	if c := b.record().Config; !c.FilesOnly || c.IDBase == 0 || w.node.Len() != 1 || w.layers.held() != 1 {
		t.Errorf("files are served with %+v, %d sandboxes", c, w.node.Len())
	}
	if _, err := e.Enter(t.Context(), id, false); !errs.Is(err, errs.Precondition) {
		t.Errorf("exec meanwhile: %v", err)
	}
	first.Leave()
	w.clock.advance(2 * keepFiles)
	second.Leave()
	if w.node.Len() != 1 {
		t.Error("ended while it was in use")
	}
	w.clock.advance(keepFiles + time.Second)
	w.eventually("ended when unused", func() bool { return w.node.Len() == 0 })
	w.eventually("range given back", func() bool { return b.record().Config.IDBase == 0 })
	// A crash while it is up.
	if _, err := e.Enter(t.Context(), id, true); err != nil {
		t.Fatal(err)
	}
	w.node.Kill(id, "")
	w.eventually("cleared", func() bool { return w.node.Len() == 0 && !b.files.Load() && b.record().Config.IDBase == 0 })
	// A restart while it is up.
	if _, err := e.Enter(t.Context(), id, true); err != nil {
		t.Fatal(err)
	}
	e = w.restart()
	if w.node.Len() != 0 {
		t.Error("the supervisor for files outlived the server")
	}
	if _, err := e.Enter(t.Context(), id, true); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	w.stop(s.GetId())
	w.empty()
}

func TestEnterWaitsForCreation(t *testing.T) {
	w := newWorld(t)
	entered, hold := make(chan struct{}), make(chan struct{})
	w.config = func(c *Config) {
		c.Faults = func(step string) error {
			if step == "backend.create" {
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
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Enter(ctx, id, false); !errs.Is(err, errs.Cancelled) {
		t.Errorf("a caller that goes: %v", err)
	}
	got := make(chan error, 1)
	go func() {
		use, err := e.Enter(t.Context(), id, false)
		if err == nil {
			use.Leave()
		}
		got <- err
	}()
	close(hold)
	if err := errors.Join(<-got, <-created); err != nil {
		t.Error(err)
	}
}

func TestCounters(t *testing.T) {
	w := newWorld(t)
	w.config = func(c *Config) { c.Poll = time.Millisecond }
	e := w.up()
	hog, bomb := w.create(), w.create()
	w.node.SetUsage(sandbox.ID(hog.GetId()), backend.Usage{OOMKills: 3})
	w.node.SetUsage(sandbox.ID(bomb.GetId()), backend.Usage{PidsHits: 7})
	w.machine.set(func(n *nodeFake) { n.kills += 3 })
	w.eventually("both are reported", func() bool {
		kinds := w.kinds()
		return slices.Contains(kinds, "sandbox.oom") && slices.Contains(kinds, "sandbox.pids-limit")
	})
	if s, err := e.Get(hog.GetId()); err != nil || s.GetOomKills() != 3 || s.GetState() != "running" {
		t.Errorf("hog: %v, %v", s, err)
	}
	before := len(w.kinds())
	e = w.restart()
	if s, err := e.Get(hog.GetId()); err != nil || s.GetOomKills() != 3 {
		t.Errorf("hog after a restart: %v, %v", s, err)
	}
	if after := len(w.kinds()); after != before+2 {
		t.Errorf("%d events after a restart, %d before: reported again", after, before)
	}
}

func TestListPages(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	const n = 25
	for i := range n {
		if i%4 == 0 {
			w.clock.advance(time.Millisecond) // several are of one moment
		}
		w.create(func(s *harenav1.SandboxSpec) { s.Labels = map[string]string{"half": fmt.Sprint(i % 2)} })
	}
	var all []*harenav1.Sandbox
	token := ""
	for {
		resp, err := e.List(&harenav1.ListRequest{Page: &harenav1.Page{Size: 4, Token: token}})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, resp.GetSandboxes()...)
		if token = resp.GetNextPageToken(); token == "" {
			break
		}
		if len(resp.GetSandboxes()) != 4 {
			t.Fatalf("a page of %d", len(resp.GetSandboxes()))
		}
	}
	ids := map[string]bool{}
	for i, s := range all {
		ids[s.GetId()] = true
		if i > 0 && s.GetCreated().AsTime().Before(all[i-1].GetCreated().AsTime()) {
			t.Error("not in order of age")
		}
	}
	if len(all) != n || len(ids) != n {
		t.Errorf("%d listed, %d of them different, want %d", len(all), len(ids), n)
	}
	w.stop(all[0].GetId())
	for _, test := range []struct {
		name string
		req  *harenav1.ListRequest
		want int
	}{
		{"live", &harenav1.ListRequest{}, n - 1},
		{"all", &harenav1.ListRequest{All: true}, n},
		{"label, all", &harenav1.ListRequest{All: true, Labels: map[string]string{"half": "1"}}, 12},
		{"job", &harenav1.ListRequest{Job: "none"}, 0},
		{"project", &harenav1.ListRequest{Project: "lab"}, n - 1},
		{"other project", &harenav1.ListRequest{Project: "la"}, 0},
	} {
		if resp, err := e.List(test.req); err != nil || len(resp.GetSandboxes()) != test.want {
			t.Errorf("%s: %d, %v; want %d", test.name, len(resp.GetSandboxes()), err, test.want)
		}
	}
	for _, page := range []*harenav1.Page{{Size: -1}, {Size: 10_001}, {Token: "junk!"}, {Token: "aGVsbG8"}} {
		if _, err := e.List(&harenav1.ListRequest{Page: page}); !errs.Is(err, errs.Invalid) {
			t.Errorf("page %v: %v", page, err)
		}
	}
}

// TestWatch checks the order of what a watcher sees, and that a slow one neither blocks nor misses the end.
func TestWatch(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	first := w.create()
	block := make(chan struct{})
	var got []string
	done := make(chan error, 1)
	enough := errors.New("enough")
	const n = 50
	go func() {
		stopped := 0
		done <- e.Watch(t.Context(), &harenav1.WatchRequest{Project: "lab"}, func(s *harenav1.Sandbox, synced bool) error {
			if synced {
				got = append(got, "synced")
				<-block
				return nil
			}
			got = append(got, s.GetId()+" "+s.GetState())
			if s.GetState() == "stopped" {
				if stopped++; stopped == n {
					return enough
				}
			}
			return nil
		})
	}()
	w.eventually("watched", func() bool {
		e.watchers.mu.Lock()
		defer e.watchers.mu.Unlock()
		return len(e.watchers.all) == 1
	})
	for range n {
		w.stop(w.create().GetId())
	}
	close(block)
	if err := <-done; !errors.Is(err, enough) {
		t.Fatal(err)
	}
	if got[0] != first.GetId()+" running" || got[1] != "synced" {
		t.Errorf("began with %v", got[:2])
	}
	order := map[string]string{}
	legal := map[string][]string{"": {"creating"}, "creating": {"creating", "running"}, "running": {"stopping"}, "stopping": {"stopped"}}
	for _, line := range got[2:] {
		id, state := line[:20], line[21:]
		if !slices.Contains(legal[order[id]], state) {
			t.Errorf("%s after %q", line, order[id])
		}
		order[id] = state
	}
}

func TestDrain(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	s := w.create()
	if p, err := e.Drain(true); err != nil || p.GetState() != "draining" || p.GetSandboxesByState()["running"] != 1 {
		t.Errorf("drain: %v, %v", p, err)
	}
	e = w.restart()
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()}); !errs.Is(err, errs.Capacity) {
		t.Errorf("create on a draining edge: %v", err)
	}
	if got, err := e.Get(s.GetId()); err != nil || got.GetState() != "running" {
		t.Errorf("sandbox of a draining edge: %v, %v", got, err)
	}
	if p, err := e.Drain(false); err != nil || p.GetState() != "healthy" {
		t.Errorf("undrain: %v, %v", p, err)
	}
	w.create()
}

func TestStopAll(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	for range 20 {
		w.create()
	}
	failed := w.create()
	w.node.Kill(sandbox.ID(failed.GetId()), "")
	w.reach(failed.GetId(), sandbox.Failed)
	if err := e.StopAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.empty()
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()}); !errs.Is(err, errs.Capacity) {
		t.Errorf("create while going down: %v", err)
	}
}

func TestRetention(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	for range 3 {
		w.stop(w.create().GetId())
	}
	e.mu.Lock()
	oldest := e.stopped[0].id
	// As if there were many more.
	filler := make([]*box, maxStopped-3)
	for i := range filler {
		filler[i] = newBox(sandbox.ID(fmt.Sprintf("%s%014d", e.ID(), i)))
		e.show(filler[i], &Record{Config: backend.Config{ID: filler[i].id}, Spec: spec(), State: sandbox.Stopped, Ended: w.clock.Now()})
	}
	e.stopped = append(e.stopped, filler...)
	e.mu.Unlock()
	w.stop(w.create().GetId())
	if _, err := e.Get(string(oldest)); !errs.Is(err, errs.NotFound) {
		t.Errorf("the oldest is kept: %v", err)
	}
	if n := len(w.dirs()); n != 3 {
		t.Errorf("%d records on disk, want 3", n)
	}
}
