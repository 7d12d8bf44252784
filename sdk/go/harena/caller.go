package harena

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
)

// caller stands around every call: it gives calls that change something a
// request ID, repeats unary calls that reached no server, and makes errors *Error.
type caller struct{ c *Client }

// retryDelays are the pauses between the attempts of a unary call.
var retryDelays = [...]time.Duration{50 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond}

// WrapUnary implements connect.Interceptor.
func (w *caller) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		setRequestID(req.Any())
		if m, ok := req.Any().(interface{ GetOpId() string }); ok && m.GetOpId() != "" {
			return w.lasting(ctx, req, next)
		}
		for attempt := 0; ; attempt++ {
			res, err := next(ctx, req)
			if err == nil {
				return res, nil
			}
			if attempt == len(retryDelays) || ctx.Err() != nil || connect.IsWireError(err) || !unreachable(err) || !repeatable(req) {
				return nil, w.c.failure(ctx, err)
			}
			if sleep(ctx, retryDelays[attempt]) != nil {
				return nil, w.c.failure(ctx, err)
			}
		}
	}
}

// lasting makes a call that has an op_id.
func (w *caller) lasting(ctx context.Context, req connect.AnyRequest, next connect.UnaryFunc) (res connect.AnyResponse, err error) {
	err = w.c.lasting(ctx, func() error {
		res, err = next(ctx, req)
		return err
	})
	if err != nil {
		return nil, w.c.failure(ctx, err)
	}
	return res, nil
}

// lasting repeats a call that has an op_id while no server answers, one is being started again, or the connection
// breaks, for as long as the client's patience lasts: it happens once, however often it is sent.
func (c *Client) lasting(ctx context.Context, call func() error) error {
	deadline := time.Now().Add(c.patience)
	for delay := 20 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		err := call()
		if err == nil || !mayCome(ctx, err) || time.Now().After(deadline) {
			return err
		}
		if sleep(ctx, delay) != nil {
			return err
		}
	}
}

// mayCome reports whether a call that failed may succeed when it is made again.
func mayCome(ctx context.Context, err error) bool {
	var e *Error
	if errors.As(err, &e) {
		return ctx.Err() == nil && (errors.Is(err, ErrUnreachable) || e.Kind == KindCapacity && e.Limit == nil)
	}
	if !broken(ctx, err) {
		return false
	}
	var ee *errs.Error
	return !connect.IsWireError(err) || !errors.As(errs.FromConnect(err), &ee) || ee.Limit == nil
}

// WrapStreamingClient implements connect.Interceptor. Errors of streams are made by those who read them.
func (w *caller) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor; an SDK serves nothing.
func (w *caller) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// repeatable: input without an offset is the one call that would happen twice.
func repeatable(req connect.AnyRequest) bool {
	if req.Spec().Procedure != harenav1connect.ExecServiceSendInputProcedure {
		return true
	}
	m, ok := req.Any().(proto.Message)
	if !ok {
		return false
	}
	offset := m.ProtoReflect().Descriptor().Fields().ByName("offset")
	return offset != nil && m.ProtoReflect().Has(offset)
}

// setRequestID fills the request_id of a message that has one and no offset,
// which makes a repetition safe by itself.
func setRequestID(msg any) {
	m, ok := msg.(proto.Message)
	if !ok {
		return
	}
	r := m.ProtoReflect()
	fields := r.Descriptor().Fields()
	field := fields.ByName("request_id")
	if field == nil || r.Has(field) {
		return
	}
	if offset := fields.ByName("offset"); offset != nil && r.Has(offset) {
		return
	}
	r.Set(field, protoreflect.ValueOfString(newID()))
}
