// Package exec serves harena.v1's ExecService for one sandbox: it starts
// commands in it, records and streams their output, feeds their input, and
// ends them.
//
// # Output
//
// Each stream of a command is read by one goroutine, the pump, as soon as
// there is something to read. What it reads is a byte stream with offsets from
// 0. The record is its prefix: in memory up to 64 KiB, then in a file, up to
// max_output. Past the record lies the window, 256 KiB that the attached
// readers have not all taken yet; while it is full the pump does not read, so
// that the command waits (back-pressure). Without a reader the window is empty
// and what is read past the record is dropped and counted.
//
// With several readers the slowest one sets the pace, but only one that reads:
// a reader that takes nothing for 60 s while the command waits for it is
// dropped with an error of kind timeout, and its command goes on. It may
// connect again; what it missed is a gap.
//
// # End of a command
//
// The result is given when the main process has ended and its streams are at
// their end, or 200 ms after it ended, when a child still holds a stream: what
// the main process left in the pipe is delivered in any case. Then the command
// is detached, until its cgroup is empty; what its children print still goes
// to the record. When a time-out killed everything but the main process does
// not die (it hangs in the kernel), the result is given 5 s later without it.
//
// # Records
//
// The last 1,000 ended commands are kept. All recorded files of a sandbox
// together hold at most 2 GiB: the records of the oldest ended commands are dropped
// first, then running commands stop recording. Records in memory of ended
// commands hold at most 1 MiB together, the oldest move to files.
//
// A service without a running command holds no goroutine, timer or buffer.
package exec

import (
	"log/slog"
	"os"
	"path/filepath"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor/journal"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
	"github.com/harena-dev/harena/internal/supervisor/users"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// Config is what a Service works with.
type Config struct {
	SandboxID sandbox.ID
	// Hostname inside, for HOSTNAME; default: the first 12 characters of the ID.
	Hostname string
	Spawner  zygote.Spawner
	Users    users.Resolver
	// Groups is the cgroup2 directory below which every command gets its own.
	Groups cgroup.Dir
	// Devpts is the root directory of the sandbox's own devpts, opened before
	// anything untrusted ran. Nil: no terminals (unsupported).
	Devpts *os.File
	// IDBase is the host ID of the sandbox's user 0.
	IDBase uint32
	// RecordDir is on the node, for this package alone; it is made when needed.
	RecordDir string
	// Defaults apply to commands that do not say otherwise; may be nil.
	Defaults *harenav1.ProcessDefaults
	// OOMKills counts processes of the sandbox killed for want of memory, ever.
	// Nil: oom_killed is never reported.
	OOMKills func() int64
	// Activity is told of every call and of every command that ends; may be nil.
	Activity func()
	Log      *slog.Logger
	// Journal of the sandbox's operations; default: one of its own, in RecordDir.
	Journal *journal.Journal
	// OpLog is the sandbox's operation log; may be nil.
	OpLog *oplog.Log
	// FilesOnly: the sandbox has failed. Nothing is started any more; what was recorded is told.
	FilesOnly bool
	// shells of sessions; default: usualShells.
	shells []shellKind
	// Now is the clock of timestamps; default time.Now.
	Now    func() time.Time
	Limits Limits
}

// Limits bound a Service. The zero value of each field is its default.
type Limits struct {
	Running     int           // commands that run or are detached; 512
	Ended       int           // ended commands that are kept; 1,000
	Ops         int           // op_ids of a Journal that the service makes itself; journal.Ops
	RecordBytes int64         // in files, of all commands; 2 GiB
	EndedMemory int64         // recorded in memory, of all ended commands; 1 MiB
	Grace       time.Duration // for streams that a child holds; 200 ms
	KillGrace   time.Duration // for a killed process that does not die; 5 s
	Stall       time.Duration // for a reader that takes nothing; 60 s
	Keepalive   time.Duration // 15 s
}

// Bounds of one request.
const (
	maxArg       = 128<<10 - 1 // one argument: the kernel's MAX_ARG_STRLEN, less its NUL
	maxArgs      = 1 << 20     // all of them; with the environment below the kernel's 2 MiB (a quarter of an 8 MiB stack)
	maxCwd       = 4095        // PATH_MAX less its NUL
	maxInput     = 1 << 20
	maxOutput    = 1 << 30
	defOutput    = 16 << 20
	maxID        = 128
	maxTag       = 1 << 10
	maxTerm      = 64
	maxLine      = 4 << 10 // command_line in listings
	maxProgram   = 256     // candidates of one PATH search
	recentCalls  = 1024    // request_ids that are remembered
	chunkSize    = 64 << 10
	windowSize   = 256 << 10
	memoryRecord = 64 << 10
)

func (l Limits) withDefaults() Limits {
	def(&l.Running, 512)
	def(&l.Ended, 1000)
	def(&l.RecordBytes, 2<<30)
	def(&l.EndedMemory, 1<<20)
	def(&l.Grace, 200*time.Millisecond)
	def(&l.KillGrace, 5*time.Second)
	def(&l.Stall, time.Minute)
	def(&l.Keepalive, 15*time.Second)
	return l
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c *Config) complete() error {
	if c.Spawner == nil || c.Users == nil || c.Groups == "" || c.RecordDir == "" {
		return errs.E(errs.Internal, "exec: Spawner, Users, Groups and RecordDir are needed")
	}
	c.Limits = c.Limits.withDefaults()
	if c.Hostname == "" {
		c.Hostname = string(c.SandboxID[:min(12, len(c.SandboxID))])
	}
	if c.Defaults == nil {
		c.Defaults = &harenav1.ProcessDefaults{}
	}
	if c.OOMKills == nil {
		c.OOMKills = func() int64 { return 0 }
	}
	if c.Activity == nil {
		c.Activity = func() {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.shells == nil {
		c.shells = usualShells()
	}
	if c.Journal != nil {
		return nil
	}
	var err error
	c.Journal, err = journal.Open(filepath.Join(c.RecordDir, "ops"), c.Limits.Ops)
	return err
}
