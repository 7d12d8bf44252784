package lifecycle

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/guestconn"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// stopCall says how to stop.
type stopCall struct {
	grace  time.Duration
	remove bool
	reason sandbox.Reason
	// only, when set, is the state in which the stop still applies, for stops that nobody asked for.
	only sandbox.State
}

// stop ends a sandbox and removes its writable state. It is idempotent, and wins over a creation under way. When ctx ends
// the stop goes on without the caller.
func (e *Edge) stop(ctx context.Context, b *box, c stopCall) error {
	select {
	case <-b.made:
	default:
		b.stopAsked.Store(true)
		b.cancel(errStopped)
		select {
		case <-b.made:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if !e.begin() {
		return errs.E(errs.Capacity, "the server is shutting down").WithHint("try again")
	}
	done := make(chan error, 1)
	go func() {
		defer e.work.Done()
		done <- e.stopMade(b, c)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stopMade stops a sandbox whose creation is over.
func (e *Edge) stopMade(b *box, c stopCall) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), patience+c.grace)
	defer cancel()
	b.stops.Add(1)
	defer b.stops.Add(-1)
	if interrupt := b.interrupt.Load(); interrupt != nil {
		(*interrupt)(errInterrupted)
	}
	if err := b.takeSoon(ctx); err != nil {
		return busy(b)
	}
	defer b.give()
	r := b.record()
	if c.only != "" && r.State != c.only {
		e.review(b)
		return nil
	}
	if r.State != sandbox.Stopped {
		if b.isGone() {
			return nil // rolled back, or forgotten
		}
		if err := e.end(ctx, b, c); err != nil {
			return err
		}
	}
	if !c.remove || b.isGone() {
		return nil
	}
	return e.forget(b)
}

func (b *box) isGone() bool {
	b.commitMu.Lock()
	defer b.commitMu.Unlock()
	return b.gone
}

// end takes a sandbox from running or failed to stopped. b's turn is held.
func (e *Edge) end(ctx context.Context, b *box, c stopCall) error {
	was := b.record()
	err := e.commit(b, true, func(r *Record) error {
		switch {
		case c.reason != "":
			r.Reason = c.reason
		case r.State.CanExec():
			r.Reason = "" // why it was paused, which is not why it is stopped
		}
		if r.State == sandbox.Stopping {
			return nil // found like this after a restart
		}
		return r.to(sandbox.Stopping)
	})
	if err != nil {
		return err
	}
	b.dismiss()
	if err := e.fault("stopping"); err != nil {
		return e.stuck(b, err)
	}
	if c.grace > 0 && was.State.CanExec() {
		e.thawToEnd(ctx, b, was)
		e.ask(ctx, b, c.grace)
	}
	if err := e.release(ctx, b); err != nil {
		return e.stuck(b, err)
	}
	if err := e.fault("files"); err != nil {
		return e.stuck(b, err)
	}
	if err := e.trash.takeFiles(b.id); err != nil {
		return e.stuck(b, err)
	}
	base := b.record().Config.IDBase
	err = e.commit(b, true, func(r *Record) error {
		r.Config.IDBase, r.Config.FilesOnly = 0, false
		if r.Reason == reasonStopFailed {
			r.Reason, r.Message = "", ""
		}
		return r.end(sandbox.Stopped, c.reason, "", e.clock.Now())
	})
	if err != nil {
		return err
	}
	if err := e.fault("stopped"); err != nil {
		return err
	}
	e.freeRange(base)
	r := b.record()
	var attributes map[string]string
	if r.Reason != "" {
		attributes = map[string]string{"reason": string(r.Reason)}
	}
	e.event("sandbox.stopped", r, "", attributes)
	e.review(b)
	e.retain(b)
	return nil
}

// stuck marks a sandbox that could not be ended; it keeps its range, and the stop is tried again later.
func (e *Edge) stuck(b *box, cause error) error {
	e.log.Error("a sandbox could not be stopped", "sandbox", b.id, "err", cause)
	err := e.commit(b, true, func(r *Record) error {
		return r.end(sandbox.Failed, reasonStopFailed, "it could not be stopped; this is tried again", e.clock.Now())
	})
	e.event("sandbox.failed", b.record(), "it could not be stopped", map[string]string{"reason": string(reasonStopFailed)})
	e.review(b)
	return errors.Join(errs.E(errs.Internal, "sandbox %s could not be stopped: %w", b.id, cause).On("sandbox %s", b.id), err)
}

// ask lets the workload end by itself for up to grace. What does not is killed afterwards, so errors do not matter.
func (e *Edge) ask(ctx context.Context, b *box, grace time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, grace+2*time.Second)
	defer cancel()
	_, err := e.guest(b.id).Shutdown(ctx, connect.NewRequest(&guestv1.ShutdownRequest{GraceMillis: grace.Milliseconds()}))
	if err != nil {
		e.log.Debug("a supervisor did not shut down by itself", "sandbox", b.id, "err", err)
	}
}

func (e *Edge) guest(id sandbox.ID) guestv1connect.GuestServiceClient {
	return guestv1connect.NewGuestServiceClient(e.client, guestconn.URL(id))
}

// retain remembers a stopped sandbox, and forgets the oldest beyond what is kept.
func (e *Edge) retain(b *box) {
	e.mu.Lock()
	e.stopped = append(e.stopped, b)
	var old []*box
	if n := len(e.stopped) - maxStopped; n > 0 {
		old = append(old, e.stopped[:n]...)
	}
	e.mu.Unlock()
	for _, o := range old {
		if err := e.forget(o); err != nil {
			e.log.Error("an old record could not be removed", "sandbox", o.id, "err", err)
		}
	}
}

// Stop stops the selected sandboxes, in parallel.
func (e *Edge) Stop(ctx context.Context, req *harenav1.StopRequest) (*harenav1.StopResponse, error) {
	grace := duration(req.GetGrace())
	if grace < 0 || grace > 10*time.Minute {
		return nil, errs.OverLimit(errs.Invalid, "grace of a stop", "10m", grace)
	}
	// Before they are listed: a creation looks at it as it joins them.
	e.stops.add(req.GetSelector(), e.clock.Now())
	boxes, missing, err := e.selected(req.GetSelector(), func(s sandbox.State) bool { return s != sandbox.Stopped || req.GetRemove() })
	if err != nil {
		return nil, err
	}
	outcomes := e.each(ctx, boxes, func(b *box) error {
		return e.stop(ctx, b, stopCall{grace: grace, remove: req.GetRemove()})
	})
	return &harenav1.StopResponse{Outcomes: append(outcomes, missing...)}, nil
}
