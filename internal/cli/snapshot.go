package cli

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

func (a *app) snapshotCommand() *cobra.Command {
	var o harena.SnapshotOptions
	var labels pairsValue
	var job, rules string
	cmd := &cobra.Command{
		Use: "snapshot SANDBOX... | --job J | --label K=V --name NAME[:TAG]", Short: "Make an image of what a sandbox changed",
		Long: "Make a layer of what a sandbox changed; it is then an image: `harena run --image NAME`. The sandbox goes on.\n\n" +
			"Residue (caches, histories, logs, credentials …) is left out: docs/snapshots.md has the rules. What would hurt others or give\n" +
			"something away is reported. Of several sandboxes each gets NAME-ID.",
	}
	cmd.Flags().StringVar(&o.Name, "name", "", "`NAME`[:TAG] of the layer")
	cmd.Flags().BoolVar(&o.NoClean, "no-clean", false, "leave residue in")
	cmd.Flags().StringVar(&rules, "rules", "", "residue rules beside the defaults: `FILE` of patterns, one a line")
	cmd.Flags().StringArrayVar(&o.Keep, "keep", nil, "`PATH` or pattern that is no residue; may be repeated")
	cmd.Flags().BoolVar(&o.Strict, "strict", false, "fail when something is found")
	cmd.Flags().StringVar(&o.RequestID, "request-id", "", "repeating a request with the same ID returns the first one's result")
	cmd.Flags().VarP(&labels, "label", "l", "all with the label; may be repeated")
	cmd.Flags().StringVar(&job, "job", "", "all of the job")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 && job == "" && len(labels.m) == 0 {
			return invalid("give IDs, --job or --label", "no sandbox was selected")
		}
		if o.Name == "" {
			return invalid("add --name NAME[:TAG]", "no name was given")
		}
		if rules != "" {
			b, err := os.ReadFile(rules)
			if err != nil {
				return invalid("name a file of patterns, one a line", "the rules cannot be read: %v", err)
			}
			o.Rules = string(b)
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		list, err := c.Snapshots(cmd.Context(), &harenav1.Selector{Ids: args, Job: job, Labels: labels.m}, o)
		if err != nil {
			return err
		}
		return a.printSnapshots(list)
	}
	return cmd
}

// snapshotJSON is a snapshot as --json prints it.
type snapshotJSON struct {
	SandboxID    string   `json:"sandbox_id"`
	Name         string   `json:"name,omitempty"`
	Digest       string   `json:"digest,omitempty"`
	FrozenMS     float64  `json:"frozen_ms"`
	StoredBytes  int64    `json:"stored_bytes"`
	LogicalBytes int64    `json:"logical_bytes"`
	Added        []string `json:"added"`
	Changed      []string `json:"changed"`
	Deleted      []string `json:"deleted"`
	Cleaned      []string `json:"cleaned"`
	Counts       any      `json:"counts"`
	Findings     []string `json:"findings"`
	Warnings     []string `json:"warnings"`
	TimingsMS    any      `json:"timings_ms,omitempty"`
	Error        string   `json:"error,omitempty"`
}

func (a *app) printSnapshots(list []*harena.Snapshot) error {
	failed := false
	out := make([]snapshotJSON, 0, len(list))
	for _, s := range list {
		j := snapshotJSON{
			SandboxID: s.SandboxID, Name: s.Layer.GetName(), Digest: s.Layer.GetDigest(), FrozenMS: ms(s.Frozen),
			StoredBytes: s.StoredBytes, LogicalBytes: s.LogicalBytes,
			Added: some(s.Added), Changed: some(s.Changed), Deleted: some(s.Deleted), Cleaned: some(s.Cleaned), Findings: some(s.Findings), Warnings: some(s.Warnings),
			Counts: map[string]int64{"added": s.AddedCount, "changed": s.ChangedCount, "deleted": s.DeletedCount, "cleaned": s.CleanedCount},
		}
		steps := map[string]float64{}
		for _, t := range s.Timings {
			steps[t.GetStep()] = ms(time.Duration(t.GetMicros()) * time.Microsecond)
		}
		j.TimingsMS = steps
		if s.Err != nil {
			failed = true
			j.Error = oneLine(s.Err.Error())
			a.complain(s.Err)
		}
		out = append(out, j)
		if !a.json {
			a.printSnapshot(s)
		}
	}
	if a.json {
		var err error
		if len(out) == 1 {
			err = a.printJSON(out[0])
		} else {
			err = a.printJSON(out)
		}
		if err != nil {
			return err
		}
	}
	if failed {
		return &ExitError{exitFailure}
	}
	return nil
}

// printSnapshot prints the layer's digest on standard output, and what there is to say of it on standard error.
func (a *app) printSnapshot(s *harena.Snapshot) {
	for _, w := range s.Warnings {
		a.warn(printable(w))
	}
	for _, f := range s.Findings {
		fmt.Fprintf(a.Stderr, "found: %s\n", printable(f))
	}
	if s.Err != nil {
		return
	}
	fmt.Fprintf(a.Stderr, "%s of sandbox %s: %d added, %d changed, %d deleted, %d cleaned; %s stored of %s; frozen for %.1f ms\n",
		printable(s.Layer.GetName()), s.SandboxID, s.AddedCount, s.ChangedCount, s.DeletedCount, s.CleanedCount, size(s.StoredBytes), size(s.LogicalBytes), ms(s.Frozen))
	fmt.Fprintln(a.Stdout, s.Layer.GetDigest())
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// some is a list that is never null in JSON.
func some(l []string) []string {
	if l == nil {
		return []string{}
	}
	return l
}

func (a *app) forkCommand() *cobra.Command {
	var o harena.ForkOptions
	var labels pairsValue
	cmd := &cobra.Command{
		Use: "fork SANDBOX -n N", Short: "Make sandboxes with the same files and print their IDs",
		Long: "Make N sandboxes whose files are those of SANDBOX at one instant, and print their IDs, one a line. Processes, memory and what lies\n" +
			"in memory file systems are not shared. All N are made, or none.",
		Args: exactly(1, "a sandbox"),
	}
	cmd.Flags().IntVarP(&o.Count, "count", "n", 1, "how many")
	cmd.Flags().VarP(&labels, "label", "l", "label beside those of SANDBOX; may be repeated")
	cmd.Flags().StringVar(&o.Job, "job", "", "the job that they belong to (default that of SANDBOX)")
	cmd.Flags().StringVar(&o.RequestID, "request-id", "", "repeating a request with the same ID returns the first one's result")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		o.Labels = labels.m
		f, err := c.Sandbox(args[0]).Fork(cmd.Context(), o)
		if err != nil {
			return err
		}
		var list []*harenav1.Sandbox
		for _, s := range f.Sandboxes {
			list = append(list, s.Info())
			if !a.json {
				fmt.Fprintln(a.Stdout, s.ID())
			}
		}
		if a.json {
			return printList(a, list)
		}
		return nil
	}
	return cmd
}
