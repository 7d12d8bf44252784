package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

func (a *app) eventsCommand() *cobra.Command {
	var f harenav1.EventFilter
	var follow bool
	var record string
	cmd := &cobra.Command{
		Use: "events", Short: "Show what happened to sandboxes", Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if record != "" {
				return unsupported("events --record", "recording is not built yet; redirect `harena events --follow --json` to a file")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if follow {
				return c.FollowEvents(cmd.Context(), &f, a.printEvent)
			}
			list, err := c.Events(cmd.Context(), &f)
			if err != nil {
				return err
			}
			if a.json {
				return printList(a, list)
			}
			for _, e := range list {
				if err := a.printEvent(e); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&f.SandboxId, "sandbox", "", "only of this sandbox")
	cmd.Flags().StringVar(&f.Job, "job", "", "only of this job")
	cmd.Flags().StringVar(&f.Kind, "kind", "", "only of kinds that begin so, such as sandbox.")
	cmd.Flags().Int64Var(&f.AfterSeq, "after", 0, "only those after this sequence number")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with new ones as they happen; with --json one object a line")
	cmd.Flags().StringVar(&record, "record", "", "write a record to this file")
	cmd.AddCommand(laterCommand("verify", "events verify", "hash-chained logs are not built yet"))
	return cmd
}

// printEvent prints one event in one line.
func (a *app) printEvent(e *harenav1.Event) error {
	if a.json {
		raw, err := rawJSON(e)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.Stdout, "%s\n", raw)
		return err
	}
	line := fmt.Sprintf("%s %-22s %-20s %s", e.GetTime().AsTime().Local().Format(time.RFC3339), e.GetKind(), e.GetSandboxId(), e.GetMessage())
	if attrs := pairs(e.GetAttributes()); attrs != "" {
		line += " " + attrs
	}
	_, err := fmt.Fprintln(a.Stdout, printable(line))
	return err
}

func (a *app) fleetCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "fleet", Short: "Show and steer the edges", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	cmd.AddCommand(
		&cobra.Command{Use: "ls", Short: "List edges", Args: exactly(0, "flags only"), RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			edges, err := c.Edges(cmd.Context())
			if err != nil {
				return err
			}
			return a.edges(edges)
		}},
		a.steer("drain", "Keep new sandboxes away from an edge", (*harena.Client).Drain),
		a.steer("undrain", "Let new sandboxes onto an edge again", (*harena.Client).Undrain),
	)
	return cmd
}

func (a *app) steer(name, what string, call func(*harena.Client, context.Context, string) (*harenav1.Edge, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " [EDGE]", Short: what,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return invalid("`harena fleet ls` lists them", "expected one edge, got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			edge, err := call(c, cmd.Context(), append(args, "")[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(edge)
			}
			fmt.Fprintf(a.Stdout, "%s %s\n", edge.GetId(), edge.GetState())
			return nil
		},
	}
}

func (a *app) edges(edges []*harenav1.Edge) error {
	if a.json {
		return printList(a, edges)
	}
	var rows [][]string
	for _, e := range edges {
		running := int64(0)
		for _, n := range e.GetSandboxesByBackend() {
			running += n
		}
		rows = append(rows, []string{
			e.GetId(), e.GetState(), fmt.Sprint(running), fmt.Sprint(e.GetCpuCores()),
			size(e.GetMemoryAvailableBytes()) + " of " + size(e.GetMemoryBytes()), size(e.GetDiskAvailableBytes()), e.GetVersion(),
		})
	}
	return a.table("EDGE STATE SANDBOXES CPU MEMORY DISK VERSION", rows)
}

// exitUnclean tells that doctor found something.
const exitUnclean = 1

func (a *app) doctorCommand() *cobra.Command {
	var edge, data string
	cmd := &cobra.Command{
		Use: "doctor", Short: "Show what a node supports, what is degraded, and what leaked",
		Long: "Show what a node supports, what is degraded or unverified, and what leaked. When no server answers, the\ndata directory of this machine is inspected. The exit status is 1 when something failed or leaked.",
		Args: exactly(0, "flags only"),
	}
	cmd.Flags().StringVar(&edge, "edge", "", "the edge (default the only one)")
	cmd.Flags().StringVar(&data, "data", "/var/lib/harena", "data directory to inspect when no server answers")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := a.diagnose(cmd.Context(), edge, data)
		if err != nil {
			return err
		}
		if a.json {
			err = a.printMessage(report)
		} else {
			err = a.printReport(report)
		}
		if err == nil && !report.GetClean() {
			err = &ExitError{exitUnclean}
		}
		return err
	}
	return cmd
}

func (a *app) diagnose(ctx context.Context, edge, data string) (*harenav1.DoctorResponse, error) {
	c, err := a.client()
	if err == nil {
		var report *harenav1.DoctorResponse
		if report, err = c.Doctor(ctx, edge); err == nil {
			return report, nil
		}
	}
	// Without a server, or without knowing one.
	if a.OfflineDoctor == nil || edge != "" || !errors.Is(err, harena.ErrUnreachable) && !harena.IsKind(err, harena.KindInvalid) {
		return nil, err
	}
	fmt.Fprintf(a.Stderr, "harena: no server answers; inspecting %s\n", data)
	return a.OfflineDoctor(ctx, data)
}

func (a *app) printReport(r *harenav1.DoctorResponse) error {
	counts := map[string]int{}
	var rows [][]string
	for _, c := range r.GetChecks() {
		counts[c.GetStatus()]++
		detail := c.GetDetail()
		if c.GetHint() != "" {
			detail += " (" + c.GetHint() + ")"
		}
		rows = append(rows, []string{c.GetStatus(), c.GetName(), oneLine(detail)})
	}
	if err := a.table("STATUS CHECK DETAIL", rows); err != nil {
		return err
	}
	verdict := "clean: nothing failed, nothing leaked"
	if !r.GetClean() {
		verdict = fmt.Sprintf("not clean: %d failed, %d leaked", counts["failed"], counts["leaked"])
	}
	fmt.Fprintf(a.Stdout, "%s; %d ok, %d degraded, %d unsupported, %d unverified\n", verdict, counts["ok"], counts["degraded"], counts["unsupported"], counts["unverified"])
	return nil
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the versions of this program and of the server", Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := struct {
				Client string          `json:"client"`
				Server json.RawMessage `json:"server"`
			}{Client: a.Version, Server: json.RawMessage("null")}
			server := "none answers"
			if c, err := a.client(); err == nil {
				ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second)
				defer cancel()
				if v, err := c.Version(ctx); err == nil {
					server = v.GetVersion() + " (" + v.GetApi() + ")"
					if out.Server, err = rawJSON(v); err != nil {
						return err
					}
				}
			}
			if a.json {
				return a.printJSON(out)
			}
			fmt.Fprintf(a.Stdout, "harena %s\nserver %s\n", a.Version, server)
			return nil
		},
	}
}
