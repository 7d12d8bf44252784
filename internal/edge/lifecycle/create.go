package lifecycle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"time"

	"google.golang.org/protobuf/proto"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// patience bounds effects that are not bounded by a caller.
const patience = 60 * time.Second

// request is a checked CreateRequest.
type request struct {
	id      sandbox.ID
	project string
	key     string
	spec    *harenav1.SandboxSpec
	print   string
	explain bool
	started time.Time
	asked   time.Time // when the call came of which this is a part; zero: now
	origin  string    // the sandbox that is forked
	fork    *ForkMark
}

// Create makes a sandbox, or returns the one that an equal request made. It returns when commands can run. When every caller
// that waits for it has gone, the creation is given up and nothing stays.
func (e *Edge) Create(ctx context.Context, req *edgev1.CreateRequest) (*harenav1.CreateResponse, error) {
	rq, err := e.check(req)
	if err != nil {
		return nil, err
	}
	return e.create(ctx, rq)
}

func (e *Edge) create(ctx context.Context, rq *request) (*harenav1.CreateResponse, error) {
	for {
		b, err := e.claim(ctx, rq)
		if err != nil {
			return nil, err
		}
		if !b.join() {
			// It is being rolled back because its callers went; then this call starts anew.
			select {
			case <-b.made:
				continue
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		select {
		case <-b.made:
			b.leave()
		case <-ctx.Done():
			b.leave()
			return nil, errs.E(errs.KindOf(context.Cause(ctx)), "the call ended before sandbox %s was made: %w", b.id, context.Cause(ctx)).On("sandbox %s", b.id)
		}
		b.mu.Lock()
		failure, timings, explained := b.failure, b.timings, b.explained
		b.mu.Unlock()
		if errors.Is(failure, errAbandoned) {
			continue
		}
		if failure != nil {
			return nil, failure
		}
		resp := &harenav1.CreateResponse{Sandbox: b.face.Load().view, Timings: timings}
		if rq.explain {
			resp.Explanation = explained
		}
		return resp, nil
	}
}

func (e *Edge) check(req *edgev1.CreateRequest) (*request, error) {
	rq := &request{project: req.GetProject(), key: req.GetRequestId(), explain: req.GetExplain(), started: time.Now()}
	if req.GetAsked() != nil {
		rq.asked = req.GetAsked().AsTime()
	}
	var err error
	if req.GetId() == "" {
		rq.id, err = sandbox.NewID(e.dir.Edge(), e.cfg.Rand)
	} else {
		rq.id, err = sandbox.ParseID(req.GetId())
	}
	if err != nil {
		return nil, err
	}
	if rq.id.Edge() != e.dir.Edge() {
		return nil, errs.E(errs.Invalid, "sandbox ID %s is not of edge %s", rq.id, e.dir.Edge()).On("sandbox %s", rq.id)
	}
	if rq.spec, err = sandbox.Normalize(req.GetSpec()); err != nil {
		return nil, err
	}
	if err := e.supported(rq.spec); err != nil {
		return nil, err
	}
	rq.print, err = fingerprint(rq.project, rq.spec)
	return rq, err
}

// supported refuses what this version or this node does not have: never a silent downgrade.
func (e *Edge) supported(s *harenav1.SandboxSpec) error {
	for _, f := range []struct {
		used bool
		what string
	}{
		{s.GetRuntime() == "gvisor", "runtime gvisor"},
		{s.GetLimits().GetGpus() != 0, "GPUs"},
		{len(s.GetNetwork().GetAllow()) > 0, "network rules"},
		{len(s.GetGuard().GetRules()) > 0, "guard rules"},
		{s.GetQos() == "ls", "qos ls"},
	} {
		if f.used {
			return NotBuilt(f.what)
		}
	}
	_, err := e.backend(s.GetBackend())
	return err
}

// NotBuilt is the answer to a request for what a later version will have.
func NotBuilt(what string) error {
	return errs.E(errs.Unsupported, "%s: this version of harena does not have it yet", what).WithHint("leave it out")
}

func fingerprint(project string, spec *harenav1.SandboxSpec) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(spec)
	if err != nil {
		return "", fmt.Errorf("encode spec: %w", err)
	}
	sum := sha256.Sum256(append([]byte(project+"\x00"), b...))
	return hex.EncodeToString(sum[:16]), nil
}

// claim returns the sandbox that an equal request made, or admits a new one and starts its creation.
func (e *Edge) claim(ctx context.Context, rq *request) (*box, error) {
	pressure := e.room(ctx)
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.boxes[rq.id]
	if rq.key != "" {
		if first := e.requests[requestKey{rq.project, rq.key}]; first != nil {
			b = first
		}
	}
	if b != nil {
		if b.record().Print != rq.print {
			return nil, errs.E(errs.Exists, "another sandbox was asked for under the same ID").On("sandbox %s", b.id).
				WithHint("use a new request_id for a new request")
		}
		return b, nil
	}
	if err := e.stops.overtook(rq.spec, rq.asked, e.clock.Now()); err != nil {
		return nil, err
	}
	if rq.spec.GetJob() != "" {
		if err := e.jobs.closed(jobKey{rq.project, rq.spec.GetJob()}); err != nil {
			return nil, err
		}
	}
	if e.closing {
		return nil, errs.E(errs.Capacity, "edge %s is shutting down", e.dir.Edge())
	}
	if e.dir.Draining() {
		return nil, errs.E(errs.Capacity, "edge %s is draining", e.dir.Edge()).WithHint("`harena fleet undrain` ends it")
	}
	load := admission.Load{Sandboxes: int(e.alive.Load()), RangesFree: e.ranges.Available(), Recent: e.sampler.recent(), Returning: e.returning.sum(e.clock.Now())}
	if err := admission.Decide(pressure, load, e.cfg.Limits, admission.Ask{Memory: rq.spec.GetLimits().GetMemory()}); err != nil {
		return nil, err
	}
	base, ok := e.ranges.Take()
	if !ok {
		return nil, errs.E(errs.Internal, "no host ID range although some are free")
	}
	e.sampler.admitted()
	now := e.clock.Now()
	r := &Record{
		Format: recordFormat, Config: backend.Config{ID: rq.id, Dir: e.records.dir(rq.id), IDBase: base},
		Project: rq.project, RequestID: rq.key, Print: rq.print, State: sandbox.Creating, Boot: e.dir.Boot(),
		Created: now, TTLFrom: now, LeaseFrom: now, Origin: rq.origin, Fork: rq.fork,
	}
	if err := r.setSpec(rq.spec); err != nil {
		e.ranges.Free(base)
		return nil, err
	}
	b = newBox(rq.id)
	ctx, cancel := context.WithCancelCause(e.ctx)
	b.cancel = cancel
	b.used(now)
	b.turn <- struct{}{}
	e.show(b, r)
	e.boxes[b.id] = b
	if rq.key != "" {
		e.requests[requestKey{rq.project, rq.key}] = b
	}
	if rq.explain {
		b.explained = append(b.explained, admission.Explain(pressure, load, e.cfg.Limits))
	}
	e.work.Add(1)
	go func() {
		defer e.work.Done()
		e.build(ctx, b, rq)
	}()
	return b, nil
}

// withImage fills in what the image asks for and the spec leaves open.
func withImage(spec *harenav1.SandboxSpec, c *harenav1.ImageConfig) *harenav1.SandboxSpec {
	if c == nil {
		return spec
	}
	s := proto.Clone(spec).(*harenav1.SandboxSpec)
	env := map[string]string{}
	for _, kv := range c.GetEnv() {
		for i := range len(kv) {
			if kv[i] == '=' && i > 0 {
				env[kv[:i]] = kv[i+1:]
				break
			}
		}
	}
	maps.Copy(env, s.GetProcess().GetEnv())
	if len(env) > 0 {
		s.Process.Env = env
	}
	if s.Process.User == "" {
		s.Process.User = c.GetUser()
	}
	if s.Process.Cwd == "" {
		s.Process.Cwd = c.GetWorkingDir()
	}
	return s
}
