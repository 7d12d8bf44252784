package cli

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// attach follows a running or ended command.
func (a *app) attach(ctx context.Context, sb *harena.Sandbox, id string, interactive bool) error {
	return a.follow(ctx, sb, harena.Cmd{Stdout: a.Stdout, Stderr: a.Stderr}, nil, func(ctx context.Context, spec harena.Cmd) (*harena.Command, bool, error) {
		tty := false
		if _, ok := terminal(a.Stdin); ok && interactive {
			list, err := sb.Commands(ctx)
			if err != nil {
				return nil, false, err
			}
			for _, c := range list {
				tty = tty || c.GetCommandId() == id && c.GetPty()
			}
		}
		c, err := sb.Attach(ctx, id, spec.Stdout, spec.Stderr)
		if err == nil && interactive {
			go func() {
				_, _ = io.Copy(c.Stdin(), a.Stdin)
				_ = c.Stdin().Close()
			}()
		}
		return c, tty, err
	})
}

// attached starts a command, connected to our streams, and ends with its exit status.
func (a *app) attached(ctx context.Context, sb *harena.Sandbox, spec harena.Cmd, tm *timings) error {
	return a.follow(ctx, sb, spec, tm, func(ctx context.Context, spec harena.Cmd) (*harena.Command, bool, error) {
		c, err := sb.Start(ctx, spec)
		return c, spec.PTY != nil, err
	})
}

// notify collects the signals that are for the command rather than for us.
func notify() (signals chan os.Signal, stop func()) {
	signals = make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	return signals, func() { signal.Stop(signals) }
}
