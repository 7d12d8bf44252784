package cli

import (
	"context"
	"fmt"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/harena-dev/harena/internal/cli/bench"
)

func (a *app) benchCommand() *cobra.Command {
	var o bench.Options
	cmd := &cobra.Command{
		Use: "bench " + strings.Join(bench.Names(), "|"), Short: "Measure this node, beside the floor and other tools on it",
		Args: exactly(1, "one of "+strings.Join(bench.Names(), ", ")),
	}
	cmd.Flags().IntVarP(&o.N, "count", "n", 0, "how many samples (default the measure's own)")
	cmd.Flags().IntVarP(&o.Concurrency, "concurrency", "c", 0, "how many at once (default the measure's own)")
	cmd.Flags().StringVar(&o.Image, "image", "", "base layer with a shell (default a layer of busybox, made when missing)")
	cmd.Flags().Var((*sizeValue)(&o.Size), "size", "content of the image that layer makes (default 1500m)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		if !a.json {
			o.Progress = a.Stderr
		}
		// What a measure has started it ends itself; a second signal does not wait for that.
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		defer stop()
		context.AfterFunc(ctx, stop)
		report, err := bench.Run(ctx, c, args[0], o)
		if err != nil {
			return fmt.Errorf("bench %s: %w", args[0], err)
		}
		if a.json {
			return a.printJSON(report)
		}
		return report.Print(a.Stdout)
	}
	return cmd
}
