package harena

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// CollectOptions say what CollectGarbage removes, and how.
type CollectOptions struct {
	// DryRun only tells what would go.
	DryRun bool
	// Shared collects in the store that nodes share instead of on this node; what is younger than Grace is kept (default 24 h).
	Shared bool
	Grace  time.Duration
	// Progress is told the phase and how many things were looked at; may be nil.
	Progress func(phase string, seen int64)
}

// CollectGarbage removes layers that no name and no sandbox reaches, or only tells which those are.
func (c *Client) CollectGarbage(ctx context.Context, o CollectOptions) (*harenav1.CollectGarbageResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := &harenav1.CollectGarbageRequest{DryRun: o.DryRun, Shared: o.Shared}
	if o.Grace != 0 {
		req.Grace = durationpb.New(o.Grace)
	}
	stream, err := c.layer.CollectGarbageProgress(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, c.failure(ctx, err)
	}
	out := &harenav1.CollectGarbageResponse{}
	done := false
	for stream.Receive() {
		m := stream.Msg()
		out.Digests = append(out.Digests, m.GetDigests()...)
		out.Problems = append(out.Problems, m.GetProblems()...)
		out.FreedBytes += m.GetFreedBytes()
		done = done || m.GetPhase() == "done"
		if o.Progress != nil {
			o.Progress(m.GetPhase(), m.GetSeen())
		}
	}
	if err := stream.Err(); err != nil {
		return nil, c.failure(ctx, err)
	}
	if !done {
		return nil, &Error{Kind: KindInternal, Message: "the server ended the collection before it was done"}
	}
	return out, nil
}

// ReachOfLayer says what a name reaches: sandboxes and layers that were made from what it points, or pointed, at. next, which
// may be empty, is a layer that the name is to point at.
func (c *Client) ReachOfLayer(ctx context.Context, name, next string) (*harenav1.ReachResponse, error) {
	res, err := c.layer.Reach(ctx, connect.NewRequest(&harenav1.ReachRequest{Project: c.project, Name: name, Next: next}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// PushLayer copies a layer that only the node has to the store that nodes share. Progress may be nil.
func (c *Client) PushLayer(ctx context.Context, name string, progress func(ImportProgress)) (*harenav1.Layer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.layer.Push(ctx, connect.NewRequest(&harenav1.PushRequest{Project: c.project, Name: name}))
	if err != nil {
		return nil, c.failure(ctx, err)
	}
	var layer *harenav1.Layer
	for stream.Receive() {
		m := stream.Msg()
		if m.GetLayer() != nil {
			layer = m.GetLayer()
		}
		if progress != nil {
			progress(ImportProgress{Phase: m.GetPhase(), Message: m.GetMessage(), Done: m.GetDoneBytes(), Total: m.GetTotalBytes()})
		}
	}
	if err := stream.Err(); err != nil {
		return nil, c.failure(ctx, err)
	}
	if layer == nil {
		return nil, &Error{Kind: KindInternal, Message: "the server ended the transfer without a layer"}
	}
	return layer, nil
}
