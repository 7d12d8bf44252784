package lifecycle

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

const (
	// maxForks bounds the forks of one call.
	maxForks = 1000
	// forkWidth is how many are made at once.
	forkWidth = 8
)

// ForkMark tells the sandboxes of one fork from others. Before all of them run none is sealed; after a kill of the server in
// between, those that are there are removed, so that a fork is whole or absent.
type ForkMark struct {
	Batch  string `json:"batch"`
	Count  int    `json:"count"`
	Sealed bool   `json:"sealed,omitempty"`
}

// Fork makes sandboxes whose files are what those of a sandbox are at one instant. All of them are made, or none. What they
// share lies in a layer without a name, which stays as long as one of them does.
func (e *Edge) Fork(ctx context.Context, req *harenav1.ForkRequest) (*harenav1.ForkResponse, error) {
	switch n := req.GetCount(); {
	case n < 1:
		return nil, errs.E(errs.Invalid, "a count of %d forks is not valid", n).WithHint("use 1 to %d", maxForks)
	case n > maxForks:
		return nil, errs.OverLimit(errs.Invalid, "forks of one call", maxForks, n)
	}
	id, err := sandbox.ParseID(req.GetId())
	if err != nil {
		return nil, err
	}
	b, err := e.find(id)
	if err != nil {
		return nil, err
	}
	same := proto.Clone(req).(*harenav1.ForkRequest)
	same.RequestId = ""
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(same)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	sum := sha256.Sum256(text)
	res, err := e.forks.do(ctx, callKey{req.GetId(), req.GetRequestId()}, hex.EncodeToString(sum[:16]), func() (*harenav1.ForkResponse, error) {
		return e.fork(ctx, b, req)
	})
	if err != nil {
		return nil, err
	}
	return proto.Clone(res).(*harenav1.ForkResponse), nil
}

// fork is Fork of a checked request.
func (e *Edge) fork(ctx context.Context, b *box, req *harenav1.ForkRequest) (_ *harenav1.ForkResponse, err error) {
	if !e.begin() {
		return nil, errs.E(errs.Capacity, "the server is shutting down").WithHint("try again")
	}
	defer e.work.Done()
	asked := e.clock.Now()
	watch := &stopwatch{last: time.Now()}
	if made := e.forked(b, req); made != nil {
		return made, nil
	}
	use, err := e.Enter(ctx, b.id, false)
	if err != nil {
		return nil, err
	}
	defer use.Leave()
	batch := rand.Text()
	c, err := e.capture(ctx, b, PackOptions{Project: b.record().Project}, watch)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := e.fault("fork.finish"); err != nil {
		return nil, err
	}
	// The layer has an owner until those that are made from it own it.
	owner := "fork-" + batch
	defer func() {
		if rerr := e.cfg.Layers.Release(owner); rerr != nil {
			e.log.Error("the common layer of forks could not be released", "sandbox", b.id, "err", rerr)
		}
		if err != nil {
			e.noteForkGone() // it may be there, and nobody has it
		}
	}()
	packed, err := c.Finish(ctx, func(l Layer) error {
		_, err := e.cfg.Layers.Acquire(ctx, owner, []string{l.Digest})
		return err
	})
	if err != nil {
		return nil, err
	}
	watch.lap("finish")
	made, err := e.makeForks(ctx, b, req, &request{
		project: b.record().Project, spec: forkSpec(b.record().Spec, packed.Layer.Digest, req), origin: string(b.id), asked: asked,
		fork: &ForkMark{Batch: batch, Count: int(req.GetCount())},
	})
	if err != nil {
		return nil, err
	}
	watch.lap("create")
	e.event("sandbox.forked", b.record(), fmt.Sprintf("made %d forks", len(made)), map[string]string{"count": fmt.Sprint(len(made))})
	return &harenav1.ForkResponse{Sandboxes: made, Frozen: durationpb.New(c.frozen), Timings: watch.steps}, nil
}

// forkSpec is what a fork is made from: the same as the sandbox, but its identity.
func forkSpec(spec *harenav1.SandboxSpec, image string, req *harenav1.ForkRequest) *harenav1.SandboxSpec {
	s := proto.Clone(spec).(*harenav1.SandboxSpec)
	s.Image, s.Workspace, s.Toolkits, s.Hostname = image, "", nil, ""
	if req.GetJob() != "" {
		s.Job = req.GetJob()
	}
	if len(req.GetLabels()) > 0 {
		labels := maps.Clone(s.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, req.GetLabels())
		s.Labels = labels
	}
	return s
}

// forkKey is the request ID under which one fork of a call is made.
func forkKey(b *box, request string, i int) string {
	if request == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(string(b.id) + "\x00" + request))
	return fmt.Sprintf("fork-%s-%d", hex.EncodeToString(sum[:16]), i)
}

// forked returns what an earlier server made for the same request; nil when it did not, or not all of it is there any more.
func (e *Edge) forked(b *box, req *harenav1.ForkRequest) *harenav1.ForkResponse {
	if req.GetRequestId() == "" {
		return nil
	}
	res := &harenav1.ForkResponse{}
	e.mu.RLock()
	defer e.mu.RUnlock()
	for i := range int(req.GetCount()) {
		f := e.requests[requestKey{b.record().Project, forkKey(b, req.GetRequestId(), i)}]
		if f == nil || f.record().Fork == nil || f.record().Fork.Count != int(req.GetCount()) {
			return nil
		}
		res.Sandboxes = append(res.Sandboxes, f.face.Load().view)
	}
	return res
}

// makeForks creates all, or removes what it created.
func (e *Edge) makeForks(ctx context.Context, b *box, req *harenav1.ForkRequest, of *request) ([]*harenav1.Sandbox, error) {
	var err error
	if of.spec, err = sandbox.Normalize(of.spec); err != nil {
		return nil, err
	}
	if err = e.supported(of.spec); err != nil {
		return nil, err
	}
	if of.print, err = fingerprint(of.project, of.spec); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	made := make([]*harenav1.Sandbox, req.GetCount())
	begun := make([]sandbox.ID, len(made))
	failures := make([]error, len(made))
	indexes := make(chan int)
	var wg sync.WaitGroup
	for range min(forkWidth, len(made)) {
		wg.Go(func() {
			for i := range indexes {
				rq := *of
				rq.key, rq.started = forkKey(b, req.GetRequestId(), i), time.Now()
				if rq.id, failures[i] = sandbox.NewID(e.dir.Edge(), e.cfg.Rand); failures[i] == nil {
					begun[i] = rq.id
					made[i], failures[i] = e.makeFork(ctx, &rq)
				}
				if failures[i] != nil {
					cancel(failures[i])
				}
			}
		})
	}
	for i := range made {
		if ctx.Err() != nil {
			break
		}
		indexes <- i
	}
	close(indexes)
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, errors.Join(err, e.unmakeForks(made, begun))
	}
	for _, s := range made {
		if err := e.sealFork(sandbox.ID(s.GetId())); err != nil {
			return nil, errors.Join(err, e.unmakeForks(made, begun))
		}
	}
	return made, nil
}

func (e *Edge) makeFork(ctx context.Context, rq *request) (*harenav1.Sandbox, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	res, err := e.create(ctx, rq)
	if err != nil {
		return nil, err
	}
	return res.GetSandbox(), nil
}

// sealFork notes that the whole fork is there. One that has been stopped meanwhile needs no mark.
func (e *Edge) sealFork(id sandbox.ID) error {
	b, err := e.find(id)
	if err == nil {
		err = e.commit(b, false, func(r *Record) error {
			if r.Fork == nil {
				return errs.E(errs.Internal, "sandbox %s is no fork", id)
			}
			mark := *r.Fork
			mark.Sealed = true
			r.Fork = &mark
			return nil
		})
	}
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}

// unmakeForks removes what was made of a fork that is given up, and waits until creations that were given up are undone: one may
// have succeeded nevertheless, and the call may be repeated under the same request ID.
func (e *Edge) unmakeForks(made []*harenav1.Sandbox, begun []sandbox.ID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), patience)
	defer cancel()
	ids := map[sandbox.ID]bool{}
	for i, s := range made {
		ids[begun[i]] = true
		if s != nil {
			ids[sandbox.ID(s.GetId())] = true
		}
	}
	var boxes []*box
	for id := range ids {
		b, err := e.find(id)
		if err != nil {
			continue
		}
		select {
		case <-b.made:
		case <-ctx.Done():
		}
		if b, err = e.find(id); err == nil {
			boxes = append(boxes, b)
		}
	}
	var failed []error
	for _, o := range e.each(ctx, boxes, func(b *box) error { return e.stopMade(b, stopCall{remove: true}) }) {
		if o.GetError() != nil {
			failed = append(failed, fmt.Errorf("remove fork %s: %s", o.GetSandboxId(), o.GetErrorMessage()))
		}
	}
	return errors.Join(failed...)
}

// settleForks removes, after a restart, forks of which not all were made, and seals the others. It returns how many it removed.
func (e *Edge) settleForks(boxes []*box) int {
	sealed := map[string]bool{}
	open := map[string][]*box{}
	for _, b := range boxes {
		f := b.record().Fork
		switch {
		case f == nil:
		case f.Sealed:
			sealed[f.Batch] = true
		case !b.isGone():
			open[f.Batch] = append(open[f.Batch], b)
		}
	}
	removed := 0
	for batch, all := range open {
		for _, b := range all {
			var err error
			if sealed[batch] || len(all) == b.record().Fork.Count {
				err = e.sealFork(b.id)
			} else {
				err = e.stopMade(b, stopCall{remove: true})
				removed++
			}
			if err != nil {
				e.log.Error("a fork that is not whole could not be settled", "sandbox", b.id, "err", err)
			}
		}
	}
	return removed
}
