package server

import (
	"context"

	"connectrpc.com/connect"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	"github.com/harena-dev/harena/api/harena/edge/v1/edgev1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/errs"
)

// service implements EdgeService.
type service struct{ edge *lifecycle.Edge }

var _ edgev1connect.EdgeServiceHandler = service{}

// answer wraps a message, or passes the error on.
func answer[T any](m *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

// Create implements EdgeService.
func (s service) Create(ctx context.Context, req *connect.Request[edgev1.CreateRequest]) (*connect.Response[harenav1.CreateResponse], error) {
	return answer(s.edge.Create(ctx, req.Msg))
}

// Get implements EdgeService.
func (s service) Get(_ context.Context, req *connect.Request[harenav1.GetRequest]) (*connect.Response[harenav1.GetResponse], error) {
	found, err := s.edge.Get(req.Msg.GetId())
	return answer(&harenav1.GetResponse{Sandbox: found}, err)
}

// List implements EdgeService.
func (s service) List(_ context.Context, req *connect.Request[harenav1.ListRequest]) (*connect.Response[harenav1.ListResponse], error) {
	return answer(s.edge.List(req.Msg))
}

// Stop implements EdgeService.
func (s service) Stop(ctx context.Context, req *connect.Request[harenav1.StopRequest]) (*connect.Response[harenav1.StopResponse], error) {
	return answer(s.edge.Stop(ctx, req.Msg))
}

// Pause implements EdgeService.
func (s service) Pause(ctx context.Context, req *connect.Request[harenav1.PauseRequest]) (*connect.Response[harenav1.PauseResponse], error) {
	return answer(s.edge.Pause(ctx, req.Msg))
}

// Resume implements EdgeService.
func (s service) Resume(ctx context.Context, req *connect.Request[harenav1.ResumeRequest]) (*connect.Response[harenav1.ResumeResponse], error) {
	return answer(s.edge.Resume(ctx, req.Msg))
}

// ListJobs implements EdgeService.
func (s service) ListJobs(_ context.Context, req *connect.Request[harenav1.ListJobsRequest]) (*connect.Response[harenav1.ListJobsResponse], error) {
	return answer(s.edge.ListJobs(req.Msg), nil)
}

// LeaseJob implements EdgeService.
func (s service) LeaseJob(ctx context.Context, req *connect.Request[harenav1.LeaseJobRequest]) (*connect.Response[harenav1.LeaseJobResponse], error) {
	return answer(s.edge.LeaseJob(ctx, req.Msg))
}

// Fork implements EdgeService.
func (s service) Fork(ctx context.Context, req *connect.Request[harenav1.ForkRequest]) (*connect.Response[harenav1.ForkResponse], error) {
	return answer(s.edge.Fork(ctx, req.Msg))
}

// Snapshot implements EdgeService.
func (s service) Snapshot(ctx context.Context, req *connect.Request[harenav1.SnapshotRequest], stream *connect.ServerStream[harenav1.SnapshotResponse]) error {
	return s.edge.Snapshot(ctx, req.Msg, stream.Send)
}

// SetNetwork implements EdgeService.
func (s service) SetNetwork(ctx context.Context, req *connect.Request[harenav1.SetNetworkRequest]) (*connect.Response[harenav1.SetNetworkResponse], error) {
	return answer(s.edge.SetNetwork(ctx, req.Msg))
}

// SetGuard implements EdgeService.
func (s service) SetGuard(context.Context, *connect.Request[harenav1.SetGuardRequest]) (*connect.Response[harenav1.SetGuardResponse], error) {
	return nil, lifecycle.NotBuilt("guard policy")
}

// SetLifetime implements EdgeService.
func (s service) SetLifetime(ctx context.Context, req *connect.Request[harenav1.SetLifetimeRequest]) (*connect.Response[harenav1.SetLifetimeResponse], error) {
	return answer(s.edge.SetLifetime(ctx, req.Msg))
}

// Watch implements EdgeService.
func (s service) Watch(ctx context.Context, req *connect.Request[harenav1.WatchRequest], stream *connect.ServerStream[harenav1.WatchResponse]) error {
	return s.edge.Watch(ctx, req.Msg, func(sb *harenav1.Sandbox, synced bool) error {
		return stream.Send(&harenav1.WatchResponse{Sandbox: sb, Synced: synced})
	})
}

// Probe implements EdgeService.
func (s service) Probe(context.Context, *connect.Request[edgev1.ProbeRequest]) (*connect.Response[edgev1.ProbeResponse], error) {
	return answer(&edgev1.ProbeResponse{Edge: s.edge.Probe()}, nil)
}

// Drain implements EdgeService.
func (s service) Drain(_ context.Context, req *connect.Request[harenav1.DrainRequest]) (*connect.Response[harenav1.DrainResponse], error) {
	edge, err := s.drain(req.Msg.GetEdge(), true)
	return answer(&harenav1.DrainResponse{Edge: edge}, err)
}

// Undrain implements EdgeService.
func (s service) Undrain(_ context.Context, req *connect.Request[harenav1.UndrainRequest]) (*connect.Response[harenav1.UndrainResponse], error) {
	edge, err := s.drain(req.Msg.GetEdge(), false)
	return answer(&harenav1.UndrainResponse{Edge: edge}, err)
}

func (s service) drain(name string, on bool) (*harenav1.Edge, error) {
	if err := s.isMe(name); err != nil {
		return nil, err
	}
	return s.edge.Drain(on)
}

func (s service) isMe(name string) error {
	if name != "" && name != string(s.edge.ID()) {
		return errs.E(errs.NotFound, "this is edge %s, not %.40q", s.edge.ID(), name)
	}
	return nil
}

// Doctor implements EdgeService.
func (s service) Doctor(ctx context.Context, req *connect.Request[harenav1.DoctorRequest]) (*connect.Response[harenav1.DoctorResponse], error) {
	if err := s.isMe(req.Msg.GetEdge()); err != nil {
		return nil, err
	}
	return answer(s.edge.Doctor(ctx), nil)
}
