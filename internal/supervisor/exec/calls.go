package exec

import (
	"context"
	"errors"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
)

// calls remembers the results of recent calls by their request_id. A call that
// failed is not remembered: a retry tries again.
type calls struct {
	mu    sync.Mutex
	known map[string]*call
	order []string // oldest first; may name calls that are gone
}

type call struct {
	hash  digest
	done  chan struct{}
	value any
	err   error
}

// do runs f, or returns what it returned for the same ID. While the first call
// runs, others with its ID wait for it.
func (k *calls) do(ctx context.Context, id string, hash digest, f func() (any, error)) (any, error) {
	if id == "" {
		return f()
	}
	if err := validateID("request_id", id); err != nil {
		return nil, err
	}
	k.mu.Lock()
	c, repeated := k.known[id]
	if !repeated {
		c = k.add(id, hash)
	}
	k.mu.Unlock()
	if !repeated {
		c.value, c.err = f()
		if c.err != nil {
			k.mu.Lock()
			delete(k.known, id)
			k.mu.Unlock()
		}
		close(c.done)
		return c.value, c.err
	}
	if c.hash != hash {
		return nil, errs.E(errs.Exists, "request_id %q was used for another request", id).WithHint("use a new request_id for every new request")
	}
	select {
	case <-c.done:
		if errors.Is(c.err, errGivenUp) && ctx.Err() == nil {
			return k.do(ctx, id, hash, f)
		}
		return c.value, c.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (k *calls) add(id string, hash digest) *call {
	if k.known == nil {
		k.known = map[string]*call{}
	}
	for len(k.order) >= recentCalls {
		delete(k.known, k.order[0])
		k.order = k.order[1:]
	}
	c := &call{hash: hash, done: make(chan struct{})}
	k.known[id] = c
	k.order = append(k.order, id)
	return c
}
