package server_test

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
)

// ListJobs returns what a test put there.
func (f *fakeEdge) ListJobs(context.Context, *connect.Request[harenav1.ListJobsRequest]) (*connect.Response[harenav1.ListJobsResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return connect.NewResponse(&harenav1.ListJobsResponse{Jobs: f.jobs}), nil
}

// LeaseJob keeps one lease, as an edge does.
func (f *fakeEdge) LeaseJob(_ context.Context, r *connect.Request[harenav1.LeaseJobRequest]) (*connect.Response[harenav1.LeaseJobResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leases = append(f.leases, r.Msg)
	if r.Msg.GetJob() == "unknown" {
		return nil, errs.ToConnect(errs.E(errs.NotFound, "job unknown has no lease on edge %s", f.id).On("job unknown").WithHint("give a duration"))
	}
	j := &harenav1.Job{Name: r.Msg.GetJob(), Project: r.Msg.GetProject(), SandboxesByState: map[string]int64{"running": 1}, Lease: f.lease}
	return connect.NewResponse(&harenav1.LeaseJobResponse{Job: j}), nil
}

func (n *node) jobs(t *testing.T) harenav1connect.JobServiceClient {
	return harenav1connect.NewJobServiceClient(n.client(t), n.url)
}

// leaseUntil is a lease that lapses so many minutes after the beginning of time.
func leaseUntil(minutes int64, state string) *harenav1.JobLease {
	return &harenav1.JobLease{Duration: durationpb.New(time.Hour), Lapses: timestamppb.New(time.Unix(minutes*60, 0)), State: state}
}

// TestJobsSpanEdges: sandboxes are added up by project and name; of a lease that the edges do not agree on, the one that lapses first is shown.
func TestJobsSpanEdges(t *testing.T) {
	running := func(n int64) map[string]int64 { return map[string]int64{"running": n} }
	n := newNode(t, "edgeaa", "edgebb", "edgecc")
	n.edges[0].jobs = []*harenav1.Job{
		{Project: "q", Name: "a", SandboxesByState: running(1)},
		{Project: "p", Name: "b", Lease: leaseUntil(20, "active")}, // a lease alone
		{Project: "p", Name: "late", SandboxesByState: running(1), Lease: leaseUntil(30, "active")},
	}
	n.edges[1].jobs = []*harenav1.Job{
		{Project: "p", Name: "a", SandboxesByState: running(2)},
		{Project: "p", Name: "b", SandboxesByState: map[string]int64{"running": 3, "paused": 1}},
		{Project: "p", Name: "late", SandboxesByState: map[string]int64{"paused": 4}, Lease: leaseUntil(10, "lapsed")},
	}
	n.edges[2].jobs = []*harenav1.Job{
		{Project: "p", Name: "b", SandboxesByState: running(5), Lease: leaseUntil(20, "active")},
		{Project: "p", Name: "late", SandboxesByState: running(1), Lease: leaseUntil(40, "active")},
	}
	res, err := n.jobs(t).ListJobs(within(t), connect.NewRequest(&harenav1.ListJobsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	want := &harenav1.ListJobsResponse{Jobs: []*harenav1.Job{
		{Project: "p", Name: "a", SandboxesByState: running(2)},
		{Project: "p", Name: "b", SandboxesByState: map[string]int64{"running": 8, "paused": 1}, Lease: leaseUntil(20, "active")},
		{Project: "p", Name: "late", SandboxesByState: map[string]int64{"running": 2, "paused": 4}, Lease: leaseUntil(10, "lapsed")},
		{Project: "q", Name: "a", SandboxesByState: running(1)},
	}}
	if !proto.Equal(res.Msg, want) {
		t.Errorf("got %v\nwant %v", res.Msg, want)
	}
}

// TestLeaseReachesEveryEdge, in the token's project; also those behind one that cannot be told, which the answer is about.
func TestLeaseReachesEveryEdge(t *testing.T) {
	n := newNode(t, "edgeaa", "edgebb")
	a, b := n.edges[0], n.edges[1]
	a.lease, b.lease = leaseUntil(20, "active"), leaseUntil(10, "active")
	c := n.jobs(t)
	lease := func(job string) (*harenav1.Job, error) {
		res, err := c.LeaseJob(within(t), connect.NewRequest(&harenav1.LeaseJobRequest{Job: job, Lease: durationpb.New(time.Minute), OnLapse: "stop"}))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetJob(), nil
	}
	j, err := lease("j")
	if err != nil || j.GetName() != "j" || j.GetSandboxesByState()["running"] != 2 || !proto.Equal(j.GetLease(), b.lease) {
		t.Errorf("%v, %v", j, err)
	}
	for _, f := range n.edges {
		if len(f.leases) != 1 || f.leases[0].GetProject() != "default" || f.leases[0].GetOnLapse() != "stop" || f.leases[0].GetLease().AsDuration() != time.Minute {
			t.Errorf("edge %s was told %v", f.id, f.leases)
		}
	}
	_, err = lease("unknown")
	kindOf(t, err, errs.NotFound, "give a duration")
	if _, err := lease("a\nb"); !errs.Is(errs.FromConnect(err), errs.Invalid) || len(a.leases) != 2 {
		t.Errorf("a bad name: %v, edge was told %v", err, a.leases)
	}
	// Jobs are whole or not answered for: what the edge that is gone has of them is not known.
	a.stop()
	_, err = lease("j")
	kindOf(t, err, errs.Capacity, "try again")
	if len(b.leases) != 3 {
		t.Errorf("the edge that is there was told %d times of 3", len(b.leases))
	}
	_, err = c.ListJobs(within(t), connect.NewRequest(&harenav1.ListJobsRequest{}))
	kindOf(t, err, errs.Capacity, "try again")
}

func TestLeaseWithoutEdges(t *testing.T) {
	_, err := newNode(t).jobs(t).LeaseJob(within(t), connect.NewRequest(&harenav1.LeaseJobRequest{Job: "j", Lease: durationpb.New(time.Minute)}))
	kindOf(t, err, errs.Capacity, "fleet ls")
}

// TestPauseOfAJobListsPartialFailures: what one edge refuses is listed beside what was done.
func TestPauseOfAJobListsPartialFailures(t *testing.T) {
	n := newNode(t, "edgeaa", "edgebb")
	for _, f := range n.edges {
		f.pauses = []*harenav1.Outcome{{SandboxId: f.sandboxID("1"), State: "paused"}}
	}
	detail, message := errs.Detail(errs.E(errs.Timeout, "it could not be frozen").WithHint("end the process"))
	n.edges[0].pauses = append(n.edges[0].pauses, &harenav1.Outcome{SandboxId: n.edges[0].sandboxID("2"), State: "running", Error: detail, ErrorMessage: message})
	res, err := n.sandboxes(t).Pause(within(t), connect.NewRequest(&harenav1.PauseRequest{Selector: &harenav1.Selector{Job: "j"}}))
	if err != nil {
		t.Fatal(err)
	}
	want := &harenav1.PauseResponse{Outcomes: []*harenav1.Outcome{n.edges[0].pauses[0], n.edges[0].pauses[1], n.edges[1].pauses[0]}}
	if !proto.Equal(res.Msg, want) {
		t.Errorf("got %v\nwant %v", res.Msg, want)
	}
}

// Pause is not built where a test says nothing of it.
func (f *fakeEdge) Pause(ctx context.Context, r *connect.Request[harenav1.PauseRequest]) (*connect.Response[harenav1.PauseResponse], error) {
	if f.pauses == nil {
		return f.UnimplementedEdgeServiceHandler.Pause(ctx, r)
	}
	return connect.NewResponse(&harenav1.PauseResponse{Outcomes: f.pauses}), nil
}
