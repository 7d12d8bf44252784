package harena

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Never is a duration that switches a time-out off where zero means its default.
const Never time.Duration = -1

// Spec says what to create. Zero values mean the defaults of the API: 2 cores,
// 2 GiB of memory, 10 GiB of disk, 1,024 processes, stopped after 30 minutes of idleness, no network.
type Spec struct {
	Image     string   // base layer (name[:tag] or digest) or snapshot; required
	Workspace string   // layer laid over the image
	Toolkits  []string // layers laid over the workspace, the last is uppermost
	Backend   string   // container, microvm, vm
	Runtime   string   // native, gvisor
	CPU       float64  // cores
	Memory    int64    // bytes
	Disk      int64    // bytes of the writable layer
	Pids      int64
	GPUs      float64
	QoS       string        // be, ls
	TTL       time.Duration // stop this long after creation
	Idle      time.Duration // idle time-out; Never: none
	OnIdle    string        // stop, pause
	Lease     time.Duration // stop unless Renew is called within this time
	User      string        // of commands that do not say otherwise
	Cwd       string
	Env       map[string]string
	Labels    map[string]string
	Job       string
	Hostname  string
	Network   *harenav1.NetworkPolicy

	RequestID string // default: a new one
	Explain   bool   // fill Sandbox.Explanation
}

func (s *Spec) proto() *harenav1.SandboxSpec {
	p := &harenav1.SandboxSpec{
		Image: s.Image, Workspace: s.Workspace, Toolkits: s.Toolkits, Backend: s.Backend, Runtime: s.Runtime, Qos: s.QoS,
		Limits:   &harenav1.Limits{Cpu: s.CPU, Memory: s.Memory, Disk: s.Disk, Pids: s.Pids, Gpus: s.GPUs},
		Lifetime: &harenav1.Lifetime{OnIdle: s.OnIdle},
		Process:  &harenav1.ProcessDefaults{User: s.User, Cwd: s.Cwd, Env: s.Env},
		Labels:   s.Labels, Job: s.Job, Hostname: s.Hostname, Network: s.Network,
	}
	if s.TTL != 0 {
		p.Lifetime.Ttl = durationpb.New(s.TTL)
	}
	if s.Lease != 0 {
		p.Lifetime.Lease = durationpb.New(s.Lease)
	}
	switch {
	case s.Idle == Never:
		p.Lifetime.Idle = durationpb.New(0)
	case s.Idle != 0:
		p.Lifetime.Idle = durationpb.New(s.Idle)
	}
	return p
}

// Sandbox is a handle on one sandbox.
type Sandbox struct {
	c    *Client
	id   string
	info *harenav1.Sandbox

	// Timings and Explanation are what the creation reported; empty on other handles.
	Timings     []*harenav1.Timing
	Explanation []string
}

// CreateSandbox makes a sandbox and returns when it is running.
func (c *Client) CreateSandbox(ctx context.Context, spec Spec) (*Sandbox, error) {
	return c.create(ctx, &harenav1.CreateRequest{RequestId: spec.RequestID, Spec: spec.proto(), Explain: spec.Explain})
}

// CreateFromSpec is CreateSandbox for a spec in the form of the API.
func (c *Client) CreateFromSpec(ctx context.Context, spec *harenav1.SandboxSpec) (*Sandbox, error) {
	return c.create(ctx, &harenav1.CreateRequest{Spec: spec})
}

func (c *Client) create(ctx context.Context, req *harenav1.CreateRequest) (*Sandbox, error) {
	req.Project = c.project
	res, err := c.sandboxes.Create(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	sb := c.handle(res.Msg.GetSandbox())
	sb.Timings, sb.Explanation = res.Msg.GetTimings(), res.Msg.GetExplanation()
	return sb, nil
}

func (c *Client) handle(info *harenav1.Sandbox) *Sandbox {
	return &Sandbox{c: c, id: info.GetId(), info: info}
}

// BatchCreate makes count sandboxes of one spec and calls each as they come,
// one call at a time, with either a sandbox or the error of that item.
func (c *Client) BatchCreate(ctx context.Context, spec Spec, count int, each func(index int, sb *Sandbox, err error)) error {
	if spec.RequestID == "" {
		spec.RequestID = newID()
	}
	stream, err := c.sandboxes.BatchCreate(ctx, connect.NewRequest(&harenav1.BatchCreateRequest{
		RequestId: spec.RequestID, Project: c.project, Spec: spec.proto(), Count: int32(min(count, 1<<30)), //nolint:gosec // bounded
	}))
	if err != nil {
		return c.failure(ctx, err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		item := stream.Msg()
		if item.GetError() != nil {
			each(int(item.GetIndex()), nil, fromDetail(item.GetError(), item.GetErrorMessage()))
			continue
		}
		each(int(item.GetIndex()), c.handle(item.GetSandbox()), nil)
	}
	return c.failure(ctx, stream.Err())
}

// Sandbox returns a handle without asking the server.
func (c *Client) Sandbox(id string) *Sandbox {
	return &Sandbox{c: c, id: id, info: &harenav1.Sandbox{Id: id}}
}

// GetSandbox returns a handle with fresh information.
func (c *Client) GetSandbox(ctx context.Context, id string) (*Sandbox, error) {
	sb := c.Sandbox(id)
	return sb, sb.Refresh(ctx)
}

// Filter narrows a listing.
type Filter struct {
	All    bool // also those that ended
	Job    string
	Labels map[string]string
}

// Sandboxes lists sandboxes.
func (c *Client) Sandboxes(ctx context.Context, f Filter) ([]*harenav1.Sandbox, error) {
	return pages(func(page *harenav1.Page) ([]*harenav1.Sandbox, string, error) {
		res, err := c.sandboxes.List(ctx, connect.NewRequest(&harenav1.ListRequest{Page: page, All: f.All, Job: f.Job, Labels: f.Labels, Project: c.project}))
		if err != nil {
			return nil, "", err
		}
		return res.Msg.GetSandboxes(), res.Msg.GetNextPageToken(), nil
	})
}

// pages reads all pages of a listing.
func pages[T any](list func(*harenav1.Page) ([]T, string, error)) ([]T, error) {
	var all []T
	page := &harenav1.Page{}
	for {
		items, next, err := list(page)
		if err != nil {
			return nil, err
		}
		if all = append(all, items...); next == "" {
			return all, nil
		}
		page = &harenav1.Page{Token: next}
	}
}

// ID returns the sandbox's ID.
func (s *Sandbox) ID() string { return s.id }

// Info returns what was last heard of the sandbox.
func (s *Sandbox) Info() *harenav1.Sandbox { return s.info }

// Refresh asks the server for the sandbox's state.
func (s *Sandbox) Refresh(ctx context.Context) error {
	res, err := s.c.sandboxes.Get(ctx, connect.NewRequest(&harenav1.GetRequest{Id: s.id}))
	if err != nil {
		return err
	}
	s.info = res.Msg.GetSandbox()
	return nil
}

// Stop ends the sandbox at once and removes its writable state. It is idempotent.
func (s *Sandbox) Stop(ctx context.Context) error {
	return s.stop(ctx, false)
}

// Remove is Stop that also forgets the sandbox's record.
func (s *Sandbox) Remove(ctx context.Context) error {
	return s.stop(ctx, true)
}

func (s *Sandbox) stop(ctx context.Context, remove bool) error {
	outcomes, err := s.c.StopSandboxes(ctx, &harenav1.Selector{Ids: []string{s.id}}, StopOptions{Remove: remove})
	if err != nil {
		return err
	}
	return outcomeError(outcomes)
}

// Renew starts the clock of the sandbox's lease anew.
func (s *Sandbox) Renew(ctx context.Context) error {
	return s.SetLifetime(ctx, &harenav1.Lifetime{})
}

// SetLifetime replaces the fields of the sandbox's lifetime that are present.
func (s *Sandbox) SetLifetime(ctx context.Context, l *harenav1.Lifetime) error {
	res, err := s.c.sandboxes.SetLifetime(ctx, connect.NewRequest(&harenav1.SetLifetimeRequest{
		Selector: &harenav1.Selector{Ids: []string{s.id}}, Lifetime: l,
	}))
	if err != nil {
		return err
	}
	return outcomeError(res.Msg.GetOutcomes())
}

// StopOptions says how to stop.
type StopOptions struct {
	Grace  time.Duration // SIGTERM first, SIGKILL after this time; 0: SIGKILL at once
	Remove bool          // also forget the records
}

// StopSandboxes stops the selected sandboxes.
func (c *Client) StopSandboxes(ctx context.Context, sel *harenav1.Selector, o StopOptions) ([]*harenav1.Outcome, error) {
	req := &harenav1.StopRequest{Selector: sel, Remove: o.Remove}
	if o.Grace > 0 {
		req.Grace = durationpb.New(o.Grace)
	}
	res, err := c.sandboxes.Stop(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetOutcomes(), nil
}

// OutcomeError returns the error of one sandbox's part in a group operation, or nil.
func OutcomeError(o *harenav1.Outcome) error {
	return fromDetail(o.GetError(), o.GetErrorMessage())
}

func outcomeError(outcomes []*harenav1.Outcome) error {
	for _, o := range outcomes {
		if err := OutcomeError(o); err != nil {
			return err
		}
	}
	return nil
}
