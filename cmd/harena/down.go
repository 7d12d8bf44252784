package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/errs"
)

// stopTime bounds the end of all sandboxes.
const stopTime = 5 * time.Minute

func downCommand() *cobra.Command {
	var data, guest string
	cmd := &cobra.Command{
		Use: "down", Short: "Stop all sandboxes and the server of a node",
		Long: "Stop all sandboxes and the server of a node. Layers and events are kept; nothing stays mounted or running.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return shown(down(cmd.Context(), data, guest, cmd.OutOrStdout(), cmd.ErrOrStderr()))
		},
	}
	dataFlag(cmd, &data)
	cmd.Flags().StringVar(&guest, "guest", "", "`PATH` of harena-guest (default beside this program)")
	return cmd
}

// down ends the server, if one runs, and then takes the node over to stop what
// lives on: the same way whether the server answers, hangs or was killed.
func down(ctx context.Context, data, guest string, stdout, stderr io.Writer) error {
	if err := needRoot("down"); err != nil {
		return err
	}
	log, err := logger("warn", stderr)
	if err != nil {
		return err
	}
	info, err := datadir.Inspect(data)
	if err != nil {
		return err
	}
	if info.ServerPid != "" {
		fmt.Fprintf(stdout, "ending the server with pid %s\n", info.ServerPid)
		if err := endServer(ctx, data, info.ServerPid); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	n, err := openNode(ctx, nodeConfig{data: data, guest: guest, lockWait: lockWait, log: log})
	if err != nil {
		return datadir.Fault("take the node over", data, err)
	}
	fmt.Fprintln(stdout, "stopping sandboxes")
	if err := n.down(ctx); err != nil {
		return err
	}
	fmt.Fprintln(stdout, "down")
	return nil
}

// endServer sends SIGTERM, and SIGKILL when that does not help. It refers to the
// process by a descriptor, so that a reused ID is not signalled.
func endServer(ctx context.Context, data, pid string) error {
	n, err := strconv.Atoi(pid)
	if err != nil || n <= 1 {
		return errs.E(errs.Precondition, "another process has %s, and which one is not known", data).WithHint("end it and try again")
	}
	fd, err := unix.PidfdOpen(n, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", n, err)
	}
	defer func() { _ = unix.Close(fd) }()
	// Opened now, it is the server only if the directory is still held under this ID.
	if info, err := datadir.Inspect(data); err != nil || info.ServerPid != pid {
		return err
	}
	for _, step := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{unix.SIGTERM, shutdownTime + 2*drainTime}, {unix.SIGKILL, lockWait}} {
		if err := unix.PidfdSendSignal(fd, step.signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal process %d: %w", n, err)
		}
		ended, err := waitPidfd(ctx, fd, step.wait)
		if ended || err != nil {
			return err
		}
	}
	return errs.E(errs.Timeout, "the server with pid %d does not end", n).WithHint("it hangs in the kernel; look at /proc/%d/stack", n)
}

// waitPidfd waits until the process has ended: its descriptor becomes readable.
func waitPidfd(ctx context.Context, fd int, patience time.Duration) (bool, error) {
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100) //nolint:gosec // a descriptor fits
		if n > 0 {
			return true, nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, fmt.Errorf("wait for the server's end: %w", err)
		}
	}
	return false, nil
}
