package exec

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/journal"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
)

// Service implements harenav1connect.ExecServiceHandler for one sandbox.
type Service struct {
	cfg     Config
	journal *journal.Journal
	opLog   *oplog.Log
	calls   calls
	streams atomic.Int64 // attached readers
	chunks  sync.Pool
	// ctx ends with the service; wg counts what Close waits for.
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	opMu sync.Mutex // taken before mu

	sessions sessions

	// mu is taken before any command's; its fields below.
	mu      sync.Mutex
	closing bool
	numbers numbers
	held    bool
	running int // started or starting, without a result
	// alive are commands of which something runs, ended those that are kept, oldest first.
	alive    map[string]*command
	ended    []*command
	endedIDs map[string]*command
	ops      map[string]*command // by op_id, of alive and ended
	// unfinished are operations of an earlier supervisor whose end is not known, by command.
	unfinished  map[string]*journal.Entry
	endedMemory int64
	fileBytes   int64
}

var _ harenav1connect.ExecServiceHandler = (*Service)(nil)

// chunk is what one read takes and one message carries.
type chunk [chunkSize]byte

func (s *Service) getChunk() *chunk  { return s.chunks.Get().(*chunk) }
func (s *Service) putChunk(b *chunk) { s.chunks.Put(b) }

// New makes the service. What an earlier supervisor of the same sandbox recorded under RecordDir is taken over.
func New(cfg Config) (*Service, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Service{
		cfg:        cfg,
		journal:    cfg.Journal,
		opLog:      cfg.OpLog,
		chunks:     sync.Pool{New: func() any { return new(chunk) }},
		alive:      map[string]*command{},
		endedIDs:   map[string]*command{},
		ops:        map[string]*command{},
		unfinished: map[string]*journal.Entry{},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.numbers = numbers{file: filepath.Join(cfg.RecordDir, "numbers"), failed: func(err error) {
		cfg.Log.Error("reserve command numbers", "error", err)
	}}
	if err := s.recover(); err != nil {
		return nil, fmt.Errorf("take over records of commands: %w", err)
	}
	return s, nil
}

// Handler returns the path and handler to mount. Messages are not compressed:
// they cross one machine, and compression would cost most of the throughput.
func (s *Service) Handler(opts ...connect.HandlerOption) (string, http.Handler) {
	return harenav1connect.NewExecServiceHandler(s, append(opts, connect.WithCompression("gzip", nil, nil))...)
}

// Running returns how many commands run or are being started, and how many
// streams of output are attached.
func (s *Service) Running() (commands, streams int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, int(s.streams.Load())
}

// closeWait is how long Close gives killed commands to end, and then the service to let go of them.
const closeWait = 10 * time.Second

// Close kills every command and what it left behind, and returns when the
// service holds nothing any more. Attached readers get the results.
func (s *Service) Close() error {
	s.mu.Lock()
	s.closing = true
	var all []*command
	for _, c := range s.alive {
		all = append(all, c)
	}
	s.mu.Unlock()
	defer s.cancel()
	deadline := time.NewTimer(closeWait)
	defer deadline.Stop()
	failed := s.sessions.kill()
	for _, c := range all {
		select {
		case <-c.ready:
			if c.startErr == nil {
				failed = errors.Join(failed, c.group.path.Kill())
			}
		case <-deadline.C:
			deadline.Reset(0)
		}
	}
	idle := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return failed
	case <-deadline.C:
	}
	s.cancel()
	deadline.Reset(closeWait)
	select {
	case <-idle:
		return failed
	case <-deadline.C:
		return errors.Join(failed, errs.E(errs.Timeout, "commands did not end within %v", 2*closeWait))
	}
}

// enter begins every call.
func (s *Service) enter(sandboxID string) error {
	s.cfg.Activity()
	if sandboxID != "" && sandboxID != string(s.cfg.SandboxID) {
		return errs.E(errs.NotFound, "sandbox %.40q is not served here", sandboxID).On("sandbox %.40s", sandboxID)
	}
	return nil
}

// Run implements ExecService.
func (s *Service) Run(ctx context.Context, req *connect.Request[harenav1.RunRequest], out *connect.ServerStream[harenav1.RunResponse]) error {
	m := req.Msg
	if err := s.enter(m.GetSandboxId()); err != nil {
		return errs.ToConnect(err)
	}
	c, r, attached, err := s.begin(ctx, m.GetCommand(), m.GetRequestId(), true)
	if err != nil {
		return errs.ToConnect(err)
	}
	return errs.ToConnect(r.serve(ctx, c.startedMessage(attached), func(o *harenav1.Output) error {
		return out.Send(&harenav1.RunResponse{Output: o})
	}))
}

// Connect implements ExecService.
func (s *Service) Connect(ctx context.Context, req *connect.Request[harenav1.ConnectRequest], out *connect.ServerStream[harenav1.ConnectResponse]) error {
	m := req.Msg
	c, err := s.lookup(ctx, m.GetSandboxId(), m.GetCommandId())
	if err != nil {
		return errs.ToConnect(err)
	}
	r, err := c.attach([2]int64{m.GetStdoutOffset(), m.GetStderrOffset()}, m.GetNoFollow())
	if err != nil {
		return errs.ToConnect(err)
	}
	return errs.ToConnect(r.serve(ctx, c.startedMessage(true), func(o *harenav1.Output) error {
		return out.Send(&harenav1.ConnectResponse{Output: o})
	}))
}

// lookup finds a command of a call and waits until it runs.
func (s *Service) lookup(ctx context.Context, sandboxID, id string) (*command, error) {
	if err := s.enter(sandboxID); err != nil {
		return nil, err
	}
	c, err := s.find(id)
	if err != nil {
		return nil, err
	}
	select {
	case <-c.ready:
		return c, c.startErr
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *command) startedMessage(attached bool) *harenav1.Started {
	return &harenav1.Started{CommandId: c.id, Pid: c.pid, Attached: attached}
}

// serve sends what there is to send until the end, and closes the reader.
func (r *reader) serve(ctx context.Context, started *harenav1.Started, send func(*harenav1.Output) error) error {
	defer r.close()
	if err := send(&harenav1.Output{Event: &harenav1.Output_Started{Started: started}}); err != nil {
		return err
	}
	for {
		ev, err := r.next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(ev); err != nil {
			return err
		}
	}
}

// Start implements ExecService.
func (s *Service) Start(ctx context.Context, req *connect.Request[harenav1.StartRequest]) (*connect.Response[harenav1.StartResponse], error) {
	m := req.Msg
	if err := s.enter(m.GetSandboxId()); err != nil {
		return nil, errs.ToConnect(err)
	}
	c, _, attached, err := s.begin(ctx, m.GetCommand(), m.GetRequestId(), false)
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	return connect.NewResponse(&harenav1.StartResponse{Started: c.startedMessage(attached)}), nil
}

// SendInput implements ExecService.
func (s *Service) SendInput(ctx context.Context, req *connect.Request[harenav1.SendInputRequest]) (*connect.Response[harenav1.SendInputResponse], error) {
	m := req.Msg
	c, err := s.lookup(ctx, m.GetSandboxId(), m.GetCommandId())
	if err == nil {
		err = atMost("bytes of data in one call", len(m.GetData()), maxInput)
	}
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	v, err := s.once(ctx, m.GetRequestId(), "input", m, func() (any, error) {
		if c.in == nil {
			return nil, inputEnded.err() // taken over from an earlier supervisor
		}
		return c.in.send(ctx, m.GetData(), m.Offset, m.GetEof())
	})
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	return connect.NewResponse(&harenav1.SendInputResponse{Offset: v.(int64)}), nil
}

// once runs f for the first call with a request_id.
func (s *Service) once(ctx context.Context, requestID, method string, m proto.Message, f func() (any, error)) (any, error) {
	if requestID == "" {
		return f()
	}
	hash, err := digestOf(method, m)
	if err != nil {
		return nil, err
	}
	return s.calls.do(ctx, requestID, hash, f)
}

// Resize implements ExecService.
func (s *Service) Resize(ctx context.Context, req *connect.Request[harenav1.ResizeRequest]) (*connect.Response[harenav1.ResizeResponse], error) {
	m := req.Msg
	c, err := s.lookup(ctx, m.GetSandboxId(), m.GetCommandId())
	if err == nil {
		err = validateSize(m.GetCols(), m.GetRows())
	}
	if err == nil {
		_, err = s.once(ctx, m.GetRequestId(), "resize", m, func() (any, error) { return nil, c.resize(m.GetCols(), m.GetRows()) })
	}
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	return connect.NewResponse(&harenav1.ResizeResponse{}), nil
}

func (c *command) resize(cols, rows uint32) error {
	if !c.tty {
		return errs.E(errs.Precondition, "command %s has no terminal", c.id).WithHint("start it with pty")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.published {
		return c.hasEnded()
	}
	raw, err := c.streams[0].file.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Control(func(fd uintptr) { serr = setSize(int(fd), cols, rows) })
	return errors.Join(err, serr)
}

func (c *command) hasEnded() error {
	return errs.E(errs.Precondition, "command %s has ended", c.id).On("command %s", c.id)
}

// Signal implements ExecService.
func (s *Service) Signal(ctx context.Context, req *connect.Request[harenav1.SignalRequest]) (*connect.Response[harenav1.SignalResponse], error) {
	m := req.Msg
	sig, err := parseSignal(m.GetSignal())
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	c, err := s.lookup(ctx, m.GetSandboxId(), m.GetCommandId())
	if err == nil {
		_, err = s.once(ctx, m.GetRequestId(), "signal", m, func() (any, error) {
			err := c.signal(sig, m.GetTree())
			if err == nil {
				s.logSignal(c, signalName(int(sig)), m.GetTree())
			}
			return nil, err
		})
	}
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	return connect.NewResponse(&harenav1.SignalResponse{}), nil
}

// signal signals the process group, or everything that the command started.
// After the main process ended there is no group that is surely its own, so a
// detached command gets every signal as a tree.
func (c *command) signal(sig unix.Signal, tree bool) error {
	c.mu.Lock()
	state, exited := c.state, c.exited
	c.mu.Unlock()
	switch {
	case state == stateEnded:
		return c.hasEnded()
	case c.session != nil:
		return c.session.signal(sig)
	case tree || exited:
		return c.group.signal(sig)
	}
	return c.proc.Signal(int(sig))
}

// ListCommands implements ExecService.
func (s *Service) ListCommands(_ context.Context, req *connect.Request[harenav1.ListCommandsRequest]) (*connect.Response[harenav1.ListCommandsResponse], error) {
	if err := s.enter(req.Msg.GetSandboxId()); err != nil {
		return nil, errs.ToConnect(err)
	}
	out := &harenav1.ListCommandsResponse{}
	for _, c := range s.list() {
		out.Commands = append(out.Commands, c.info())
	}
	return connect.NewResponse(out), nil
}
