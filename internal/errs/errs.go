// Package errs is the closed set of error kinds that every part of Harena uses
// and that survives the wire.
//
// A message says what was asked, what was wrong and, in the hint, what to do.
// Wrap causes with %w; the innermost *Error decides the kind. An error without
// one is internal, and its text never reaches a caller (see ToConnect).
package errs

import (
	"context"
	"errors"
	"fmt"
)

// Kind is one of a closed set.
type Kind string

// The kinds, and when each is used.
const (
	Invalid         Kind = "invalid"         // the request itself is wrong
	Unauthenticated Kind = "unauthenticated" // no valid token
	Denied          Kind = "denied"          // the caller may not
	NotFound        Kind = "not-found"
	Exists          Kind = "exists"       // a name or ID is taken, or an ID is reused for another request
	Quota           Kind = "quota"        // the caller's allowance is used up
	Capacity        Kind = "capacity"     // this node cannot take more; another one, or later, may
	Precondition    Kind = "precondition" // the target is in the wrong state
	Timeout         Kind = "timeout"
	Cancelled       Kind = "cancelled"
	Unsupported     Kind = "unsupported" // not built yet, or not on this node
	Internal        Kind = "internal"
)

// Limit is a bound that the caller exceeded.
type Limit struct {
	Name, Value, Asked string
}

// Error is an error of a kind.
type Error struct {
	Kind     Kind
	Message  string // one sentence, lower case, no full stop
	Resource string // what it is about, such as "sandbox abc…"; may be empty
	Hint     string // what to do; may be empty
	Limit    *Limit
	Err      error // cause, for errors.Is and As; its text is part of Message
}

// Error implements error.
func (e *Error) Error() string {
	return e.Message
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// E makes an error of a kind. A %w in the format sets the cause.
func E(kind Kind, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Message: err.Error(), Err: errors.Unwrap(err)}
}

// On sets what the error is about and returns it.
func (e *Error) On(format string, args ...any) *Error {
	e.Resource = fmt.Sprintf(format, args...)
	return e
}

// WithHint says what to do and returns the error.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// Exhausts names the limit that was reached, where nobody knows by how much, and returns the error. Who repeats what broke
// does not repeat what reached a limit.
func (e *Error) Exhausts(name string) *Error {
	e.Limit = &Limit{Name: name}
	return e
}

// OverLimit makes the error for a limit that a caller exceeded.
func OverLimit(kind Kind, name string, limit, asked any) *Error {
	l := &Limit{Name: name, Value: fmt.Sprint(limit), Asked: fmt.Sprint(asked)}
	return &Error{Kind: kind, Limit: l, Message: fmt.Sprintf("the limit of %s is %s, asked %s", l.Name, l.Value, l.Asked)}
}

// KindOf returns the kind of the outermost *Error in err's chain, or the kind
// that a context error means, or Internal. It returns "" for nil.
func KindOf(err error) Kind {
	if err == nil {
		return ""
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Kind
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, context.Canceled):
		return Cancelled
	}
	return Internal
}

// Is reports whether err is of the kind.
func Is(err error, kind Kind) bool { return KindOf(err) == kind }
