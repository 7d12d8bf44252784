package server

import (
	"context"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

type execService struct{ s *Server }

type execClient = harenav1connect.ExecServiceClient

func (h *execService) Run(ctx context.Context, r *connect.Request[harenav1.RunRequest], out *connect.ServerStream[harenav1.RunResponse]) error {
	return relayStream(ctx, h.s, r.Msg, out, execOf, execClient.Run)
}

func (h *execService) Start(ctx context.Context, r *connect.Request[harenav1.StartRequest]) (*connect.Response[harenav1.StartResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.Start)
}

func (h *execService) Connect(ctx context.Context, r *connect.Request[harenav1.ConnectRequest], out *connect.ServerStream[harenav1.ConnectResponse]) error {
	return relayStream(ctx, h.s, r.Msg, out, execOf, execClient.Connect)
}

func (h *execService) SendInput(ctx context.Context, r *connect.Request[harenav1.SendInputRequest]) (*connect.Response[harenav1.SendInputResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.SendInput)
}

func (h *execService) Resize(ctx context.Context, r *connect.Request[harenav1.ResizeRequest]) (*connect.Response[harenav1.ResizeResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.Resize)
}

func (h *execService) Signal(ctx context.Context, r *connect.Request[harenav1.SignalRequest]) (*connect.Response[harenav1.SignalResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.Signal)
}

func (h *execService) ListCommands(ctx context.Context, r *connect.Request[harenav1.ListCommandsRequest]) (*connect.Response[harenav1.ListCommandsResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.ListCommands)
}

func (h *execService) CreateSession(ctx context.Context, r *connect.Request[harenav1.CreateSessionRequest]) (*connect.Response[harenav1.CreateSessionResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.CreateSession)
}

func (h *execService) ListSessions(ctx context.Context, r *connect.Request[harenav1.ListSessionsRequest]) (*connect.Response[harenav1.ListSessionsResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.ListSessions)
}

func (h *execService) CloseSession(ctx context.Context, r *connect.Request[harenav1.CloseSessionRequest]) (*connect.Response[harenav1.CloseSessionResponse], error) {
	return relay(ctx, h.s, r.Msg, execOf, execClient.CloseSession)
}

func (h *execService) Log(ctx context.Context, r *connect.Request[harenav1.LogRequest], out *connect.ServerStream[harenav1.LogResponse]) error {
	return relayStream(ctx, h.s, r.Msg, out, execOf, execClient.Log)
}
