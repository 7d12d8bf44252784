package lifecycle

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// face is a sandbox at one moment. It is never changed, only replaced.
type face struct {
	rec     *Record
	view    *harenav1.Sandbox
	version int64
}

// box is one sandbox in memory.
//
// Whoever has effects on it holds its turn. Its record is replaced by Edge.commit only, which writes are the order of.
type box struct {
	id   sandbox.ID
	face atomic.Pointer[face]
	turn chan struct{}

	commitMu sync.Mutex
	gone     bool // under commitMu: forgotten; nothing is written any more

	degraded atomic.Pointer[[]string] // why, if it is; see Edge.SetDegraded

	// Creation.
	made      chan struct{}           // closed when it runs, or is rolled back
	cancel    context.CancelCauseFunc // of its creation
	stopAsked atomic.Bool             // a stop races it
	mu        sync.Mutex              // guards the following
	waiters   int
	abandoned bool  // every caller went away before it was made
	failure   error // why it was rolled back
	timings   []*harenav1.Timing
	explained []string

	// Use.
	streams  atomic.Int64  // calls under way
	lastUse  atomic.Int64  // Unix nanoseconds
	looked   atomic.Int64  // lastUse when counters were read last
	diskTold atomic.Bool   // that its disk is full
	oomAt    atomic.Int64  // Unix nanoseconds: when a kill for want of memory was seen last
	files    atomic.Bool   // a supervisor for the files of a failed sandbox is up
	quit     chan struct{} // closed when an exit is no news any more; replaced under turn

	// Pause.
	hurry  atomic.Pointer[context.CancelFunc] // ends the wait for its memory
	wanted atomic.Int32                       // how many want it to stand still no longer

	// Snapshots.
	interrupt atomic.Pointer[context.CancelCauseFunc] // ends a capture under way
	stops     atomic.Int32                            // stops that want the turn

	// Under timers.mu.
	due  time.Time
	slot int
}

func newBox(id sandbox.ID) *box {
	return &box{id: id, turn: make(chan struct{}, 1), made: make(chan struct{})}
}

func (b *box) record() *Record { return b.face.Load().rec }

func (b *box) state() sandbox.State { return b.record().State }

// take takes the turn, or returns why ctx ended.
func (b *box) take(ctx context.Context) error {
	select {
	case b.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case b.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (b *box) give() { <-b.turn }

func (b *box) used(now time.Time) { b.lastUse.Store(now.UnixNano()) }

// finish ends the creation: with nil it runs.
func (b *box) finish(err error) {
	b.mu.Lock()
	b.failure = err
	b.mu.Unlock()
	b.cancel(nil)
	close(b.made)
}

// join adds a caller that waits for the creation; false when it has been given up already.
func (b *box) join() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.abandoned {
		return false
	}
	b.waiters++
	return true
}

// leave is called by a caller that does not wait any more. The last one gives the creation up.
func (b *box) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiters--
	select {
	case <-b.made:
		return
	default:
	}
	if b.waiters == 0 {
		b.abandoned = true
		b.cancel(errAbandoned)
	}
}

// commit replaces b's record by what change makes of a copy, on disk and then in memory. With must, an error of the disk does
// not stop it: what happens to a sandbox happens also when the disk is full.
func (e *Edge) commit(b *box, must bool, change func(*Record) error) error {
	b.commitMu.Lock()
	defer b.commitMu.Unlock()
	if b.gone {
		return errs.E(errs.NotFound, "sandbox %s is gone", b.id).On("sandbox %s", b.id)
	}
	r := *b.record()
	if err := change(&r); err != nil {
		return err
	}
	if err := e.records.write(&r, must); err != nil {
		if !must {
			return err
		}
		e.log.Error("a record could not be written", "sandbox", b.id, "state", r.State, "err", err)
	}
	e.show(b, &r)
	return nil
}

// show makes r the record that everybody sees.
func (e *Edge) show(b *box, r *Record) {
	f := &face{rec: r, view: r.view(e.dir.Edge()), version: e.versions.Add(1)}
	if why := b.degraded.Load(); why != nil && !r.State.Ended() {
		f.view.Degraded = append(f.view.Degraded, *why...)
	}
	old := b.face.Swap(f)
	was := old != nil && old.rec.State.Live()
	switch is := r.State.Live(); {
	case is && !was:
		e.alive.Add(1)
	case was && !is:
		e.alive.Add(-1)
	}
	e.watchers.tell(f)
}
