package server

import (
	"context"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

// eventService merges the events of the edges. Verify is relayed.
type eventService struct{ s *Server }

type eventClient = harenav1connect.EventServiceClient

func (h *eventService) List(ctx context.Context, r *connect.Request[harenav1.ListEventsRequest]) (*connect.Response[harenav1.ListEventsResponse], error) {
	if id := r.Msg.GetFilter().GetSandboxId(); id != "" {
		e, err := h.s.edgeOf(id)
		if err != nil {
			return nil, err
		}
		return send(ctx, e, connect.NewRequest(r.Msg), eventsOf, eventClient.List)
	}
	events, next, err := listPages(h.s, r.Msg.GetPage(), func(e *Edge, page *harenav1.Page) ([]*harenav1.Event, string, error) {
		res, err := send(ctx, e, connect.NewRequest(&harenav1.ListEventsRequest{Filter: r.Msg.GetFilter(), Page: page}), eventsOf, eventClient.List)
		if err != nil {
			return nil, "", err
		}
		return res.Msg.GetEvents(), res.Msg.GetNextPageToken(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.ListEventsResponse{Events: events, NextPageToken: next}), nil
}

func (h *eventService) Follow(ctx context.Context, r *connect.Request[harenav1.FollowEventsRequest], out *connect.ServerStream[harenav1.FollowEventsResponse]) error {
	edges := h.s.allEdges()
	if id := r.Msg.GetFilter().GetSandboxId(); id != "" {
		e, err := h.s.edgeOf(id)
		if err != nil {
			return err
		}
		edges = []*Edge{e}
	}
	return merge(ctx, edges, func(ctx context.Context, e *Edge, take func(*harenav1.FollowEventsResponse) error) error {
		return receive(ctx, e, connect.NewRequest(r.Msg), eventsOf, eventClient.Follow, take)
	}, out.Send)
}

func (h *eventService) Verify(ctx context.Context, r *connect.Request[harenav1.VerifyEventsRequest]) (*connect.Response[harenav1.VerifyEventsResponse], error) {
	return relay(ctx, h.s, r.Msg, eventsOf, eventClient.Verify)
}
