// Package memory is a backend that runs nothing. It keeps the contract's promises (states, exits, leaks, recovery) so
// that the life cycle can be tested and measured without a kernel.
package memory

import (
	"context"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Options say how a Backend behaves.
type Options struct {
	// Name of the backend; default container.
	Name string
	// Delay is how long Create takes.
	Delay time.Duration
	// ReclaimTakes is how long Reclaim takes.
	ReclaimTakes time.Duration
	// Fail, when set, is asked before each method's effect, with the method's name; an error is returned as it is.
	Fail func(method string, id sandbox.ID) error
	// Status, when set, edits what a supervisor answers.
	Status func(id sandbox.ID, s *guestv1.StatusResponse)
}

// Backend implements backend.Backend on a Node.
type Backend struct {
	node *Node
	opts Options
}

var _ backend.Backend = (*Backend)(nil)

// New makes a backend on a node. Several may follow each other on one, as servers do on a machine.
func New(node *Node, opts Options) *Backend {
	if opts.Name == "" {
		opts.Name = sandbox.BackendContainer
	}
	node.mu.Lock()
	node.status = opts.Status
	node.mu.Unlock()
	return &Backend{node: node, opts: opts}
}

// Name implements backend.Backend.
func (b *Backend) Name() string { return b.opts.Name }

func (b *Backend) fail(method string, id sandbox.ID) error {
	if b.opts.Fail == nil {
		return nil
	}
	return b.opts.Fail(method, id)
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, c backend.Config) ([]*harenav1.Timing, error) {
	start := time.Now()
	n := b.node
	n.mu.Lock()
	if n.sandboxes[c.ID] != nil {
		n.mu.Unlock()
		return nil, errs.E(errs.Exists, "sandbox %s is there already", c.ID)
	}
	e := newEntry()
	e.files = c.FilesOnly
	n.sandboxes[c.ID] = e
	err := n.persist(c.ID, "half")
	n.mu.Unlock()
	if err == nil {
		err = b.fail("create", c.ID)
	}
	if err == nil && b.opts.Delay > 0 {
		select {
		case <-ctx.Done():
		case <-time.After(b.opts.Delay):
		}
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = n.persist(c.ID, e.content())
	}
	if err != nil {
		b.remove(c.ID)
		return nil, err
	}
	n.mu.Lock()
	e.complete = true
	n.mu.Unlock()
	return []*harenav1.Timing{{Step: "backend.start", Micros: time.Since(start).Microseconds()}}, nil
}

// Recover implements backend.Backend.
func (b *Backend) Recover(_ context.Context, c backend.Config) error {
	if err := b.fail("recover", c.ID); err != nil {
		return err
	}
	b.node.mu.Lock()
	defer b.node.mu.Unlock()
	if e := b.node.sandboxes[c.ID]; e == nil || !e.complete || e.dead {
		return errs.E(errs.Precondition, "sandbox %s is not alive", c.ID)
	}
	return nil
}

// Dial implements backend.Backend.
func (b *Backend) Dial(_ context.Context, id sandbox.ID) (net.Conn, error) {
	if err := b.fail("dial", id); err != nil {
		return nil, err
	}
	return b.node.dial(id)
}

// Exited implements backend.Backend.
func (b *Backend) Exited(id sandbox.ID) <-chan struct{} {
	b.node.mu.Lock()
	defer b.node.mu.Unlock()
	if e := b.node.sandboxes[id]; e != nil {
		return e.exited
	}
	return nil
}

// Usage implements backend.Backend.
func (b *Backend) Usage(id sandbox.ID) (backend.Usage, error) {
	b.node.mu.Lock()
	defer b.node.mu.Unlock()
	e := b.node.sandboxes[id]
	if e == nil {
		return backend.Usage{}, errs.E(errs.NotFound, "sandbox %s is not there", id)
	}
	u := e.usage
	u.Frozen = e.frozen
	return u, nil
}

// Freeze implements backend.Backend.
func (b *Backend) Freeze(ctx context.Context, id sandbox.ID) error {
	if err := b.fail("freeze", id); err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return b.freeze(id, true)
}

// Thaw implements backend.Backend.
func (b *Backend) Thaw(_ context.Context, id sandbox.ID) error {
	if err := b.fail("thaw", id); err != nil {
		return err
	}
	if err := b.freeze(id, false); err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}
	return nil
}

// Reclaim implements backend.Backend. Until ctx ends it takes as long as ReclaimTakes says.
func (b *Backend) Reclaim(ctx context.Context, id sandbox.ID) (backend.Reclaimed, error) {
	if err := b.fail("reclaim", id); err != nil {
		return backend.Reclaimed{}, err
	}
	if b.opts.ReclaimTakes > 0 {
		select {
		case <-ctx.Done():
		case <-time.After(b.opts.ReclaimTakes):
		}
	}
	n := b.node
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[id]
	if e == nil || !e.complete {
		return backend.Reclaimed{}, errs.E(errs.NotFound, "sandbox %s is not there", id)
	}
	r := backend.Reclaimed{Before: e.usage.MemoryBytes}
	if ctx.Err() != nil {
		r.After, r.Anonymous = r.Before, r.Before
		return r, nil
	}
	r.Swapped = r.Before
	e.usage.MemoryBytes = 0
	return r, nil
}

func (b *Backend) freeze(id sandbox.ID, on bool) error {
	n := b.node
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[id]
	if e == nil || !e.complete {
		return errs.E(errs.NotFound, "sandbox %s is not there", id)
	}
	e.frozen = on
	return n.persist(id, e.content())
}

// Destroy implements backend.Backend.
func (b *Backend) Destroy(_ context.Context, id sandbox.ID) error {
	if err := b.fail("destroy", id); err != nil {
		return err
	}
	b.remove(id)
	return nil
}

func (b *Backend) remove(id sandbox.ID) {
	n := b.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.sandboxes[id]; e != nil {
		e.drop()
	}
	delete(n.sandboxes, id)
	_ = n.forget(id)
}

// Leaks implements backend.Backend.
func (b *Backend) Leaks(live map[sandbox.ID]bool) ([]backend.Leak, error) {
	b.node.mu.Lock()
	defer b.node.mu.Unlock()
	var leaks []backend.Leak
	for id := range b.node.sandboxes {
		if !live[id] {
			leaks = append(leaks, backend.Leak{Kind: "process", Name: string(id), Release: func() error {
				b.remove(id)
				return nil
			}})
		}
	}
	return leaks, nil
}

// Checks implements backend.Backend.
func (b *Backend) Checks(context.Context) []*harenav1.Check {
	return []*harenav1.Check{{Name: "backend." + b.opts.Name, Status: "ok", Detail: "kept in memory; nothing runs"}}
}

// Close implements backend.Backend.
func (b *Backend) Close() error { return nil }

// guest serves GuestService of one sandbox.
type guest struct {
	node *Node
	id   sandbox.ID
}

func (n *Node) guestHandler(id sandbox.ID) (string, http.Handler) {
	return guestv1connect.NewGuestServiceHandler(guest{node: n, id: id})
}

// Status implements GuestService.
func (g guest) Status(context.Context, *connect.Request[guestv1.StatusRequest]) (*connect.Response[guestv1.StatusResponse], error) {
	g.node.mu.Lock()
	defer g.node.mu.Unlock()
	s := &guestv1.StatusResponse{SandboxId: string(g.id), Version: "memory"}
	if e := g.node.sandboxes[g.id]; e != nil {
		s.Alive, s.Reason = !e.dead, e.reason
	}
	if g.node.status != nil {
		g.node.status(g.id, s)
	}
	return connect.NewResponse(s), nil
}

// Hold implements GuestService.
func (g guest) Hold(_ context.Context, r *connect.Request[guestv1.HoldRequest]) (*connect.Response[guestv1.HoldResponse], error) {
	g.node.mu.Lock()
	defer g.node.mu.Unlock()
	if e := g.node.sandboxes[g.id]; e != nil {
		e.held = r.Msg.GetHeld()
	}
	return connect.NewResponse(&guestv1.HoldResponse{}), nil
}

// Shutdown implements GuestService.
func (g guest) Shutdown(context.Context, *connect.Request[guestv1.ShutdownRequest]) (*connect.Response[guestv1.ShutdownResponse], error) {
	g.node.Kill(g.id, "shutdown")
	return connect.NewResponse(&guestv1.ShutdownResponse{}), nil
}
