package server

import (
	"context"
	"sync"

	"connectrpc.com/connect"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

type fleetService struct{ s *Server }

const (
	apiVersion       = "harena.v1"
	stateUnreachable = "unreachable"
)

func (h *fleetService) ListEdges(ctx context.Context, _ *connect.Request[harenav1.ListEdgesRequest]) (*connect.Response[harenav1.ListEdgesResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return connect.NewResponse(&harenav1.ListEdgesResponse{Edges: h.s.probeAll(ctx)}), nil
}

// probeAll asks every edge for its state, all at once.
func (s *Server) probeAll(ctx context.Context) []*harenav1.Edge {
	edges := s.allEdges()
	out := make([]*harenav1.Edge, len(edges))
	var wg sync.WaitGroup
	for i, e := range edges {
		wg.Go(func() {
			res, err := e.life.Probe(ctx, connect.NewRequest(&edgev1.ProbeRequest{}))
			if err != nil || res.Msg.GetEdge() == nil {
				s.Log.WarnContext(ctx, "edge does not answer a probe", "edge", e.id, "error", err)
				out[i] = &harenav1.Edge{Id: string(e.id), Address: e.url, State: stateUnreachable}
				return
			}
			out[i] = res.Msg.GetEdge()
		})
	}
	wg.Wait()
	return out
}

func (h *fleetService) Drain(ctx context.Context, r *connect.Request[harenav1.DrainRequest]) (*connect.Response[harenav1.DrainResponse], error) {
	e, err := h.s.edgeNamed(r.Msg.GetEdge())
	if err != nil {
		return nil, err
	}
	return send(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.Drain)
}

func (h *fleetService) Undrain(ctx context.Context, r *connect.Request[harenav1.UndrainRequest]) (*connect.Response[harenav1.UndrainResponse], error) {
	e, err := h.s.edgeNamed(r.Msg.GetEdge())
	if err != nil {
		return nil, err
	}
	return send(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.Undrain)
}

func (h *fleetService) Doctor(ctx context.Context, r *connect.Request[harenav1.DoctorRequest]) (*connect.Response[harenav1.DoctorResponse], error) {
	e, err := h.s.edgeNamed(r.Msg.GetEdge())
	if err != nil {
		return nil, err
	}
	return send(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.Doctor)
}

func (h *fleetService) Version(context.Context, *connect.Request[harenav1.VersionRequest]) (*connect.Response[harenav1.VersionResponse], error) {
	return connect.NewResponse(&harenav1.VersionResponse{Version: h.s.Config.Version, Api: apiVersion}), nil
}

// iamService answers who the caller is; the rest is unsupported.
type iamService struct {
	harenav1connect.UnimplementedIAMServiceHandler
}

func (*iamService) WhoAmI(ctx context.Context, _ *connect.Request[harenav1.WhoAmIRequest]) (*connect.Response[harenav1.WhoAmIResponse], error) {
	p := principalOf(ctx)
	return connect.NewResponse(&harenav1.WhoAmIResponse{
		Principal: &harenav1.Principal{Id: p.TokenID, Name: p.Role, Project: p.Project, Kind: "service"},
		Project:   p.Project, Role: p.Role,
	}), nil
}
