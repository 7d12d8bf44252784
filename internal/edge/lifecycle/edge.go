// Package lifecycle is the life of sandboxes on one node: it admits, creates, watches, stops and forgets them, and after a
// crash finds them again from what is on disk.
//
// Composition, in order:
//
//	dir, err := datadir.Open(path, datadir.Options{Rand: rand.Reader})     // identity, lock, slot
//	…make layer store and backends with dir.Edge() and dir.Path()
//	edge, err := lifecycle.Open(ctx, lifecycle.Config{Dir: dir, Backends: …, Layers: …, Rand: rand.Reader, Log: log})
//	handler := server.New(edge, server.Config{…})
//	…
//	edge.Shutdown(ctx)  // sandboxes live on; or first edge.StopAll(ctx)
//	backend.Close(); dir.Close()  // or, after StopAll, dir.Down()
package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/disk"
	"github.com/harena-dev/harena/internal/edge/events"
	"github.com/harena-dev/harena/internal/edge/guestconn"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/edge/lifecycle/idrange"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// reasonStopFailed: something of the sandbox could not be ended. It is tried again.
const reasonStopFailed sandbox.Reason = "stop-failed"

var (
	errAbandoned = errors.New("every caller went away")
	errStopped   = errors.New("stopped while it was created")
	errShutdown  = errors.New("the server is shutting down")
)

// Composition is what a spec's layers come to.
type Composition struct {
	// Layers, lowest first, without repetition.
	Layers []Layer
	// Config is the image's; may be nil.
	Config *harenav1.ImageConfig
}

// Layers is what the life cycle needs of the layer store. An owner is the ID of a sandbox that runs, or has failed and still
// has files; a layer that has one is not collected.
type Layers interface {
	// Compose finds and orders the layers that a normalised spec names, without effects.
	Compose(ctx context.Context, project string, spec *harenav1.SandboxSpec) (Composition, error)
	// Hold keeps every layer from being collected until release; between Compose and a record that names them.
	Hold() (release func())
	// Acquire mounts layers, if they are not mounted, for owner, and returns their directories in the same order. On
	// error owner has none of them.
	Acquire(ctx context.Context, owner string, digests []string) (dirs []string, err error)
	// Adopt is Acquire after a restart: owner has the layers again, and nothing is mounted. A later Acquire may mount them.
	Adopt(owner string, digests []string) error
	// Release gives up all that owner holds. Idempotent.
	Release(owner string) error
	// Leaks lists mounts, of this node, of layers that no owner holds.
	Leaks() ([]backend.Leak, error)
	// Checks reports what the node supports.
	Checks(ctx context.Context) []*harenav1.Check
}

// Node tells how much of the machine is left.
type Node interface {
	Snapshot() admission.Snapshot
	// OOMKills counts processes killed for want of memory, anywhere on the machine; -1 when unknown.
	OOMKills() int64
}

// Config is what Open needs. Fields without a default are required.
type Config struct {
	Dir      *datadir.Dir
	Backends []backend.Backend
	Layers   Layers
	// Packer makes snapshots; without it there are none.
	Packer Packer
	Rand   io.Reader
	Log    *slog.Logger
	// Version is shown in Probe.
	Version string
	// Limits: the zero value means admission.Defaults for the machine.
	Limits admission.Limits
	Clock  Clock // default SystemClock
	Node   Node  // default admission.Probe
	// Poll is how often counters are looked at; default 1 s, negative: never.
	Poll time.Duration
	// Checks adds to what Doctor says.
	Checks func() []*harenav1.Check
	// Faults, for tests, is called before every step, with its name; an error makes the step fail.
	Faults func(step string) error
}

// Edge is the life cycle of one node's sandboxes. It is safe for concurrent use.
type Edge struct {
	cfg       Config
	dir       *datadir.Dir
	log       *slog.Logger
	clock     Clock
	records   records
	trash     *trash
	disk      *disk.Disk
	left      int64       // what sandboxes leave free of a volume of the node's own; 0 for another disk
	watch     *disk.Watch // nil where the file system bounds writable layers
	events    *events.Log
	timers    *timers
	sampler   *sampler
	watchers  watchers
	jobs      jobs
	stops     stopMarks
	squeezes  squeezes
	snapshots calls[*snapped]
	forks     calls[*harenav1.ForkResponse]
	returning returning
	backends  map[string]backend.Backend
	versions  atomic.Int64
	alive     atomic.Int64 // sandboxes that have not ended

	transport *http.Transport
	client    *http.Client

	mu       sync.RWMutex // guards the following
	boxes    map[sandbox.ID]*box
	requests map[requestKey]*box
	ranges   *idrange.Pool
	stopped  []*box // ended by stop, oldest first
	closing  bool   // no new sandboxes
	down     bool   // nothing new at all

	ctx    context.Context // ends when the edge shuts down
	cancel context.CancelCauseFunc
	work   sync.WaitGroup // effects under way
	loops  sync.WaitGroup // timers, polls, exits
	gate   chan struct{}  // bounds what timers start at once
	// forkGone tells collectForks that a fork is gone.
	forkGone chan struct{}
}

type requestKey struct{ project, request string }

// Open recovers what an earlier server left in the data directory, removes what belongs to nobody, and begins to serve.
// The edge does not own Dir and the backends: close them after Shutdown.
func Open(ctx context.Context, c Config) (*Edge, error) {
	if c.Dir == nil || c.Layers == nil || c.Rand == nil || c.Log == nil {
		return nil, errs.E(errs.Internal, "lifecycle: incomplete configuration")
	}
	if c.Clock == nil {
		c.Clock = SystemClock{}
	}
	if c.Node == nil {
		c.Node = admission.Probe{Dir: c.Dir.Path()}
	}
	if c.Limits == (admission.Limits{}) {
		c.Limits = admission.Defaults(c.Node.Snapshot())
	}
	c.Poll = cmp.Or(c.Poll, time.Second)
	e := &Edge{
		cfg: c, dir: c.Dir, log: c.Log, clock: c.Clock, records: records{root: c.Dir.Path()},
		backends: map[string]backend.Backend{}, boxes: map[sandbox.ID]*box{}, requests: map[requestKey]*box{},
		sampler: &sampler{node: c.Node, clock: c.Clock}, gate: make(chan struct{}, 32), forkGone: make(chan struct{}, 1),
	}
	for _, b := range c.Backends {
		e.backends[b.Name()] = b
	}
	e.transport = guestconn.NewTransport(e.dial)
	e.client = &http.Client{Transport: e.transport}
	e.ctx, e.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	e.timers = newTimers(e.clock, e.fire)
	err := e.openDisk()
	if err != nil {
		return nil, err
	}
	e.events, err = events.Open(filepath.Join(c.Dir.Path(), "events"), events.Options{Edge: string(c.Dir.Edge()), Now: e.clock.Now, Log: c.Log})
	if err != nil {
		return nil, e.records.fault("open the event log", err)
	}
	e.event("edge.started", nil, "", map[string]string{"version": c.Version})
	if err := errors.Join(e.openJobs(), e.recover(ctx)); err != nil {
		e.cancel(errShutdown)
		e.loops.Wait()
		return nil, errors.Join(err, e.events.Close())
	}
	e.loops.Go(func() { e.timers.run(e.ctx) })
	e.loops.Go(func() { e.runJobs(e.ctx) })
	if c.Packer != nil {
		e.noteForkGone() // before a kill, perhaps
		e.loops.Go(e.collectForks)
	}
	if e.watch != nil {
		e.loops.Go(func() { e.watch.Run(e.ctx) })
	}
	if e.left > 0 {
		e.loops.Go(func() { e.keepRoom(e.ctx) })
	}
	if c.Poll > 0 {
		e.loops.Go(func() { e.poll(e.ctx) })
	}
	return e, nil
}

// Events returns the node's event log.
func (e *Edge) Events() *events.Log { return e.events }

// ID returns the edge's ID.
func (e *Edge) ID() sandbox.EdgeID { return e.dir.Edge() }

// Transport reaches supervisors; see guestconn.URL.
func (e *Edge) Transport() http.RoundTripper { return e.transport }

// Done is closed when the edge shuts down; calls that would wait for ever end then.
func (e *Edge) Done() <-chan struct{} { return e.ctx.Done() }

// Shutdown ends the life cycle and leaves sandboxes running. Creations under way are rolled back.
func (e *Edge) Shutdown(ctx context.Context) error {
	e.mu.Lock()
	e.closing, e.down = true, true
	boxes := e.all()
	e.mu.Unlock()
	for _, b := range boxes {
		select {
		case <-b.made:
			b.hasten()
		default:
			b.cancel(errShutdown)
		}
	}
	done := make(chan struct{})
	go func() {
		e.work.Wait()
		close(done)
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = errs.E(errs.Timeout, "shutting down took too long: %w", context.Cause(ctx))
	}
	e.cancel(errShutdown)
	e.loops.Wait()
	e.trash.close()
	e.transport.CloseIdleConnections()
	return errors.Join(err, e.events.Close())
}

// StopAll stops every sandbox, also failed ones, removes what they left and unmounts layers, for a node that goes down.
func (e *Edge) StopAll(ctx context.Context) error {
	e.mu.Lock()
	e.closing = true
	boxes := e.all()
	e.mu.Unlock()
	outcomes := e.each(ctx, boxes, func(b *box) error { return e.stop(ctx, b, stopCall{}) })
	var failed []error
	for _, o := range outcomes {
		if o.GetError() != nil {
			failed = append(failed, errs.E(errs.Internal, "sandbox %s: %s", o.GetSandboxId(), o.GetErrorMessage()))
		}
	}
	_, err := e.sweep()
	failed = append(failed, err)
	select {
	case <-e.trash.wait():
	case <-ctx.Done():
		failed = append(failed, context.Cause(ctx))
	}
	return errors.Join(failed...)
}

// begin counts an effect, until e.work.Done; false when the edge shuts down.
func (e *Edge) begin() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.down {
		return false
	}
	e.work.Add(1)
	return true
}

// all lists every sandbox; e.mu is held.
func (e *Edge) all() []*box {
	boxes := make([]*box, 0, len(e.boxes))
	for _, b := range e.boxes {
		boxes = append(boxes, b)
	}
	return boxes
}

// snapshot lists every sandbox.
func (e *Edge) snapshot() []*box {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.all()
}

// find returns the sandbox with an ID.
func (e *Edge) find(id sandbox.ID) (*box, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if b := e.boxes[id]; b != nil {
		return b, nil
	}
	return nil, errs.E(errs.NotFound, "sandbox %s does not exist", id).On("sandbox %s", id).
		WithHint("`harena ps --all` lists sandboxes; ended ones are forgotten after an hour")
}

func (e *Edge) backend(name string) (backend.Backend, error) {
	if b := e.backends[name]; b != nil {
		return b, nil
	}
	return nil, errs.E(errs.Unsupported, "backend %s is not available on this node", name).WithHint("`harena doctor` says what is")
}

func (e *Edge) dial(ctx context.Context, id sandbox.ID) (net.Conn, error) {
	b, err := e.find(id)
	if err != nil {
		return nil, err
	}
	be, err := e.backend(b.record().Spec.GetBackend())
	if err != nil {
		return nil, err
	}
	return be.Dial(ctx, id)
}

func (e *Edge) fault(step string) error {
	if e.cfg.Faults == nil {
		return nil
	}
	return e.cfg.Faults(step)
}

func (e *Edge) event(kind string, r *Record, message string, attributes map[string]string) {
	ev := &harenav1.Event{Kind: kind, Message: message, Attributes: attributes}
	if r != nil {
		ev.SandboxId, ev.Job, ev.Project = string(r.ID()), r.Spec.GetJob(), r.Project
	}
	e.events.Append(ev)
}
