package lifecycle

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

func TestDecideLease(t *testing.T) {
	t0 := time.Unix(1_000_000, 0)
	at := func(n int) time.Time { return t0.Add(time.Duration(n) * time.Minute) }
	base := lease{Duration: 5 * time.Minute, OnLapse: "pause", StopAfter: 10 * time.Minute, Renewed: t0}
	with := func(change func(*lease)) lease {
		l := base
		change(&l)
		return l
	}
	active := with(func(l *lease) { l.State = leaseActive })
	tests := []struct {
		name string
		l    lease
		now  time.Time
		want leaseStep
	}{
		{"active", active, at(4), leaseStep{next: at(5)}},
		{"lapses", active, at(5), leaseStep{to: leaseLapsed}},
		{"nobody looked for long", active, at(15), leaseStep{to: leaseStopped}},
		{"lapsed, not done", with(func(l *lease) { l.State = leaseLapsed }), at(6), leaseStep{again: true}},
		{"lapsed", with(func(l *lease) { l.State, l.Done = leaseLapsed, true }), at(6), leaseStep{next: at(15)}},
		{"lapsed, never stops", with(func(l *lease) { l.State, l.Done, l.StopAfter = leaseLapsed, true, 0 }), at(600), leaseStep{}},
		{"stops", with(func(l *lease) { l.State, l.Done = leaseLapsed, true }), at(15), leaseStep{to: leaseStopped}},
		{"stops though not all are paused", with(func(l *lease) { l.State = leaseLapsed }), at(15), leaseStep{to: leaseStopped}},
		{"stop at once", with(func(l *lease) { l.State, l.OnLapse = leaseActive, "stop" }), at(5), leaseStep{to: leaseStopped}},
		{"stopped, not done", with(func(l *lease) { l.State = leaseStopped }), at(16), leaseStep{again: true}},
		{"stopped", with(func(l *lease) { l.State, l.Done = leaseStopped, true }), at(16), leaseStep{next: at(15 + 24*60)}},
		{"stopped long ago", with(func(l *lease) { l.State, l.Done = leaseStopped, true }), at(15 + 24*60), leaseStep{forget: true}},
	}
	for _, test := range tests {
		if got := decideLease(test.l, test.now); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
}

func inJob(name string) func(*harenav1.SandboxSpec) {
	return func(s *harenav1.SandboxSpec) {
		s.Job, s.Lifetime = name, &harenav1.Lifetime{Idle: durationpb.New(0)}
	}
}

func (w *world) lease(job string, change func(*harenav1.LeaseJobRequest)) (*harenav1.Job, error) {
	req := &harenav1.LeaseJobRequest{Job: job, Project: "lab"}
	if change != nil {
		change(req)
	}
	resp, err := w.edge.LeaseJob(w.t.Context(), req)
	return resp.GetJob(), err
}

func TestJobLease(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	first, other := w.create(inJob("j")), w.create(inJob("other"))
	if _, err := w.lease("j", nil); !errs.Is(err, errs.Precondition) {
		t.Errorf("renewal of no lease: %v", err)
	}
	job, err := w.lease("j", func(r *harenav1.LeaseJobRequest) {
		r.Lease, r.StopAfter = durationpb.New(time.Minute), durationpb.New(10*time.Minute)
	})
	if err != nil || job.GetLease().GetState() != "active" || job.GetSandboxesByState()["running"] != 1 {
		t.Fatalf("%v, %v", job, err)
	}
	second := w.create(inJob("j")) // the lease is for those that come later too
	for range 3 {
		w.clock.advance(50 * time.Second)
		if _, err := w.lease("j", nil); err != nil {
			t.Fatal(err)
		}
	}
	w.holds(first.GetId(), sandbox.Running)
	w.clock.advance(time.Minute)
	for _, s := range []*harenav1.Sandbox{first, second} {
		if got := w.reach(s.GetId(), sandbox.Paused); got.GetReason() != "lease" {
			t.Errorf("reason %q", got.GetReason())
		}
	}
	w.holds(other.GetId(), sandbox.Running)
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(inJob("j")), Project: "lab"}); !errs.Is(err, errs.Precondition) {
		t.Errorf("a sandbox joined a job whose lease lapsed: %v", err)
	}
	// The same name in another project is another job.
	if _, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(inJob("j")), Project: "shop"}); err != nil {
		t.Errorf("a job of another project: %v", err)
	}
	// The trainer is back: nothing resumes by itself, a call does.
	if _, err := w.lease("j", nil); err != nil {
		t.Fatal(err)
	}
	w.holds(first.GetId(), sandbox.Paused)
	use, err := e.Enter(t.Context(), sandbox.ID(first.GetId()), false)
	if err != nil {
		t.Fatal(err)
	}
	use.Leave()
	// It is gone for good; meanwhile the server is started anew.
	e = w.restart()
	w.clock.advance(time.Minute)
	w.reach(first.GetId(), sandbox.Paused)
	w.clock.advance(10 * time.Minute)
	for _, s := range []*harenav1.Sandbox{first, second} {
		if got := w.reach(s.GetId(), sandbox.Stopped); got.GetReason() != "lease" {
			t.Errorf("reason %q", got.GetReason())
		}
	}
	w.eventually("done", func() bool {
		jobs := e.ListJobs(&harenav1.ListJobsRequest{Project: "lab"}).GetJobs()
		return len(jobs) == 2 && jobs[0].GetLease().GetState() == "stopped"
	})
	w.clock.advance(keepJob)
	w.eventually("forgotten", func() bool { return len(e.ListJobs(&harenav1.ListJobsRequest{Project: "lab"}).GetJobs()) == 1 })
	for _, kind := range []string{"job.leased", "job.lapsed", "job.stopped"} {
		if !slices.Contains(w.kinds(), kind) {
			t.Errorf("no event %s in %v", kind, w.kinds())
		}
	}
}

func TestJobLeaseInput(t *testing.T) {
	w := newWorld(t)
	w.up()
	for name, change := range map[string]func(*harenav1.LeaseJobRequest){
		"name":       func(r *harenav1.LeaseJobRequest) { r.Job = "a b" },
		"no name":    func(r *harenav1.LeaseJobRequest) { r.Job = "" },
		"negative":   func(r *harenav1.LeaseJobRequest) { r.Lease = durationpb.New(-1) },
		"too long":   func(r *harenav1.LeaseJobRequest) { r.Lease = durationpb.New(maxLease + 1) },
		"stop after": func(r *harenav1.LeaseJobRequest) { r.StopAfter = durationpb.New(-1) },
		"on lapse":   func(r *harenav1.LeaseJobRequest) { r.OnLapse = "explode" },
	} {
		_, err := w.lease("j", func(r *harenav1.LeaseJobRequest) {
			r.Lease = durationpb.New(time.Minute)
			change(r)
		})
		if !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := w.lease("j", func(r *harenav1.LeaseJobRequest) { r.Lease = durationpb.New(time.Minute) }); err != nil {
		t.Fatal(err)
	}
	if j, err := w.lease("j", func(r *harenav1.LeaseJobRequest) { r.Lease = durationpb.New(0) }); err != nil || j.GetLease() != nil {
		t.Errorf("end of a lease: %v, %v", j, err)
	}
	if names, err := os.ReadDir(filepath.Join(w.path, "jobs")); err != nil || len(names) != 0 {
		t.Errorf("%v, %v", names, err)
	}
}

// TestLeaseFiles: leases of an interrupted or other server are found, and what cannot be read is left out.
func TestLeaseFiles(t *testing.T) {
	f := leaseFiles{dir: filepath.Join(t.TempDir(), "jobs")}
	l := lease{Format: 1, Project: "lab", Name: "a/b", Duration: time.Minute, OnLapse: "pause", Renewed: time.Unix(5, 0).UTC(), State: leaseActive}
	if err := f.write(l); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"x.json": "{", "y.json": `{"format":9}`, "z.json": `{"format":1,"name":"j","state":"active","duration":60000000000}`, "w.json.tmp": "",
	} {
		if err := os.WriteFile(filepath.Join(f.dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, torn, err := f.load()
	if err != nil || len(all) != 1 || all[l.key()] != l || len(torn) != 3 {
		t.Errorf("%v, %v, %v", all, torn, err)
	}
}

func FuzzDecodeLease(f *testing.F) {
	f.Add([]byte(`{"format":1,"name":"j","state":"active","duration":60000000000}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := decodeLease(b)
		if err == nil && (l.Duration <= 0 || l.Name == "") {
			t.Errorf("%q is taken for %+v", b, l)
		}
		if err == nil {
			decideLease(l, time.Now())
			l.view()
		}
	})
}

// TestStopOvertakesCreations: a stop of a job ends also what was asked for before it and arrives later.
func TestStopOvertakesCreations(t *testing.T) {
	w := newWorld(t)
	w.options.Delay = time.Millisecond
	e := w.up()
	stop := func(s *harenav1.Selector) {
		if _, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: s}); err != nil {
			t.Fatal(err)
		}
	}
	asked := timestamppb.New(w.clock.Now())
	create := func(asked *timestamppb.Timestamp, change func(*harenav1.SandboxSpec)) error {
		_, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(change), Project: "lab", Asked: asked})
		return err
	}
	// A batch whose items arrive while the job is stopped.
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				_ = create(asked, inJob("j"))
			}
		})
	}
	stop(&harenav1.Selector{Job: "j"})
	wg.Wait()
	w.empty()
	if err := create(asked, inJob("j")); !errs.Is(err, errs.Precondition) {
		t.Errorf("a late part of a batch: %v", err)
	}
	label := func(s *harenav1.SandboxSpec) { s.Labels = map[string]string{"a": "1", "b": "2"} }
	stop(&harenav1.Selector{Labels: map[string]string{"a": "1"}})
	if err := create(asked, label); !errs.Is(err, errs.Precondition) {
		t.Errorf("by label: %v", err)
	}
	// What is asked for later, or is another's, is not concerned.
	w.clock.advance(time.Second)
	for name, err := range map[string]error{
		"later":       create(timestamppb.New(w.clock.Now()), inJob("j")),
		"another job": create(asked, inJob("k")),
		"no time":     create(nil, inJob("j")),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.clock.advance(maxAsked)
	if err := create(asked, inJob("k")); !errs.Is(err, errs.Capacity) {
		t.Errorf("a very late part: %v", err)
	}
}
