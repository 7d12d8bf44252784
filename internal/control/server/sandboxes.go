package server

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	"github.com/harena-dev/harena/api/harena/edge/v1/edgev1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// sandboxService is the life cycle. Verify answers unsupported.
type sandboxService struct {
	harenav1connect.UnimplementedSandboxServiceHandler
	s *Server
}

type edgeClient = edgev1connect.EdgeServiceClient

func (h *sandboxService) Create(ctx context.Context, r *connect.Request[harenav1.CreateRequest]) (*connect.Response[harenav1.CreateResponse], error) {
	spec, err := sandbox.Normalize(r.Msg.GetSpec())
	if err != nil {
		return nil, err
	}
	res, err := h.create(ctx, &edgev1.CreateRequest{
		RequestId: r.Msg.GetRequestId(), Project: projectOr(ctx, r.Msg.GetProject()), Spec: spec, Explain: r.Msg.GetExplain(),
		Asked: timestamppb.Now(),
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// create places one sandbox: edges are asked in the order of their rank until
// one does not refuse for want of capacity. It sets req's ID.
func (h *sandboxService) create(ctx context.Context, req *edgev1.CreateRequest) (*harenav1.CreateResponse, error) {
	start := time.Now()
	seed, err := h.seed(req)
	if err != nil {
		return nil, err
	}
	known := h.s.Edges.IDs()
	var refusals []string
	failure := error(errs.E(errs.Capacity, "no edge is connected").WithHint("start one, or wait until it has joined; `harena fleet ls` lists them"))
	for _, id := range h.s.Placement(req.GetSpec(), known, seed) {
		edge, ok := h.s.Edges.Client(id)
		if !ok {
			continue
		}
		sandboxID, err := sandbox.NewID(id, h.s.Random)
		if err != nil {
			return nil, err
		}
		req.Id = string(sandboxID)
		res, err := send(ctx, edge, connect.NewRequest(req), lifeOf, edgeClient.Create)
		if err == nil {
			out := res.Msg
			out.Timings = append(out.Timings, &harenav1.Timing{Step: "apiserver", Micros: time.Since(start).Microseconds()})
			if req.GetExplain() {
				line := fmt.Sprintf("placement: edge %s, of %d", id, len(known))
				out.Explanation = append(append([]string{line}, refusals...), out.Explanation...)
			}
			return out, nil
		}
		if failure = err; !errs.Is(errs.FromConnect(err), errs.Capacity) {
			return nil, err
		}
		refusals = append(refusals, fmt.Sprintf("placement: edge %s refused: %v", id, errs.FromConnect(err)))
	}
	return nil, failure
}

func (h *sandboxService) seed(req *edgev1.CreateRequest) (string, error) {
	if req.GetRequestId() != "" {
		return req.GetProject() + "\x00" + req.GetRequestId(), nil
	}
	id, err := sandbox.NewEdgeID(h.s.Random)
	return string(id), err
}

func (h *sandboxService) Get(ctx context.Context, r *connect.Request[harenav1.GetRequest]) (*connect.Response[harenav1.GetResponse], error) {
	e, err := h.s.edgeOf(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return send(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.Get)
}

func (h *sandboxService) Fork(ctx context.Context, r *connect.Request[harenav1.ForkRequest]) (*connect.Response[harenav1.ForkResponse], error) {
	e, err := h.s.edgeOf(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return send(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.Fork)
}

func (h *sandboxService) List(ctx context.Context, r *connect.Request[harenav1.ListRequest]) (*connect.Response[harenav1.ListResponse], error) {
	sandboxes, next, err := listPages(h.s, r.Msg.GetPage(), func(e *Edge, page *harenav1.Page) ([]*harenav1.Sandbox, string, error) {
		res, err := send(ctx, e, connect.NewRequest(&harenav1.ListRequest{
			Page: page, All: r.Msg.GetAll(), Job: r.Msg.GetJob(), Labels: r.Msg.GetLabels(), Project: r.Msg.GetProject(),
		}), lifeOf, edgeClient.List)
		if err != nil {
			return nil, "", err
		}
		return res.Msg.GetSandboxes(), res.Msg.GetNextPageToken(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.ListResponse{Sandboxes: sandboxes, NextPageToken: next}), nil
}

func (h *sandboxService) Stop(ctx context.Context, r *connect.Request[harenav1.StopRequest]) (*connect.Response[harenav1.StopResponse], error) {
	outcomes, err := group(ctx, h.s, r.Msg.GetSelector(), func(sel *harenav1.Selector) *harenav1.StopRequest {
		return &harenav1.StopRequest{RequestId: r.Msg.GetRequestId(), Selector: sel, Grace: r.Msg.GetGrace(), Remove: r.Msg.GetRemove()}
	}, edgeClient.Stop)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.StopResponse{Outcomes: outcomes}), nil
}

func (h *sandboxService) Pause(ctx context.Context, r *connect.Request[harenav1.PauseRequest]) (*connect.Response[harenav1.PauseResponse], error) {
	outcomes, err := group(ctx, h.s, r.Msg.GetSelector(), func(sel *harenav1.Selector) *harenav1.PauseRequest {
		return &harenav1.PauseRequest{RequestId: r.Msg.GetRequestId(), Selector: sel}
	}, edgeClient.Pause)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.PauseResponse{Outcomes: outcomes}), nil
}

func (h *sandboxService) Resume(ctx context.Context, r *connect.Request[harenav1.ResumeRequest]) (*connect.Response[harenav1.ResumeResponse], error) {
	outcomes, err := group(ctx, h.s, r.Msg.GetSelector(), func(sel *harenav1.Selector) *harenav1.ResumeRequest {
		return &harenav1.ResumeRequest{RequestId: r.Msg.GetRequestId(), Selector: sel}
	}, edgeClient.Resume)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.ResumeResponse{Outcomes: outcomes}), nil
}

func (h *sandboxService) SetNetwork(ctx context.Context, r *connect.Request[harenav1.SetNetworkRequest]) (*connect.Response[harenav1.SetNetworkResponse], error) {
	outcomes, err := group(ctx, h.s, r.Msg.GetSelector(), func(sel *harenav1.Selector) *harenav1.SetNetworkRequest {
		return &harenav1.SetNetworkRequest{RequestId: r.Msg.GetRequestId(), Selector: sel, Network: r.Msg.GetNetwork()}
	}, edgeClient.SetNetwork)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.SetNetworkResponse{Outcomes: outcomes}), nil
}

func (h *sandboxService) SetGuard(ctx context.Context, r *connect.Request[harenav1.SetGuardRequest]) (*connect.Response[harenav1.SetGuardResponse], error) {
	outcomes, err := group(ctx, h.s, r.Msg.GetSelector(), func(sel *harenav1.Selector) *harenav1.SetGuardRequest {
		return &harenav1.SetGuardRequest{RequestId: r.Msg.GetRequestId(), Selector: sel, Guard: r.Msg.GetGuard(), OlderProcesses: r.Msg.GetOlderProcesses()}
	}, edgeClient.SetGuard)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.SetGuardResponse{Outcomes: outcomes}), nil
}

func (h *sandboxService) SetLifetime(ctx context.Context, r *connect.Request[harenav1.SetLifetimeRequest]) (*connect.Response[harenav1.SetLifetimeResponse], error) {
	outcomes, err := group(ctx, h.s, r.Msg.GetSelector(), func(sel *harenav1.Selector) *harenav1.SetLifetimeRequest {
		return &harenav1.SetLifetimeRequest{RequestId: r.Msg.GetRequestId(), Selector: sel, Lifetime: r.Msg.GetLifetime()}
	}, edgeClient.SetLifetime)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.SetLifetimeResponse{Outcomes: outcomes}), nil
}

// Watch merges the streams of all edges; synced is sent when every edge has sent its own.
func (h *sandboxService) Watch(ctx context.Context, r *connect.Request[harenav1.WatchRequest], out *connect.ServerStream[harenav1.WatchResponse]) error {
	waiting := len(h.s.Edges.IDs())
	if waiting == 0 {
		if err := out.Send(&harenav1.WatchResponse{Synced: true}); err != nil {
			return err
		}
	}
	return merge(ctx, h.s.allEdges(), func(ctx context.Context, e *Edge, take func(*harenav1.WatchResponse) error) error {
		return receive(ctx, e, connect.NewRequest(r.Msg), lifeOf, edgeClient.Watch, take)
	}, func(m *harenav1.WatchResponse) error {
		if m.GetSynced() {
			if waiting--; waiting != 0 {
				return nil
			}
		}
		return out.Send(m)
	})
}

// projectOr returns the project that was asked for, else the caller's.
func projectOr(ctx context.Context, asked string) string {
	if asked = strings.TrimSpace(asked); asked != "" {
		return asked
	}
	return principalOf(ctx).Project
}
