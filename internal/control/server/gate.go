package server

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"runtime/debug"
	"strings"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
)

// gate stands around every procedure: it authorises the call and checks its
// request ID once the message is there, and gives every error that leaves its
// kind and hint.
type gate struct{ s *Server }

// WrapUnary implements connect.Interceptor.
func (g *gate) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if err := g.admit(ctx, req.Spec().Procedure, req.Any()); err != nil {
			return nil, g.s.outgoing(ctx, req.Spec().Procedure, err)
		}
		res, err := next(ctx, req)
		if err != nil {
			return nil, g.s.outgoing(ctx, req.Spec().Procedure, err)
		}
		return res, nil
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (g *gate) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := next(ctx, &gatedConn{conn, ctx, g})
		return g.s.outgoing(ctx, conn.Spec().Procedure, err)
	}
}

// WrapStreamingClient implements connect.Interceptor; the server makes no calls with it.
func (g *gate) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

type gatedConn struct {
	connect.StreamingHandlerConn
	ctx  context.Context //nolint:containedctx // the connection lives as long as its call
	gate *gate
}

func (c *gatedConn) Receive(msg any) error {
	if err := c.StreamingHandlerConn.Receive(msg); err != nil {
		return err
	}
	return c.gate.admit(c.ctx, c.Spec().Procedure, msg)
}

func (g *gate) admit(ctx context.Context, procedure string, msg any) error {
	if procedure == harenav1connect.FleetServiceVersionProcedure {
		return nil
	}
	verb, ok := verbs[procedure]
	if !ok {
		return errs.E(errs.Denied, "%s has no rule of access", procedure)
	}
	if err := authorize(ctx, principalOf(ctx), verb, resourceOf(msg)); err != nil {
		return err
	}
	if m, ok := msg.(interface{ GetRequestId() string }); ok {
		return validateRequestID(m.GetRequestId())
	}
	return nil
}

func resourceOf(msg any) string {
	switch m := msg.(type) {
	case interface{ GetSandboxId() string }:
		return "sandbox " + m.GetSandboxId()
	case interface{ GetId() string }:
		return m.GetId()
	case interface{ GetName() string }:
		return m.GetName()
	case interface{ GetEdge() string }:
		return m.GetEdge()
	}
	return ""
}

const maxRequestID = 128

func validateRequestID(id string) error {
	if len(id) > maxRequestID {
		return errs.OverLimit(errs.Invalid, "characters of request_id", maxRequestID, len(id))
	}
	for i := range len(id) {
		if id[i] < 0x20 || id[i] > 0x7e {
			return errs.E(errs.Invalid, "request_id %.80q is not printable ASCII", id).WithHint("use a UUID, or up to 128 printable ASCII characters")
		}
	}
	return nil
}

// later says, by service, why a procedure is not there yet.
var later = map[string]string{
	harenav1connect.IAMServiceName:      "this version has one admin token; projects, principals, policies, quotas and tokens are not built yet",
	harenav1connect.DisplayServiceName:  "full virtual machines are not built yet",
	harenav1connect.FunctionServiceName: "function calls are not built yet; `harena run` runs a command in a sandbox of its own",
	harenav1connect.SandboxServiceName:  "it is not built yet",
	harenav1connect.ExecServiceName:     "it is not built yet",
	harenav1connect.FileServiceName:     "it is not built yet",
	harenav1connect.LayerServiceName:    "it is not built yet",
	harenav1connect.EventServiceName:    "it is not built yet",
	harenav1connect.FleetServiceName:    "it is not built yet",
}

// outgoing turns err into what leaves the server: a Connect error with one
// ErrorDetail. The cause of an internal error goes to the log, under an ID that
// the caller sees.
func (s *Server) outgoing(ctx context.Context, procedure string, err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		if hasDetail(ce) {
			return copyError(ce)
		}
		if ce.Code() == connect.CodeUnimplemented {
			service, method, _ := strings.Cut(strings.TrimPrefix(procedure, "/"), "/")
			err = errs.E(errs.Unsupported, "%s is not supported", strings.TrimPrefix(service, "harena.v1.")+"."+method).WithHint("%s", later[service])
		} else {
			err = errs.FromConnect(ce)
		}
	}
	var e *errs.Error
	if ctx.Err() != nil && !errors.As(err, &e) {
		err = errs.E(errs.KindOf(ctx.Err()), "the call was given up: %w", context.Cause(ctx))
	}
	if errs.Is(err, errs.Internal) {
		id := s.errorID()
		s.Log.ErrorContext(ctx, "internal error", "error_id", id, "procedure", procedure, "error", err)
		err = errs.E(errs.Internal, "internal error").WithHint("this is a fault of the server; its log has the cause under error ID %s", id)
	}
	return errs.ToConnect(err)
}

func hasDetail(ce *connect.Error) bool {
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if _, ok := v.(*harenav1.ErrorDetail); ok {
				return true
			}
		}
	}
	return false
}

// copyError leaves behind what belongs to the connection to the edge, such as its headers.
func copyError(ce *connect.Error) error {
	out := connect.NewError(ce.Code(), errors.New(ce.Message()))
	for _, d := range ce.Details() {
		out.AddDetail(d)
	}
	return out
}

func (s *Server) errorID() string {
	b := make([]byte, 6)
	if _, err := io.ReadFull(s.Random, b); err != nil {
		return "unknown"
	}
	return hex.EncodeToString(b)
}

// recovered answers a call whose handler panicked.
func (s *Server) recovered(ctx context.Context, spec connect.Spec, _ http.Header, p any) error {
	s.Log.ErrorContext(ctx, "panic", "procedure", spec.Procedure, "panic", p, "stack", string(debug.Stack()))
	return s.outgoing(ctx, spec.Procedure, errs.E(errs.Internal, "panic: %v", p))
}
