package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/lifecycle/idrange"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// fate is what becomes of a sandbox when a server starts.
type fate string

const (
	discard  fate = "discarded" // half created
	revive   fate = "recovered"
	rebooted fate = "rebooted" // it ran before the machine was booted
	finish   fate = "stopped"  // it was being stopped
	keep     fate = "kept"     // it had ended
	clearUp  fate = "cleared"  // it had failed, and holds something still
	tooOld   fate = "forgotten"
)

// recoverWidth bounds how many sandboxes are recovered at once.
const recoverWidth = 8

// fateOf decides it. Pure.
func fateOf(r *Record, boot string, now time.Time) fate {
	switch r.State {
	case sandbox.Creating:
		return discard
	case sandbox.Stopping:
		return finish
	case sandbox.Stopped, sandbox.Failed:
		// A failed one whose stop failed is taken up again by its timer.
		if decide(moment{now: now, record: r}).do == forget {
			return tooOld
		}
		if r.State == sandbox.Failed && r.Reason != reasonStopFailed && r.Config.IDBase != 0 {
			return clearUp
		}
		return keep
	}
	if r.Boot != boot {
		return rebooted
	}
	return revive
}

// recover makes the sandboxes in memory from the records on disk, and the machine agree with them.
func (e *Edge) recover(ctx context.Context) error {
	recs, odd, torn, err := e.records.load()
	if err != nil {
		return err
	}
	if e.trash, err = newTrash(e.records, e.log); err != nil {
		return err
	}
	bases := make([]uint32, 0, len(recs))
	for _, r := range recs {
		bases = append(bases, r.Config.IDBase)
	}
	e.ranges = idrange.New(e.dir.Slot(), bases)
	slices.SortFunc(recs, func(a, b *Record) int { return a.Ended.Compare(b.Ended) })
	boxes := make([]*box, len(recs))
	for i, r := range recs {
		boxes[i] = e.adopt(r)
	}
	counts := map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	gate := make(chan struct{}, recoverWidth)
	now := e.clock.Now()
	for _, b := range boxes {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			f, err := e.meet(ctx, b, fateOf(b.record(), e.dir.Boot(), now))
			if err != nil {
				e.log.Error("a sandbox could not be recovered as it should", "sandbox", b.id, "fate", f, "err", err)
			}
			mu.Lock()
			defer mu.Unlock()
			counts[string(f)]++
		})
	}
	wg.Wait()
	if n := e.settleForks(boxes); n > 0 {
		counts["half-forked"] = n
	}
	for _, name := range odd {
		if err := e.trash.take(name); err != nil {
			return err
		}
		counts["directory"]++
	}
	for _, name := range torn {
		if err := e.setAside(name); err != nil {
			return err
		}
		counts["unreadable"]++
	}
	swept, err := e.sweep()
	if err != nil {
		e.log.Error("something that nobody owns could not be removed", "err", err)
	}
	for kind, n := range swept {
		counts["swept-"+kind] += n
	}
	attributes := map[string]string{}
	for what, n := range counts {
		attributes[what] = strconv.Itoa(n)
	}
	e.event("edge.recovered", nil, fmt.Sprintf("%d sandboxes live on", counts[string(revive)]), attributes)
	return nil
}

// adopt puts a record found on disk into memory.
func (e *Edge) adopt(r *Record) *box {
	b := newBox(r.ID())
	b.cancel = func(error) {}
	b.used(r.Created)
	close(b.made)
	e.show(b, r)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.boxes[b.id] = b
	if r.RequestID != "" {
		e.requests[requestKey{r.Project, r.RequestID}] = b
	}
	if r.State == sandbox.Stopped {
		e.stopped = append(e.stopped, b)
	}
	return b
}

// meet brings a sandbox's fate about, and returns what it came to.
func (e *Edge) meet(ctx context.Context, b *box, f fate) (fate, error) {
	if err := b.take(ctx); err != nil {
		return f, err
	}
	defer b.give()
	if err := e.fault("recover." + string(f)); err != nil {
		return f, err
	}
	if f == rebooted || f == clearUp || f == keep && b.state() == sandbox.Failed {
		if err := e.cfg.Layers.Adopt(string(b.id), digests(b.record().Layers)); err != nil {
			return f, err
		}
	}
	switch f {
	case discard:
		return f, e.unmake(b, errs.E(errs.Internal, "the server ended while it was created"))
	case finish:
		return f, e.end(ctx, b, stopCall{})
	case tooOld:
		return f, e.forget(b)
	case rebooted:
		return f, e.fail(ctx, b, sandbox.ReasonRebooted, "the node was booted anew", backend.Usage{})
	case clearUp:
		err := e.settle(ctx, b)
		e.review(b)
		return f, err
	case revive:
		err := e.revive(ctx, b)
		if err == nil {
			e.review(b)
			return f, nil
		}
		e.log.Warn("a sandbox did not survive the server", "sandbox", b.id, "err", err)
		return "lost", e.fail(ctx, b, sandbox.ReasonLostSup, "the sandbox's supervisor is gone", backend.Usage{})
	}
	e.review(b)
	return f, nil
}

func (e *Edge) revive(ctx context.Context, b *box) error {
	r := b.record()
	be, err := e.backend(r.Spec.GetBackend())
	if err != nil {
		return err
	}
	if err := e.cfg.Layers.Adopt(string(b.id), digests(r.Layers)); err != nil {
		return err
	}
	if err := be.Recover(ctx, r.Config); err != nil {
		return err
	}
	if err := e.settlePause(ctx, b, be); err != nil {
		return err
	}
	e.attend(b, be)
	e.watchDisk(b, be, true)
	return nil
}

// sweep releases what belongs to no sandbox, and counts it by kind.
func (e *Edge) sweep() (map[string]int, error) {
	leaks, err := e.leaks()
	failed := []error{err}
	counts := map[string]int{}
	for _, l := range leaks {
		if l.Release == nil {
			continue
		}
		if err := l.Release(); err != nil {
			failed = append(failed, fmt.Errorf("%s %s: %w", l.Kind, l.Name, err))
			continue
		}
		counts[l.Kind]++
	}
	return counts, errors.Join(failed...)
}

// leaks lists what belongs to no sandbox: backends' first, because what they hold keeps mounts busy.
func (e *Edge) leaks() ([]backend.Leak, error) {
	owned := map[sandbox.ID]bool{}
	for _, b := range e.snapshot() {
		if r := b.record(); r.State.Live() || r.Config.IDBase != 0 {
			owned[b.id] = true
		}
	}
	var all []backend.Leak
	var failed []error
	for _, be := range e.cfg.Backends {
		found, err := be.Leaks(owned)
		all, failed = append(all, found...), append(failed, err)
	}
	found, err := e.cfg.Layers.Leaks()
	return append(all, found...), errors.Join(append(failed, err)...)
}

// setAside keeps a sandbox's directory whose record cannot be read, for people to look at.
func (e *Edge) setAside(name string) error {
	lost := filepath.Join(e.records.root, "lost")
	if err := os.MkdirAll(lost, 0o700); err != nil {
		return e.records.fault("set an unreadable record aside", err)
	}
	to := filepath.Join(lost, name+"."+strconv.FormatInt(e.clock.Now().UnixNano(), 36))
	if err := os.Rename(filepath.Join(e.records.root, "sandboxes", name), to); err != nil {
		return e.records.fault("set an unreadable record aside", err)
	}
	e.log.Error("the record of a sandbox cannot be read; its directory was set aside", "directory", to)
	return nil
}
