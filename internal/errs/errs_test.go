package errs_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/internal/errs"
)

func TestKindOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		want errs.Kind
	}{
		{nil, ""},
		{errors.New("x"), errs.Internal},
		{fmt.Errorf("wrapped: %w", errs.E(errs.Quota, "none left")), errs.Quota},
		{errs.E(errs.NotFound, "no file: %w", fs.ErrNotExist), errs.NotFound},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), errs.Timeout},
		{context.Canceled, errs.Cancelled},
	} {
		if got := errs.KindOf(c.err); got != c.want {
			t.Errorf("KindOf(%v) = %q, want %q", c.err, got, c.want)
		}
	}
	if err := errs.E(errs.NotFound, "no file: %w", fs.ErrNotExist); !errors.Is(err, fs.ErrNotExist) || err.Error() != "no file: file does not exist" {
		t.Errorf("cause lost or printed twice: %v", err)
	}
}

func TestErrorsSurviveTheWire(t *testing.T) {
	kinds := []errs.Kind{errs.Invalid, errs.Unauthenticated, errs.Denied, errs.NotFound, errs.Exists, errs.Quota, errs.Capacity,
		errs.Precondition, errs.Timeout, errs.Cancelled, errs.Unsupported}
	for _, k := range kinds {
		err := errs.OverLimit(k, "pids", 10, 11).On("sandbox %s", "abc").WithHint("ask for %d", 10)
		back := errs.FromConnect(errs.ToConnect(fmt.Errorf("context: %w", err)))
		var e *errs.Error
		if !errors.As(back, &e) || e.Kind != k || e.Resource != "sandbox abc" || e.Hint != "ask for 10" ||
			e.Limit == nil || *e.Limit != (errs.Limit{Name: "pids", Value: "10", Asked: "11"}) || e.Message != "context: the limit of pids is 10, asked 11" {
			t.Errorf("%s came back as %#v", k, back)
		}
		// Without the detail, as from a proxy, the code still tells the kind.
		if bare := errs.FromConnect(connect.NewError(connect.CodeOf(errs.ToConnect(err)), errors.New("x"))); errs.KindOf(bare) != k {
			t.Errorf("%s by its code alone came back as %s", k, errs.KindOf(bare))
		}
	}
}

func TestInternalsStayInside(t *testing.T) {
	back := errs.FromConnect(errs.ToConnect(errors.New("open /secret/path: denied")))
	if errs.KindOf(back) != errs.Internal || back.Error() != "internal error" {
		t.Errorf("an internal error reached the caller as %v", back)
	}
	if errs.ToConnect(nil) != nil || errs.FromConnect(nil) != nil {
		t.Error("nil did not stay nil")
	}
}

func TestDetailIsOneLineWithoutInternals(t *testing.T) {
	joined := errors.Join(errs.E(errs.Capacity, "the disk is full"), errors.New("and the file is still there"))
	if _, m := errs.Detail(joined); m != "the disk is full; and the file is still there" {
		t.Errorf("joined: %q", m)
	}
	for cause, want := range map[error]string{
		context.DeadlineExceeded: "the call did not end in time", context.Canceled: "the call was given up",
	} {
		if _, m := errs.Detail(fmt.Errorf("inner.step: %w", cause)); m != want {
			t.Errorf("%v: %q", cause, m)
		}
	}
}
