package server

import (
	"context"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/api/harena/edge/v1/edgev1connect"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

// aboutSandbox is a request that names its sandbox.
type aboutSandbox[M any] interface {
	*M
	GetSandboxId() string
}

// unaryCall and streamCall are the methods of generated clients, as expressions.
type (
	unaryCall[C, Req, Res any]  func(C, context.Context, *connect.Request[Req]) (*connect.Response[Res], error)
	streamCall[C, Req, Res any] func(C, context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error)
)

// relay passes a call on to the edge of the sandbox that it names.
func relay[C, Req, Res any, M aboutSandbox[Req]](ctx context.Context, s *Server, msg M, client func(*Edge) C, call unaryCall[C, Req, Res]) (*connect.Response[Res], error) {
	e, err := s.edgeOf(msg.GetSandboxId())
	if err != nil {
		return nil, err
	}
	req := connect.NewRequest((*Req)(msg))
	req.Header().Set(HeaderSandbox, msg.GetSandboxId())
	res, err := send(ctx, e, req, client, call)
	return res, e.ended(ctx, msg.GetSandboxId(), err)
}

// send makes one call to an edge.
func send[C, Req, Res any](ctx context.Context, e *Edge, req *connect.Request[Req], client func(*Edge) C, call unaryCall[C, Req, Res]) (*connect.Response[Res], error) {
	res, err := call(client(e), ctx, req)
	if err != nil {
		return nil, e.failure(ctx, err)
	}
	// A fresh response: headers of the inner connection stay behind.
	return connect.NewResponse(res.Msg), nil
}

// relayStream passes a server stream on from the edge of the sandbox that msg names.
func relayStream[C, Req, Res any, M aboutSandbox[Req]](ctx context.Context, s *Server, msg M, out *connect.ServerStream[Res], client func(*Edge) C, call streamCall[C, Req, Res]) error {
	e, err := s.edgeOf(msg.GetSandboxId())
	if err != nil {
		return err
	}
	req := connect.NewRequest((*Req)(msg))
	req.Header().Set(HeaderSandbox, msg.GetSandboxId())
	return e.ended(ctx, msg.GetSandboxId(), receive(ctx, e, req, client, call, out.Send))
}

// receive makes a streaming call to an edge and hands each message to take. A
// slow take stops the edge (flow control of HTTP/2); an error from it, and the
// end of ctx, cancel the call.
func receive[C, Req, Res any](ctx context.Context, e *Edge, req *connect.Request[Req], client func(*Edge) C, call streamCall[C, Req, Res], take func(*Res) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in, err := call(client(e), ctx, req)
	if err != nil {
		return e.failure(ctx, err)
	}
	for in.Receive() {
		if err := take(in.Msg()); err != nil {
			cancel() // before Close, which would else read the rest
			_ = in.Close()
			return err
		}
	}
	err = e.failure(ctx, in.Err())
	_ = in.Close()
	return err
}

func lifeOf(e *Edge) edgev1connect.EdgeServiceClient      { return e.life }
func execOf(e *Edge) harenav1connect.ExecServiceClient    { return e.exec }
func fileOf(e *Edge) harenav1connect.FileServiceClient    { return e.file }
func layerOf(e *Edge) harenav1connect.LayerServiceClient  { return e.layer }
func eventsOf(e *Edge) harenav1connect.EventServiceClient { return e.events }
