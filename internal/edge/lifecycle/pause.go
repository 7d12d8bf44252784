package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// reclaimTime bounds how long a pause goes on giving memory back; what is left by then stays.
const reclaimTime = 20 * time.Second

// holdTime bounds the word to the supervisor that the clocks rest, or go on.
const holdTime = 2 * time.Second

// Pause is what is kept of a pause while it lasts.
type Pause struct {
	Since        time.Time         `json:"since"`
	Freeze       time.Duration     `json:"freeze"`
	Reclaim      time.Duration     `json:"reclaim"`
	Memory       backend.Reclaimed `json:"memory"`
	NodeBefore   int64             `json:"node_before"`
	NodeAfter    int64             `json:"node_after"`
	ZramGrew     int64             `json:"zram_grew"`
	DiskSwapGrew int64             `json:"disk_swap_grew"`
	Note         string            `json:"note,omitempty"`
}

func (p *Pause) report() *harenav1.PauseReport {
	if p == nil {
		return nil
	}
	return &harenav1.PauseReport{
		MemoryBefore: p.Memory.Before, MemoryAfter: p.Memory.After, Swapped: p.Memory.Swapped, CacheDropped: p.Memory.CacheDropped,
		NodeAvailableBefore: p.NodeBefore, NodeAvailableAfter: p.NodeAfter, ZramGrew: p.ZramGrew, DiskSwapGrew: p.DiskSwapGrew,
		FreezeTook: durationpb.New(p.Freeze), ReclaimTook: durationpb.New(p.Reclaim), Note: p.Note,
	}
}

// pauseCall says why a sandbox is paused.
type pauseCall struct {
	reason sandbox.Reason
	// idle: only while nobody uses it.
	idle bool
}

// errInUse: a pause that nobody asked for was given up.
var errInUse = errors.New("the sandbox is in use")

// pause stops everything in a sandbox and gives its memory back. It is idempotent. When ctx ends the pause goes on without
// the caller.
//
// Whatever else wants the sandbox waits for its turn: an exec that finds it pausing resumes it as soon as it stands still and
// ends the wait for its memory; a stop does the same and ends it; a snapshot finds it paused or running, never between.
func (e *Edge) pause(ctx context.Context, b *box, c pauseCall) error {
	return e.detached(ctx, b, func() error { return e.pauseMade(b, c) })
}

// resume lets everything go on. It is idempotent, and any number of callers cause one resume.
func (e *Edge) resume(ctx context.Context, b *box) error {
	return e.detached(ctx, b, func() error { return e.resumeMade(b) })
}

// detached waits until b is made, calls f, which goes on when ctx ends, and returns its error.
func (e *Edge) detached(ctx context.Context, b *box, f func() error) error {
	select {
	case <-b.made:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if !e.begin() {
		return errs.E(errs.Capacity, "the server is shutting down").WithHint("try again")
	}
	done := make(chan error, 1)
	go func() {
		defer e.work.Done()
		done <- f()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (e *Edge) pauseMade(b *box, c pauseCall) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), patience+reclaimTime)
	defer cancel()
	if err := b.take(ctx); err != nil {
		return busy(b)
	}
	defer b.give()
	switch r := b.record(); {
	case b.isGone():
		return notRunning(r)
	case r.State == sandbox.Paused:
		return nil
	case r.State != sandbox.Running:
		return notRunning(r)
	}
	be, err := e.backend(b.record().Spec.GetBackend())
	if err != nil {
		return err
	}
	if err := e.commit(b, false, func(r *Record) error { return r.to(sandbox.Pausing) }); err != nil {
		return err
	}
	p, err := e.standStill(ctx, b, be, c)
	if err != nil {
		return e.unpause(ctx, b, be, err)
	}
	e.giveBack(ctx, b, be, p)
	p.Since = e.clock.Now()
	if err := e.fault("pause.record"); err != nil {
		return e.unpause(ctx, b, be, err)
	}
	err = e.commit(b, true, func(r *Record) error {
		r.Pause = p
		if c.reason != "" {
			r.Reason = c.reason
		}
		return r.to(sandbox.Paused)
	})
	if err != nil {
		return err
	}
	attributes := map[string]string{"memory_before": fmt.Sprint(p.Memory.Before), "memory_after": fmt.Sprint(p.Memory.After)}
	if c.reason != "" {
		attributes["reason"] = string(c.reason)
	}
	e.event("sandbox.paused", b.record(), "", attributes)
	e.review(b)
	return nil
}

// unpause gives a pause up: the sandbox runs on, as if nothing had been asked. One that cannot is paused, and the next resume
// tries again.
func (e *Edge) unpause(ctx context.Context, b *box, be backend.Backend, why error) error {
	err := e.goOn(ctx, b, be)
	if err == nil {
		return why
	}
	e.log.Error("a sandbox could not be thawed", "sandbox", b.id, "err", err)
	return errors.Join(why, err, e.commit(b, true, func(r *Record) error {
		r.Pause = &Pause{Since: e.clock.Now()}
		return r.to(sandbox.Paused)
	}))
}

func busy(b *box) error {
	return errs.E(errs.Timeout, "sandbox %s is busy with something that does not end", b.id).On("sandbox %s", b.id)
}

// standStill freezes the workload. b's turn is held, and its state is pausing: every call from now on waits.
func (e *Edge) standStill(ctx context.Context, b *box, be backend.Backend, c pauseCall) (*Pause, error) {
	if c.idle {
		// A call counts itself before it looks at the state, and the state was set before this: one of the two sees the other.
		if m := e.asked(b, e.moment(b)); m.busy {
			return nil, errInUse
		}
	}
	if err := e.fault("pause.freeze"); err != nil {
		return nil, err
	}
	e.hold(ctx, b, true)
	start := time.Now()
	if err := be.Freeze(ctx, b.id); err != nil {
		return nil, err
	}
	return &Pause{Freeze: time.Since(start)}, nil
}

// goOn takes a sandbox from pausing or resuming to running. b's turn is held.
func (e *Edge) goOn(ctx context.Context, b *box, be backend.Backend) error {
	if err := e.fault("thaw"); err != nil {
		return err
	}
	if err := be.Thaw(ctx, b.id); err != nil {
		return err
	}
	e.hold(ctx, b, false)
	err := e.commit(b, true, func(r *Record) error {
		r.Pause, r.Reason = nil, ""
		return r.to(sandbox.Running)
	})
	e.review(b)
	return err
}

// hold tells the supervisor that the clocks of commands rest, or go on. One that does not answer will be found out otherwise.
func (e *Edge) hold(ctx context.Context, b *box, on bool) {
	ctx, cancel := context.WithTimeout(ctx, holdTime)
	defer cancel()
	if _, err := e.guest(b.id).Hold(ctx, connect.NewRequest(&guestv1.HoldRequest{Held: on})); err != nil {
		e.log.Warn("a supervisor was not told of a pause; time-outs of commands go on", "sandbox", b.id, "held", on, "err", err)
	}
}

// giveBack returns the memory of a frozen sandbox to the node, as far as it can. Somebody who needs the sandbox ends it.
func (e *Edge) giveBack(ctx context.Context, b *box, be backend.Backend, p *Pause) {
	ctx, cancel := context.WithTimeout(ctx, reclaimTime)
	defer cancel()
	b.hurry.Store(&cancel)
	defer b.hurry.Store(nil)
	if b.wanted.Load() > 0 {
		cancel()
	}
	release := e.squeezes.enter(ctx)
	defer release()
	before := e.cfg.Node.Snapshot()
	start := time.Now()
	var err error
	p.Memory, err = be.Reclaim(ctx, b.id)
	p.Reclaim = time.Since(start)
	after := e.cfg.Node.Snapshot()
	p.NodeBefore, p.NodeAfter = before.MemoryAvailable, after.MemoryAvailable
	p.ZramGrew, p.DiskSwapGrew = after.ZramBytes-before.ZramBytes, after.DiskSwapUsed-before.DiskSwapUsed
	if err != nil {
		e.log.Warn("the memory of a paused sandbox was not given back", "sandbox", b.id, "err", err)
	}
	p.Note = pauseNote(p.Memory, after, err, ctx.Err() != nil)
}

// pauseNote says why not more memory was given back. Pure.
func pauseNote(m backend.Reclaimed, s admission.Snapshot, err error, cut bool) string {
	const much = 4 << 20
	switch {
	case err != nil && errs.Is(err, errs.Unsupported):
		_, message := errs.Detail(err)
		return message
	case err != nil:
		return "the kernel did not give the memory back; the server's log says why"
	case cut && m.After > much:
		return "giving memory back was ended early"
	case m.Anonymous > much && s.SwapTotal == 0:
		return "the node has no swap, so only cached files were given back; `harena up --zram SIZE` or `--swap SIZE` adds some"
	case m.Anonymous > much && s.SwapFree < much:
		return "the node's swap is full"
	}
	return ""
}

func (e *Edge) resumeMade(b *box) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), patience+reclaimTime)
	defer cancel()
	if err := b.takeSoon(ctx); err != nil {
		return busy(b)
	}
	defer b.give()
	switch r := b.record(); {
	case b.isGone():
		return notRunning(r)
	case r.State == sandbox.Running:
		return nil
	case r.State != sandbox.Paused:
		return notRunning(r)
	}
	be, err := e.backend(b.record().Spec.GetBackend())
	if err != nil {
		return err
	}
	if err := e.roomFor(b); err != nil {
		return err
	}
	if err := e.commit(b, true, func(r *Record) error { return r.to(sandbox.Resuming) }); err != nil {
		return err
	}
	was := b.record()
	b.used(e.clock.Now())
	if err := e.goOn(ctx, b, be); err != nil {
		err = errs.E(errs.Internal, "sandbox %s could not be resumed: %w", b.id, err).On("sandbox %s", b.id)
		return errors.Join(err, e.commit(b, true, func(r *Record) error { return r.to(sandbox.Paused) }))
	}
	e.event("sandbox.resumed", b.record(), "", map[string]string{"paused_for": e.clock.Now().Sub(was.Pause.since()).String()})
	return nil
}

func (p *Pause) since() time.Time {
	if p == nil {
		return time.Time{}
	}
	return p.Since
}

// roomFor refuses a resume for whose memory the node has no room: it comes back as the sandbox touches it.
func (e *Edge) roomFor(b *box) error {
	p := b.record().Pause
	if p == nil || p.Memory.Swapped == 0 {
		return nil
	}
	s, _ := e.sampler.get(false)
	if err := admission.DecideResume(s, e.returning.sum(e.clock.Now()), e.cfg.Limits, p.Memory.Swapped); err != nil {
		return err
	}
	e.returning.add(e.clock.Now(), p.Memory.Swapped)
	return nil
}

// takeSoon is take for those who end what a pause still does for memory.
func (b *box) takeSoon(ctx context.Context) error {
	// Whoever begins to give memory back later looks at wanted; whoever has begun is in hurry.
	b.wanted.Add(1)
	defer b.wanted.Add(-1)
	b.hasten()
	return b.take(ctx)
}

// hasten ends the wait for a pausing sandbox's memory.
func (b *box) hasten() {
	if cancel := b.hurry.Load(); cancel != nil {
		(*cancel)()
	}
}

// squeezes bounds how many sandboxes give memory back at once: the kernel compresses it with one core each.
type squeezes struct {
	once sync.Once
	gate chan struct{}
}

// enter waits for room, or for the end of ctx.
func (s *squeezes) enter(ctx context.Context) (leave func()) {
	s.once.Do(func() { s.gate = make(chan struct{}, runtime.NumCPU()) })
	select {
	case s.gate <- struct{}{}:
		return func() { <-s.gate }
	case <-ctx.Done():
		return func() {}
	}
}

// returning is memory that resumed sandboxes are about to touch again, which the node's counters do not show yet.
type returning struct {
	mu  sync.Mutex
	all []comeback
}

type comeback struct {
	until time.Time
	bytes int64
}

// comebackTime is how long it is expected to take.
const comebackTime = 10 * time.Second

func (r *returning) add(now time.Time, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, comeback{now.Add(comebackTime), bytes})
}

func (r *returning) sum(now time.Time) (bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := r.all[:0]
	for _, c := range r.all {
		// What takes longer is from before the machine's clock was set back.
		if c.until.After(now) && !c.until.After(now.Add(comebackTime)) {
			kept = append(kept, c)
			bytes += c.bytes
		}
	}
	r.all = kept
	return bytes
}

// Pause pauses the selected sandboxes, in parallel.
func (e *Edge) Pause(ctx context.Context, req *harenav1.PauseRequest) (*harenav1.PauseResponse, error) {
	boxes, missing, err := e.selected(req.GetSelector(), sandbox.State.CanPause)
	if err != nil {
		return nil, err
	}
	outcomes := e.each(ctx, boxes, func(b *box) error { return e.pause(ctx, b, pauseCall{}) })
	for i, b := range boxes {
		if r := b.record(); outcomes[i].GetError() == nil {
			outcomes[i].Pause = r.Pause.report()
		}
	}
	return &harenav1.PauseResponse{Outcomes: append(outcomes, missing...)}, nil
}

// Resume resumes the selected sandboxes, in parallel.
func (e *Edge) Resume(ctx context.Context, req *harenav1.ResumeRequest) (*harenav1.ResumeResponse, error) {
	boxes, missing, err := e.selected(req.GetSelector(), sandbox.State.CanPause)
	if err != nil {
		return nil, err
	}
	outcomes := e.each(ctx, boxes, func(b *box) error { return e.resume(ctx, b) })
	return &harenav1.ResumeResponse{Outcomes: append(outcomes, missing...)}, nil
}

// settlePause brings what was found frozen, or not, after a restart in line with the record: what is paused stays so; what was
// on the way there, on the way back, or stood still for a snapshot, runs. b's turn is held.
func (e *Edge) settlePause(ctx context.Context, b *box, be backend.Backend) error {
	switch state := b.record().State; state {
	case sandbox.Paused:
		u, err := be.Usage(b.id)
		if err != nil || u.Frozen {
			return err
		}
		return be.Freeze(ctx, b.id)
	case sandbox.Pausing, sandbox.Resuming:
		e.event("sandbox.resumed", b.record(), "the server ended while it was "+string(state), nil)
		return e.goOn(ctx, b, be)
	}
	return be.Thaw(ctx, b.id)
}

// thawToEnd lets a paused sandbox that is to be stopped with grace run, so that it can end by itself.
func (e *Edge) thawToEnd(ctx context.Context, b *box, was *Record) {
	if was.State == sandbox.Running {
		return
	}
	be, err := e.backend(was.Spec.GetBackend())
	if err == nil {
		err = be.Thaw(ctx, b.id)
	}
	if err != nil {
		e.log.Warn("a paused sandbox could not be thawed to end by itself; it is killed", "sandbox", b.id, "err", err)
	}
}

// SetNetwork is to replace the network policy of the selected sandboxes; each refuses for now, by itself.
func (e *Edge) SetNetwork(ctx context.Context, req *harenav1.SetNetworkRequest) (*harenav1.SetNetworkResponse, error) {
	boxes, missing, err := e.selected(req.GetSelector(), sandbox.State.Live)
	if err != nil {
		return nil, err
	}
	outcomes := e.each(ctx, boxes, func(*box) error { return NotBuilt("network policy") })
	return &harenav1.SetNetworkResponse{Outcomes: append(outcomes, missing...)}, nil
}
