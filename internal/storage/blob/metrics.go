package blob

import (
	"context"
	"io"
	"sync/atomic"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// Metrics counts what is asked of a store. Its zero value is ready; it may be shared by several.
type Metrics struct{ put, get, stat, list, delete counter }

type counter struct{ requests, bytes, failures, nanoseconds, running atomic.Int64 }

// Stats are the counters of a Metrics at one time.
type Stats struct {
	Put    OpStats `json:"put"`
	Get    OpStats `json:"get"`
	Stat   OpStats `json:"stat"`
	List   OpStats `json:"list"`
	Delete OpStats `json:"delete"`
}

// OpStats are the counters of one operation. Repeated calls count each time.
type OpStats struct {
	Requests int64 `json:"requests"`
	Bytes    int64 `json:"bytes"`    // of bodies that were sent or taken
	Failures int64 `json:"failures"` // not-found and calls that were given up are none
	Running  int64 `json:"running"`  // open bodies included
	// Time is the sum of the times to the answer, for Get to its first byte.
	Time time.Duration `json:"time_ns"`
}

// Stats reads the counters.
func (m *Metrics) Stats() Stats {
	return Stats{m.put.stats(), m.get.stats(), m.stat.stats(), m.list.stats(), m.delete.stats()}
}

func (c *counter) stats() OpStats {
	return OpStats{c.requests.Load(), c.bytes.Load(), c.failures.Load(), c.running.Load(), time.Duration(c.nanoseconds.Load())}
}

// begin counts a request; the function that it returns counts its answer.
func (c *counter) begin() func(error) {
	start := time.Now()
	c.requests.Add(1)
	c.running.Add(1)
	return func(err error) {
		c.nanoseconds.Add(int64(time.Since(start)))
		c.running.Add(-1)
		c.fail(err)
	}
}

func (c *counter) fail(err error) {
	if err != nil && !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.Cancelled) {
		c.failures.Add(1)
	}
}

// WithMetrics counts the calls of a store.
func WithMetrics(s Store, m *Metrics) Store { return &measured{s, m} }

type measured struct {
	s Store
	m *Metrics
}

// counted is a body that counts its bytes.
type counted struct {
	r io.Reader
	c *counter
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.c.bytes.Add(int64(n))
	return n, err
}

func (s *measured) Put(ctx context.Context, name string, r io.Reader) error {
	end := s.m.put.begin()
	err := s.s.Put(ctx, name, &counted{r, &s.m.put})
	end(err)
	return err
}

func (s *measured) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	end := s.m.get.begin()
	r, err := s.s.Get(ctx, name, off, n)
	end(err)
	if err != nil {
		return nil, err
	}
	s.m.get.running.Add(1)
	return &measuredBody{r: r, c: &s.m.get}, nil
}

type measuredBody struct {
	r      io.ReadCloser
	c      *counter
	closed atomic.Bool
}

func (b *measuredBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	b.c.bytes.Add(int64(n))
	if err != io.EOF { //nolint:errorlint // the contract of io.Reader
		b.c.fail(err)
	}
	return n, err
}

func (b *measuredBody) Close() error {
	if b.closed.CompareAndSwap(false, true) {
		b.c.running.Add(-1)
	}
	return b.r.Close()
}

func (b *measuredBody) Version() string { return versionOf(b.r) }

func (s *measured) Stat(ctx context.Context, name string) (Info, error) {
	end := s.m.stat.begin()
	info, err := s.s.Stat(ctx, name)
	end(err)
	return info, err
}

func (s *measured) List(ctx context.Context, prefix, after string, limit int) ([]Info, error) {
	end := s.m.list.begin()
	found, err := s.s.List(ctx, prefix, after, limit)
	end(err)
	return found, err
}

func (s *measured) Delete(ctx context.Context, names ...string) error {
	end := s.m.delete.begin()
	err := s.s.Delete(ctx, names...)
	end(err)
	return err
}

func (s *measured) Sweep(ctx context.Context, before time.Time) (int, error) {
	return Sweep(ctx, s.s, before)
}
