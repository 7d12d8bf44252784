package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// selectFlags are the flags of commands on groups.
type selectFlags struct {
	labels pairsValue
	job    string
}

func (f *selectFlags) add(cmd *cobra.Command) {
	cmd.Flags().VarP(&f.labels, "label", "l", "all with the label; may be repeated")
	cmd.Flags().StringVar(&f.job, "job", "", "all of the job")
}

func (f *selectFlags) selector(args []string) (*harenav1.Selector, error) {
	if len(args) == 0 && f.job == "" && len(f.labels.m) == 0 {
		return nil, invalid("give IDs, --job or --label", "no sandbox was selected")
	}
	return &harenav1.Selector{Ids: args, Job: f.job, Labels: f.labels.m}, nil
}

func (a *app) pauseCommand() *cobra.Command {
	var f selectFlags
	cmd := &cobra.Command{
		Use: "pause SANDBOX... | --job J | --label K=V", Short: "Stop sandboxes where they are and give their memory back",
		Long: "Stop everything in sandboxes where it is, and give their memory back to the node. Commands that run stay attached and go on\nwhen the sandbox is resumed, which the next exec, copy, snapshot or fork does by itself. Prints the IDs; what was given back is\nsaid on standard error, and with --json.",
	}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.onGroup(cmd.Context(), &f, args, (*harena.Client).PauseSandboxes)
	}
	return cmd
}

func (a *app) resumeCommand() *cobra.Command {
	var f selectFlags
	cmd := &cobra.Command{
		Use: "resume SANDBOX... | --job J | --label K=V", Short: "Let paused sandboxes go on",
	}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.onGroup(cmd.Context(), &f, args, (*harena.Client).ResumeSandboxes)
	}
	return cmd
}

type groupCall func(*harena.Client, context.Context, *harenav1.Selector) ([]*harenav1.Outcome, error)

func (a *app) onGroup(ctx context.Context, f *selectFlags, args []string, call groupCall) error {
	sel, err := f.selector(args)
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	outcomes, err := call(c, ctx, sel)
	if err != nil {
		return err
	}
	if !a.json {
		for _, o := range outcomes {
			if p := o.GetPause(); p != nil {
				fmt.Fprintf(a.Stderr, "%s: %s\n", o.GetSandboxId(), gaveBack(p))
			}
		}
	}
	return a.outcomes(outcomes)
}

// gaveBack says in one line what a pause gave back.
func gaveBack(p *harenav1.PauseReport) string {
	s := fmt.Sprintf("%s → %s in %v (%s swapped, %s of cache dropped); node: %s available",
		size(p.GetMemoryBefore()), size(p.GetMemoryAfter()), (p.GetFreezeTook().AsDuration() + p.GetReclaimTook().AsDuration()).Round(time.Millisecond),
		size(p.GetSwapped()), size(p.GetCacheDropped()), signed(p.GetNodeAvailableAfter()-p.GetNodeAvailableBefore()))
	if p.GetZramGrew() != 0 {
		s += ", zram holds " + signed(p.GetZramGrew())
	}
	if p.GetDiskSwapGrew() != 0 {
		s += ", disk swap " + signed(p.GetDiskSwapGrew())
	}
	if p.GetNote() != "" {
		s += "; " + printable(p.GetNote())
	}
	return s
}

func signed(n int64) string {
	if n < 0 {
		return "-" + size(-n)
	}
	return "+" + size(n)
}

func (a *app) jobCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "job", Short: "Show jobs and lease them"}
	cmd.AddCommand(a.jobLsCommand(), a.jobLeaseCommand())
	return cmd
}

func (a *app) jobLsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List jobs that have live sandboxes or a lease", Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			jobs, err := c.Jobs(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return printList(a, jobs)
			}
			var rows [][]string
			for _, j := range jobs {
				states := map[string]string{}
				for state, n := range j.GetSandboxesByState() {
					states[state] = fmt.Sprint(n)
				}
				row := []string{j.GetName(), j.GetProject(), pairs(states), "", "", "", ""}
				if l := j.GetLease(); l != nil {
					row[3], row[4], row[5] = l.GetState(), l.GetDuration().AsDuration().String(), until(l.GetLapses().AsTime())
					if l.GetStops() != nil {
						row[6] = until(l.GetStops().AsTime())
					}
				}
				rows = append(rows, row)
			}
			return a.table("JOB PROJECT SANDBOXES LEASE DURATION LAPSES STOPS", rows)
		},
	}
}

func until(t time.Time) string {
	d := time.Until(t).Round(time.Second)
	if d < 0 {
		return (-d).String() + " ago"
	}
	return "in " + d.String()
}

func (a *app) jobLeaseCommand() *cobra.Command {
	var o harena.JobLease
	var stopAfter durationValue
	cmd := &cobra.Command{
		Use: "lease JOB [D]", Short: "Give a job a lease, renew it, or end it",
		Long: "Give a job a lease of D, or renew the one that it has. When it is not renewed in time it lapses: the job's sandboxes are paused,\nand stopped after a further time (--stop-after, one hour), or stopped at once (--on-lapse stop); no sandbox can join the job until\nthe lease is renewed. A D of 0 ends the lease.",
	}
	cmd.Flags().StringVar(&o.OnLapse, "on-lapse", "", "pause (default) or stop")
	cmd.Flags().Var(&stopAfter, "stop-after", "stop this long after the lapse, 0 for never (default 1h)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) < 1 || len(args) > 2 {
			return invalid("see --help", "expected a job and a time, got %d arguments", len(args))
		}
		if len(args) == 2 {
			d, err := parseDuration(args[1])
			if err != nil {
				return invalid("see --help", "%v", err)
			}
			o.Duration = orNever(d)
		}
		if stopAfter.set {
			o.StopAfter = orNever(stopAfter.d)
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		j, err := c.LeaseJob(cmd.Context(), args[0], o)
		if err != nil {
			return err
		}
		if a.json {
			return a.printMessage(j)
		}
		if l := j.GetLease(); l != nil {
			fmt.Fprintf(a.Stdout, "%s: %s, lapses %s\n", j.GetName(), l.GetState(), until(l.GetLapses().AsTime()))
			return nil
		}
		fmt.Fprintf(a.Stdout, "%s: no lease\n", j.GetName())
		return nil
	}
	return cmd
}

func orNever(d time.Duration) time.Duration {
	if d == 0 {
		return harena.Never
	}
	return d
}
