package harena

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Command is a running command. Its output is received in the background and
// goes to the writers of Cmd or, where there are none, to Stdout and Stderr. A
// stream that is neither written nor read holds the command up once 1 MiB of it waits, as a
// full pipe does.
//
// A Command does not depend on the context that started it; Close lets go of it.
type Command struct {
	sb       *Sandbox
	id       string
	pid      int64
	attached bool

	stdout, stderr *output
	stdin          *stdinPipe

	cancel context.CancelFunc
	done   chan struct{}
	result *Result // valid after done
	err    error   // valid after done
}

// Start starts a command and returns when it runs.
func (s *Sandbox) Start(ctx context.Context, cmd Cmd) (*Command, error) {
	p, stdin, err := cmd.proto()
	if err != nil {
		return nil, err
	}
	// The same request ID on every attempt: the command starts once.
	req := &harenav1.RunRequest{SandboxId: s.id, Command: p, RequestId: newID()}
	c, err := s.follow(ctx, cmd.Stdout, cmd.Stderr, cmd.OpID != "", func(ctx context.Context) (source, error) {
		st, err := s.c.exec.Run(ctx, connect.NewRequest(req))
		if err != nil {
			return nil, err
		}
		return &runSource{st}, nil
	})
	if err != nil {
		return nil, err
	}
	if p.GetStdinOpen() {
		c.stdin = &stdinPipe{c: c, known: true, offset: int64(len(p.GetStdin()))}
	}
	if stdin != nil {
		go c.copyStdin(stdin)
	}
	return c, nil
}

// Attach follows a command that was started before: what is recorded of its
// output, then what it goes on to print. The writers may be nil.
func (s *Sandbox) Attach(ctx context.Context, commandID string, stdout, stderr io.Writer) (*Command, error) {
	c, err := s.follow(ctx, stdout, stderr, false, func(ctx context.Context) (source, error) {
		return s.connect(ctx, commandID, 0, 0)
	})
	if err != nil {
		return nil, err
	}
	c.stdin = &stdinPipe{c: c}
	return c, nil
}

func (s *Sandbox) connect(ctx context.Context, commandID string, stdout, stderr int64) (source, error) {
	st, err := s.c.exec.Connect(ctx, connect.NewRequest(&harenav1.ConnectRequest{
		SandboxId: s.id, CommandId: commandID, StdoutOffset: stdout, StderrOffset: stderr,
	}))
	if err != nil {
		return nil, err
	}
	return &connectSource{st}, nil
}

// source is a stream of a command's output.
type source interface {
	next() (*harenav1.Output, error) // io.EOF at the end
	close()
}

type runSource struct {
	*connect.ServerStreamForClient[harenav1.RunResponse]
}

func (s *runSource) next() (*harenav1.Output, error) {
	if s.Receive() {
		return s.Msg().GetOutput(), nil
	}
	return nil, endOf(s.Err())
}

func (s *runSource) close() { _ = s.Close() }

type connectSource struct {
	*connect.ServerStreamForClient[harenav1.ConnectResponse]
}

func (s *connectSource) next() (*harenav1.Output, error) {
	if s.Receive() {
		return s.Msg().GetOutput(), nil
	}
	return nil, endOf(s.Err())
}

func (s *connectSource) close() { _ = s.Close() }

func endOf(err error) error {
	if err == nil {
		return io.EOF
	}
	return err
}

// follow opens a stream, waits until the command has started, and goes on receiving in the background.
func (s *Sandbox) follow(ctx context.Context, stdout, stderr io.Writer, lasting bool, open func(context.Context) (source, error)) (*Command, error) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	// Until it has started, the caller's context holds.
	release := context.AfterFunc(ctx, cancel)
	c := &Command{sb: s, stdout: newOutput(stdout), stderr: newOutput(stderr), cancel: cancel, done: make(chan struct{})}
	src, err := c.begin(life, open, lasting)
	if err != nil {
		release()
		cancel()
		return nil, s.c.failure(ctx, err)
	}
	if !release() {
		// ctx ended in between: life is, or soon will be, cancelled.
		src.close()
		return nil, s.c.failure(ctx, ctx.Err())
	}
	go c.pump(life, src)
	return c, nil
}

// begin opens the first stream and reads its started message.
func (c *Command) begin(ctx context.Context, open func(context.Context) (source, error), lasting bool) (source, error) {
	deadline := time.Now().Add(c.sb.c.patience)
	for attempt := 0; ; attempt++ {
		src, err := open(ctx)
		if err == nil {
			var out *harenav1.Output
			if out, err = src.next(); err == nil {
				started := out.GetStarted()
				if started == nil {
					src.close()
					return nil, &Error{Kind: KindInternal, Message: "the server sent output before it said that the command started"}
				}
				c.id, c.pid, c.attached = started.GetCommandId(), started.GetPid(), started.GetAttached()
				return src, nil
			}
			src.close()
		}
		if lasting && (!mayCome(ctx, err) || time.Now().After(deadline)) {
			return nil, err
		}
		if !lasting && (attempt == len(retryDelays) || ctx.Err() != nil || connect.IsWireError(err) || !unreachable(err)) {
			return nil, err
		}
		if sleep(ctx, retryDelays[min(attempt, len(retryDelays)-1)]) != nil {
			return nil, err
		}
	}
}

// pump receives until the result is there, and takes the stream up again where it broke.
func (c *Command) pump(ctx context.Context, src source) {
	defer close(c.done)
	defer c.cancel()
	defer c.stdout.close()
	defer c.stderr.close()
	lost := false
	for {
		result, err := c.drain(ctx, src, &lost)
		src.close()
		if result != nil {
			c.result = resultOf(result, c.id, lost)
			return
		}
		if src, err = c.resume(ctx, err); err != nil {
			c.err = c.sb.c.failure(ctx, err)
			return
		}
	}
}

// drain delivers what src sends. It returns the result, or why there is none.
func (c *Command) drain(ctx context.Context, src source, lost *bool) (*harenav1.Result, error) {
	for {
		out, err := src.next()
		if err != nil {
			return nil, err
		}
		switch e := out.GetEvent().(type) {
		case *harenav1.Output_Stdout:
			err = c.stdout.write(ctx, e.Stdout)
		case *harenav1.Output_Stderr:
			err = c.stderr.write(ctx, e.Stderr)
		case *harenav1.Output_Gap:
			*lost = true
			if e.Gap.GetStream() == "stderr" {
				c.stderr.offset += e.Gap.GetBytes()
			} else {
				c.stdout.offset += e.Gap.GetBytes()
			}
		case *harenav1.Output_Result:
			return e.Result, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// resume connects to the command again after err broke its stream, for as long as the client's patience lasts.
func (c *Command) resume(ctx context.Context, err error) (source, error) {
	deadline := time.Now().Add(c.sb.c.patience)
	for delay := 20 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		if !broken(ctx, err) || time.Now().After(deadline) {
			return nil, err
		}
		if serr := sleep(ctx, delay); serr != nil {
			return nil, serr
		}
		var src source
		if src, err = c.sb.connect(ctx, c.id, c.stdout.offset, c.stderr.offset); err != nil {
			continue
		}
		// Only an answer is progress: a stream may open on a connection that is about to break.
		var out *harenav1.Output
		if out, err = src.next(); err == nil {
			return &resumed{src, out}, nil
		}
		src.close()
	}
}

// resumed is a stream whose first message was read already.
type resumed struct {
	source
	first *harenav1.Output
}

func (r *resumed) next() (*harenav1.Output, error) {
	if out := r.first; out != nil {
		r.first = nil
		return out, nil
	}
	return r.source.next()
}

// broken reports whether err only means that a connection broke somewhere on the way.
func broken(ctx context.Context, err error) bool {
	var failed *writeError
	switch {
	case ctx.Err() != nil || errors.As(err, &failed):
		return false
	case errors.Is(err, io.EOF):
		return true // the end of a stream without a result
	case connect.IsWireError(err):
		return connect.CodeOf(err) == connect.CodeUnavailable
	}
	return unreachable(err)
}

// ID names the command within its sandbox.
func (c *Command) ID() string { return c.id }

// PID is the process ID inside.
func (c *Command) PID() int64 { return c.pid }

// Attached reports whether Start found a command with the same OpID.
func (c *Command) Attached() bool { return c.attached }

// Stdout returns the command's standard output. It must be read to its end, or the command closed.
func (c *Command) Stdout() io.Reader { return c.stdout.claim() }

// Stderr returns the command's standard error. It must be read to its end, or the command closed.
func (c *Command) Stderr() io.Reader { return c.stderr.claim() }

// Wait waits for the end of the command. Output that nobody asked for is
// discarded from now on. The end of ctx ends the waiting, not the command.
func (c *Command) Wait(ctx context.Context) (*Result, error) {
	c.stdout.discardUnclaimed()
	c.stderr.discardUnclaimed()
	select {
	case <-c.done:
		return c.result, c.err
	case <-ctx.Done():
		return nil, c.sb.c.failure(ctx, ctx.Err())
	}
}

// Done is closed when the command has ended, or cannot be followed any more.
func (c *Command) Done() <-chan struct{} { return c.done }

// Signal sends a signal to the command's process group.
func (c *Command) Signal(ctx context.Context, signal string) error {
	return c.sb.Signal(ctx, c.id, signal, false)
}

// Kill kills the command and every process that it started.
func (c *Command) Kill(ctx context.Context) error {
	return c.sb.Signal(ctx, c.id, "SIGKILL", true)
}

// Resize sets the size of the command's terminal.
func (c *Command) Resize(ctx context.Context, cols, rows uint32) error {
	_, err := c.sb.c.exec.Resize(ctx, connect.NewRequest(&harenav1.ResizeRequest{SandboxId: c.sb.id, CommandId: c.id, Cols: cols, Rows: rows}))
	return err
}

// Close lets go of the command, which goes on. See Sandbox.Attach.
func (c *Command) Close() { c.cancel() }

// stop is Close that waits until nothing is written to Cmd's writers any more.
func (c *Command) stop() {
	c.cancel()
	<-c.done
}
