package harena

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Cmd says what to run. Exactly one of Argv and Shell is set.
type Cmd struct {
	Argv  []string // argv[0] without a slash is looked up in PATH
	Shell string   // text for /bin/sh -c

	User    string // name or ID, optionally ":group"; default: the sandbox's
	Cwd     string
	Env     map[string]string
	Timeout time.Duration // then the whole process tree is killed; 0: never

	// Stdin is copied to the command; nil: empty. What tells its length (such as
	// *bytes.Reader) and is at most 1 MiB goes along with the start.
	Stdin io.Reader
	// OpenStdin keeps input open for Command.Stdin. Not together with Stdin.
	OpenStdin bool
	input     []byte // with OpenStdin: what goes along with the start
	// Stdout and Stderr receive output as it comes. A slow writer slows the command down.
	Stdout, Stderr io.Writer

	PTY       *PTY   // run on a terminal; everything is printed to Stdout
	MaxOutput int64  // bytes of each stream that are recorded; 0: 16 MiB
	OpID      string // a retry with the same ID attaches or returns the recorded result
	Session   string
	Tag       string
}

// PTY is a terminal. Zero values mean 80 × 24, xterm-256color.
type PTY struct {
	Cols, Rows uint32
	Term       string
}

const (
	maxInlineStdin   = 1 << 20
	defaultMaxOutput = 16 << 20
)

func (c *Cmd) proto() (*harenav1.Command, io.Reader, error) {
	p := &harenav1.Command{
		Shell: c.Shell, User: c.User, Cwd: c.Cwd, Env: c.Env, StdinOpen: c.OpenStdin,
		MaxOutput: c.MaxOutput, OpId: c.OpID, Session: c.Session, Tag: c.Tag,
	}
	p.Argv, p.ArgvBytes = argv(c.Argv)
	if c.Timeout > 0 {
		p.Timeout = durationpb.New(c.Timeout)
	}
	if c.PTY != nil {
		p.Pty = &harenav1.Pty{Cols: c.PTY.Cols, Rows: c.PTY.Rows, Term: c.PTY.Term}
	}
	if c.Stdin == nil {
		p.Stdin = c.input
		return p, nil, nil
	}
	if l, ok := c.Stdin.(interface{ Len() int }); ok && l.Len() <= maxInlineStdin {
		b, err := io.ReadAll(c.Stdin)
		p.Stdin = b
		return p, nil, err
	}
	p.StdinOpen = true
	return p, c.Stdin, nil
}

// Result is how a command ended.
type Result struct {
	// 0–255; 128+n after signal n; 127 program not found; 126 not executable; 124 timed out.
	ExitCode int
	Signal   string // such as SIGKILL; empty when it exited by itself
	TimedOut bool
	// The kernel killed a process of the command for want of memory.
	OOMKilled bool
	// What was printed, when Cmd had no writers for it, up to MaxOutput.
	Stdout, Stderr []byte
	// Something that was printed is missing from Stdout or Stderr, or from the record.
	Truncated bool
	// A child of the command still held its output when it ended.
	Detached bool
	Duration time.Duration
	CPUTime  time.Duration
	Message  string // why the program could not be started
	// CommandID names the command within its sandbox.
	CommandID string
	// Proto is the result as the server sent it.
	Proto *harenav1.Result
}

// String says how the command ended and what it printed, for people.
func (r *Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "exit %d", r.ExitCode)
	for _, part := range []struct {
		holds bool
		text  string
	}{
		{r.Signal != "", r.Signal},
		{r.TimedOut, "timed out"},
		{r.OOMKilled, "out of memory"},
		{r.Message != "", r.Message},
		{r.Truncated, "output truncated"},
		{true, "after " + r.Duration.Round(time.Millisecond).String()},
	} {
		if part.holds {
			b.WriteString(", " + part.text)
		}
	}
	for _, stream := range []struct {
		name string
		data []byte
	}{{"stdout", r.Stdout}, {"stderr", r.Stderr}} {
		if len(stream.data) > 0 {
			fmt.Fprintf(&b, "\n%s:\n%s", stream.name, bytes.TrimSuffix(stream.data, []byte("\n")))
		}
	}
	return b.String()
}

func resultOf(p *harenav1.Result, id string, lost bool) *Result {
	return &Result{
		ExitCode: int(p.GetExitCode()), Signal: p.GetSignal(), TimedOut: p.GetTimedOut(), OOMKilled: p.GetOomKilled(),
		Truncated: lost || p.GetStdout().GetDropped() > 0 || p.GetStderr().GetDropped() > 0,
		Detached:  p.GetDetached(), Duration: p.GetDuration().AsDuration(), CPUTime: p.GetCpuTime().AsDuration(),
		Message: p.GetMessage(), CommandID: id, Proto: p,
	}
}

// lastCalls is how long Run takes at most, each time, to learn which command it started and to kill it when its context has ended.
const lastCalls = 5 * time.Second

// Run runs a command to its end. That it fails is not an error: see
// Result.ExitCode. When ctx ends first the command is killed with all it
// started, and what it printed so far is returned beside the error.
func (s *Sandbox) Run(ctx context.Context, cmd Cmd) (*Result, error) {
	limit := cmd.MaxOutput
	if limit == 0 {
		limit = defaultMaxOutput
	}
	stdout, stderr := &capture{limit: limit}, &capture{limit: limit}
	if cmd.Stdout == nil {
		cmd.Stdout = stdout
	}
	if cmd.Stderr == nil {
		cmd.Stderr = stderr
	}
	if ctx.Err() != nil {
		return nil, s.c.failure(ctx, ctx.Err())
	}
	// A command that starts just as ctx ends must become known, to be killed.
	starting, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastCalls, giveUp) })()
	c, err := s.Start(starting, cmd)
	switch {
	case err != nil && starting.Err() != nil:
		return nil, s.c.failure(ctx, ctx.Err())
	case err != nil:
		return nil, err
	}
	defer c.Close()
	res, err := c.Wait(ctx)
	if err != nil {
		if ctx.Err() != nil {
			kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastCalls)
			defer cancel()
			_ = c.Kill(kill)
		}
		c.stop()
		res = &Result{CommandID: c.id, ExitCode: -1}
	}
	res.Stdout, res.Stderr = stdout.bytes, stderr.bytes
	res.Truncated = res.Truncated || stdout.cut || stderr.cut
	return res, err
}

// RunShell runs text with /bin/sh -c to its end.
func (s *Sandbox) RunShell(ctx context.Context, text string) (*Result, error) {
	return s.Run(ctx, Cmd{Shell: text})
}

// capture keeps the first limit bytes.
type capture struct {
	bytes []byte
	limit int64
	cut   bool
}

func (c *capture) Write(b []byte) (int, error) {
	n := min(int64(len(b)), c.limit-int64(len(c.bytes)))
	c.bytes = append(c.bytes, b[:n]...)
	c.cut = c.cut || n < int64(len(b))
	return len(b), nil
}

// Commands lists the sandbox's running commands and those that ended lately.
func (s *Sandbox) Commands(ctx context.Context) ([]*harenav1.CommandInfo, error) {
	res, err := s.c.exec.ListCommands(ctx, connect.NewRequest(&harenav1.ListCommandsRequest{SandboxId: s.id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetCommands(), nil
}

// Signal sends a signal, by name or number, to a command's process group or,
// with tree, to every process that it started.
func (s *Sandbox) Signal(ctx context.Context, commandID, signal string, tree bool) error {
	_, err := s.c.exec.Signal(ctx, connect.NewRequest(&harenav1.SignalRequest{SandboxId: s.id, CommandId: commandID, Signal: signal, Tree: tree}))
	return err
}

// StartDetached starts a command and does not follow it; see Attach. Stdin
// must fit along with the start.
func (s *Sandbox) StartDetached(ctx context.Context, cmd Cmd) (*harenav1.Started, error) {
	p, rest, err := cmd.proto()
	if err != nil {
		return nil, err
	}
	if rest != nil {
		return nil, &Error{Kind: KindInvalid, Message: "a detached command takes at most 1 MiB of standard input, of known length"}
	}
	res, err := s.c.exec.Start(ctx, connect.NewRequest(&harenav1.StartRequest{SandboxId: s.id, Command: p}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetStarted(), nil
}
