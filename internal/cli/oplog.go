package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

func (a *app) logCommand() *cobra.Command {
	var o harena.LogOptions
	cmd := &cobra.Command{
		Use: "log SANDBOX", Short: "Print what callers had a sandbox do, in order",
		Long: "Print the operation log of a sandbox, also of one that has failed: commands with their input and how they ended, changes of files, sessions.\nWith --json it is JSON Lines, which `harena replay` runs again.",
		Args: exactly(1, "a sandbox"),
	}
	cmd.Flags().BoolVarP(&o.Follow, "follow", "f", false, "go on with what is to come")
	cmd.Flags().Int64Var(&o.From, "from", 0, "number of the first entry")
	cmd.Flags().BoolVar(&o.NoContent, "no-content", false, "leave out the content of files and large inputs, without which a replay skips what needs it")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		print := a.logLine
		if a.json {
			print = a.jsonLine
		} else {
			o.NoContent = true
		}
		return c.Sandbox(args[0]).Log(cmd.Context(), o, print)
	}
	return cmd
}

// logLine prints an entry for people.
func (a *app) logLine(e *harenav1.LogEntry) error {
	_, err := fmt.Fprintf(a.Stdout, "%6d  %s  %s\n", e.GetNumber(), e.GetTime().AsTime().Local().Format(time.TimeOnly), printable(cut(oneLine(harena.DescribeEntry(e)), 200)))
	return err
}

func (a *app) jsonLine(e *harenav1.LogEntry) error {
	raw, err := compactJSON(e)
	if err != nil {
		return err
	}
	_, err = a.Stdout.Write(append(raw, '\n'))
	return err
}

func (a *app) replayCommand() *cobra.Command {
	var image string
	var stop, codes, remove bool
	cmd := &cobra.Command{
		Use: "replay LOG", Short: "Run an operation log again in a new sandbox, and compare",
		Long: "Run an operation log again, in order, in a new sandbox made as the first one was, and print its ID. LOG is a file that\n`harena log --json` made, - for standard input, or a sandbox whose log is taken.\n" +
			"What is different is reported for each step: exit codes, and the digests of what was printed. The exit status is 1 when\nanything is; outputs that tell times or process IDs always are, see --codes.",
		Args: exactly(1, "a log"),
	}
	fs := cmd.Flags()
	fs.StringVar(&image, "image", "", "image of the new sandbox (default the log's)")
	fs.BoolVar(&stop, "stop", false, "stop at the first difference")
	fs.BoolVar(&codes, "codes", false, "compare exit codes only, not what was printed")
	fs.BoolVar(&remove, "rm", false, "stop and remove the new sandbox at the end")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		log, err := a.openLog(cmd.Context(), c, args[0])
		if err != nil {
			return err
		}
		defer func() { _ = log.Close() }()
		if log.CutOff {
			a.warn("the last line of the log is cut off, and left out")
		}
		spec := log.Header.GetSpec()
		if spec == nil {
			spec = &harenav1.SandboxSpec{}
		}
		if image != "" {
			spec.Image = image
		}
		if spec.GetImage() == "" {
			return invalid("name one with --image", "the log does not say of which image the sandbox was made")
		}
		sb, err := c.CreateFromSpec(cmd.Context(), spec)
		if err != nil {
			return err
		}
		if remove {
			defer func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), runRemove)
				defer cancel()
				if err := sb.Remove(ctx); err != nil {
					a.warn("the sandbox " + sb.ID() + " was not removed: " + err.Error())
				}
			}()
		}
		return a.replay(cmd.Context(), sb, log, stop, codes)
	}
	return cmd
}

// openLog reads a log from wherever its name says.
func (a *app) openLog(ctx context.Context, c *harena.Client, name string) (*harena.LogFile, error) {
	if name == "-" {
		return harena.ReadLog(a.Stdin)
	}
	f, err := os.Open(name)
	switch {
	case err == nil:
		defer func() { _ = f.Close() }()
		return harena.ReadLog(f)
	case !errors.Is(err, fs.ErrNotExist) || strings.ContainsAny(name, "/."):
		return nil, invalid("LOG is a file, - or a sandbox", "%s", err)
	}
	log, err := harena.NewLogFile()
	if err != nil {
		return nil, err
	}
	err = c.Sandbox(name).Log(ctx, harena.LogOptions{}, log.Add)
	if err == nil {
		err = log.Whole()
	}
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	return log, nil
}

// replayReport is what replay prints with --json, after the steps.
type replayReport struct {
	SandboxID string       `json:"sandbox_id"`
	Steps     int          `json:"steps"`
	Same      int          `json:"same"`
	Diverged  int          `json:"diverged"`
	Codes     int          `json:"diverged_in_exit_code"` // or that could not be done at all
	Skipped   int          `json:"skipped"`
	Details   []replayStep `json:"details"`
}

type replayStep struct {
	Number      int64              `json:"number"`
	CommandID   string             `json:"command_id,omitempty"`
	What        string             `json:"what"`
	Status      string             `json:"status"` // same, diverged, skipped
	Skipped     string             `json:"skipped,omitempty"`
	Differences []replayDifference `json:"differences,omitempty"`
}

type replayDifference struct {
	What string `json:"what"`
	Was  string `json:"was"`
	Now  string `json:"now"`
}

var errStopped = errors.New("stopped at the first difference")

func isOutput(d harena.Difference) bool { return d.What == "stdout" || d.What == "stderr" }

func (a *app) replay(ctx context.Context, sb *harena.Sandbox, log *harena.LogFile, stop, codes bool) error {
	r := replayReport{SandboxID: sb.ID()}
	if !a.json {
		fmt.Fprintln(a.Stdout, sb.ID())
	}
	a.compareLayers(log, sb)
	err := sb.Replay(ctx, log, func(s harena.Step) error {
		if codes {
			s.Differences = slices.DeleteFunc(s.Differences, isOutput)
		}
		r.add(s)
		if !a.json {
			a.replayLine(s)
		}
		if stop && len(s.Differences) > 0 {
			return errStopped
		}
		return nil
	})
	if err != nil && !errors.Is(err, errStopped) {
		return fmt.Errorf("sandbox %s: %w", sb.ID(), err)
	}
	if a.json {
		if err := a.printJSON(r); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(a.Stderr, "%d steps: %d the same, %d diverged (%d not only in what was printed), %d skipped\n", r.Steps, r.Same, r.Diverged, r.Codes, r.Skipped)
	}
	if r.Diverged > 0 || r.Skipped > 0 {
		return &ExitError{1}
	}
	return nil
}

// compareLayers warns when names mean other layers than they did.
func (a *app) compareLayers(log *harena.LogFile, sb *harena.Sandbox) {
	var now []string
	for _, l := range sb.Info().GetLayers() {
		now = append(now, l.GetDigest())
	}
	if was := log.Header.GetLayers(); len(was) > 0 && len(now) > 0 && !slices.Equal(was, now) {
		a.warn("the layers are not those of the log: " + strings.Join(now, ", ") + " in place of " + strings.Join(was, ", "))
	}
}

func (r *replayReport) add(s harena.Step) {
	step := replayStep{Number: s.Number, CommandID: s.CommandID, What: s.What, Status: "same", Skipped: s.Skipped}
	for _, d := range s.Differences {
		step.Differences = append(step.Differences, replayDifference(d))
	}
	r.Steps++
	switch {
	case s.Skipped != "":
		step.Status = "skipped"
		r.Skipped++
	case len(s.Differences) > 0:
		step.Status = "diverged"
		r.Diverged++
		if !slices.ContainsFunc(s.Differences, isOutput) || slices.ContainsFunc(s.Differences, func(d harena.Difference) bool { return !isOutput(d) }) {
			r.Codes++
		}
	default:
		r.Same++
	}
	r.Details = append(r.Details, step)
}

func (a *app) replayLine(s harena.Step) {
	status, more := "same", ""
	switch {
	case s.Skipped != "":
		status, more = "skipped", ": "+s.Skipped
	case len(s.Differences) > 0:
		status = "DIVERGED"
		for _, d := range s.Differences {
			more += fmt.Sprintf("\n          %s: was %s, is %s", d.What, oneLine(d.Was), oneLine(d.Now))
		}
	}
	lines := strings.Split(more, "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	fmt.Fprintf(a.Stderr, "%-8s  %s%s\n", status, printable(cut(oneLine(s.What), 160)), strings.Join(lines, "\n"))
}

func (a *app) sessionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "session", Short: "List and close shell sessions",
		Long: "Shell sessions keep directory, variables and functions between commands: `harena exec --session NAME SANDBOX -- CMD...`\nmakes one at its first use.",
		Args: exactly(0, "a subcommand"), RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	list := &cobra.Command{
		Use: "ls SANDBOX", Short: "List the sessions of a sandbox", Args: exactly(1, "a sandbox"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			all, err := c.Sandbox(args[0]).Sessions(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return printList(a, all)
			}
			var rows [][]string
			for _, s := range all {
				rows = append(rows, []string{s.GetName(), s.GetUser(), s.GetShell(), fmt.Sprint(s.GetPid()), s.GetCommandId(), age(s.GetCreated()), s.GetEnded()})
			}
			return a.table("SESSION USER SHELL PID COMMAND AGE ENDED", rows)
		},
	}
	var user string
	create := &cobra.Command{
		Use: "create SANDBOX NAME", Short: "Start a session", Args: exactly(2, "a sandbox and a name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return c.Sandbox(args[0]).CreateSession(cmd.Context(), args[1], user)
		},
	}
	create.Flags().StringVarP(&user, "user", "u", "", "user, by name or ID (default the sandbox's)")
	end := &cobra.Command{
		Use: "close SANDBOX NAME", Short: "End a session with all that runs in it", Args: exactly(2, "a sandbox and a name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return c.Sandbox(args[0]).CloseSession(cmd.Context(), args[1])
		},
	}
	cmd.AddCommand(list, create, end)
	return cmd
}

func (a *app) watchCommand() *cobra.Command {
	var user string
	var recursive bool
	cmd := &cobra.Command{
		Use: "watch SANDBOX PATH", Short: "Print what changes in a directory of a sandbox, as it changes", Args: exactly(2, "a sandbox and a path"),
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "also below it")
	cmd.Flags().StringVarP(&user, "user", "u", "", "user whose rights apply inside (default the sandbox's)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		return c.Sandbox(args[0]).Watch(cmd.Context(), args[1], recursive, func(e *harena.WatchEvent) error {
			if a.json {
				raw, err := compactJSON(e)
				if err == nil {
					_, err = a.Stdout.Write(append(raw, '\n'))
				}
				return err
			}
			from := ""
			if e.GetFrom() != "" {
				from = " from " + e.GetFrom()
			}
			_, err := fmt.Fprintf(a.Stdout, "%-10s  %s\n", e.GetKind(), printable(e.GetPath()+from))
			return err
		}, harena.AsUser(user))
	}
	return cmd
}
