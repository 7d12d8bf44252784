package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/internal/errs"
)

// requestHeader carries a number under which the logs of all servers mention a call.
const requestHeader = "X-Request-Id"

// interceptor is the one place where errors are put into the form of the wire, panics are caught, and internal errors are logged.
type interceptor struct{ log *slog.Logger }

// WrapUnary implements connect.Interceptor.
func (i interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		id := requestID(req.Header())
		defer func() {
			if p := recover(); p != nil {
				resp, err = nil, i.panicked(p)
			}
			if err = i.finish(req.Spec().Procedure, id, err); err == nil {
				resp.Header().Set(requestHeader, id)
			}
		}()
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		id := requestID(conn.RequestHeader())
		conn.ResponseHeader().Set(requestHeader, id)
		defer func() {
			if p := recover(); p != nil {
				err = i.panicked(p)
			}
			err = i.finish(conn.Spec().Procedure, id, err)
		}()
		return next(ctx, conn)
	}
}

func (i interceptor) panicked(p any) error {
	if err, is := p.(error); is && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}
	return fmt.Errorf("panic: %v\n%s", p, debug.Stack())
}

func (i interceptor) finish(procedure, id string, err error) error {
	if err != nil && errs.Is(err, errs.Internal) {
		i.log.Error("call failed", "procedure", procedure, "request", id, "err", err)
	}
	return errs.ToConnect(err)
}

// requestID returns the caller's, if it is usable, or a new one.
func requestID(h http.Header) string {
	id := h.Get(requestHeader)
	if id == "" || len(id) > 64 {
		return rand.Text()
	}
	for _, c := range []byte(id) {
		if c <= ' ' || c > '~' {
			return rand.Text()
		}
	}
	return id
}
