package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// maxFrozen bounds how long a sandbox stands still for a snapshot, whatever the size of its writable layer.
const maxFrozen = 30 * time.Second

var errInterrupted = errors.New("the sandbox is being stopped")

// captured is a writable layer at one instant, on its way to become a layer.
type captured struct {
	Packing
	frozen time.Duration
}

// minCopy is from what size on a writable layer is copied, where the file system can do that in one step, and read afterwards.
// A smaller one is read sooner than copied: making a copy takes two commits of the file system, some 10 ms each.
const minCopy = 48 << 20

// copied is a copy of a writable layer in the trash, where a start removes what a crash left.
type copied struct {
	e          *Edge
	from, name string
}

// newCopy returns nil where a layer had better be read while the sandbox stands still.
func (e *Edge) newCopy(id sandbox.ID) (*copied, error) {
	upper := e.records.upper(id)
	if used, ok := e.disk.Used(upper); !ok || used < minCopy || !e.disk.Copies() {
		return nil, nil
	}
	c := &copied{e: e, from: upper}
	// The first one writes most of what is not on disk yet, while the sandbox still runs.
	if err := c.take(); err != nil {
		return nil, err
	}
	c.remove()
	return c, nil
}

func (c *copied) path() string { return filepath.Join(c.e.trash.dir, c.name) }

func (c *copied) take() (err error) {
	if c.name, err = c.e.trash.name("copy"); err != nil {
		return err
	}
	if err = c.e.disk.Copy(c.from, c.path()); err != nil {
		c.name = ""
		return c.e.records.fault("copy the writable layer", err)
	}
	return nil
}

func (c *copied) remove() {
	if c != nil && c.name != "" {
		c.e.trash.remove(c.name)
		c.name = ""
	}
}

// capture takes what a sandbox's files are at one instant. The sandbox stands still meanwhile and goes on when this returns,
// whatever the outcome; a stop interrupts it. Files change in a sandbox that is paused as little as in one that is frozen,
// so one that was paused after Enter stays as it is.
func (e *Edge) capture(ctx context.Context, b *box, o PackOptions, watch *stopwatch) (_ *captured, err error) {
	if e.cfg.Packer == nil {
		return nil, NotBuilt("taking snapshots")
	}
	r := b.record()
	o.Sandbox, o.Layers = string(b.id), r.Layers
	if r.Snapshot != nil {
		o.Earlier = append(o.Earlier, r.Snapshot.Layer.Digest)
	}
	packing, err := e.cfg.Packer.Begin(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			packing.Close()
		}
	}()
	copied, err := e.newCopy(b.id)
	if err != nil {
		return nil, err
	}
	defer func() { copied.remove() }()
	watch.lap("prepare")
	c := &captured{Packing: packing}
	if copied == nil {
		err = e.captureStill(ctx, b, watch, &c.frozen, func(ctx context.Context) error {
			return packing.Capture(ctx, filepath.Join(e.records.upper(b.id), "data"))
		})
		return c, err
	}
	err = e.captureStill(ctx, b, watch, &c.frozen, func(context.Context) error { return copied.take() })
	if err == nil {
		err = packing.Capture(ctx, filepath.Join(copied.path(), "data"))
		watch.lap("read")
	}
	return c, err
}

// captureStill calls take while the sandbox stands still.
func (e *Edge) captureStill(ctx context.Context, b *box, watch *stopwatch, frozen *time.Duration, take func(context.Context) error) error {
	if err := b.takeSoon(ctx); err != nil {
		return errs.E(errs.KindOf(err), "sandbox %s is busy: %w", b.id, err).On("sandbox %s", b.id).WithHint("try again")
	}
	defer b.give()
	ctx, cancel := context.WithTimeoutCause(ctx, maxFrozen, errs.E(errs.Timeout,
		"capturing the files of sandbox %s took more than %v, and it was thawed", b.id, maxFrozen).On("sandbox %s", b.id).
		WithHint("remove what is large and not needed, or keep the node's data on a file system with reflinks (harena up --data-size)"))
	defer cancel()
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	b.interrupt.Store(&interrupt)
	defer b.interrupt.Store(nil)
	if b.stops.Load() > 0 {
		return e.interrupted(b)
	}
	watch.lap("turn")
	err := e.whileFrozen(ctx, b, watch, frozen, func() error { return take(ctx) })
	switch cause := context.Cause(ctx); {
	case err == nil:
		return nil
	case errors.Is(cause, errInterrupted):
		return e.interrupted(b)
	case cause != nil && errs.Is(cause, errs.Timeout):
		return cause
	}
	return err
}

func (e *Edge) interrupted(b *box) error {
	return errs.E(errs.Precondition, "sandbox %s was stopped while its files were captured", b.id).On("sandbox %s", b.id)
}

// whileFrozen calls f while nothing in the sandbox runs. b's turn is held.
func (e *Edge) whileFrozen(ctx context.Context, b *box, watch *stopwatch, took *time.Duration, f func() error) (err error) {
	r := b.record()
	switch r.State {
	case sandbox.Paused:
		return f()
	case sandbox.Running:
	default:
		return notRunning(r)
	}
	be, err := e.backend(r.Spec.GetBackend())
	if err != nil {
		return err
	}
	start := time.Now()
	defer func() {
		// Also after a failed freeze, which may have frozen some.
		tctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		terr := e.fault("snapshot.thaw")
		if terr == nil {
			terr = be.Thaw(tctx, b.id)
		}
		if terr != nil {
			e.log.Error("a sandbox could not be thawed", "sandbox", b.id, "err", terr)
			e.thawLater(b)
			err = errors.Join(err, fmt.Errorf("thaw sandbox %s: %w", b.id, terr))
		}
		*took = time.Since(start)
		watch.lap("thaw")
	}()
	if err := e.fault("snapshot.freeze"); err != nil {
		return err
	}
	if err := be.Freeze(ctx, b.id); err != nil {
		return err
	}
	watch.lap("freeze")
	if err := e.fault("snapshot.capture"); err != nil {
		return err
	}
	err = f()
	watch.lap("capture")
	return err
}

// thawAgain is how long after a failed thaw the next one is tried.
const thawAgain = time.Second

// thawLater thaws a sandbox that could not be, as soon as that can be done: nobody else would, since it counts as running. The
// caller is counted by e.work.
func (e *Edge) thawLater(b *box) {
	e.loops.Go(func() {
		for {
			select {
			case <-time.After(thawAgain):
			case <-e.ctx.Done():
				return // the next server thaws what runs
			}
			done, err := e.thawRunning(b)
			if done {
				return
			}
			e.log.Error("a sandbox could still not be thawed", "sandbox", b.id, "err", err)
		}
	})
}

// thawRunning thaws a sandbox that is to run; done: it does, or is not meant to any more.
func (e *Edge) thawRunning(b *box) (done bool, err error) {
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	if err := b.take(ctx); err != nil {
		return false, err
	}
	defer b.give()
	r := b.record()
	if r.State != sandbox.Running {
		return true, nil
	}
	be, err := e.backend(r.Spec.GetBackend())
	if err != nil {
		return true, err
	}
	err = be.Thaw(ctx, b.id)
	return err == nil, err
}
