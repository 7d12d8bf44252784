package cli

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/harena-dev/harena/sdk/go/harena"
)

func (a *app) layerGC() *cobra.Command {
	var o harena.CollectOptions
	cmd := &cobra.Command{
		Use: "gc", Short: "Free layers that no name and no sandbox reaches", Args: exactly(0, "flags only"),
		Long: "Free layers that no name and no sandbox reaches. With --shared those of the store that nodes share: what a node\nmakes use of, and what is younger than --grace, stays.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("grace") && !o.Shared {
				return invalid("give it together with --shared", "--grace is for the shared store only")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			p := a.newProgress()
			o.Progress = func(phase string, seen int64) { p.report(phase, fmt.Sprintf("%d looked at", seen), 0, 0) }
			res, err := c.CollectGarbage(cmd.Context(), o)
			p.end()
			if err != nil {
				return err
			}
			for _, s := range res.GetProblems() {
				a.warn(oneLine(printable(s)))
			}
			if a.json {
				return a.printMessage(res)
			}
			for _, d := range res.GetDigests() {
				fmt.Fprintln(a.Stdout, d)
			}
			verb := map[bool]string{false: "freed", true: "would free"}[o.DryRun]
			fmt.Fprintf(a.Stdout, "%s %d layers, %s\n", verb, len(res.GetDigests()), size(res.GetFreedBytes()))
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.DryRun, "dry-run", false, "only tell what would go")
	cmd.Flags().BoolVar(&o.Shared, "shared", false, "collect in the store that nodes share")
	cmd.Flags().DurationVar(&o.Grace, "grace", 24*time.Hour, "keep what is younger, at least 1h (with --shared)")
	return cmd
}

func (a *app) layerReach() *cobra.Command {
	var next string
	cmd := &cobra.Command{
		Use: "reach NAME[:TAG]", Short: "Show what was made from a name, and what pointing it elsewhere changes", Args: exactly(1, "a name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			r, err := c.ReachOfLayer(cmd.Context(), args[0], next)
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(r)
			}
			fmt.Fprintf(a.Stdout, "%s %s\n", r.GetName(), r.GetDigest())
			which := map[bool]string{true: "current", false: "earlier"}
			var rows [][]string
			for _, b := range r.GetSandboxes() {
				rows = append(rows, []string{"sandbox", b.GetId(), b.GetState(), which[b.GetCurrent()], short(b.GetDigest())})
			}
			for _, l := range r.GetLayers() {
				name := strings.Join(l.GetNames(), ",")
				if name == "" {
					name = short(l.GetDigest())
				}
				rows = append(rows, []string{"layer", name, l.GetKind(), which[l.GetCurrent()], short(l.GetParent())})
			}
			for _, n := range r.GetNames() {
				rows = append(rows, []string{"name", n, "", "current", short(r.GetDigest())})
			}
			if len(rows) > 0 {
				if err := a.table("WHAT NAME STATE MADE-FROM DIGEST", rows); err != nil {
					return err
				}
			}
			for _, e := range r.GetEffects() {
				fmt.Fprintln(a.Stdout, e)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&next, "to", "", "a `LAYER` that the name is to point at")
	return cmd
}

func (a *app) layerPush() *cobra.Command {
	return &cobra.Command{
		Use: "push NAME...", Short: "Copy layers that only this node has to the store that nodes share",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return invalid("`harena layer ls` lists them", "no layer was named")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			for _, name := range args {
				p := a.newProgress()
				l, err := c.PushLayer(cmd.Context(), name, func(i harena.ImportProgress) { p.report(i.Phase, i.Message, i.Done, i.Total) })
				p.end()
				if err != nil {
					return err
				}
				if a.json {
					if err := a.printMessage(l); err != nil {
						return err
					}
					continue
				}
				fmt.Fprintf(a.Stdout, "%s %s\n", l.GetDigest(), name)
			}
			return nil
		},
	}
}
