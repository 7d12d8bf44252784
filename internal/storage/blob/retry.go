package blob

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// RetryPolicy says how often and after what pauses a call is repeated. Pauses are
// random, between nothing and a bound that doubles from First to Longest
// (full jitter: many nodes do not come back at once). The zero value repeats nothing.
type RetryPolicy struct {
	Attempts int // calls in all
	First    time.Duration
	Longest  time.Duration
}

// DefaultRetry is a policy that bridges outages of some 8 seconds on average.
func DefaultRetry() RetryPolicy {
	return RetryPolicy{Attempts: 8, First: 100 * time.Millisecond, Longest: 5 * time.Second}
}

// Transient tells whether the same call may succeed later.
func Transient(err error) bool {
	var spent *exhausted
	if err == nil || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.As(err, &spent) {
		return false
	}
	switch errs.KindOf(err) {
	case errs.Internal, errs.Timeout, errs.Capacity:
		return true
	}
	return false
}

// wait pauses after the failed attempt (from 0) and tells whether there shall be another.
func (p RetryPolicy) wait(ctx context.Context, attempt int, err error) bool {
	if attempt+1 >= p.Attempts || !Transient(err) || ctx.Err() != nil {
		return false
	}
	bound := min(p.First<<min(attempt, 20), p.Longest)
	if bound <= 0 {
		return true
	}
	t := time.NewTimer(rand.N(bound) + 1)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p RetryPolicy) do(ctx context.Context, call func() error) error {
	for attempt := 0; ; attempt++ {
		err := call()
		if err == nil || !p.wait(ctx, attempt, err) {
			return err
		}
	}
}

// exhausted is an error of a call that was repeated already.
type exhausted struct{ error }

func (e *exhausted) Unwrap() error { return e.error }

// within is do for calls inside a store: those around it do not repeat what it has.
func (p RetryPolicy) within(ctx context.Context, call func() error) error {
	err := p.do(ctx, call)
	if p.Attempts > 1 && Transient(err) {
		return &exhausted{err}
	}
	return err
}

// WithRetry repeats calls that failed for a reason that may pass. A body that breaks
// goes on where it broke. A Put is repeated when its reader can be rewound (io.Seeker);
// stores repeat parts of large ones themselves. Every call of the contract may be repeated without harm.
func WithRetry(s Store, p RetryPolicy) Store {
	if p.Attempts <= 1 {
		return s
	}
	return &retrying{s, p}
}

type retrying struct {
	s Store
	p RetryPolicy
}

func (r *retrying) Put(ctx context.Context, name string, src io.Reader) error {
	seeker, ok := src.(io.Seeker)
	if !ok {
		return r.s.Put(ctx, name, src)
	}
	begin, err := seeker.Seek(0, io.SeekCurrent)
	if err != nil { // such as a pipe that is an *os.File
		return r.s.Put(ctx, name, src)
	}
	guarded := &guardedSource{r: src}
	for attempt := 0; ; attempt++ {
		err := r.s.Put(ctx, name, guarded)
		if err == nil || guarded.failed || !r.p.wait(ctx, attempt, err) {
			return err
		}
		if _, err := seeker.Seek(begin, io.SeekStart); err != nil {
			return putError(name, err)
		}
	}
}

// guardedSource notices errors of a Put's source, which another attempt does not mend.
type guardedSource struct {
	r      io.Reader
	failed bool
}

func (g *guardedSource) Read(p []byte) (int, error) {
	n, err := g.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		g.failed = true
	}
	return n, err
}

func (r *retrying) Stat(ctx context.Context, name string) (info Info, err error) {
	err = r.p.do(ctx, func() error {
		info, err = r.s.Stat(ctx, name)
		return err
	})
	return info, err
}

func (r *retrying) List(ctx context.Context, prefix, after string, limit int) (found []Info, err error) {
	err = r.p.do(ctx, func() error {
		found, err = r.s.List(ctx, prefix, after, limit)
		return err
	})
	return found, err
}

func (r *retrying) Delete(ctx context.Context, names ...string) error {
	return r.p.do(ctx, func() error { return r.s.Delete(ctx, names...) })
}

func (r *retrying) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	b := &resuming{r: r, ctx: ctx, name: name, off: off, n: n}
	err := r.p.do(ctx, b.open)
	if err != nil {
		return nil, err
	}
	b.version = versionOf(b.now)
	return b, nil
}

// resuming is a body that survives breaks. Progress gives it all attempts again.
type resuming struct {
	r       *retrying
	ctx     context.Context
	name    string
	off, n  int64 // as asked
	got     int64
	failed  int
	now     io.ReadCloser // nil: broken
	version string
}

func (b *resuming) Version() string { return b.version }

// open gets what has not come yet.
func (b *resuming) open() (err error) {
	off, n := b.off, b.n
	if b.got > 0 {
		switch {
		case off < 0:
			// Where the end is, is known only to the store.
			info, err := b.r.s.Stat(b.ctx, b.name)
			if err != nil {
				return err
			}
			off, n = span(info.Size, off, n)
		case n > 0:
			n -= b.got
		}
		off += b.got
		if b.off < 0 {
			n -= b.got
		}
	}
	b.now, err = b.r.s.Get(b.ctx, b.name, off, n)
	return err
}

func (b *resuming) Read(p []byte) (int, error) {
	for {
		var n int
		var err error
		if b.now == nil {
			err = b.resume()
		} else if n, err = b.now.Read(p); n > 0 {
			b.got += int64(n)
			b.failed = 0
		}
		if err == nil || errors.Is(err, io.EOF) {
			return n, err
		}
		if b.now != nil {
			b.now.Close()
			b.now = nil
		}
		if n > 0 {
			return n, nil // the next Read resumes
		}
		if !b.r.p.wait(b.ctx, b.failed, err) {
			return 0, err
		}
		b.failed++
	}
}

// resume goes on with the same version of the object.
func (b *resuming) resume() error {
	if err := b.open(); err != nil {
		return err
	}
	v := versionOf(b.now)
	if v != b.version && b.got > 0 {
		return errs.E(errs.Precondition, "object %s was replaced while it was read", b.name).On("object %s", b.name).
			WithHint("read it again")
	}
	b.version = v
	return nil
}

func (b *resuming) Close() error {
	if b.now == nil {
		return nil
	}
	return b.now.Close()
}

// Sweep implements Sweeper where the store does.
func (r *retrying) Sweep(ctx context.Context, before time.Time) (n int, err error) {
	err = r.p.do(ctx, func() error {
		k, err := Sweep(ctx, r.s, before)
		n += k
		return err
	})
	return n, err
}

// Sweep removes what interrupted Puts left in a store that can have such.
func Sweep(ctx context.Context, s Store, before time.Time) (int, error) {
	if w, ok := s.(Sweeper); ok {
		return w.Sweep(ctx, before)
	}
	return 0, nil
}
