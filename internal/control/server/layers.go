package server

import (
	"context"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
)

// layerService relays to the edge that holds the layers.
type layerService struct{ s *Server }

type layerClient = harenav1connect.LayerServiceClient

// edge returns the edge whose store has the layers: there can be only one until
// edges share a store.
func (h *layerService) edge() (*Edge, error) {
	return h.s.onlyEdge(errs.Unsupported, "layers of several edges need a shared store, which is not built yet")
}

func layerCall[Req, Res any](ctx context.Context, h *layerService, msg *Req, call unaryCall[layerClient, Req, Res]) (*connect.Response[Res], error) {
	e, err := h.edge()
	if err != nil {
		return nil, err
	}
	return send(ctx, e, connect.NewRequest(msg), layerOf, call)
}

func (h *layerService) Import(ctx context.Context, r *connect.Request[harenav1.ImportRequest], out *connect.ServerStream[harenav1.ImportResponse]) error {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	e, err := h.edge()
	if err != nil {
		return err
	}
	return receive(ctx, e, connect.NewRequest(r.Msg), layerOf, layerClient.Import, out.Send)
}

func (h *layerService) List(ctx context.Context, r *connect.Request[harenav1.ListLayersRequest]) (*connect.Response[harenav1.ListLayersResponse], error) {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	return layerCall(ctx, h, r.Msg, layerClient.List)
}

func (h *layerService) Get(ctx context.Context, r *connect.Request[harenav1.GetLayerRequest]) (*connect.Response[harenav1.GetLayerResponse], error) {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	return layerCall(ctx, h, r.Msg, layerClient.Get)
}

func (h *layerService) Tag(ctx context.Context, r *connect.Request[harenav1.TagRequest]) (*connect.Response[harenav1.TagResponse], error) {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	return layerCall(ctx, h, r.Msg, layerClient.Tag)
}

func (h *layerService) Remove(ctx context.Context, r *connect.Request[harenav1.RemoveLayerRequest]) (*connect.Response[harenav1.RemoveLayerResponse], error) {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	return layerCall(ctx, h, r.Msg, layerClient.Remove)
}

func (h *layerService) Verify(ctx context.Context, r *connect.Request[harenav1.VerifyLayerRequest], out *connect.ServerStream[harenav1.VerifyLayerResponse]) error {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	e, err := h.edge()
	if err != nil {
		return err
	}
	return receive(ctx, e, connect.NewRequest(r.Msg), layerOf, layerClient.Verify, out.Send)
}

func (h *layerService) CollectGarbage(ctx context.Context, r *connect.Request[harenav1.CollectGarbageRequest]) (*connect.Response[harenav1.CollectGarbageResponse], error) {
	return layerCall(ctx, h, r.Msg, layerClient.CollectGarbage)
}

func (h *layerService) CollectGarbageProgress(ctx context.Context, r *connect.Request[harenav1.CollectGarbageRequest], out *connect.ServerStream[harenav1.CollectGarbageProgressResponse]) error {
	e, err := h.edge()
	if err != nil {
		return err
	}
	return receive(ctx, e, connect.NewRequest(r.Msg), layerOf, layerClient.CollectGarbageProgress, out.Send)
}

func (h *layerService) Reach(ctx context.Context, r *connect.Request[harenav1.ReachRequest]) (*connect.Response[harenav1.ReachResponse], error) {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	return layerCall(ctx, h, r.Msg, layerClient.Reach)
}

func (h *layerService) Push(ctx context.Context, r *connect.Request[harenav1.PushRequest], out *connect.ServerStream[harenav1.PushResponse]) error {
	r.Msg.Project = projectOr(ctx, r.Msg.GetProject())
	e, err := h.edge()
	if err != nil {
		return err
	}
	return receive(ctx, e, connect.NewRequest(r.Msg), layerOf, layerClient.Push, out.Send)
}
