package container

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// readyTimeout bounds the start of a supervisor, on a node that is busy.
	readyTimeout = 30 * time.Second
	// refill is how many supervisors start at once when nobody waits for one.
	refill = 2
	// maxPool bounds what a burst makes the pool grow to, about 2 MB each.
	maxPool = 32
	// growEvery lets it double once in a burst, not once for each waiter.
	growEvery = 50 * time.Millisecond
	// shrinkAfter is how long the pool stays grown after it last ran empty.
	shrinkAfter = time.Minute
	// refillAfter lets the first command of a sandbox that was just made go before the start of the next supervisor, which is
	// as much work as the sandbox was.
	refillAfter = 50 * time.Millisecond
	// retryAfter spaces attempts when supervisors fail to start and nobody waits.
	retryAfter = time.Second
)

// pool keeps supervisors that wait to be claimed, so that their start, longer than all else in Create, is off its path. It
// doubles when it runs empty, and shrinks again.
type pool struct {
	starter starter
	log     *slog.Logger
	base    int

	// starts is held for reading from fork until the child is in all; Leaks holds it for writing while it looks at processes.
	starts sync.RWMutex

	mu       sync.Mutex
	ready    []*process
	all      map[*process]bool // started, and not yet taken over for good (keep)
	waiters  []chan taken
	starting int
	target   int
	emptied  time.Time // when it last ran empty and grew
	later    *time.Timer
	due      time.Time // when later calls refill; zero: not at all
	closed   bool
	wg       sync.WaitGroup
}

type taken struct {
	p   *process
	err error
}

func newPool(s starter, size int, log *slog.Logger) *pool {
	p := &pool{starter: s, log: log, base: size, target: size, all: map[*process]bool{}}
	p.refill()
	return p
}

// take returns a supervisor that is ready. The caller kills it or calls keep, and calls used when it is done with the hurry.
func (p *pool) take(ctx context.Context) (*process, error) {
	p.mu.Lock()
	for len(p.ready) > 0 {
		x := p.ready[0]
		p.ready = slices.Delete(p.ready, 0, 1)
		if x.alive() {
			p.mu.Unlock()
			return x, nil
		}
		p.drop(x)
	}
	if p.closed {
		p.mu.Unlock()
		return nil, errs.E(errs.Capacity, "this edge is shutting down")
	}
	if now := time.Now(); now.Sub(p.emptied) > growEvery {
		p.emptied = now
		p.target = min(p.target*2, maxPool)
		p.again(shrinkAfter + growEvery)
	}
	w := make(chan taken, 1)
	p.waiters = append(p.waiters, w)
	p.kick()
	p.mu.Unlock()

	select {
	case t := <-w:
		return t.p, t.err
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.waiters, w); i >= 0 {
		p.waiters = slices.Delete(p.waiters, i, i+1)
	} else if t := <-w; t.p != nil {
		// It was handed over just now.
		p.offer(t.p)
	}
	return nil, ctx.Err()
}

// used tells that a supervisor was taken. What is missing is started soon, or now when little is left.
func (p *pool) used() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if 2*len(p.ready) < p.target {
		p.kick()
	} else {
		p.again(refillAfter)
	}
}

// refill starts what is missing, and lets go what is too much.
func (p *pool) refill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due = time.Time{}
	if p.target > p.base && time.Since(p.emptied) > shrinkAfter {
		p.target = p.base
	}
	for len(p.ready) > p.target {
		last := len(p.ready) - 1
		p.drop(p.ready[last])
		p.ready = p.ready[:last]
	}
	p.kick()
	if p.target > p.base {
		p.again(time.Until(p.emptied.Add(shrinkAfter)) + growEvery)
	}
}

// kick starts supervisors until enough are on their way. p.mu is held.
func (p *pool) kick() {
	if p.closed {
		return
	}
	most := refill
	if len(p.waiters) > 0 {
		// A start is mostly CPU time: more at once than this only make each slower.
		most = max(refill, 2*runtime.NumCPU())
	}
	for p.starting < most && len(p.ready)+p.starting < p.target+len(p.waiters) {
		p.starting++
		p.wg.Go(p.startOne)
	}
}

func (p *pool) startOne() {
	x, err := p.startReady()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starting--
	if err == nil {
		p.offer(x)
		p.kick()
		return
	}
	if p.closed {
		return
	}
	if len(p.waiters) > 0 {
		p.waiters[0] <- taken{err: err}
		p.waiters = p.waiters[1:]
		p.kick()
		return
	}
	p.log.Error("a supervisor for the pool failed to start", "error", err)
	p.again(retryAfter)
}

// again calls refill after d, or earlier when that was asked for. p.mu is held.
func (p *pool) again(d time.Duration) {
	at := time.Now().Add(d)
	if p.closed || !p.due.IsZero() && p.due.Before(at) {
		return
	}
	p.due = at
	if p.later == nil {
		p.later = time.AfterFunc(d, p.refill)
		return
	}
	p.later.Reset(d)
}

// keep takes x out of the pool's care: it is known elsewhere, or has ended.
func (p *pool) keep(x *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, x)
}

// startReady starts one and waits until it is ready.
func (p *pool) startReady() (*process, error) {
	p.starts.RLock()
	x, err := p.starter.start()
	if err == nil {
		p.mu.Lock()
		p.all[x] = true
		p.mu.Unlock()
	}
	p.starts.RUnlock()
	if err != nil {
		return nil, err
	}
	if err := x.ready(readyTimeout); err != nil {
		p.mu.Lock()
		p.drop(x)
		p.mu.Unlock()
		return nil, err
	}
	return x, nil
}

// offer hands x to whoever waits, or keeps it. p.mu is held.
func (p *pool) offer(x *process) {
	switch {
	case p.closed:
		p.drop(x)
	case len(p.waiters) > 0:
		p.waiters[0] <- taken{p: x}
		p.waiters = p.waiters[1:]
	default:
		p.ready = append(p.ready, x)
	}
}

// drop lets x go: it ends by itself when its channel closes. p.mu is held.
func (p *pool) drop(x *process) {
	x.channel.Close()
	delete(p.all, x)
	p.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		select {
		case <-x.ended:
		case <-ctx.Done():
			if err := x.kill(); err != nil {
				p.log.Error("a pooled supervisor does not end", "pid", x.pid, "error", err)
			}
		}
	})
}

// pids lists the supervisors of the pool. p.starts is held for writing.
func (p *pool) pids() map[int]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[int]bool{}
	for x := range p.all {
		out[x.pid] = true
	}
	return out
}

// close lets all go and waits for their end.
func (p *pool) close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	if p.later != nil {
		p.later.Stop()
	}
	for _, w := range p.waiters {
		w <- taken{err: errs.E(errs.Capacity, "this edge is shutting down")}
	}
	p.waiters, p.ready = nil, nil
	for x := range p.all {
		p.drop(x)
	}
	p.mu.Unlock()
	p.wg.Wait()
	return p.starter.control.Close()
}
