package lifecycle

import (
	"context"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
)

// maxCalls bounds the results kept for repeated requests of one kind; the oldest go first.
const maxCalls = 1000

// calls remembers the results of calls by their request IDs, in memory: what outlives a server is in records.
type calls[T any] struct {
	mu    sync.Mutex
	all   map[callKey]*call[T]
	order []callKey // of successful ones, oldest first
}

// callKey is a sandbox, and a request about it.
type callKey struct{ about, request string }

type call[T any] struct {
	print  string
	done   chan struct{}
	ok     bool
	result T
}

// do runs f, or returns the result of the call that had the same request ID. One that comes while the first still runs waits
// for it; after a failure the next one runs. exists: the ID was used for another request. Without an ID f just runs.
func (c *calls[T]) do(ctx context.Context, key callKey, print string, f func() (T, error)) (result T, err error) {
	if key.request == "" {
		return f()
	}
	for {
		c.mu.Lock()
		first := c.all[key]
		if first == nil {
			mine := &call[T]{print: print, done: make(chan struct{})}
			if c.all == nil {
				c.all = map[callKey]*call[T]{}
			}
			c.all[key] = mine
			c.mu.Unlock()
			// Also after a panic, or those who wait would wait for ever.
			defer func() { c.finish(key, mine) }()
			mine.result, err = f()
			mine.ok = err == nil
			return mine.result, err
		}
		c.mu.Unlock()
		if first.print != print {
			return result, errs.E(errs.Exists, "request_id %q was used for another request", key.request).
				WithHint("use a new request_id for each request")
		}
		select {
		case <-first.done:
		case <-ctx.Done():
			return result, context.Cause(ctx)
		}
		if first.ok {
			return first.result, nil
		}
	}
}

func (c *calls[T]) finish(key callKey, mine *call[T]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer close(mine.done)
	if !mine.ok {
		delete(c.all, key)
		return
	}
	c.order = append(c.order, key)
	if len(c.order) > maxCalls {
		delete(c.all, c.order[0])
		c.order = c.order[1:]
	}
}
