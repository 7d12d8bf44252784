package scenario

import (
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

func uniqueJob(t *testing.T) string { return fmt.Sprintf("%s-%d", t.Name(), time.Now().UnixNano()) }

func ofJob(name string) func(*harenav1.SandboxSpec) {
	return func(s *harenav1.SandboxSpec) { s.Job = name }
}

func TestJobAsAWhole(t *testing.T) {
	job := uniqueJob(t)
	first, second := create(t, ofJob(job)), create(t, ofJob(job))
	sel := &harenav1.Selector{Job: job}
	if out := pauseAll(t, sel); len(out) != 2 || out[0].GetError() != nil || out[1].GetError() != nil {
		t.Errorf("pause: %v", out)
	}
	first.must("true") // resumes this one only
	first.is("running")
	second.is("paused")
	if out := resumeAll(t, sel); len(out) != 2 || out[0].GetState() != "running" || out[1].GetState() != "running" {
		t.Errorf("resume: %v", out)
	}
	// One that is gone is told beside those that are done.
	mixed := pauseAll(t, &harenav1.Selector{Ids: []string{first.id[:6] + "aaaaaaaaaaaaaa", second.id}})
	if len(mixed) != 2 || mixed[0].GetError().GetKind() != "not-found" || mixed[1].GetError() != nil {
		t.Errorf("mixed: %v", mixed)
	}
}

func TestJobLease(t *testing.T) {
	jobs := harenav1connect.NewJobServiceClient(the.http, the.url)
	job := uniqueJob(t)
	b := create(t, ofJob(job))
	lease := func(d, stopAfter time.Duration) (*harenav1.Job, error) {
		req := &harenav1.LeaseJobRequest{Job: job}
		if d > 0 {
			req.Lease, req.StopAfter = durationpb.New(d), durationpb.New(stopAfter)
		}
		res, err := jobs.LeaseJob(within(t, time.Minute), connect.NewRequest(req))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetJob(), nil
	}
	if _, err := lease(0, 0); kind(err) != "precondition" {
		t.Errorf("renewal of no lease: %v", err)
	}
	if j, err := lease(4*time.Second, 30*time.Second); err != nil || j.GetLease().GetState() != "active" {
		t.Fatalf("%v, %v", j, err)
	}
	later := create(t, ofJob(job))
	for _, x := range []*box{b, later} {
		eventually(t, "paused", time.Minute, func() bool { return x.get().GetState() == "paused" })
		if r := x.get().GetReason(); r != "lease" {
			t.Errorf("reason %q", r)
		}
	}
	_, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: the.image, Job: job}}))
	if kind(err) != "precondition" || detail(err).GetHint() == "" {
		t.Errorf("a sandbox joined a job whose lease lapsed: %v", err)
	}
	if _, err := lease(time.Second, time.Second); err != nil {
		t.Fatal(explain(err))
	}
	for _, x := range []*box{b, later} {
		eventually(t, "stopped", time.Minute, func() bool { return x.get().GetState() == "stopped" })
	}
	if _, err := jobs.LeaseJob(within(t, time.Minute), connect.NewRequest(&harenav1.LeaseJobRequest{Job: job, Lease: durationpb.New(0)})); err != nil {
		t.Error(explain(err))
	}
	doctor(t)
}

// TestStopOfAJobThatIsBeingMade: whatever the moment, nothing of the batch is left.
func TestStopOfAJobThatIsBeingMade(t *testing.T) {
	for round := range count(5, 50) {
		job := uniqueJob(t)
		batch, err := the.sandboxes.BatchCreate(within(t, 2*time.Minute), connect.NewRequest(&harenav1.BatchCreateRequest{
			Spec: &harenav1.SandboxSpec{Image: the.image, Job: job}, Count: 40,
		}))
		if err != nil {
			t.Fatal(explain(err))
		}
		for range round % 7 {
			batch.Receive()
		}
		_, err = the.sandboxes.Stop(within(t, 2*time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Job: job}, Remove: true}))
		if err != nil {
			t.Fatal(explain(err))
		}
		for batch.Receive() {
			if e := batch.Msg().GetError(); e != nil && e.GetKind() != "precondition" {
				t.Errorf("an item of the batch: %v %s", e, batch.Msg().GetErrorMessage())
			}
		}
		if err := batch.Err(); err != nil {
			t.Errorf("batch: %v", explain(err))
		}
		res, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{Job: job}))
		if err != nil || len(res.Msg.GetSandboxes()) != 0 {
			t.Errorf("round %d: left %v, %v", round, res, err)
		}
	}
	doctor(t)
}
