package exec

import (
	"context"
	"crypto/sha256"
	"errors"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// command is one command, from its admission to the end of its record.
type command struct {
	s      *Service
	id     string
	number uint64
	hash   digest // of the request
	line   string
	user   string
	tag    string
	opID   string
	begun  time.Time // Service's clock
	clock  time.Time // monotonic

	// Set before ready is closed.
	startErr error
	spec     zygote.Spec
	proc     zygote.Process
	pid      int64
	group    *group
	session  *session // whose shell runs it; nil: a process of its own
	in       *input
	tty      bool
	timings  []*harenav1.Timing
	oomsThen int64

	ready   chan struct{} // closed when the command runs, or startErr is set
	drained chan struct{} // closed when every pump has ended

	mu      sync.Mutex
	changed chan struct{} // closed at the next change; nil while nobody waits
	streams [2]*stream
	readers map[*reader]struct{}
	pumps   int
	first   time.Time
	shared  bool // another command ran at the same time
	timeout *time.Timer
	// left is what the clock of the time-out had left when it was started, at due; 0 when there is none.
	left time.Duration
	due  time.Time
	// onLimit is what happens when it has run out.
	onLimit func()
	// killed: the time-out struck; exited: the main process is gone.
	killed, exited bool
	giveUp         context.CancelCauseFunc
	// published: result or broken is set, and stays as it is.
	published bool
	result    *harenav1.Result
	broken    error // the sandbox ended under it
	state     string
}

// States of CommandInfo.
const (
	stateRunning  = "running"
	stateDetached = "detached"
	stateEnded    = "ended"
)

// errHung: the main process was killed and does not die.
var errHung = errors.New("the process does not die")

func (s *Service) newCommand(number uint64, id string) *command {
	c := &command{
		s: s, number: number, id: id, state: stateRunning,
		ready: make(chan struct{}), drained: make(chan struct{}), readers: map[*reader]struct{}{},
	}
	for i, name := range []string{"stdout", "stderr"} {
		c.streams[i] = &stream{c: c, i: i, name: name, rec: record{
			name: name, dir: filepath.Join(s.cfg.RecordDir, id), reserve: s.reserve,
		}}
		if s.opLog != nil {
			c.streams[i].rec.sum = sha256.New()
		}
	}
	return c
}

// changes returns a channel that is closed at the next change; mu is held.
func (c *command) changes() <-chan struct{} {
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.changed
}

func (c *command) broadcast() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

func (c *command) firstOutput() {
	if c.first.IsZero() {
		c.first = time.Now()
	}
}

func (c *command) pumpEnded(st *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	st.eof = true
	if c.pumps--; c.pumps == 0 {
		close(c.drained)
	}
	c.broadcast()
}

// supervise follows a command that was spawned to the end of its record.
func (c *command) supervise(ctx context.Context, timeout time.Duration) {
	defer c.s.wg.Done()
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	c.mu.Lock()
	c.giveUp = giveUp
	c.mu.Unlock()
	c.limit(timeout, c.strike)

	exit, err := c.proc.Wait(ctx)
	ended := time.Now()
	c.mu.Lock()
	c.exited = true
	if c.timeout != nil {
		c.timeout.Stop()
	}
	c.mu.Unlock()

	hung := errors.Is(context.Cause(ctx), errHung)
	detached := c.awaitOutput() || hung
	if err != nil && !hung {
		c.fail(err)
	} else {
		c.publish(c.makeResult(exit, ended, detached))
	}
	c.in.close(inputEnded)
	c.s.left(c)
	c.outlive()
	c.s.retire(c)
}

// strike is the time-out: it kills the whole tree, also what left the process group.
func (c *command) strike() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exited {
		return
	}
	c.killed = true
	if err := c.group.path.Kill(); err != nil {
		c.s.cfg.Log.Error("kill a command that timed out", "command", c.id, "error", err)
	}
	c.timeout = time.AfterFunc(c.s.cfg.Limits.KillGrace, func() { c.giveUp(errHung) })
}

// awaitOutput returns when the streams are at their end, or after the grace
// when all is delivered that was written by then. It reports whether somebody
// still holds a stream.
func (c *command) awaitOutput() bool {
	select {
	case <-c.drained:
		return false
	default:
	}
	grace := time.NewTimer(c.s.cfg.Limits.Grace)
	defer grace.Stop()
	select {
	case <-c.drained:
		return false
	case <-grace.C:
	case <-c.s.ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, st := range c.streams {
		// A child that goes on printing must not hold the result, so no more than a pipe's worth.
		st.cut = st.total + chunkSize + maxPipe
	}
	for c.s.ctx.Err() == nil && (!c.streams[0].settled() || !c.streams[1].settled()) {
		changed := c.changes()
		c.mu.Unlock()
		select {
		case <-changed:
		case <-c.s.ctx.Done():
		}
		c.mu.Lock()
	}
	return !c.streams[0].eof || !c.streams[1].eof
}

func (c *command) makeResult(exit zygote.Exit, ended time.Time, detached bool) *harenav1.Result {
	r := &harenav1.Result{
		Detached: detached,
		Duration: durationpb.New(ended.Sub(c.clock)),
		CpuTime:  durationpb.New(exit.CPU),
	}
	setStatus(r, exit, c.spec)
	ooms := c.s.cfg.OOMKills() > c.oomsThen
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed {
		r.TimedOut, r.ExitCode = true, codeTimedOut
		if exit.Signal == 0 && detached {
			r.Message = "its processes were killed but have not ended yet"
		}
	}
	// The counter is the sandbox's: with others running, only a death by SIGKILL
	// (or a shell that reports one) tells whose process it was.
	r.OomKilled = ooms && (!c.shared || !c.killed && r.ExitCode == codeSignal+9)
	r.Timings = c.timings
	if !c.first.IsZero() {
		r.Timings = append(r.Timings, timing("first_output", c.first.Sub(c.clock)))
	}
	r.Timings = append(r.Timings, timing("total", ended.Sub(c.clock)))
	return r
}

func timing(step string, d time.Duration) *harenav1.Timing {
	return &harenav1.Timing{Step: step, Micros: d.Microseconds()}
}

// publish gives the result. A command with an op_id is journalled before.
func (c *command) publish(r *harenav1.Result) {
	count := func() {
		for i, dst := range []**harenav1.StreamRecord{&r.Stdout, &r.Stderr} {
			st := c.streams[i]
			*dst = &harenav1.StreamRecord{Total: st.total, Recorded: st.rec.size, Dropped: st.total - st.rec.size}
		}
	}
	if c.opID != "" {
		e := entryOf(c)
		small := c.s.journal.Room()
		e.Stdout, e.Stderr = c.streams[0].persist(small), c.streams[1].persist(small)
		c.mu.Lock()
		count()
		c.mu.Unlock()
		c.s.logEnd(c, r)
		c.s.opLog.Sync()
		if err := finish(c.s.journal, e, r); err != nil {
			c.s.cfg.Log.Error("journal a result", "command", c.id, "error", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	count()
	if c.opID == "" {
		c.s.logEnd(c, r)
	}
	c.result = r
	c.end()
	if r.Detached {
		c.state = stateDetached
	}
}

// fail ends a command whose sandbox ended under it: how it ended is not known.
func (c *command) fail(err error) {
	if c.s.ctx.Err() != nil {
		err = errs.E(errs.Precondition, "the sandbox was stopped while command %s ran", c.id)
	} else if k := errs.KindOf(err); k == errs.Internal || k == errs.Cancelled {
		c.s.cfg.Log.Error("wait for a command", "command", c.id, "error", err)
		err = errs.E(errs.Precondition, "the sandbox ended while command %s ran", c.id)
	}
	if kerr := c.group.path.Kill(); kerr != nil {
		c.s.cfg.Log.Error("kill a command", "command", c.id, "error", kerr)
	}
	if c.opID != "" {
		c.s.journal.Leave(c.opID)
	}
	c.s.logLost(c, err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken = err
	c.end()
}

// end fixes where the attached readers stop; mu is held.
func (c *command) end() {
	c.published = true
	c.state = stateEnded
	for r := range c.readers {
		for i, st := range c.streams {
			r.limit[i] = max(st.total, r.pos[i])
		}
	}
	c.broadcast()
}

// outlive stays with what a command left behind until nothing of it is left, then releases all it held but its record.
func (c *command) outlive() {
	populated, err := c.group.path.Populated()
	if err == nil && populated {
		c.mu.Lock()
		c.state = stateDetached
		c.mu.Unlock()
		err = c.group.waitEmpty(c.s.ctx)
	}
	if err != nil && c.s.ctx.Err() == nil {
		c.s.cfg.Log.Error("watch what a command left behind", "command", c.id, "error", err)
	}
	// Nobody of the command is left. Who else holds its streams has no claim on them.
	for _, st := range c.streams {
		if st.file != nil {
			_ = st.file.SetReadDeadline(time.Unix(1, 0))
		}
	}
	<-c.drained
	for _, st := range c.streams {
		st.close()
	}
	if err := c.group.remove(); err != nil {
		c.s.cfg.Log.Error("remove cgroup of a command", "command", c.id, "error", err)
	}
	c.mu.Lock()
	c.state = stateEnded
	c.mu.Unlock()
}

// info describes the command for a listing.
func (c *command) info() *harenav1.CommandInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &harenav1.CommandInfo{
		CommandId: c.id, CommandLine: c.line, State: c.state, Started: timestamppb.New(c.begun),
		Result: c.result, Pid: c.pid, User: c.user, Tag: c.tag, OpId: c.opID, Pty: c.tty,
	}
}
