package blobcache

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// flight is a frame on its way from the store. Everybody who wants it waits for the same one.
type flight struct {
	done chan struct{}
	raw  []byte // set before done is closed, as is err
	err  error
}

// purpose is who wants frames.
type purpose int

const (
	demand purpose = iota // a reader waits for them
	ahead                 // a sequential reader will, soon
	idle                  // nobody: an access profile, or the rest of a blob
)

const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
	// attemptTime bounds one request without the arrival of a frame: a store that took the call and says nothing.
	attemptTime = 15 * time.Second
	// damagedAttempts is how often frames are fetched that are not what the index says, before that is believed.
	damagedAttempts = 3
	// completeAt is the share of a blob that is there when the rest is fetched, too, because then new mounts need no daemon.
	completeAt = 0.85
)

// touch notes a read of frames, starts what is missing and what a sequential reader will want next, and tells whether all were there.
func (e *entry) touch(_ context.Context, x *blob.Index, first, last int) bool {
	e.mu.Lock()
	now := e.c.tick()
	e.lastUse = now
	hit := true
	if e.state == partial && e.index == x {
		for i := first; i <= last; i++ {
			e.used[i] = now
			hit = hit && (e.have[i] || e.c.recent.has(e, i))
		}
	}
	slack := 2 * (last - first + 1)
	s := pick(e.streams[:], first, slack)
	from, to := s.advance(last, x.Frames(), x.FrameSize(), now)
	records := e.records
	e.mu.Unlock()
	for _, r := range records {
		fa, fb := x.Frame(first), x.Frame(last)
		r.add(e.obj.Digest, fa.RawOff, fb.RawOff+int64(fb.RawLen)-fa.RawOff)
	}
	e.want(x, first, last, demand)
	if from < to {
		e.want(x, from, to-1, ahead)
	}
	return hit
}

// want starts fetching those of frames first to last that are neither there nor on their way.
func (e *entry) want(x *blob.Index, first, last int, why purpose) {
	perJob := max(1, maxJob/x.FrameSize())
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state != partial || e.index != x || e.c.ctx.Err() != nil {
		return
	}
	for i := first; i <= last; {
		if !e.lacks(i) {
			i++
			continue
		}
		begin := i
		for i <= last && i-begin < perJob && e.lacks(i) {
			e.inflight[i] = &flight{done: make(chan struct{})}
			i++
		}
		count := i - begin
		if !e.c.spawn(func() { e.run(x, begin, count, why) }) {
			e.abandon(begin, count, e.c.ctx.Err())
		}
	}
}

// lacks tells whether a frame has to be fetched; mu is held.
func (e *entry) lacks(i int) bool {
	return !e.have[i] && e.inflight[i] == nil && !e.c.recent.has(e, i)
}

// run fetches frames that want has put in flight.
func (e *entry) run(x *blob.Index, first, count int, why purpose) {
	// Readers bring their own deadline; this one ends what nobody waits for any more.
	ctx, cancel := context.WithTimeout(e.c.ctx, e.c.cfg.ReadTime)
	defer cancel()
	next := first
	err := e.withSlot(ctx, func() error {
		return e.attempts(ctx, &x, func(ctx context.Context) (progress bool, err error) {
			before := next
			attempt, alive, cancel := withProgress(ctx)
			defer cancel()
			e.c.n.requests.Add(1)
			err = x.Fetch(attempt, e.c.cfg.Store, blobName(e.obj.Digest), e.c.dec, next, first+count-next, func(i int, raw []byte) error {
				alive()
				e.c.n.moved.Add(int64(x.Frame(i).Len))
				e.c.n.fetched.Add(int64(len(raw)))
				if why != demand {
					e.c.n.prefetched.Add(int64(len(raw)))
				}
				e.arrived(i, raw)
				next = i + 1
				return nil
			})
			return next > before, err
		})
	})
	if err != nil {
		e.mu.Lock()
		e.abandon(next, first+count-next, err)
		e.mu.Unlock()
		return
	}
	e.enough(x)
}

// abandon ends the wait for frames that will not come; mu is held.
func (e *entry) abandon(first, count int, err error) {
	for i := first; i < first+count; i++ {
		if fl := e.inflight[i]; fl != nil {
			fl.err = err
			close(fl.done)
			delete(e.inflight, i)
		}
	}
}

// withProgress returns a context that ends when alive has not been called for attemptTime.
func withProgress(ctx context.Context) (attempt context.Context, alive, cancel func()) {
	attempt, stop := context.WithCancelCause(ctx)
	t := time.AfterFunc(attemptTime, func() {
		stop(errs.E(errs.Timeout, "the store has sent nothing for %v", attemptTime))
	})
	return attempt, func() { t.Reset(attemptTime) }, func() { t.Stop(); stop(nil) }
}

func (e *entry) withSlot(ctx context.Context, f func() error) error {
	select {
	case e.c.slots <- struct{}{}:
		defer func() { <-e.c.slots }()
		return f()
	case <-ctx.Done():
		return fmt.Errorf("wait for a request to the store: %w", ctx.Err())
	}
}

// attempts calls f until it succeeds, ctx ends, or it fails in a way that time does not mend.
func (e *entry) attempts(ctx context.Context, x **blob.Index, f func(context.Context) (progress bool, err error)) error {
	pause, damaged := firstPause, 0
	for {
		progress, err := f(ctx)
		if err == nil {
			e.c.storeAnswers()
			return nil
		}
		if e.c.ctx.Err() != nil {
			return e.c.ctx.Err()
		}
		if progress {
			pause = firstPause
		}
		switch {
		case errors.Is(err, blob.ErrDamaged), errs.Is(err, errs.NotFound):
			// It may be replaced this very moment, or a proxy on the way may be at fault.
			damaged++
			if errors.Is(err, blob.ErrDamaged) {
				e.c.n.corrupt.Add(1)
			}
			if damaged >= damagedAttempts {
				return err
			}
			if x != nil {
				e.refreshIndex(ctx, x)
			}
		case !temporary(err):
			return err
		default:
			e.c.storeFails(err, e.layers())
		}
		select {
		case <-ctx.Done():
			return errs.E(errs.Timeout, "the store did not give blob %s in time: %w", e.name(), err)
		case <-time.After(pause):
		}
		pause = min(pause*2, lastPause)
	}
}

// temporary tells whether trying again may help.
func temporary(err error) bool {
	if errors.Is(err, blob.ErrDamaged) {
		return false
	}
	switch errs.KindOf(err) {
	case errs.NotFound, errs.Invalid, errs.Unsupported:
		return false
	}
	return true
}

// refreshIndex takes the index anew when the object was stored again with other compression: the same frames at other offsets.
func (e *entry) refreshIndex(ctx context.Context, x **blob.Index) {
	fresh, err := blob.ReadIndex(ctx, e.c.cfg.Store, blobName(e.obj.Digest), e.obj.Size)
	if err != nil || e.accept(fresh) != nil || fresh.Root() != (*x).Root() {
		return
	}
	e.mu.Lock()
	if e.state == partial && e.index == *x {
		e.index = fresh
	}
	e.mu.Unlock()
	*x = fresh
	_ = writeFile(e.indexFile(), fresh.Bytes())
}

// askIndex reads the index from the store.
func (e *entry) askIndex(ctx context.Context) (*blob.Index, error) {
	var x *blob.Index
	err := e.withSlot(ctx, func() error {
		return e.attempts(ctx, nil, func(ctx context.Context) (bool, error) {
			attempt, _, cancel := withProgress(ctx)
			defer cancel()
			var err error
			if x, err = blob.ReadIndex(attempt, e.c.cfg.Store, blobName(e.obj.Digest), e.obj.Size); err != nil {
				return false, err
			}
			return true, e.accept(x)
		})
	})
	return x, err
}

// arrived takes a verified frame: on disk if there is room, and to those who wait.
func (e *entry) arrived(i int, raw []byte) {
	e.c.recent.put(e, i, raw)
	kept := e.store(i, raw)
	e.mu.Lock()
	defer e.mu.Unlock()
	if kept && e.state == partial && !e.have[i] {
		e.have[i] = true
		e.missing--
		e.c.account(e, e.bytes+int64(len(raw)))
	}
	if fl := e.inflight[i]; fl != nil {
		fl.raw = raw
		close(fl.done)
		delete(e.inflight, i)
	}
}

// full tells whether the disk had no room a moment ago.
func (c *Cache) full() bool { return int64(time.Since(c.opened)) < c.fullUntil.Load() }

// store writes a frame to the partial file.
func (e *entry) store(i int, raw []byte) bool {
	if e.c.full() {
		e.c.n.notCached.Add(int64(len(raw)))
		return false
	}
	e.file.RLock()
	defer e.file.RUnlock()
	e.mu.Lock()
	x, st := e.index, e.state
	e.mu.Unlock()
	if e.f == nil || st != partial {
		e.c.n.notCached.Add(int64(len(raw)))
		return false
	}
	if _, err := e.f.WriteAt(raw, x.Frame(i).RawOff); err != nil {
		e.c.n.notCached.Add(int64(len(raw)))
		if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
			e.c.cfg.Log.Warn("the cache cannot be written", "blob", e.name(), "err", err)
		}
		e.c.fullUntil.Store(int64(time.Since(e.c.opened) + fullPause))
		e.c.makeRoom(true)
		return false
	}
	e.c.makeRoom(false)
	return true
}

// enough completes a blob of which all, or nearly all, is there.
func (e *entry) enough(x *blob.Index) {
	e.mu.Lock()
	missing, st := e.missing, e.state
	e.mu.Unlock()
	switch {
	case st != partial:
	case missing == 0:
		e.seal()
	case float64(x.Frames()-missing) >= completeAt*float64(x.Frames()):
		e.fetchIdle(x, 0, x.Frames()-1)
	}
}

// fetchIdle fetches frames in nobody's hurry: few at a time, and only while the disk has room.
func (e *entry) fetchIdle(x *blob.Index, first, last int) {
	e.c.spawn(func() {
		perJob := max(1, maxJob/x.FrameSize())
		for i := first; i <= last; i += perJob {
			select {
			case e.c.idle <- struct{}{}:
			case <-e.c.ctx.Done():
				return
			}
			if !e.c.full() {
				e.want(x, i, min(i+perJob-1, last), idle)
				e.settle(i, min(i+perJob-1, last))
			}
			<-e.c.idle
		}
	})
}

// settle waits until frames are no longer on their way.
func (e *entry) settle(first, last int) {
	for i := first; i <= last; i++ {
		e.mu.Lock()
		fl := e.inflight[i]
		e.mu.Unlock()
		if fl != nil {
			select {
			case <-fl.done:
			case <-e.c.ctx.Done():
				return
			}
		}
	}
}
