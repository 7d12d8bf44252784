// Package backend is the contract between an edge's life cycle and what runs
// sandboxes: containers now, virtual machines later.
package backend

import (
	"context"
	"net"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Config is everything a backend needs to make one sandbox. It is plain data,
// decided before any effect, and stored in the sandbox's record.
type Config struct {
	ID   sandbox.ID            `json:"id"`
	Spec *harenav1.SandboxSpec `json:"-"` // normalised; stored beside it as protojson
	// Dir is the sandbox's own directory; it exists, mode 0700.
	Dir string `json:"dir"`
	// Lowers are directories of mounted layers, lowest first.
	Lowers []string `json:"lowers"`
	// IDBase is the first of the 65,536 host IDs that the sandbox owns.
	IDBase uint32 `json:"id_base"`
	// FilesOnly asks for file calls on what a failed sandbox left behind: no command may run.
	FilesOnly bool `json:"files_only,omitempty"`
}

// Backend makes sandboxes of one kind.
//
// Life cycle: Create → (Dial | Exited | Freeze → Thaw | Destroy)*. An edge that restarts calls Recover in place of Create.
// Everything a sandbox holds outside its Dir (processes, cgroups, mounts) has a name derived from its ID, so Destroy
// works without memory of Create, and Leaks can tell what belongs to nobody.
//
// Methods may be called concurrently for different IDs; the caller serialises them for one ID, except Dial.
type Backend interface {
	// Name is the backend's name in the API, such as "container".
	Name() string
	// Create makes and starts the sandbox and returns when commands can be run, with the named steps and their times. On
	// error nothing is left. Errors: capacity (the node ran out of something), unsupported, internal; ctx ends it early.
	Create(ctx context.Context, c Config) ([]*harenav1.Timing, error)
	// Recover takes over a sandbox that an earlier process of this edge created. precondition: it is not alive any more.
	Recover(ctx context.Context, c Config) error
	// Dial connects to the sandbox's supervisor, which speaks HTTP/2 without TLS.
	Dial(ctx context.Context, id sandbox.ID) (net.Conn, error)
	// Exited returns a channel that is closed when the sandbox ended by itself (never by Destroy). It is valid after Create or Recover.
	Exited(id sandbox.ID) <-chan struct{}
	// Freeze stops every process of the workload, commands and file workers included, at one moment, and returns when all
	// have stopped. It is bounded in time; on error everything runs again. The supervisor is not stopped: what it starts
	// meanwhile begins to run with Thaw. It outlives the server: a later one must Thaw, or keep it frozen. Idempotent.
	// Errors: timeout (a process waits in the kernel), not-found.
	Freeze(ctx context.Context, id sandbox.ID) error
	// Thaw lets everything run again, whoever froze it. Idempotent; no error for a sandbox that is not frozen.
	Thaw(ctx context.Context, id sandbox.ID) error
	// Reclaim takes back the memory of a frozen sandbox, to swap where it must be kept, until hardly anything is left, nothing
	// more can be taken, or ctx ends, which is no error. What was taken comes back as it is touched. Errors: unsupported,
	// not-found.
	Reclaim(ctx context.Context, id sandbox.ID) (Reclaimed, error)
	// Usage reads counters of the sandbox; zero for what the node cannot tell.
	Usage(id sandbox.ID) (Usage, error)
	// Destroy kills everything in the sandbox and releases all it holds outside Dir. Idempotent; also for IDs that were
	// never created, or whose supervisor is dead.
	Destroy(ctx context.Context, id sandbox.ID) error
	// Leaks lists what this backend finds on the node, of this edge, that belongs to none of the live IDs.
	Leaks(live map[sandbox.ID]bool) ([]Leak, error)
	// Checks reports what the node supports.
	Checks(ctx context.Context) []*harenav1.Check
	// Close releases the pool. Sandboxes go on.
	Close() error
}

// Usage is what a sandbox uses and suffered.
type Usage struct {
	MemoryBytes int64
	CPUNanos    int64
	Pids        int64
	OOMKills    int64 // processes killed for want of memory, ever
	PidsHits    int64 // forks refused by the pids limit, ever
	Frozen      bool  // by Freeze
}

// Reclaimed is what a Reclaim came to, in bytes.
type Reclaimed struct {
	// Before and After are charged to the sandbox.
	Before int64 `json:"before"`
	After  int64 `json:"after"`
	// Swapped went to swap; CacheDropped was cached content of files.
	Swapped      int64 `json:"swapped"`
	CacheDropped int64 `json:"cache_dropped"`
	// Anonymous stayed, and can go nowhere but to swap.
	Anonymous int64 `json:"anonymous"`
}

// Leak is a resource that nobody owns.
type Leak struct {
	Kind string // process, cgroup, mount, directory, pool
	Name string
	// Release frees it.
	Release func() error `json:"-"`
}
