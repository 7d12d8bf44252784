package scenario

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func TestCreateGetListStop(t *testing.T) {
	label := fmt.Sprintf("%s-%d", t.Name(), time.Now().UnixNano()) // stopped ones of an earlier run are kept for an hour
	b := create(t, func(s *harenav1.SandboxSpec) {
		s.Labels["test"] = label
		s.Job = "job-1"
	})
	s := b.get()
	if s.GetState() != "running" || s.GetImage() != the.image || s.GetBackend() != the.backend || s.GetJob() != "job-1" || s.GetProject() == "" ||
		len(s.GetLayers()) != 1 || s.GetSpec().GetLimits().GetPids() == 0 || s.GetCreated() == nil {
		t.Errorf("%v", s)
	}
	list := func(all bool) int {
		res, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{All: all, Labels: map[string]string{"test": label}}))
		if err != nil {
			t.Fatal(explain(err))
		}
		return len(res.Msg.GetSandboxes())
	}
	if n := list(false); n != 1 {
		t.Errorf("listed %d times", n)
	}
	for range 2 { // stop is idempotent
		if err := stop(within(t, time.Minute), b.id); err != nil {
			t.Error(explain(err))
		}
	}
	if s := b.get(); s.GetState() != "stopped" || s.GetEnded() == nil {
		t.Errorf("after stop: %v", s)
	}
	if n, all := list(false), list(true); n != 0 || all != 1 {
		t.Errorf("after stop %d are listed, %d with all", n, all)
	}
	if _, err := b.try(within(t, time.Minute), &harenav1.Command{Shell: "true"}); kind(err) != "precondition" {
		t.Errorf("exec in a stopped sandbox: %v", err)
	}
	if _, err := the.sandboxes.Get(within(t, time.Minute), connect.NewRequest(&harenav1.GetRequest{Id: b.id[:6] + "aaaaaaaaaaaaaa"})); kind(err) != "not-found" {
		t.Errorf("get of nobody: %v", err)
	}
}

func TestRefusalsExplainThemselves(t *testing.T) {
	for name, c := range map[string]struct {
		spec *harenav1.SandboxSpec
		kind string
	}{
		"no image":      {&harenav1.SandboxSpec{}, "invalid"},
		"unknown image": {&harenav1.SandboxSpec{Image: "no-such-image:1"}, "not-found"},
		"bad image":     {&harenav1.SandboxSpec{Image: "../../etc/passwd"}, "invalid"},
		"tiny memory":   {&harenav1.SandboxSpec{Image: the.image, Limits: &harenav1.Limits{Memory: 1024}}, "invalid"},
		"vast memory":   {&harenav1.SandboxSpec{Image: the.image, Limits: &harenav1.Limits{Memory: 1 << 60}}, "capacity"},
		"backend":       {&harenav1.SandboxSpec{Image: the.image, Backend: "docker"}, "invalid"},
		"gvisor":        {&harenav1.SandboxSpec{Image: the.image, Runtime: "gvisor"}, "unsupported"},
		"gpu":           {&harenav1.SandboxSpec{Image: the.image, Limits: &harenav1.Limits{Gpus: 1}}, "unsupported"},
		"network rule":  {&harenav1.SandboxSpec{Image: the.image, Network: &harenav1.NetworkPolicy{Allow: []*harenav1.NetworkRule{{Target: &harenav1.NetworkRule_Service{Service: "pypi"}}}}}, "unsupported"},
	} {
		_, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: c.spec}))
		d := detail(err)
		if d.GetKind() != c.kind || (d.GetHint() == "" && d.GetLimitName() == "") {
			t.Errorf("%s: %v, detail %v", name, err, d)
		}
	}
	// What a later version brings is refused with the reason.
	b := create(t)
	res, err := the.sandboxes.SetNetwork(within(t, time.Minute), connect.NewRequest(&harenav1.SetNetworkRequest{Selector: &harenav1.Selector{Ids: []string{b.id}}}))
	d := detail(err)
	if err == nil && len(res.Msg.GetOutcomes()) == 1 {
		d = res.Msg.GetOutcomes()[0].GetError()
	}
	if d.GetKind() != "unsupported" || d.GetHint() == "" {
		t.Errorf("network policy: %v, %v", res, err)
	}
}

func TestTokensAreRequired(t *testing.T) {
	for _, auth := range []string{"", "Bearer wrong", "Basic " + the.token, the.token} {
		for _, path := range []string{"/harena.v1.SandboxService/List", "/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa/files?path=/etc/passwd", "/v1/layers?name=x"} {
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, the.url+path, bytes.NewReader([]byte("{}")))
			req.Header.Set("Content-Type", "application/json")
			if auth != "" {
				req.Header.Set("Authorization", auth)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s with %q: %s", path, auth, res.Status)
			}
		}
	}
	for _, path := range []string{"/livez", "/readyz"} {
		res, err := http.Get(the.url + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, res.Status)
		}
	}
}

func TestRequestIDRepeats(t *testing.T) {
	req := &harenav1.CreateRequest{RequestId: "once-" + time.Now().Format(time.RFC3339Nano), Spec: &harenav1.SandboxSpec{Image: the.image, Backend: the.backend}}
	ids := make([]string, 8)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			res, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(req))
			if err != nil {
				t.Error(explain(err))
				return
			}
			ids[i] = res.Msg.GetSandbox().GetId()
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("one request made %v", ids)
			break
		}
	}
	other := &harenav1.CreateRequest{RequestId: req.RequestId, Spec: &harenav1.SandboxSpec{Image: the.image, Backend: the.backend, Hostname: "other"}}
	if _, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(other)); kind(err) != "exists" {
		t.Errorf("another request under the same ID: %v", err)
	}
	for _, id := range ids {
		if id != "" {
			_ = stop(within(t, time.Minute), id)
		}
	}
}

func TestTTLIdleAndLease(t *testing.T) {
	for reason, lifetime := range map[string]*harenav1.Lifetime{
		"ttl":   {Ttl: seconds(2)},
		"idle":  {Idle: seconds(2)},
		"lease": {Lease: seconds(2)},
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			b := create(t, func(s *harenav1.SandboxSpec) { s.Lifetime = lifetime })
			eventually(t, reason, 30*time.Second, func() bool { return b.get().GetState() == "stopped" })
			if s := b.get(); s.GetReason() != reason {
				t.Errorf("reason %q", s.GetReason())
			}
		})
	}
	t.Run("activity and renewal keep it", func(t *testing.T) {
		t.Parallel()
		b := create(t, func(s *harenav1.SandboxSpec) { s.Lifetime = &harenav1.Lifetime{Idle: seconds(3), Lease: seconds(3)} })
		// A running command is not idle; the lease is renewed beside it.
		b.start(&harenav1.Command{Argv: []string{"sleep", "100"}})
		for range 8 {
			time.Sleep(time.Second)
			if _, err := the.sandboxes.SetLifetime(within(t, time.Minute), connect.NewRequest(&harenav1.SetLifetimeRequest{Selector: &harenav1.Selector{Ids: []string{b.id}}, Lifetime: &harenav1.Lifetime{}})); err != nil {
				t.Fatal(explain(err))
			}
		}
		if s := b.get(); s.GetState() != "running" {
			t.Errorf("%s (%s)", s.GetState(), s.GetReason())
		}
		if _, err := the.sandboxes.SetLifetime(within(t, time.Minute), connect.NewRequest(&harenav1.SetLifetimeRequest{Selector: &harenav1.Selector{Ids: []string{b.id}}, Lifetime: &harenav1.Lifetime{Ttl: durationpb.New(time.Second)}})); err != nil {
			t.Fatal(explain(err))
		}
		eventually(t, "the new ttl ends it", 30*time.Second, func() bool { return b.get().GetReason() == "ttl" })
	})
}

func TestConcurrentStopAndCreate(t *testing.T) {
	for range count(20, 200) {
		ctx, cancel := context.WithCancel(t.Context())
		id := make(chan string, 1)
		go func() {
			defer close(id)
			res, err := the.sandboxes.Create(ctx, connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: the.image, Backend: the.backend, Labels: map[string]string{"race": "stop"}}}))
			if err == nil {
				id <- res.Msg.GetSandbox().GetId()
			}
		}()
		time.Sleep(2 * time.Millisecond)
		_, _ = the.sandboxes.Stop(within(t, time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Labels: map[string]string{"race": "stop"}}}))
		cancel()
		<-id
		_, _ = the.sandboxes.Stop(within(t, time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Labels: map[string]string{"race": "stop"}}}))
	}
	eventually(t, "nothing of the race is left", 20*time.Second, func() bool {
		res, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{Labels: map[string]string{"race": "stop"}}))
		if err != nil {
			t.Fatal(explain(err))
		}
		for _, s := range res.Msg.GetSandboxes() {
			_ = stop(within(t, time.Minute), s.GetId())
		}
		return len(res.Msg.GetSandboxes()) == 0
	})
}

func TestBatchAndGroupStop(t *testing.T) {
	stream, err := the.sandboxes.BatchCreate(within(t, 3*time.Minute), connect.NewRequest(&harenav1.BatchCreateRequest{Count: 40, Spec: &harenav1.SandboxSpec{Image: the.image, Backend: the.backend, Job: "batch"}}))
	if err != nil {
		t.Fatal(explain(err))
	}
	defer stream.Close()
	seen := map[int32]bool{}
	for stream.Receive() {
		m := stream.Msg()
		if m.GetError() != nil {
			t.Errorf("%d: %s", m.GetIndex(), m.GetErrorMessage())
		}
		seen[m.GetIndex()] = true
	}
	if err := stream.Err(); err != nil || len(seen) != 40 {
		t.Errorf("%d created, %v", len(seen), err)
	}
	res, err := the.sandboxes.Stop(within(t, 2*time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Job: "batch"}}))
	if err != nil {
		t.Fatal(explain(err))
	}
	for _, o := range res.Msg.GetOutcomes() {
		if o.GetState() != "stopped" {
			t.Errorf("%v", o)
		}
	}
	if len(res.Msg.GetOutcomes()) != 40 {
		t.Errorf("%d outcomes", len(res.Msg.GetOutcomes()))
	}
	if _, err := the.sandboxes.Stop(within(t, time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{}})); kind(err) != "invalid" {
		t.Errorf("an empty selector: %v", err)
	}
}

func TestEventsTellTheLife(t *testing.T) {
	b := create(t)
	_ = stop(within(t, time.Minute), b.id)
	res, err := the.events.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListEventsRequest{Filter: &harenav1.EventFilter{SandboxId: b.id}}))
	if err != nil {
		t.Fatal(explain(err))
	}
	var kinds []string
	last := int64(-1)
	for _, e := range res.Msg.GetEvents() {
		kinds = append(kinds, e.GetKind())
		if e.GetSeq() <= last {
			t.Errorf("events out of order: %v", res.Msg.GetEvents())
		}
		last = e.GetSeq()
	}
	for _, want := range []string{"sandbox.created", "sandbox.running", "sandbox.stopped"} {
		found := false
		for _, k := range kinds {
			found = found || k == want
		}
		if !found {
			t.Errorf("no %s in %v", want, kinds)
		}
	}
}

func TestLayersAreComposedInOrder(t *testing.T) {
	for _, l := range []struct{ name, kind string }{{"workspace-a", "workspace"}, {"tool-a", "toolkit"}, {"tool-b", "toolkit"}} {
		importTar(t, l.name, l.kind, map[string]string{"both/" + "who": l.name, "only/" + l.name: l.name})
	}
	b := create(t, func(s *harenav1.SandboxSpec) {
		s.Workspace = "workspace-a"
		s.Toolkits = []string{"tool-b", "tool-a"}
	})
	if got := b.must("cat /both/who; ls /only; test -d /etc"); got != "tool-atool-a\ntool-b\nworkspace-a" {
		t.Errorf("composed as %q", got)
	}
	_, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: "tool-a", Backend: the.backend}}))
	if kind(err) != "invalid" && kind(err) != "precondition" {
		t.Errorf("a toolkit as image: %v", err)
	}
}
