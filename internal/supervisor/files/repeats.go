package files

import (
	"context"
	"crypto/sha256"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// maxRepeats is how many results are remembered for repeated requests.
	maxRepeats   = 256
	maxRequestID = 128
)

// repeats remembers results by request_id, the last ones only. Failures are not
// remembered: a request that failed may be tried again under its ID.
type repeats struct {
	mu    sync.Mutex
	byID  map[string]*repeat
	order []string // of those that are done
}

type repeat struct {
	print [sha256.Size]byte
	done  chan struct{}
	// result is nil until done, and after a failure.
	result proto.Message
}

// once runs a request, or returns the result of an earlier one with its ID.
func once[T proto.Message](ctx context.Context, r *repeats, id string, req proto.Message, run func() (T, error)) (T, error) {
	var none T
	if id == "" {
		return run()
	}
	if err := checkRequestID(id); err != nil {
		return none, err
	}
	print, err := fingerprint(req)
	if err != nil {
		return none, err
	}
	for {
		mine, other := r.claim(id, print)
		if mine != nil {
			result, err := run()
			if err != nil {
				r.settle(id, mine, nil)
				return none, err
			}
			r.settle(id, mine, result)
			return result, nil
		}
		if other.print != print {
			return none, errs.E(errs.Exists, "request_id %q was used for another request", id).WithHint("use a new request_id for each request")
		}
		select {
		case <-other.done:
		case <-ctx.Done():
			return none, context.Cause(ctx)
		}
		if result, ok := other.result.(T); ok {
			return result, nil
		}
		// The first one failed: now it is our turn, or somebody else's.
	}
}

// claim returns a new entry to fill in, or the one that is there.
func (r *repeats) claim(id string, print [sha256.Size]byte) (mine, other *repeat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.byID[id]; e != nil {
		return nil, e
	}
	if r.byID == nil {
		r.byID = make(map[string]*repeat)
	}
	e := &repeat{print: print, done: make(chan struct{})}
	r.byID[id] = e
	return e, nil
}

// settle ends a claim, with nil after a failure.
func (r *repeats) settle(id string, e *repeat, result proto.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.result = result
	close(e.done)
	if result == nil {
		delete(r.byID, id)
		return
	}
	r.order = append(r.order, id)
	if len(r.order) > maxRepeats {
		delete(r.byID, r.order[0])
		r.order = append(r.order[:0], r.order[1:]...)
	}
}

func checkRequestID(id string) error {
	bad := len(id) > maxRequestID
	for i := range len(id) {
		bad = bad || id[i] < ' ' || id[i] > '~'
	}
	if bad {
		return errs.E(errs.Invalid, "request_id %.40q is not valid", id).WithHint("use up to %d printable ASCII characters", maxRequestID)
	}
	return nil
}

// fingerprint tells requests apart, also those of different types.
func fingerprint(req proto.Message) ([sha256.Size]byte, error) {
	b := append([]byte(req.ProtoReflect().Descriptor().FullName()), 0)
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, req)
	return sha256.Sum256(b), err
}
