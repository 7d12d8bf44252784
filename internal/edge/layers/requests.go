package layers

import (
	"context"
	"crypto/sha256"
	"regexp"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// maxRequests bounds the results kept for repeated requests; the oldest go first.
// They are in memory only: after a restart a repeated call is done again, which
// gives the same layer under the same name.
const maxRequests = 10000

var requestPattern = regexp.MustCompile(`^[\x20-\x7e]{1,128}$`)

type requestKey struct{ project, id string }

type request struct {
	asked [sha256.Size]byte
	done  chan struct{} // closed when the call that made it has ended
	res   proto.Message // nil after a failure
}

// requests remembers the results of calls by their request IDs.
type requests struct {
	mu    sync.Mutex
	calls map[requestKey]*request
	order []requestKey // of successful calls, oldest first
}

func newRequests() *requests {
	return &requests{calls: make(map[requestKey]*request)}
}

// do runs f, or returns the result of the call that had the same request ID. A
// call that comes while the first still runs waits for it; after a failure the
// next one runs. exists: the ID was used for another request. Without an ID f just runs.
func do[T proto.Message](ctx context.Context, r *requests, project, id string, asked proto.Message, f func() (T, error)) (T, error) {
	var none T
	if id == "" {
		return f()
	}
	if !requestPattern.MatchString(id) {
		return none, errs.E(errs.Invalid, "request_id %.80q is not valid", id).WithHint("use 1-128 printable ASCII characters")
	}
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(asked)
	if err != nil {
		return none, err
	}
	sum := sha256.Sum256(append([]byte(asked.ProtoReflect().Descriptor().FullName()), text...))
	if project == "" {
		project = layer.DefaultProject
	}
	key := requestKey{project, id}
	for {
		r.mu.Lock()
		call := r.calls[key]
		if call == nil {
			call = &request{asked: sum, done: make(chan struct{})}
			r.calls[key] = call
			r.mu.Unlock()
			var res T
			// Also after a panic, or those who wait would wait for ever.
			failed := true
			defer func() { r.finish(key, call, res, failed) }()
			var err error
			res, err = f()
			failed = err != nil
			return res, err
		}
		r.mu.Unlock()
		if call.asked != sum {
			return none, errs.E(errs.Exists, "request_id %q was used for another request", id).
				WithHint("use a new request_id for each request")
		}
		select {
		case <-call.done:
		case <-ctx.Done():
			return none, context.Cause(ctx)
		}
		if res, ok := call.res.(T); ok {
			return proto.Clone(res).(T), nil
		}
	}
}

func (r *requests) finish(key requestKey, call *request, res proto.Message, failed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer close(call.done)
	if failed {
		delete(r.calls, key)
		return
	}
	call.res = proto.Clone(res)
	r.order = append(r.order, key)
	if len(r.order) > maxRequests {
		delete(r.calls, r.order[0])
		r.order = r.order[1:]
	}
}
