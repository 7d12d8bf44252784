package server

import (
	"context"
	"strconv"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/errs"
)

// eventService implements EventService for this node's events.
type eventService struct{ edge *lifecycle.Edge }

var _ harenav1connect.EventServiceHandler = eventService{}

// List implements EventService. Everything that happened before the call is in the answer.
func (s eventService) List(ctx context.Context, req *connect.Request[harenav1.ListEventsRequest]) (*connect.Response[harenav1.ListEventsResponse], error) {
	size := int(req.Msg.GetPage().GetSize())
	switch {
	case size == 0:
		size = 1000
	case size < 0 || size > 10_000:
		return nil, errs.OverLimit(errs.Invalid, "page size", 10_000, size)
	}
	var after int64
	if token := req.Msg.GetPage().GetToken(); token != "" {
		var err error
		if after, err = strconv.ParseInt(token, 10, 64); err != nil {
			return nil, errs.E(errs.Invalid, "page token %.80q is not one of this server", token)
		}
	}
	if err := s.edge.Events().Flush(ctx); err != nil {
		return nil, err
	}
	found, next, err := s.edge.Events().List(req.Msg.GetFilter(), after, size)
	if err != nil {
		return nil, err
	}
	resp := &harenav1.ListEventsResponse{Events: found}
	if next > 0 {
		resp.NextPageToken = strconv.FormatInt(next, 10)
	}
	return connect.NewResponse(resp), nil
}

// Follow implements EventService.
func (s eventService) Follow(ctx context.Context, req *connect.Request[harenav1.FollowEventsRequest], stream *connect.ServerStream[harenav1.FollowEventsResponse]) error {
	// Headers go at once, so that a caller knows that it follows before anything happens.
	if err := stream.Send(nil); err != nil {
		return err
	}
	return s.edge.Events().Follow(ctx, req.Msg.GetFilter(), func(e *harenav1.Event) error {
		return stream.Send(&harenav1.FollowEventsResponse{Event: e})
	})
}

// Verify implements EventService.
func (s eventService) Verify(context.Context, *connect.Request[harenav1.VerifyEventsRequest]) (*connect.Response[harenav1.VerifyEventsResponse], error) {
	return nil, lifecycle.NotBuilt("the hash-chained log")
}
