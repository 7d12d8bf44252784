package blobtest

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// Op is an operation of a store.
type Op string

// The operations.
const (
	Put    Op = "put"
	Get    Op = "get"
	Stat   Op = "stat"
	List   Op = "list"
	Delete Op = "delete"
)

// Faulty is a store that fails as told. Its methods may be called at any time by several goroutines.
//
// Faults are given to the nth call of an operation from now on, 1 being the next; each is used up by that call.
type Faulty struct {
	s blob.Store

	mu      sync.Mutex
	calls   map[Op]int
	faults  map[Op]map[int]fault // by the number of the call
	outage  bool
	up      chan struct{} // closed when hung calls go on
	latency time.Duration
	bytes   int64
}

type fault struct {
	err     error
	cut     int64 // of a body: fails with err after so many bytes
	flip    int64 // of a body: changes the byte at this offset
	body    bool
	corrupt bool
}

// NewFaulty returns a store that passes everything on to s until told otherwise.
func NewFaulty(s blob.Store) *Faulty {
	up := make(chan struct{})
	close(up)
	return &Faulty{s: s, calls: make(map[Op]int), faults: make(map[Op]map[int]fault), up: up}
}

// Fail lets the nth call from now fail with err; nil means an internal error, which is transient.
func (f *Faulty) Fail(op Op, nth int, err error) { f.add(op, nth, fault{err: orInternal(err)}) }

// Break lets the body of the nth Get, or the source of the nth Put, fail after some bytes.
func (f *Faulty) Break(op Op, nth int, after int64, err error) {
	f.add(op, nth, fault{err: orInternal(err), cut: after, body: true})
}

// Corrupt changes one byte of the body of the nth Get from now, at an offset within the range that is asked for.
func (f *Faulty) Corrupt(nth int, at int64) { f.add(Get, nth, fault{flip: at, corrupt: true}) }

// Truncate lets the body of the nth Get from now end early, without an error, as
// an object does that was cut off.
func (f *Faulty) Truncate(nth int, after int64) {
	f.add(Get, nth, fault{err: io.EOF, cut: after, body: true})
}

// Outage lets all calls fail while it is on, and breaks bodies that are open.
func (f *Faulty) Outage(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.outage = on
}

// Hang lets all calls and reads of bodies wait, until it is off or their context ends.
func (f *Faulty) Hang(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.up:
		if on {
			f.up = make(chan struct{})
		}
	default:
		if !on {
			close(f.up)
		}
	}
}

// Latency delays every call.
func (f *Faulty) Latency(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.latency = d
}

// Calls is how often an operation was called.
func (f *Faulty) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// Bytes is how many bytes the bodies of Get gave.
func (f *Faulty) Bytes() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes
}

func orInternal(err error) error {
	if err == nil {
		return errs.E(errs.Internal, "injected fault")
	}
	return err
}

func (f *Faulty) add(op Op, nth int, x fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.faults[op] == nil {
		f.faults[op] = make(map[int]fault)
	}
	f.faults[op][f.calls[op]+nth] = x
}

// enter counts a call, delays it and returns its fault.
func (f *Faulty) enter(ctx context.Context, op Op) (fault, error) {
	f.mu.Lock()
	f.calls[op]++
	x := f.faults[op][f.calls[op]]
	latency := f.latency
	f.mu.Unlock()
	if latency > 0 {
		select {
		case <-time.After(latency):
		case <-ctx.Done():
		}
	}
	if err := f.weather(ctx); err != nil {
		return x, err
	}
	if !x.body {
		return x, x.err
	}
	return x, nil
}

// weather is what outages and hangs do to a call or a read.
func (f *Faulty) weather(ctx context.Context) error {
	f.mu.Lock()
	outage, up := f.outage, f.up
	f.mu.Unlock()
	select {
	case <-up:
	case <-ctx.Done():
		return errs.E(errs.KindOf(ctx.Err()), "the call was given up: %w", ctx.Err())
	}
	if outage {
		return errs.E(errs.Internal, "the store is out (injected)")
	}
	return nil
}

// Put implements blob.Store.
func (f *Faulty) Put(ctx context.Context, name string, r io.Reader) error {
	x, err := f.enter(ctx, Put)
	if err != nil {
		return err
	}
	if x.body {
		r = &faultyBody{f: f, ctx: ctx, r: io.NopCloser(r), x: x}
	}
	return f.s.Put(ctx, name, r)
}

// Get implements blob.Store.
func (f *Faulty) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	x, err := f.enter(ctx, Get)
	if err != nil {
		return nil, err
	}
	r, err := f.s.Get(ctx, name, off, n)
	if err != nil {
		return nil, err
	}
	return &faultyBody{f: f, ctx: ctx, r: r, x: x, count: true}, nil
}

type faultyBody struct {
	f     *Faulty
	ctx   context.Context
	r     io.ReadCloser
	x     fault
	at    int64
	count bool
}

func (b *faultyBody) Close() error { return b.r.Close() }

func (b *faultyBody) Version() string {
	if v, ok := b.r.(blob.Versioned); ok {
		return v.Version()
	}
	return ""
}

func (b *faultyBody) Read(p []byte) (int, error) {
	if err := b.f.weather(b.ctx); err != nil {
		return 0, err
	}
	if b.x.body {
		if b.at == b.x.cut {
			return 0, b.x.err
		}
		p = p[:min(int64(len(p)), b.x.cut-b.at)]
	}
	n, err := b.r.Read(p)
	if at := b.x.flip - b.at; b.x.corrupt && at >= 0 && at < int64(n) {
		p[at] ^= 0x55
	}
	b.at += int64(n)
	if b.count {
		b.f.mu.Lock()
		b.f.bytes += int64(n)
		b.f.mu.Unlock()
	}
	return n, err
}

// Stat implements blob.Store.
func (f *Faulty) Stat(ctx context.Context, name string) (blob.Info, error) {
	if _, err := f.enter(ctx, Stat); err != nil {
		return blob.Info{}, err
	}
	return f.s.Stat(ctx, name)
}

// List implements blob.Store.
func (f *Faulty) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if _, err := f.enter(ctx, List); err != nil {
		return nil, err
	}
	return f.s.List(ctx, prefix, after, limit)
}

// Delete implements blob.Store.
func (f *Faulty) Delete(ctx context.Context, names ...string) error {
	if _, err := f.enter(ctx, Delete); err != nil {
		return err
	}
	return f.s.Delete(ctx, names...)
}
