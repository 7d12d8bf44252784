// Package container runs sandboxes as containers: namespaces, cgroups and an
// overlay on the node's own kernel. It is the edge's side; what happens inside
// is internal/supervisor's.
package container

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Config is what the backend needs.
type Config struct {
	// Dir is the edge's data directory.
	Dir    string
	EdgeID sandbox.EdgeID
	// GuestBinary is the harena-guest to install and run.
	GuestBinary string
	// Pool is how many supervisors wait for sandboxes; 0: 4.
	Pool int
	Log  *slog.Logger
	// Fault, when not nil, is asked before each step of Create; its error is the step's. For tests.
	Fault func(step string) error
}

const (
	defaultPool = 4
	// launchTimeout bounds one start, pool and all, whatever the caller's patience.
	launchTimeout = 60 * time.Second
	// destroyTimeout bounds Destroy whatever the caller's patience. A process
	// that hangs in the kernel holds its cgroup for longer; a later Destroy finds it again.
	destroyTimeout = 20 * time.Second
)

// Backend implements backend.Backend.
type Backend struct {
	cfg     Config
	log     *slog.Logger
	cgroups *cgroup.Root
	guest   string // the installed binary
	pool    *pool

	checking sync.Mutex // one round of Checks at a time

	mu    sync.Mutex
	boxes map[sandbox.ID]*box
	found int // boxes of earlier servers; their supervisors may run other guest binaries
}

// box is a sandbox whose supervisor is known to this process.
type box struct {
	dir    string
	proc   *process
	exited chan struct{}
	found  bool // of an earlier server
	// silent: it is being destroyed, its end is not reported. Guarded by Backend.mu.
	silent bool
}

var _ backend.Backend = (*Backend)(nil)

// New installs the guest binary, makes the edge's cgroups, and starts the pool. Errors: unsupported, internal.
func New(cfg Config) (*Backend, error) {
	if cfg.Pool <= 0 {
		cfg.Pool = defaultPool
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if _, err := sandbox.ParseEdgeID(string(cfg.EdgeID)); err != nil {
		return nil, err
	}
	root, err := cgroup.Open("harena-" + string(cfg.EdgeID))
	if err != nil {
		return nil, err
	}
	b := &Backend{cfg: cfg, log: cfg.Log, cgroups: root, boxes: map[sandbox.ID]*box{}}
	if b.guest, err = installGuest(cfg.Dir, cfg.GuestBinary); err != nil {
		return nil, err
	}
	if err := b.removeOldGuests(); err != nil {
		b.log.Warn("old guest binaries were not removed", "error", err)
	}
	control, err := openDir(root.Control())
	if err != nil {
		return nil, err
	}
	b.pool = newPool(starter{guest: b.guest, control: control}, cfg.Pool, b.log)
	return b, nil
}

// Name implements backend.Backend.
func (b *Backend) Name() string { return sandbox.BackendContainer }

// Exited implements backend.Backend. For an ID that is not known it is a channel that is never closed.
func (b *Backend) Exited(id sandbox.ID) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if x := b.boxes[id]; x != nil {
		return x.exited
	}
	return nil
}

// Usage implements backend.Backend.
func (b *Backend) Usage(id sandbox.ID) (backend.Usage, error) {
	group := b.cgroups.Group(string(id))
	u, err := group.Usage()
	frozen, ferr := group.Frozen()
	return backend.Usage{
		MemoryBytes: u.Memory,
		CPUNanos:    u.CPUNanos,
		Pids:        u.Pids,
		OOMKills:    u.OOMKills,
		PidsHits:    u.PidsHits,
		Frozen:      frozen,
	}, errors.Join(err, ferr)
}

// adopt makes a supervisor that runs a sandbox known, and watches it.
func (b *Backend) adopt(id sandbox.ID, dir string, p *process, found bool) {
	x := &box{dir: dir, proc: p, exited: make(chan struct{}), found: found}
	b.mu.Lock()
	b.boxes[id] = x
	if found {
		b.found++
	}
	b.mu.Unlock()
	go func() {
		if !p.wait() {
			return // Close
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if !x.silent {
			close(x.exited)
		}
	}()
}

// forget takes a sandbox out, so that its end is nobody's news. Nil when it is not known. last: no other one is left of an
// earlier server.
func (b *Backend) forget(id sandbox.ID) (p *process, last bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.boxes[id]
	if x == nil {
		return nil, b.found == 0
	}
	x.silent = true
	delete(b.boxes, id)
	if x.found {
		b.found--
	}
	return x.proc, x.found && b.found == 0
}

// Destroy implements backend.Backend.
func (b *Backend) Destroy(ctx context.Context, id sandbox.ID) error {
	ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	p, last := b.forget(id)
	err := b.destroy(ctx, id, p)
	if err == nil && last {
		if oerr := b.removeOldGuests(); oerr != nil {
			b.log.Warn("old guest binaries were not removed", "error", oerr)
		}
	}
	return err
}

// destroy kills and releases all that id holds. p is its supervisor where that is known.
func (b *Backend) destroy(ctx context.Context, id sandbox.ID, p *process) error {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return err // a name such as "control" must not become a path
	}
	group := b.cgroups.Group(string(id))
	err := group.Kill()
	if p == nil {
		found, ferr := b.findSupervisors(id)
		err = errors.Join(err, ferr)
		for _, f := range found {
			err = errors.Join(err, f.end(ctx))
		}
	} else {
		err = errors.Join(err, p.end(ctx))
	}
	// What the supervisor started between the first kill and its own end.
	err = errors.Join(err, group.Kill())
	return errors.Join(err, group.Remove(ctx))
}

// Close implements backend.Backend.
func (b *Backend) Close() error {
	err := b.pool.close()
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, x := range b.boxes {
		x.proc.release()
		delete(b.boxes, id)
	}
	return err
}

// fault is a named step where a test may fail Create.
func (b *Backend) fault(step string) error {
	if b.cfg.Fault == nil {
		return nil
	}
	return b.cfg.Fault(step)
}

func notAlive(id sandbox.ID, format string, args ...any) error {
	return errs.E(errs.Precondition, format, args...).On("sandbox %s", id).
		WithHint("its supervisor is gone; create a new sandbox, or read its files while it is kept")
}
