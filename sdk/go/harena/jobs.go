package harena

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Pause stops everything in the sandbox where it is and gives its memory back to the node. The next call that needs the
// sandbox running resumes it. The report says what was given back.
func (s *Sandbox) Pause(ctx context.Context) (*harenav1.PauseReport, error) {
	outcomes, err := s.c.PauseSandboxes(ctx, &harenav1.Selector{Ids: []string{s.id}})
	if err == nil {
		err = outcomeError(outcomes)
	}
	if err != nil || len(outcomes) == 0 {
		return nil, err
	}
	return outcomes[0].GetPause(), nil
}

// Resume lets the sandbox go on. Calls that need it do so by themselves.
func (s *Sandbox) Resume(ctx context.Context) error {
	outcomes, err := s.c.ResumeSandboxes(ctx, &harenav1.Selector{Ids: []string{s.id}})
	if err != nil {
		return err
	}
	return outcomeError(outcomes)
}

// PauseSandboxes pauses the selected sandboxes.
func (c *Client) PauseSandboxes(ctx context.Context, sel *harenav1.Selector) ([]*harenav1.Outcome, error) {
	res, err := c.sandboxes.Pause(ctx, connect.NewRequest(&harenav1.PauseRequest{Selector: sel}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetOutcomes(), nil
}

// ResumeSandboxes resumes the selected sandboxes.
func (c *Client) ResumeSandboxes(ctx context.Context, sel *harenav1.Selector) ([]*harenav1.Outcome, error) {
	res, err := c.sandboxes.Resume(ctx, connect.NewRequest(&harenav1.ResumeRequest{Selector: sel}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetOutcomes(), nil
}

// Jobs lists the jobs that have live sandboxes or a lease.
func (c *Client) Jobs(ctx context.Context) ([]*harenav1.Job, error) {
	res, err := c.job.ListJobs(ctx, connect.NewRequest(&harenav1.ListJobsRequest{Project: c.project}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetJobs(), nil
}

// JobLease says what a job's lease is to be. Zero values leave things as they are; at first that is: pause, and stop one hour later.
type JobLease struct {
	Duration  time.Duration // to be renewed within this time; Never ends the lease
	OnLapse   string        // pause or stop
	StopAfter time.Duration // after a pause; Never: stay paused
}

// LeaseJob gives a job a lease, renews it (with the zero JobLease), changes it or ends it.
func (c *Client) LeaseJob(ctx context.Context, job string, l JobLease) (*harenav1.Job, error) {
	req := &harenav1.LeaseJobRequest{Job: job, Project: c.project, OnLapse: l.OnLapse, Lease: optional(l.Duration), StopAfter: optional(l.StopAfter)}
	res, err := c.job.LeaseJob(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetJob(), nil
}

// optional is absent for 0, and zero for Never.
func optional(d time.Duration) *durationpb.Duration {
	switch {
	case d == 0:
		return nil
	case d < 0:
		return durationpb.New(0)
	}
	return durationpb.New(d)
}
