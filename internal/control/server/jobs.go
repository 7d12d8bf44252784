package server

import (
	"context"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// jobService is about jobs. Every edge keeps the leases of the jobs itself, so that one lapses also when the apiserver is gone.
type jobService struct{ s *Server }

// ListJobs puts the edges' parts of jobs together.
func (h *jobService) ListJobs(ctx context.Context, r *connect.Request[harenav1.ListJobsRequest]) (*connect.Response[harenav1.ListJobsResponse], error) {
	parts, err := onAll(ctx, h.s, func(e *Edge) ([]*harenav1.Job, error) {
		res, err := send(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.ListJobs)
		if err != nil {
			return nil, err
		}
		return res.Msg.GetJobs(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.ListJobsResponse{Jobs: mergeJobs(parts)}), nil
}

// LeaseJob tells every edge, since sandboxes may join the job on any.
func (h *jobService) LeaseJob(ctx context.Context, r *connect.Request[harenav1.LeaseJobRequest]) (*connect.Response[harenav1.LeaseJobResponse], error) {
	if err := sandbox.ValidateJob(r.Msg.GetJob()); err != nil {
		return nil, err
	}
	req := proto.Clone(r.Msg).(*harenav1.LeaseJobRequest)
	req.Project = projectOr(ctx, req.GetProject())
	parts, err := onAll(ctx, h.s, func(e *Edge) ([]*harenav1.Job, error) {
		res, err := send(ctx, e, connect.NewRequest(req), lifeOf, edgeClient.LeaseJob)
		if err != nil {
			return nil, err
		}
		return []*harenav1.Job{res.Msg.GetJob()}, nil
	})
	if err != nil {
		return nil, err
	}
	jobs := mergeJobs(parts)
	if len(jobs) == 0 {
		return nil, errs.E(errs.Capacity, "no edge is connected").WithHint("start one, or wait until it has joined; `harena fleet ls` lists them")
	}
	return connect.NewResponse(&harenav1.LeaseJobResponse{Job: jobs[0]}), nil
}

// onAll asks every edge at once; the first error is the answer.
func onAll[T any](_ context.Context, s *Server, ask func(*Edge) (T, error)) ([]T, error) {
	edges := s.allEdges()
	out, failed := make([]T, len(edges)), make([]error, len(edges))
	var wg sync.WaitGroup
	for i, e := range edges {
		wg.Go(func() { out[i], failed[i] = ask(e) })
	}
	wg.Wait()
	for _, err := range failed {
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// mergeJobs adds up sandboxes. Of a lease that the edges do not agree on, because one could not be told, the one that lapses
// first is shown.
func mergeJobs(parts [][]*harenav1.Job) []*harenav1.Job {
	type key struct{ project, name string }
	found := map[key]*harenav1.Job{}
	var all []*harenav1.Job
	for _, jobs := range parts {
		for _, j := range jobs {
			k := key{j.GetProject(), j.GetName()}
			first := found[k]
			if first == nil {
				found[k] = j
				all = append(all, j)
				continue
			}
			if first.SandboxesByState == nil {
				first.SandboxesByState = map[string]int64{}
			}
			for state, n := range j.GetSandboxesByState() {
				first.SandboxesByState[state] += n
			}
			if l := j.GetLease(); l != nil && (first.GetLease() == nil || l.GetLapses().AsTime().Before(first.GetLease().GetLapses().AsTime())) {
				first.Lease = l
			}
		}
	}
	slices.SortFunc(all, func(a, b *harenav1.Job) int {
		if c := strings.Compare(a.GetProject(), b.GetProject()); c != 0 {
			return c
		}
		return strings.Compare(a.GetName(), b.GetName())
	})
	return all
}
