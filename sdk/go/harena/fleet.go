package harena

import (
	"context"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Edges lists the nodes.
func (c *Client) Edges(ctx context.Context) ([]*harenav1.Edge, error) {
	res, err := c.fleet.ListEdges(ctx, connect.NewRequest(&harenav1.ListEdgesRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetEdges(), nil
}

// Drain keeps new sandboxes away from an edge. An empty ID means the only one.
func (c *Client) Drain(ctx context.Context, edge string) (*harenav1.Edge, error) {
	res, err := c.fleet.Drain(ctx, connect.NewRequest(&harenav1.DrainRequest{Edge: edge}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetEdge(), nil
}

// Undrain ends Drain.
func (c *Client) Undrain(ctx context.Context, edge string) (*harenav1.Edge, error) {
	res, err := c.fleet.Undrain(ctx, connect.NewRequest(&harenav1.UndrainRequest{Edge: edge}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetEdge(), nil
}

// Doctor reports what an edge supports and what leaked. An empty ID means the only one.
func (c *Client) Doctor(ctx context.Context, edge string) (*harenav1.DoctorResponse, error) {
	res, err := c.fleet.Doctor(ctx, connect.NewRequest(&harenav1.DoctorRequest{Edge: edge}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Version asks for the server's version, without a token.
func (c *Client) Version(ctx context.Context) (*harenav1.VersionResponse, error) {
	res, err := c.fleet.Version(ctx, connect.NewRequest(&harenav1.VersionRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Events lists recorded events.
func (c *Client) Events(ctx context.Context, f *harenav1.EventFilter) ([]*harenav1.Event, error) {
	return pages(func(page *harenav1.Page) ([]*harenav1.Event, string, error) {
		res, err := c.event.List(ctx, connect.NewRequest(&harenav1.ListEventsRequest{Filter: f, Page: page}))
		if err != nil {
			return nil, "", err
		}
		return res.Msg.GetEvents(), res.Msg.GetNextPageToken(), nil
	})
}

// FollowEvents calls each with recorded events and then with new ones, until
// ctx ends or each returns an error.
func (c *Client) FollowEvents(ctx context.Context, f *harenav1.EventFilter, each func(*harenav1.Event) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.event.Follow(ctx, connect.NewRequest(&harenav1.FollowEventsRequest{Filter: f}))
	if err != nil {
		return c.failure(ctx, err)
	}
	for stream.Receive() {
		if err := each(stream.Msg().GetEvent()); err != nil {
			return err
		}
	}
	return c.failure(ctx, stream.Err())
}
