package backendtest

import (
	"context"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

func expectFrozen(t *testing.T, b backend.Backend, id sandbox.ID, want bool) {
	t.Helper()
	u, err := b.Usage(id)
	if err != nil {
		t.Fatalf("usage: %v", err)
	}
	if u.Frozen != want {
		t.Errorf("frozen is %v, want %v", u.Frozen, want)
	}
}

func freeze(t *testing.T, b backend.Backend, id sandbox.ID) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := b.Freeze(ctx, id); err != nil {
		t.Fatalf("freeze: %v", err)
	}
}

func thaw(t *testing.T, b backend.Backend, id sandbox.ID) {
	t.Helper()
	if err := b.Thaw(t.Context(), id); err != nil {
		t.Fatalf("thaw: %v", err)
	}
}

func freezeThaw(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	thaw(t, b, c.ID)
	expectFrozen(t, b, c.ID, false)
	for range 2 {
		freeze(t, b, c.ID)
		expectFrozen(t, b, c.ID, true)
		// The supervisor is not part of what is frozen.
		expectAlive(t, b, c.ID)
	}
	for range 2 {
		thaw(t, b, c.ID)
		expectFrozen(t, b, c.ID, false)
	}
	expectAlive(t, b, c.ID)
	destroy(t, b, c.ID)
	if err := b.Freeze(t.Context(), c.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("freeze of a destroyed sandbox: %v, want not-found", err)
	}
	thaw(t, b, c.ID)
}

// reclaim: memory of a frozen sandbox can be taken back, for any time, and it goes on afterwards.
func reclaim(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	freeze(t, b, c.ID)
	for _, d := range []time.Duration{0, time.Millisecond, patience} {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		r, err := b.Reclaim(ctx, c.ID)
		cancel()
		if errs.Is(err, errs.Unsupported) {
			break
		}
		if err != nil || r.Before < 0 || r.After < 0 || r.Swapped < 0 || r.CacheDropped < 0 || r.Anonymous < 0 {
			t.Errorf("reclaim within %v: %+v, %v", d, r, err)
		}
		expectFrozen(t, b, c.ID, true)
	}
	thaw(t, b, c.ID)
	expectAlive(t, b, c.ID)
	destroy(t, b, c.ID)
	if _, err := b.Reclaim(t.Context(), c.ID); !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.Unsupported) {
		t.Errorf("reclaim of a destroyed sandbox: %v, want not-found", err)
	}
}

// freezeEnds: a frozen sandbox can be ended, and ends by itself, as one that runs.
func freezeEnds(t *testing.T, h Harness) {
	b := open(t, h)
	c, d := create(t, b, h), create(t, b, h)
	freeze(t, b, c.ID)
	freeze(t, b, d.ID)
	destroy(t, b, c.ID)
	exited := b.Exited(d.ID)
	h.Kill(t, b, d.ID)
	wait(t, exited, "exit of a frozen sandbox")
	destroy(t, b, d.ID)
}

// freezeOutlivesServer: what was frozen stays so, until somebody thaws it.
func freezeOutlivesServer(t *testing.T, h Harness) {
	first := h.Open(t)
	c := create(t, first, h)
	freeze(t, first, c.ID)
	if err := first.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	b := open(t, h)
	if err := b.Recover(t.Context(), c); err != nil {
		t.Fatalf("recover: %v", err)
	}
	expectFrozen(t, b, c.ID, true)
	thaw(t, b, c.ID)
	expectFrozen(t, b, c.ID, false)
	expectAlive(t, b, c.ID)
	destroy(t, b, c.ID)
}

// freezeCancelled: whatever Freeze answers is true.
func freezeCancelled(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	for i := range 6 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*100*time.Microsecond)
		err := b.Freeze(ctx, c.ID)
		cancel()
		expectFrozen(t, b, c.ID, err == nil)
		thaw(t, b, c.ID)
	}
	destroy(t, b, c.ID)
}
