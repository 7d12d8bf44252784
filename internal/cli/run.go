package cli

import (
	"context"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// A sandbox of run lives on a lease: when the client dies, it stops by itself.
const (
	runLease  = 20 * time.Second
	runRenew  = 5 * time.Second
	runRemove = 30 * time.Second
)

func (a *app) runCommand() *cobra.Command {
	var f createFlags
	var cf commandFlags
	cmd := &cobra.Command{
		Use: "run --image NAME [flags] [[--] CMD...]", Short: "Create a sandbox, run a command in it, and stop it",
		Long: "Create a sandbox, run a command in it, and stop and remove the sandbox. The exit status is the command's, as with exec.\nWithout CMD the image's own command runs: its entrypoint followed by its arguments. CMD replaces both.\nWhen this program dies, the sandbox stops within 30 seconds.",
	}
	cmd.Flags().SetInterspersed(false)
	f.add(cmd.Flags())
	cf.add(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		spec, err := f.toSpec()
		if err != nil {
			return err
		}
		spec.Lease = runLease
		return a.run(cmd.Context(), spec, cf.cmd(a, args))
	}
	return cmd
}

// imageCommand returns what an image runs by itself.
func imageCommand(ctx context.Context, c *harena.Client, image string) ([]string, error) {
	l, err := c.Layer(ctx, image)
	if err != nil {
		return nil, err
	}
	argv := slices.Concat(l.GetConfig().GetEntrypoint(), l.GetConfig().GetCmd())
	if len(argv) == 0 {
		return nil, invalid("use harena run --image NAME -- CMD...", "no command was given, and image %s has none", image)
	}
	return argv, nil
}

func (a *app) run(ctx context.Context, spec harena.Spec, command harena.Cmd) (err error) {
	c, err := a.client()
	if err != nil {
		return err
	}
	if len(command.Argv) == 0 {
		if command.Argv, err = imageCommand(ctx, c, spec.Image); err != nil {
			return err
		}
	}
	start := time.Now()
	sb, err := a.createInterruptibly(ctx, c, spec)
	if err != nil {
		return err
	}
	defer func() {
		remove, cancel := context.WithTimeout(context.WithoutCancel(ctx), runRemove)
		defer cancel()
		if rerr := sb.Remove(remove); rerr != nil {
			a.warn("the sandbox " + sb.ID() + " was not removed: " + rerr.Error())
		}
	}()
	renewing, stop := context.WithCancel(ctx)
	defer stop()
	go renew(renewing, sb)
	tm := &timings{Create: millis(time.Since(start)), Steps: map[string]float64{}}
	for _, t := range sb.Timings {
		tm.Steps["create."+t.GetStep()] = float64(t.GetMicros()) / 1000
	}
	return a.attached(ctx, sb, command, tm)
}

// createInterruptibly gives the creation up when a signal comes; what then still
// comes to exist has a lease that nobody renews.
func (a *app) createInterruptibly(ctx context.Context, c *harena.Client, spec harena.Spec) (*harena.Sandbox, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	release := endOn(ctx, signals, cancel)
	sb, err := c.CreateSandbox(ctx, spec)
	if n := release(); n != 0 {
		if err == nil {
			remove, cancel := context.WithTimeout(context.WithoutCancel(ctx), runRemove)
			defer cancel()
			_ = sb.Remove(remove)
		}
		return nil, &ExitError{exitSignal + n}
	}
	return sb, err
}

// renew renews the lease until ctx ends. A renewal that fails is tried again soon.
func renew(ctx context.Context, sb *harena.Sandbox) {
	tick := time.NewTicker(runRenew)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			once, cancel := context.WithTimeout(ctx, runRenew)
			_ = sb.Renew(once)
			cancel()
		case <-ctx.Done():
			return
		}
	}
}
