package errs

import (
	"errors"
	"strings"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// codes maps kinds to Connect codes. Exists and Capacity have codes of their
// own; the detail tells apart what shares one.
var codes = map[Kind]connect.Code{
	Invalid:         connect.CodeInvalidArgument,
	Unauthenticated: connect.CodeUnauthenticated,
	Denied:          connect.CodePermissionDenied,
	NotFound:        connect.CodeNotFound,
	Exists:          connect.CodeAlreadyExists,
	Quota:           connect.CodeResourceExhausted,
	Capacity:        connect.CodeUnavailable,
	Precondition:    connect.CodeFailedPrecondition,
	Timeout:         connect.CodeDeadlineExceeded,
	Cancelled:       connect.CodeCanceled,
	Unsupported:     connect.CodeUnimplemented,
	Internal:        connect.CodeInternal,
}

// Detail returns err in the form in which it crosses the wire, and its message.
// The text of an internal error is replaced: internals never reach a caller.
func Detail(err error) (*harenav1.ErrorDetail, string) {
	kind := KindOf(err)
	d := &harenav1.ErrorDetail{Kind: string(kind)}
	var e *Error
	if errors.As(err, &e) {
		d.Resource, d.Hint = e.Resource, e.Hint
		if e.Limit != nil {
			d.LimitName, d.LimitValue, d.AskedValue = e.Limit.Name, e.Limit.Value, e.Limit.Asked
		}
	}
	if kind == Internal {
		if d.Hint == "" {
			d.Hint = "this is a fault of the server; its log has the cause"
		}
		return d, "internal error"
	}
	if e == nil {
		// A bare context error, in whatever the server wrapped it.
		return d, contextMessages[kind]
	}
	return d, oneLine(err.Error())
}

var contextMessages = map[Kind]string{Timeout: "the call did not end in time", Cancelled: "the call was given up"}

// oneLine makes a line of joined errors, which are a line each.
func oneLine(s string) string {
	if !strings.Contains(s, "\n") {
		return s
	}
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' }), "; ")
}

// ToConnect turns err into a Connect error with one ErrorDetail. An error that
// is a Connect error already is returned as it is. Nil stays nil.
func ToConnect(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return err
	}
	d, msg := Detail(err)
	ce = connect.NewError(codes[Kind(d.GetKind())], errors.New(msg))
	if detail, derr := connect.NewErrorDetail(d); derr == nil {
		ce.AddDetail(detail)
	}
	return ce
}

// FromDetail is the inverse of Detail; nil for nil.
func FromDetail(d *harenav1.ErrorDetail, message string) error {
	if d == nil {
		return nil
	}
	e := &Error{Kind: Kind(d.GetKind()), Message: message, Resource: d.GetResource(), Hint: d.GetHint()}
	if d.GetLimitName() != "" {
		e.Limit = &Limit{Name: d.GetLimitName(), Value: d.GetLimitValue(), Asked: d.GetAskedValue()}
	}
	return e
}

// FromConnect turns a Connect error into an *Error. Without a detail the code
// decides the kind; an error that never came from a server is Internal, or
// Cancelled or Timeout where the context says so.
func FromConnect(err error) error {
	var ce *connect.Error
	if err == nil || !errors.As(err, &ce) {
		return err
	}
	for _, detail := range ce.Details() {
		if v, derr := detail.Value(); derr == nil {
			if d, ok := v.(*harenav1.ErrorDetail); ok {
				return FromDetail(d, ce.Message())
			}
		}
	}
	kind := Internal
	for k, code := range codes {
		if code == ce.Code() {
			kind = k
		}
	}
	return &Error{Kind: kind, Message: ce.Message(), Err: err}
}
