package harena

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// Kind is one of a closed set of kinds of errors.
type Kind string

// The kinds.
const (
	KindInvalid         = Kind(errs.Invalid)
	KindUnauthenticated = Kind(errs.Unauthenticated)
	KindDenied          = Kind(errs.Denied)
	KindNotFound        = Kind(errs.NotFound)
	KindExists          = Kind(errs.Exists)
	KindQuota           = Kind(errs.Quota)
	KindCapacity        = Kind(errs.Capacity)
	KindPrecondition    = Kind(errs.Precondition)
	KindTimeout         = Kind(errs.Timeout)
	KindCancelled       = Kind(errs.Cancelled)
	KindUnsupported     = Kind(errs.Unsupported)
	KindInternal        = Kind(errs.Internal)
)

// Error is what every failed call returns.
type Error struct {
	Kind     Kind
	Message  string
	Resource string // what it is about; may be empty
	Hint     string // what to do; may be empty
	Limit    *Limit // set when a limit was exceeded
	cause    error
}

// Limit is a bound that was exceeded.
type Limit struct {
	Name, Value, Asked string
}

// Error implements error.
func (e *Error) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return fmt.Sprintf("%s (%s)", e.Message, e.Hint)
}

// Unwrap returns the cause, if there is one on this side of the wire.
func (e *Error) Unwrap() error { return e.cause }

// IsKind reports whether err is an *Error of the kind.
func IsKind(err error, kind Kind) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == kind
}

func fromErrs(e *errs.Error) *Error {
	out := &Error{Kind: Kind(e.Kind), Message: e.Message, Resource: e.Resource, Hint: e.Hint, cause: e.Err}
	if e.Limit != nil {
		out.Limit = &Limit{e.Limit.Name, e.Limit.Value, e.Limit.Asked}
	}
	return out
}

// fromDetail is the error of one item in an answer; nil for nil.
func fromDetail(d *harenav1.ErrorDetail, message string) error {
	var e *errs.Error
	if err := errs.FromDetail(d, message); errors.As(err, &e) {
		return fromErrs(e)
	}
	return nil
}

// failure turns any error of a call into an *Error.
func (c *Client) failure(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	if !connect.IsWireError(err) {
		if ctx.Err() != nil {
			cause := context.Cause(ctx)
			return &Error{Kind: Kind(errs.KindOf(ctx.Err())), Message: "the call was given up: " + cause.Error(), cause: cause}
		}
		if unreachable(err) {
			return c.unreachable(err)
		}
	}
	converted := errs.FromConnect(err)
	var ee *errs.Error
	if errors.As(converted, &ee) {
		return fromErrs(ee)
	}
	return &Error{Kind: KindInternal, Message: converted.Error(), cause: err}
}

// ErrUnreachable is in the chain of errors of calls that no server answered: none listens, or the connection broke. Whether
// the call took effect is not known; every call of this package may be repeated.
var ErrUnreachable = errors.New("no server answers")

func (c *Client) unreachable(err error) error {
	out := &Error{Kind: KindPrecondition, cause: errors.Join(ErrUnreachable, err)}
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" {
		out.Message = fmt.Sprintf("cannot reach the server at %s: %s", c.url, dialReason(dial))
		out.Hint = "is `harena up` running? HARENA_URL, or a profile, may name another server"
		return out
	}
	reason := err.Error()
	var ce *connect.Error
	if errors.As(err, &ce) {
		reason = ce.Message()
	}
	out.Message = fmt.Sprintf("the connection to the server at %s broke: %s", c.url, lastPart(reason))
	out.Hint = "try again; is `harena up` running, and is this its address?"
	return out
}

// dialReason keeps of "dial tcp 127.0.0.1:1: connect: connection refused" what a person needs.
func dialReason(e *net.OpError) string {
	var number syscall.Errno
	if errors.As(e.Err, &number) {
		return number.Error()
	}
	return e.Err.Error()
}

// lastPart drops "Post \"http://…\": " from what net/http says.
func lastPart(s string) string {
	if i := strings.LastIndex(s, "\": "); i >= 0 {
		return s[i+3:]
	}
	return s
}

// unreachable reports whether err, which is no answer of a server, came from
// making or keeping the connection, so that the call may be made again.
func unreachable(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeUnknown, connect.CodeInternal, connect.CodeInvalidArgument, connect.CodeCanceled:
		// What net/http reports when a connection breaks in the middle ends up under
		// any of these codes, depending on where in a message it broke. Callers ask
		// about their own context first.
		return true
	}
	return false
}

// plainError reads the error of a plain HTTP answer, which has the JSON form of Connect.
func plainError(res *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	var wire struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Details []struct {
			Type  string `json:"type"`
			Value string `json:"value"`
		} `json:"details"`
	}
	if json.Unmarshal(body, &wire) != nil || wire.Message == "" {
		return &Error{Kind: KindInternal, Message: fmt.Sprintf("the server answered %s: %.200s", res.Status, body)}
	}
	for _, d := range wire.Details {
		raw, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(d.Value, "="))
		detail := &harenav1.ErrorDetail{}
		if err == nil && strings.HasSuffix(d.Type, string(detail.ProtoReflect().Descriptor().FullName())) && proto.Unmarshal(raw, detail) == nil {
			return fromDetail(detail, wire.Message)
		}
	}
	kind := KindInternal
	var code connect.Code
	if code.UnmarshalText([]byte(wire.Code)) == nil {
		kind = Kind(errs.KindOf(errs.FromConnect(connect.NewError(code, errors.New(wire.Message)))))
	}
	return &Error{Kind: kind, Message: wire.Message}
}
