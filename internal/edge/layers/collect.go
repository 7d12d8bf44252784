package layers

import (
	"context"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// digestsPerMessage bounds a message of CollectGarbageProgress.
const digestsPerMessage = 1000

// CollectGarbage implements LayerServiceHandler.
func (s *Service) CollectGarbage(ctx context.Context, req *connect.Request[harenav1.CollectGarbageRequest]) (*connect.Response[harenav1.CollectGarbageResponse], error) {
	plan, err := s.collect(ctx, req.Msg, nil)
	if err != nil {
		return nil, s.fail("CollectGarbage", err)
	}
	return connect.NewResponse(&harenav1.CollectGarbageResponse{FreedBytes: plan.Bytes, Digests: texts(plan.Layers), Problems: plan.Problems}), nil
}

// CollectGarbageProgress implements LayerServiceHandler.
func (s *Service) CollectGarbageProgress(ctx context.Context, req *connect.Request[harenav1.CollectGarbageRequest], stream *connect.ServerStream[harenav1.CollectGarbageProgressResponse]) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var last time.Time
	plan, err := s.collect(ctx, req.Msg, func(phase string, seen int64) {
		if time.Since(last) < reportEvery {
			return
		}
		last = time.Now()
		if err := stream.Send(&harenav1.CollectGarbageProgressResponse{Phase: phase, Seen: seen}); err != nil {
			cancel(err) // nobody waits for it any more
		}
	})
	if err != nil {
		return s.fail("CollectGarbage", err)
	}
	digests := texts(plan.Layers)
	for len(digests) > digestsPerMessage {
		if err := stream.Send(&harenav1.CollectGarbageProgressResponse{Phase: layer.PhaseCollecting, Digests: digests[:digestsPerMessage]}); err != nil {
			return err
		}
		digests = digests[digestsPerMessage:]
	}
	return stream.Send(&harenav1.CollectGarbageProgressResponse{
		Phase: "done", Seen: int64(len(plan.Layers) + len(plan.Objects)), Digests: digests, FreedBytes: plan.Bytes, Problems: plan.Problems,
	})
}

// reportEvery thins progress out.
const reportEvery = 200 * time.Millisecond

func (s *Service) collect(ctx context.Context, m *harenav1.CollectGarbageRequest, progress func(string, int64)) (*layer.GCPlan, error) {
	if m.GetShared() {
		return s.c.Store.CollectShared(ctx, layer.SharedGCOptions{Grace: m.GetGrace().AsDuration(), DryRun: m.GetDryRun(), Progress: progress})
	}
	plan, err := s.c.Store.CollectGarbage(ctx, layer.GCOptions{InUse: s.c.InUse, DryRun: m.GetDryRun(), Progress: progress})
	if err != nil || m.GetDryRun() {
		return plan, err
	}
	// The kernel keeps the space of removed files while they are mounted.
	return plan, s.c.Mounts.Drop(plan.Layers)
}

func texts(ds []layer.Digest) []string {
	out := make([]string, len(ds))
	for i, d := range ds {
		out[i] = string(d)
	}
	return out
}

// Push implements LayerServiceHandler.
func (s *Service) Push(ctx context.Context, req *connect.Request[harenav1.PushRequest], stream *connect.ServerStream[harenav1.PushResponse]) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m := req.Msg
	l, err := s.c.Store.Push(ctx, m.GetProject(), m.GetName(), func(p layer.Progress) {
		err := stream.Send(&harenav1.PushResponse{Phase: p.Phase, Message: p.Message, DoneBytes: p.Done, TotalBytes: p.Total})
		if err != nil {
			cancel(err)
		}
	})
	if err != nil {
		return s.fail("Push", err)
	}
	s.event("layer.pushed", "sent "+m.GetName()+" to the shared store", m.GetProject(), m.GetName(), l)
	p, err := s.describe(ctx, m.GetProject(), l)
	if err != nil {
		return s.fail("Push", err)
	}
	return stream.Send(&harenav1.PushResponse{Phase: "done", Message: "sent " + m.GetName(), Layer: p})
}
