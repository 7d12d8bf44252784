package harena

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

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
	KindCapacity        = Kind(errs.Capacity) // also: the server cannot be reached
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

func (c *Client) unreachable(err error) error {
	reason := err.Error()
	var ce *connect.Error
	if errors.As(err, &ce) {
		reason = ce.Message()
	}
	return &Error{
		Kind: KindCapacity, Message: fmt.Sprintf("the server at %s cannot be reached: %s", c.url, lastPart(reason)),
		Hint: "start it with `harena up`, or set HARENA_URL", cause: err,
	}
}

// lastPart keeps of "Post \"http://…\": dial tcp …: connection refused" what a person needs.
func lastPart(s string) string {
	if i := strings.Index(s, "dial "); i >= 0 {
		return s[i:]
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
		// The short form, without Connect's details.
		Kind     string `json:"kind"`
		Resource string `json:"resource"`
		Hint     string `json:"hint"`
		Details  []struct {
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
	if wire.Kind != "" {
		return &Error{Kind: Kind(wire.Kind), Message: wire.Message, Resource: wire.Resource, Hint: wire.Hint}
	}
	kind := KindInternal
	var code connect.Code
	if code.UnmarshalText([]byte(wire.Code)) == nil {
		kind = Kind(errs.KindOf(errs.FromConnect(connect.NewError(code, errors.New(wire.Message)))))
	}
	return &Error{Kind: kind, Message: wire.Message}
}
