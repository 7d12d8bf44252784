package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// commandFlags are the flags of everything that runs a command.
type commandFlags struct {
	interactive, tty bool
	timeout          durationValue
	maxOutput        sizeValue
	opID, session    string
	tag              string
}

func (f *commandFlags) add(fs *pflag.FlagSet) {
	fs.BoolVarP(&f.interactive, "interactive", "i", false, "pass standard input on")
	fs.BoolVarP(&f.tty, "tty", "t", false, "run on a terminal")
	fs.Var(&f.timeout, "timeout", "kill the command and all it started after this time; the exit status is then 124")
	fs.Var(&f.maxOutput, "max-output", "bytes of each stream that are recorded (default 16MiB)")
	fs.StringVar(&f.opID, "op-id", "", "a retry with the same ID attaches or returns the recorded result")
	fs.StringVar(&f.tag, "tag", "", "any text, shown in listings")
}

func (f *commandFlags) cmd(a *app, argv []string) harena.Cmd {
	c := harena.Cmd{
		Argv: argv, Timeout: f.timeout.d, MaxOutput: int64(f.maxOutput), OpID: f.opID, Session: f.session, Tag: f.tag,
		Stdout: a.Stdout, Stderr: a.Stderr,
	}
	if f.tty {
		cols, rows := a.terminalSize()
		c.PTY = &harena.PTY{Cols: cols, Rows: rows, Term: os.Getenv("TERM")}
	}
	if f.interactive {
		c.Stdin = a.Stdin
	}
	return c
}

func (a *app) execCommand() *cobra.Command {
	var f commandFlags
	var detach bool
	var user, cwd string
	env := pairsValue{env: true}
	cmd := &cobra.Command{
		Use: "exec [flags] SANDBOX [--] CMD...", Short: "Run a command in a sandbox",
		Long: "Run a command in a sandbox. Flags go before SANDBOX. The exit status is the command's: 124 for its time-out,\n125 for a failure of Harena, 126 and 127 when it cannot be executed or found, 128+n for a signal.",
		Args: commandArgs,
	}
	fs := cmd.Flags()
	fs.SetInterspersed(false)
	f.add(fs)
	fs.BoolVarP(&detach, "detach", "d", false, "start it, print its ID and do not wait")
	fs.StringVar(&f.session, "session", "", "run it in this shell session, which is made at its first use; a single CMD is text for its shell")
	fs.StringVarP(&user, "user", "u", "", "user, by name or ID, with an optional :group (default the sandbox's)")
	fs.StringVarP(&cwd, "cwd", "w", "", "working directory")
	fs.VarP(&env, "env", "e", "environment; may be repeated; K alone passes on the variable K")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		sb := c.Sandbox(args[0])
		spec := f.cmd(a, command(args))
		spec.User, spec.Cwd, spec.Env = user, cwd, env.m
		if spec.Session != "" && len(spec.Argv) == 1 {
			// Text for the session's shell, such as 'cd /tmp && make'; several words are words of one command.
			spec.Shell, spec.Argv = spec.Argv[0], nil
		}
		if detach {
			return a.detached(cmd.Context(), sb, spec)
		}
		return a.attached(cmd.Context(), sb, spec, nil)
	}
	return cmd
}

// commandArgs checks SANDBOX [--] CMD...
func commandArgs(_ *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return invalid("use harena exec [flags] SANDBOX -- CMD...", "no sandbox was given")
	case len(args) > 1 && strings.HasPrefix(args[1], "-") && args[1] != "--":
		return invalid("put flags before the sandbox, or -- before the command", "%s stands after the sandbox", args[1])
	case len(command(args)) == 0:
		return invalid("use harena exec [flags] SANDBOX -- CMD...", "no command was given")
	}
	return nil
}

// command is what follows SANDBOX [--].
func command(args []string) []string {
	args = args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	return args
}

func (a *app) detached(ctx context.Context, sb *harena.Sandbox, spec harena.Cmd) error {
	if spec.Stdin != nil {
		return invalid("leave -i out", "a detached command has no standard input")
	}
	started, err := sb.StartDetached(ctx, spec)
	if err != nil {
		return err
	}
	if a.json {
		return a.printMessage(started)
	}
	fmt.Fprintln(a.Stdout, started.GetCommandId())
	return nil
}

// report is what run and exec print with --json.
type report struct {
	SandboxID    string   `json:"sandbox_id"`
	CommandID    string   `json:"command_id"`
	ExitCode     int      `json:"exit_code"`
	Signal       string   `json:"signal"`
	TimedOut     bool     `json:"timed_out"`
	OOMKilled    bool     `json:"oom_killed"`
	Truncated    bool     `json:"truncated"`
	Detached     bool     `json:"detached"`
	Stdout       string   `json:"stdout"`
	Stderr       string   `json:"stderr"`
	StdoutBase64 []byte   `json:"stdout_base64,omitempty"` // when stdout is not UTF-8; stdout then has replacement characters
	StderrBase64 []byte   `json:"stderr_base64,omitempty"`
	Message      string   `json:"message,omitempty"`
	Timings      *timings `json:"timings"`
}

type timings struct {
	// From the start of the program's work to: the sandbox, the first byte of
	// output (absent without any), the end of all.
	Create      float64  `json:"create_ms,omitempty"`
	FirstOutput *float64 `json:"first_output_ms,omitempty"`
	Total       float64  `json:"total_ms"`
	// What the server says about the steps.
	Steps map[string]float64 `json:"steps_ms,omitempty"`
}

// follow begins to follow a command, connected to our streams or, with --json,
// captured, and ends with its exit status. tm is run's; nil: none was begun.
func (a *app) follow(ctx context.Context, sb *harena.Sandbox, spec harena.Cmd, tm *timings, begin func(context.Context, harena.Cmd) (*harena.Command, bool, error)) error {
	start := time.Now()
	if tm == nil {
		tm = &timings{Steps: map[string]float64{}}
	} else {
		start = start.Add(-time.Duration(tm.Create * float64(time.Millisecond)))
	}
	stdout, stderr := newCaptured(spec.MaxOutput), newCaptured(spec.MaxOutput)
	if a.json {
		spec.Stdout, spec.Stderr = stdout, stderr
	}
	first := &firstWrite{start: start}
	spec.Stdout, spec.Stderr = first.wrap(spec.Stdout), first.wrap(spec.Stderr)
	// Before anything starts, so that no signal is lost.
	signals, stop := notify()
	defer stop()
	startCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A command whose start is given up may run all the same, with nobody to end it: a signal waits until it has started.
	release := endOn(startCtx, signals, func() { time.AfterFunc(startPatience, cancel) })
	c, tty, err := begin(startCtx, spec)
	if n := release(); n != 0 {
		if err != nil {
			return &ExitError{exitSignal + n}
		}
		if err := kill(c, unix.SignalName(syscall.Signal(n))); err != nil || tty {
			c.Close()
			return &ExitError{exitSignal + n}
		}
	}
	if err != nil {
		return err
	}
	defer c.Close()
	result, err := a.wait(ctx, c, tty, signals)
	if err != nil {
		return err
	}
	tm.Total, tm.FirstOutput = millis(time.Since(start)), first.at()
	for _, t := range result.Proto.GetTimings() {
		tm.Steps["exec."+t.GetStep()] = float64(t.GetMicros()) / 1000
	}
	if !a.json {
		if result.Message != "" {
			fmt.Fprintf(a.Stderr, "harena: %s\n", oneLine(printable(result.Message)))
		}
		return exitWith(result.ExitCode)
	}
	r := report{
		SandboxID: sb.ID(), CommandID: c.ID(), ExitCode: result.ExitCode, Signal: result.Signal, TimedOut: result.TimedOut,
		OOMKilled: result.OOMKilled, Truncated: result.Truncated || stdout.cut || stderr.cut, Detached: result.Detached,
		Message: result.Message, Timings: tm,
	}
	r.Stdout, r.StdoutBase64 = stdout.text()
	r.Stderr, r.StderrBase64 = stderr.text()
	if err := a.printJSON(r); err != nil {
		return err
	}
	return exitWith(result.ExitCode)
}

// startPatience is how long a client that was interrupted waits for the start of its command, to end it.
const startPatience = 3 * time.Second

func exitWith(code int) error {
	if code == 0 {
		return nil
	}
	return &ExitError{code}
}

// endOn cancels when a signal comes. The function that it returns ends that and
// tells which signal came, 0 for none.
func endOn(ctx context.Context, signals <-chan os.Signal, cancel func()) func() int {
	stop := make(chan struct{})
	got := make(chan int, 1)
	go func() {
		select {
		case s := <-signals:
			cancel()
			got <- number(s)
		case <-stop:
			got <- 0
		case <-ctx.Done():
			got <- 0
		}
	}()
	return func() int {
		close(stop)
		return <-got
	}
}

func number(s os.Signal) int {
	if n, ok := s.(syscall.Signal); ok {
		return int(n)
	}
	return 0
}

// givingUp is how many interrupts in a row end the client itself, as with docker.
const givingUp = 3

// wait waits for the command's end. Signals go to the command; on a terminal in
// raw mode the keys do, and a signal to the client ends the client.
func (a *app) wait(ctx context.Context, c *harena.Command, tty bool, signals <-chan os.Signal) (*harena.Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if tty {
		defer a.rawTerminal()()
		go a.followSize(ctx, c)
	}
	interrupts := 0
	type ended struct {
		result *harena.Result
		err    error
	}
	end := make(chan ended, 1)
	go func() {
		r, err := c.Wait(ctx)
		end <- ended{r, err}
	}()
	for {
		select {
		case e := <-end:
			if e.err != nil && errors.Is(e.err, syscall.EPIPE) {
				// Nobody reads our output any more: what a local command would die of.
				_ = kill(c, "SIGPIPE")
				return nil, &ExitError{exitSignal + int(syscall.SIGPIPE)}
			}
			return e.result, e.err
		case s := <-signals:
			n, _ := s.(syscall.Signal)
			if n == syscall.SIGPIPE {
				continue // the write fails too, and is seen above
			}
			if n == syscall.SIGINT {
				interrupts++
			}
			if tty || interrupts >= givingUp {
				return nil, &ExitError{exitSignal + int(n)}
			}
			go func() { _ = kill(c, unix.SignalName(n)) }()
		}
	}
}

func kill(c *harena.Command, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return c.Signal(ctx, name)
}
