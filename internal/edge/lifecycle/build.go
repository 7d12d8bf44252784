package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// stopwatch times named steps.
type stopwatch struct {
	last  time.Time
	steps []*harenav1.Timing
}

func (s *stopwatch) lap(step string) {
	now := time.Now()
	s.steps = append(s.steps, &harenav1.Timing{Step: step, Micros: now.Sub(s.last).Microseconds()})
	s.last = now
}

// build creates the sandbox of a box whose turn it has, or rolls everything back.
func (e *Edge) build(ctx context.Context, b *box, rq *request) {
	watch := &stopwatch{last: rq.started}
	watch.lap("admit")
	err := e.make(ctx, b, watch)
	if err == nil {
		b.mu.Lock()
		b.timings = watch.steps
		b.explained = append(b.explained, explain(b.record())...)
		b.mu.Unlock()
		r := b.record()
		e.event("sandbox.running", r, "", nil)
		b.give()
		b.finish(nil)
		e.review(b)
		return
	}
	err = e.creationError(ctx, b, err)
	if left := e.unmake(b, err); left != nil {
		e.log.Error("a failed creation could not be undone", "sandbox", b.id, "err", left)
	}
	b.give()
	b.finish(err)
}

// make takes the steps of a creation. Nothing is undone here.
func (e *Edge) make(ctx context.Context, b *box, watch *stopwatch) error {
	rec := b.record()
	be, err := e.backend(rec.Spec.GetBackend())
	if err != nil {
		return err
	}
	// Until the layers have an owner.
	release := sync.OnceFunc(e.cfg.Layers.Hold())
	defer release()
	var stack Composition
	var dirs []string
	var c backend.Config
	steps := []struct {
		name string
		do   func() error
	}{
		{"layers.compose", func() (err error) {
			if stack, err = e.cfg.Layers.Compose(ctx, rec.Project, rec.Spec); err != nil {
				return err
			}
			r := *rec
			r.Layers = stack.Layers
			if n := len(stack.Layers); r.Origin == "" && n > 0 && stack.Layers[n-1].Kind == "snapshot" {
				r.Origin = rec.Spec.GetImage()
			}
			if err := r.setSpec(withImage(rec.Spec, stack.Config)); err != nil {
				return err
			}
			e.show(b, &r)
			return nil
		}},
		{"record.creating", func() error {
			e.event("sandbox.created", b.record(), "", nil)
			return e.records.create(b.record())
		}},
		{"dirs", func() error { return e.records.makeUpper(b.id, rec.Spec.GetLimits().GetDisk()) }},
		{"layers.mount", func() (err error) {
			dirs, err = e.cfg.Layers.Acquire(ctx, string(b.id), digests(stack.Layers))
			release()
			return err
		}},
		{"backend.create", func() error {
			c = b.record().Config
			c.Lowers = dirs
			timings, err := be.Create(ctx, c)
			watch.steps = append(watch.steps, timings...)
			return err
		}},
		{"record.running", func() error {
			return e.commit(b, false, func(r *Record) error {
				if b.stopAsked.Load() {
					return errStopped
				}
				if err := context.Cause(ctx); err != nil {
					return err
				}
				r.Config = c
				return r.to(sandbox.Running)
			})
		}},
	}
	for _, s := range steps {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := e.fault(s.name); err != nil {
			return stepFailed(s.name, err)
		}
		if err := s.do(); err != nil {
			return stepFailed(s.name, err)
		}
		watch.lap(s.name)
	}
	if err := e.fault("running"); err != nil {
		return err
	}
	e.attend(b, be)
	e.watchDisk(b, be, false)
	return nil
}

// stepFailed names the step in errors that go to the log. What is said to callers knows nothing of steps.
func stepFailed(step string, err error) error {
	if errs.Is(err, errs.Internal) {
		return fmt.Errorf("%s: %w", step, err)
	}
	return err
}

func digests(layers []Layer) []string {
	out := make([]string, len(layers))
	for i, l := range layers {
		out[i] = l.Digest
	}
	return out
}

// creationError says why a creation ended, in the callers' terms.
func (e *Edge) creationError(ctx context.Context, b *box, err error) error {
	cause := context.Cause(ctx)
	switch {
	case errors.Is(err, errStopped) || b.stopAsked.Load():
		return errs.E(errs.Precondition, "sandbox %s was stopped while it was created", b.id).On("sandbox %s", b.id)
	case errors.Is(cause, errAbandoned):
		return errAbandoned
	case errors.Is(cause, errShutdown):
		return errs.E(errs.Capacity, "the server shut down while sandbox %s was created", b.id).WithHint("try again")
	}
	return err
}

// unmake removes everything that a creation may have made, and the box. If something cannot be ended the sandbox stays,
// failed, with what it holds.
func (e *Edge) unmake(b *box, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), patience)
	defer cancel()
	r := b.record()
	if err := e.release(ctx, b); err != nil {
		message := "it could not be made, and what was made could not be removed"
		err = errors.Join(err, e.commit(b, true, func(r *Record) error {
			return r.end(sandbox.Failed, reasonStopFailed, message, e.clock.Now())
		}))
		e.review(b)
		return err
	}
	kind, state, reason, message := "sandbox.failed", sandbox.Failed, sandbox.ReasonCreate, ""
	if b.stopAsked.Load() || errors.Is(why, errAbandoned) {
		kind, state, reason = "sandbox.stopped", sandbox.Stopped, ""
	} else {
		_, message = errs.Detail(why)
	}
	err := e.forget(b)
	last := *r
	last.State, last.Reason, last.Message, last.Ended, last.Config.IDBase = state, reason, message, e.clock.Now(), 0
	e.show(b, &last)
	e.event(kind, &last, message, nil)
	return err
}

// release ends and gives back everything that a sandbox holds but its directory and its ID range.
func (e *Edge) release(ctx context.Context, b *box) error {
	if err := e.destroy(ctx, b); err != nil {
		return err
	}
	if err := e.fault("layers.release"); err != nil {
		return err
	}
	if err := e.cfg.Layers.Release(string(b.id)); err != nil {
		return fmt.Errorf("release the layers: %w", err)
	}
	if b.record().Origin != "" {
		e.noteForkGone()
	}
	return nil
}

// destroy ends what runs of a sandbox. Its layers stay its own: while its files can be read they must not be collected.
func (e *Edge) destroy(ctx context.Context, b *box) error {
	be, err := e.backend(b.record().Spec.GetBackend())
	if err != nil {
		return err
	}
	e.unwatchDisk(b.id)
	if err := e.fault("backend.destroy"); err != nil {
		return err
	}
	if err := be.Destroy(ctx, b.id); err != nil {
		return fmt.Errorf("end the sandbox: %w", err)
	}
	b.files.Store(false)
	return nil
}

// freeRange gives a range back, once no record on disk names it.
func (e *Edge) freeRange(base uint32) {
	if base == 0 {
		return
	}
	e.mu.Lock()
	e.ranges.Free(base)
	e.mu.Unlock()
}

// forget removes a box of which nothing runs.
func (e *Edge) forget(b *box) error {
	e.timers.set(b, time.Time{})
	if err := e.cfg.Layers.Release(string(b.id)); err != nil {
		return fmt.Errorf("release the layers: %w", err)
	}
	b.commitMu.Lock()
	b.gone = true
	r := b.record()
	err := e.trash.take(string(b.id))
	b.commitMu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.boxes, b.id)
	if key := (requestKey{r.Project, r.RequestID}); e.requests[key] == b {
		delete(e.requests, key)
	}
	for i, s := range e.stopped {
		if s == b {
			e.stopped = append(e.stopped[:i:i], e.stopped[i+1:]...)
			break
		}
	}
	if err == nil && r.Config.IDBase != 0 {
		e.ranges.Free(r.Config.IDBase)
	}
	if r.Origin != "" {
		e.noteForkGone()
	}
	return err
}

func explain(r *Record) []string {
	l := r.Spec.GetLimits()
	lines := make([]string, 0, len(r.Layers)+2)
	for i, layer := range r.Layers {
		lines = append(lines, fmt.Sprintf("layer %d: %s, %s, %s", i, cmpName(layer), layer.Kind, layer.Digest))
	}
	lines = append(lines,
		fmt.Sprintf("limits: cpu %g, memory %d MiB, disk %d MiB, pids %d", l.GetCpu(), l.GetMemory()>>20, l.GetDisk()>>20, l.GetPids()),
		fmt.Sprintf("confinement: backend %s, host IDs %d to %d", r.Spec.GetBackend(), r.Config.IDBase, r.Config.IDBase+65535))
	return lines
}

func cmpName(l Layer) string {
	if l.Name == "" {
		return strings.TrimPrefix(l.Digest, "sha256:")[:12]
	}
	return l.Name
}
