package blob

import (
	"context"
	"io"
	"sync"
	"time"
)

// Limits bound what is asked of a store; zero means no bound.
type Limits struct {
	BytesPerSecond    int64 // of bodies, both directions together
	RequestsPerSecond float64
}

// WithLimit delays calls and bodies so that the limits are kept on average over a
// second. Calls that wait end with their context.
func WithLimit(s Store, l Limits) Store {
	if l == (Limits{}) {
		return s
	}
	return &limited{s, newBucket(float64(l.BytesPerSecond)), newBucket(l.RequestsPerSecond)}
}

type limited struct {
	s               Store
	bytes, requests *bucket
}

// bucket is a virtual schedule: next is when what was taken so far will have been earned.
type bucket struct {
	rate float64 // a second; 0: no bound
	mu   sync.Mutex
	next time.Time
}

func newBucket(rate float64) *bucket { return &bucket{rate: rate} }

// burst is how much may be taken at once after a pause, as time.
const burst = 100 * time.Millisecond

// take takes n and waits for the time at which that is allowed.
func (b *bucket) take(ctx context.Context, n float64) error {
	if b.rate <= 0 {
		return contextError(ctx)
	}
	now := time.Now()
	b.mu.Lock()
	if earliest := now.Add(-burst); b.next.Before(earliest) {
		b.next = earliest
	}
	wait := b.next.Sub(now)
	b.next = b.next.Add(time.Duration(n / b.rate * float64(time.Second)))
	b.mu.Unlock()
	if wait <= 0 {
		return contextError(ctx)
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return contextError(ctx)
	}
}

// metered is a reader that pays for what it reads.
type metered struct {
	ctx context.Context
	r   io.Reader
	b   *bucket
}

func (m *metered) Read(p []byte) (int, error) {
	const slice = 64 << 10 // small against a second of any rate that makes sense
	n, err := m.r.Read(p[:min(len(p), slice)])
	if n > 0 {
		if e := m.b.take(m.ctx, float64(n)); e != nil {
			return n, e
		}
	}
	return n, err
}

func (l *limited) Put(ctx context.Context, name string, r io.Reader) error {
	if err := l.requests.take(ctx, 1); err != nil {
		return err
	}
	return l.s.Put(ctx, name, &metered{ctx, r, l.bytes})
}

func (l *limited) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	if err := l.requests.take(ctx, 1); err != nil {
		return nil, err
	}
	r, err := l.s.Get(ctx, name, off, n)
	if err != nil {
		return nil, err
	}
	return &body{&metered{ctx, r, l.bytes}, r.Close, versionOf(r)}, nil
}

func (l *limited) Stat(ctx context.Context, name string) (Info, error) {
	if err := l.requests.take(ctx, 1); err != nil {
		return Info{}, err
	}
	return l.s.Stat(ctx, name)
}

func (l *limited) List(ctx context.Context, prefix, after string, limit int) ([]Info, error) {
	if err := l.requests.take(ctx, 1); err != nil {
		return nil, err
	}
	return l.s.List(ctx, prefix, after, limit)
}

func (l *limited) Delete(ctx context.Context, names ...string) error {
	if err := l.requests.take(ctx, 1); err != nil {
		return err
	}
	return l.s.Delete(ctx, names...)
}

func (l *limited) Sweep(ctx context.Context, before time.Time) (int, error) {
	return Sweep(ctx, l.s, before)
}
