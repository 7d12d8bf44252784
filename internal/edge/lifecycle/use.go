package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

var errNotRunning = errors.New("the sandbox does not run")

// Use is a call's hold on a sandbox: while it lasts the sandbox is not idle.
type Use struct {
	edge *Edge
	box  *box
}

// Enter begins a call into a sandbox. It waits, for a bounded time, for one that is still being created, and resumes one that
// is paused. files says that the
// call is about files, or what was recorded: those of a failed sandbox can still be used. precondition: the sandbox does not run.
// capacity: it is paused, and the node has no room for its memory.
func (e *Edge) Enter(ctx context.Context, id sandbox.ID, files bool) (*Use, error) {
	b, err := e.find(id)
	if err != nil {
		return nil, err
	}
	select {
	case <-b.made:
	default:
		wait, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		select {
		case <-b.made:
		case <-wait.Done():
			return nil, errs.E(errs.KindOf(context.Cause(wait)), "sandbox %s is still being created", id).On("sandbox %s", id)
		}
	}
	b.streams.Add(1)
	use := &Use{edge: e, box: b}
	r := b.record()
	if r.State == sandbox.Running {
		return use, nil
	}
	if r.State.CanExec() {
		// It is paused, or on the way there or back. Another pause may follow; then the call stands still with the sandbox.
		if err := e.resume(ctx, b); err != nil {
			b.streams.Add(-1)
			return nil, err
		}
		return use, nil
	}
	if r.State == sandbox.Failed && files && r.Reason != reasonStopFailed {
		if err = e.beginFiles(ctx, b); err == nil {
			return use, nil
		}
	} else {
		err = notRunning(r)
	}
	b.streams.Add(-1)
	return nil, err
}

// Leave ends the call.
func (u *Use) Leave() {
	now := u.edge.clock.Now()
	u.box.used(now)
	if u.box.streams.Add(-1) == 0 && u.box.files.Load() {
		u.edge.timers.sooner(u.box, now.Add(keepFiles))
	}
}

// knowTime is how long it may take, after a supervisor's connection broke, until it is known how its sandbox ended.
const knowTime = 3 * time.Second

// Lost explains why the supervisor could not be reached: the sandbox has ended meanwhile, or the connection broke. It waits
// until it is known which.
func (u *Use) Lost(ctx context.Context, cause error) error {
	u.settled(ctx)
	r := u.box.record()
	if !r.State.CanExec() && !u.box.files.Load() {
		return notRunning(r)
	}
	return errs.E(errs.Capacity, "the supervisor of sandbox %s did not answer: %w", r.ID(), cause).On("sandbox %s", r.ID()).
		WithHint("try again; if it goes on, stop the sandbox")
}

// settled returns when the end of the sandbox, if it ends, is in its record; or after a time.
func (u *Use) settled(ctx context.Context) {
	r := u.box.record()
	if !r.State.CanExec() {
		return
	}
	be, err := u.edge.backend(r.Spec.GetBackend())
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, knowTime)
	defer cancel()
	// The connection breaks a moment before the end of the process is seen.
	soon := time.NewTimer(exitTime)
	defer soon.Stop()
	select {
	case <-be.Exited(u.box.id):
	case <-soon.C:
		return
	case <-ctx.Done():
		return
	}
	for u.box.state().CanExec() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// exitTime is what the end of a process takes to be seen.
const exitTime = 500 * time.Millisecond

func notRunning(r *Record) error {
	why := ""
	if r.Reason != "" {
		why = fmt.Sprintf(" (%s)", r.Reason)
	}
	err := errs.E(errs.Precondition, "sandbox %s is %s%s", r.ID(), r.State, why).On("sandbox %s", r.ID())
	switch r.State {
	case sandbox.Failed:
		return err.WithHint("its files and its log can still be read; `harena stop` removes it")
	case sandbox.Stopped, sandbox.Stopping:
		return err.WithHint("create a new one")
	}
	return err
}

// beginFiles starts a supervisor for the files of a failed sandbox, unless one is up.
func (e *Edge) beginFiles(ctx context.Context, b *box) error {
	if !e.begin() {
		return errs.E(errs.Capacity, "the server is shutting down")
	}
	defer e.work.Done()
	if err := b.take(ctx); err != nil {
		return err
	}
	defer b.give()
	r := b.record()
	if b.files.Load() {
		return nil
	}
	if r.State != sandbox.Failed || b.isGone() {
		return notRunning(r)
	}
	be, err := e.backend(r.Spec.GetBackend())
	if err != nil {
		return err
	}
	e.mu.Lock()
	base, ok := e.ranges.Take()
	e.mu.Unlock()
	if !ok {
		return errs.OverLimit(errs.Capacity, "host ID ranges of this node", "0 free", 1)
	}
	err = e.commit(b, false, func(r *Record) error {
		r.Config.IDBase, r.Config.FilesOnly = base, true
		return nil
	})
	if err != nil {
		e.freeRange(base)
		return err
	}
	c := b.record().Config
	if c.Lowers, err = e.cfg.Layers.Acquire(ctx, string(b.id), digests(r.Layers)); err == nil {
		_, err = be.Create(ctx, c)
	}
	if err != nil {
		if left := e.endFiles(context.WithoutCancel(ctx), b); left != nil {
			e.log.Error("a supervisor for files could not be undone", "sandbox", b.id, "err", left)
		}
		return fmt.Errorf("open the files of sandbox %s: %w", b.id, err)
	}
	b.files.Store(true)
	e.attend(b, be)
	return nil
}

// endFiles ends the supervisor for a failed sandbox's files. b's turn is held.
func (e *Edge) endFiles(ctx context.Context, b *box) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b.dismiss()
	if err := e.settle(ctx, b); err != nil {
		e.timers.set(b, e.clock.Now().Add(retryStop))
		return err
	}
	e.review(b)
	return nil
}
