package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/sandbox"
)

// attend watches for the sandbox's end. b's turn is held.
func (e *Edge) attend(b *box, be backend.Backend) {
	quit := make(chan struct{})
	b.quit = quit
	exited := be.Exited(b.id)
	e.loops.Go(func() {
		select {
		case <-exited:
			e.exited(b, be, quit)
		case <-quit:
		case <-e.ctx.Done():
		}
	})
}

// dismiss ends the watch: from now on an exit is no news. b's turn is held.
func (b *box) dismiss() {
	if b.quit != nil {
		close(b.quit)
		b.quit = nil
	}
}

// exited handles the end of a sandbox that nobody asked for.
func (e *Edge) exited(b *box, be backend.Backend, quit chan struct{}) {
	if !e.begin() {
		return // the next start finds it
	}
	defer e.work.Done()
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	if b.take(ctx) != nil {
		return
	}
	defer b.give()
	if b.quit != quit {
		return // stopped meanwhile
	}
	b.quit = nil
	if b.state() == sandbox.Failed {
		// It was the supervisor for the files only.
		if err := e.endFiles(ctx, b); err != nil {
			e.log.Error("a supervisor for files could not be ended", "sandbox", b.id, "err", err)
		}
		return
	}
	usage, uerr := be.Usage(b.id)
	sctx, scancel := context.WithTimeout(ctx, 500*time.Millisecond)
	status, serr := e.status(sctx, b.id)
	scancel()
	// The regular look may have seen the kill that ended it: a supervisor takes a moment to end.
	oom := uerr == nil && usage.OOMKills > b.record().OOMKills || e.clock.Now().Sub(time.Unix(0, b.oomAt.Load())) < oomEnds
	reason, message := exitReason(status, serr, oom)
	if err := e.fail(ctx, b, reason, message, usage); err != nil {
		e.log.Error("a sandbox that ended could not be cleared away", "sandbox", b.id, "err", err)
	}
}

// oomEnds is how long after a kill for want of memory the end of a sandbox is taken for its consequence.
const oomEnds = 10 * time.Second

// exitReason says why a sandbox ended, from what its supervisor still says and whether processes were killed for want of
// memory just before.
func exitReason(status *guestv1.StatusResponse, err error, oom bool) (sandbox.Reason, string) {
	switch {
	case err == nil && !status.GetAlive() && (status.GetReason() == string(sandbox.ReasonOOM) || oom):
		return sandbox.ReasonOOM, "the kernel killed the sandbox's first process for want of memory"
	case err == nil && !status.GetAlive() && status.GetReason() != "":
		return sandbox.ReasonLostSup, fmt.Sprintf("the sandbox ended: %.200s", status.GetReason())
	case oom:
		return sandbox.ReasonOOM, "the sandbox ended when the kernel killed processes for want of memory"
	}
	return sandbox.ReasonLostSup, "the sandbox's supervisor is gone"
}

// fail takes a sandbox to failed and ends what runs of it; its files stay. b's turn is held.
func (e *Edge) fail(ctx context.Context, b *box, reason sandbox.Reason, message string, usage backend.Usage) error {
	err := e.commit(b, true, func(r *Record) error {
		r.OOMKills, r.PidsHits = max(r.OOMKills, usage.OOMKills), max(r.PidsHits, usage.PidsHits)
		return r.end(sandbox.Failed, reason, message, e.clock.Now())
	})
	if err != nil {
		return err
	}
	b.dismiss()
	e.event("sandbox.failed", b.record(), message, map[string]string{"reason": string(reason)})
	// Best effort: what cannot be raised is a bound as before.
	_ = e.disk.SetLimit(e.records.upper(b.id), b.record().Spec.GetLimits().GetDisk()+diskSlack)
	err = e.settle(ctx, b)
	e.review(b)
	return err
}

// settle ends what runs of a failed sandbox, and gives its ID range back. b's turn is held.
func (e *Edge) settle(ctx context.Context, b *box) error {
	if err := e.fault("failed"); err != nil {
		return err
	}
	if err := e.destroy(ctx, b); err != nil {
		return err
	}
	base := b.record().Config.IDBase
	err := e.commit(b, false, func(r *Record) error {
		r.Config.IDBase, r.Config.FilesOnly = 0, false
		return nil
	})
	if err == nil {
		e.freeRange(base)
	}
	return err
}

func (e *Edge) status(ctx context.Context, id sandbox.ID) (*guestv1.StatusResponse, error) {
	resp, err := e.guest(id).Status(ctx, connect.NewRequest(&guestv1.StatusRequest{}))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

// review sets the timer for the next step in a sandbox's life.
func (e *Edge) review(b *box) {
	s := decide(e.moment(b))
	if s.do != rest {
		s.next = e.clock.Now()
	}
	e.timers.set(b, s.next)
}

func (e *Edge) moment(b *box) moment {
	return moment{
		now: e.clock.Now(), record: b.record(), lastUse: time.Unix(0, b.lastUse.Load()),
		busy: b.streams.Load() > 0, files: b.files.Load(),
	}
}

// fire is called when a sandbox's timer has run out. It must not wait.
func (e *Edge) fire(b *box) {
	if !e.begin() {
		return
	}
	go func() {
		defer e.work.Done()
		e.gate <- struct{}{}
		defer func() { <-e.gate }()
		if err := e.advance(b); err != nil {
			e.log.Error("a sandbox's deadline could not be handled; it is tried again", "sandbox", b.id, "err", err)
			if !b.isGone() {
				e.timers.sooner(b, e.clock.Now().Add(retryStop))
			}
		}
	}()
}

// advance takes the step that is due.
func (e *Edge) advance(b *box) error {
	m := e.moment(b)
	s := decide(m)
	if s.do == ask {
		s = decide(e.asked(b, m))
	}
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	switch s.do {
	case stop:
		return e.stop(ctx, b, stopCall{reason: s.reason, only: m.record.State})
	case pauseIdle:
		err := e.pause(ctx, b, pauseCall{reason: s.reason, idle: true})
		if errors.Is(err, errInUse) || !b.state().CanExec() {
			return nil
		}
		return err
	case stopAgain:
		return e.stop(ctx, b, stopCall{only: sandbox.Failed})
	case forget, endFiles, settleAgain:
		if err := b.take(ctx); err != nil {
			return err
		}
		defer b.give()
		if again := decide(e.moment(b)); again.do != s.do || b.isGone() {
			e.timers.sooner(b, again.next)
			return nil
		}
		if s.do == forget {
			if b.files.Load() {
				if err := e.endFiles(ctx, b); err != nil {
					return err
				}
			}
			return e.forget(b)
		}
		return e.endFiles(ctx, b) // which is the same for whatever runs of a failed sandbox
	}
	e.timers.set(b, s.next)
	return nil
}

// asked adds what the supervisor says. One that does not answer is taken for busy: if it is dead its exit will tell.
func (e *Edge) asked(b *box, m moment) moment {
	ctx, cancel := context.WithTimeout(e.ctx, 5*time.Second)
	defer cancel()
	m.asked = true
	s, err := e.status(ctx, b.id)
	if err != nil {
		m.busy = true
		return m
	}
	m.busy = m.busy || s.GetRunningCommands() > 0 || s.GetAttachedStreams() > 0
	if last := time.Unix(0, s.GetLastActivityNanos()); last.After(m.lastUse) {
		m.lastUse = last
		b.used(last)
	}
	return m
}

// poll looks at counters. One number of the kernel tells whether any process on the machine was killed for want of memory;
// the pids limit has no such number, so sandboxes that were used since are looked at, and all of them once a minute.
func (e *Edge) poll(ctx context.Context) {
	kills := e.cfg.Node.OOMKills()
	tick := time.NewTicker(e.cfg.Poll)
	defer tick.Stop()
	for round := 1; ; round++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := e.cfg.Node.OOMKills()
		all := now != kills || round%60 == 0
		if !all && round%5 != 0 {
			continue
		}
		kills = now
		for _, b := range e.snapshot() {
			used := b.lastUse.Load()
			if b.state() == sandbox.Running && (all || b.streams.Load() > 0 || b.looked.Swap(used) != used) {
				e.look(b)
			}
		}
	}
}

// look reads a sandbox's counters, and tells what is new.
func (e *Edge) look(b *box) {
	e.lookDisk(b)
	r := b.record()
	be, err := e.backend(r.Spec.GetBackend())
	if err != nil {
		return
	}
	u, err := be.Usage(b.id)
	if err != nil || u.OOMKills <= r.OOMKills && u.PidsHits <= r.PidsHits {
		return
	}
	err = e.commit(b, true, func(r *Record) error {
		if r.State != sandbox.Running {
			return errNotRunning
		}
		if n := u.OOMKills - r.OOMKills; n > 0 {
			r.OOMKills = u.OOMKills
			b.oomAt.Store(e.clock.Now().UnixNano())
			e.event("sandbox.oom", r, fmt.Sprintf("the kernel killed %d processes for want of memory", n), map[string]string{"kills": fmt.Sprint(n)})
		}
		if n := u.PidsHits - r.PidsHits; n > 0 {
			r.PidsHits = u.PidsHits
			e.event("sandbox.pids-limit", r, fmt.Sprintf("%d times a process could not be started: the limit is %d", n, r.Spec.GetLimits().GetPids()),
				map[string]string{"refused": fmt.Sprint(n)})
		}
		return nil
	})
	if err != nil {
		e.log.Debug("counters were read too late", "sandbox", b.id, "err", err)
	}
}
