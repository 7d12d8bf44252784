package server

import (
	"context"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

type fileService struct{ s *Server }

type fileClient = harenav1connect.FileServiceClient

func (h *fileService) Read(ctx context.Context, r *connect.Request[harenav1.ReadRequest]) (*connect.Response[harenav1.ReadResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.Read)
}

func (h *fileService) Write(ctx context.Context, r *connect.Request[harenav1.WriteRequest]) (*connect.Response[harenav1.WriteResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.Write)
}

func (h *fileService) Stat(ctx context.Context, r *connect.Request[harenav1.StatRequest]) (*connect.Response[harenav1.StatResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.Stat)
}

func (h *fileService) List(ctx context.Context, r *connect.Request[harenav1.ListFilesRequest]) (*connect.Response[harenav1.ListFilesResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.List)
}

func (h *fileService) Move(ctx context.Context, r *connect.Request[harenav1.MoveRequest]) (*connect.Response[harenav1.MoveResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.Move)
}

func (h *fileService) Remove(ctx context.Context, r *connect.Request[harenav1.RemoveRequest]) (*connect.Response[harenav1.RemoveResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.Remove)
}

func (h *fileService) MakeDir(ctx context.Context, r *connect.Request[harenav1.MakeDirRequest]) (*connect.Response[harenav1.MakeDirResponse], error) {
	return relay(ctx, h.s, r.Msg, fileOf, fileClient.MakeDir)
}

func (h *fileService) Watch(ctx context.Context, r *connect.Request[harenav1.WatchFilesRequest], out *connect.ServerStream[harenav1.WatchFilesResponse]) error {
	return relayStream(ctx, h.s, r.Msg, out, fileOf, fileClient.Watch)
}
