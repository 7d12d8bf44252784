package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

func (a *app) commandsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "commands SANDBOX", Short: "List the commands of a sandbox", Args: exactly(1, "a sandbox"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Sandbox(args[0]).Commands(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return printList(a, list)
			}
			var rows [][]string
			for _, i := range list {
				exit := ""
				if i.GetResult() != nil {
					exit = fmt.Sprint(i.GetResult().GetExitCode())
				}
				rows = append(rows, []string{i.GetCommandId(), i.GetState(), exit, fmt.Sprint(i.GetPid()), i.GetUser(), age(i.GetStarted()), cut(i.GetCommandLine(), 80)})
			}
			return a.table("COMMAND STATE EXIT PID USER AGE LINE", rows)
		},
	}
}

func cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

func (a *app) attachCommand() *cobra.Command {
	var interactive bool
	cmd := &cobra.Command{
		Use: "attach SANDBOX COMMAND", Short: "Show what a command printed, and follow it to its end",
		Long: "Show what is recorded of a command's output, follow it to its end and exit as it did. Signals go to the command.",
		Args: exactly(2, "a sandbox and a command"),
	}
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		return a.attach(cmd.Context(), c.Sandbox(args[0]), args[1], interactive)
	}
	return cmd
}

func (a *app) killCommand() *cobra.Command {
	var sig string
	var tree bool
	cmd := &cobra.Command{
		Use: "kill SANDBOX COMMAND [--signal S]", Short: "Send a signal to a command", Args: exactly(2, "a sandbox and a command"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return c.Sandbox(args[0]).Signal(cmd.Context(), args[1], sig, tree)
		},
	}
	cmd.Flags().StringVarP(&sig, "signal", "s", "TERM", "signal, by name or number")
	cmd.Flags().BoolVar(&tree, "tree", false, "signal every process that the command started, also those that left its process group")
	return cmd
}

// shellText starts the best shell that there is.
const shellText = "[ -x /bin/bash ] && exec /bin/bash -l; exec /bin/sh -l"

func (a *app) shellCommand() *cobra.Command {
	var user, cwd string
	cmd := &cobra.Command{
		Use: "shell SANDBOX", Short: "Open a shell in a sandbox", Args: exactly(1, "a sandbox"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			_, tty := terminal(a.Stdin)
			f := commandFlags{interactive: true, tty: tty, tag: "shell"}
			spec := f.cmd(a, nil)
			spec.Shell, spec.User, spec.Cwd = shellText, user, cwd
			return a.attached(cmd.Context(), c.Sandbox(args[0]), spec, nil)
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "user, by name or ID")
	cmd.Flags().StringVarP(&cwd, "cwd", "w", "", "working directory")
	return cmd
}

func (a *app) cpCommand() *cobra.Command {
	var user, opID string
	cmd := &cobra.Command{
		Use: "cp SRC DST", Short: "Copy files and trees; either side may be SANDBOX:PATH",
		Long: "Copy a file or a tree, as docker cp does: into DST when that is a directory, else as DST; SRC/. means the contents of SRC.\nOne side is SANDBOX:PATH.",
		Args: exactly(2, "a source and a destination"),
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "user whose rights apply inside (default the sandbox's)")
	cmd.Flags().StringVar(&opID, "op-id", "", "copy into the sandbox once, however often it is asked for under this ID; DST is then the copy's own place, unless it ends with a slash")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		from, fromPath := splitSandbox(args[0])
		to, toPath := splitSandbox(args[1])
		if (from == "") == (to == "") {
			return invalid("write SANDBOX:PATH on exactly one side", "%s and %s are on the same side", args[0], args[1])
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		var opts []harena.FileOption
		if user != "" {
			opts = append(opts, harena.AsUser(user))
		}
		if opID != "" {
			if to == "" {
				return invalid("leave --op-id out", "a copy out of a sandbox changes nothing in it")
			}
			opts = append(opts, harena.WithOpID(opID))
		}
		if to != "" {
			return c.Sandbox(to).CopyTo(cmd.Context(), fromPath, toPath, a.warn, opts...)
		}
		return c.Sandbox(from).CopyFrom(cmd.Context(), fromPath, toPath, a.warn, opts...)
	}
	return cmd
}

// splitSandbox takes SANDBOX:PATH apart. A path with a slash before its first colon is a local one.
func splitSandbox(s string) (sandbox, path string) {
	i := strings.IndexByte(s, ':')
	if i <= 0 || strings.ContainsRune(s[:i], '/') || s[0] == '.' {
		return "", s
	}
	if i == len(s)-1 {
		return s[:i], "."
	}
	return s[:i], s[i+1:]
}

func (a *app) psCommand() *cobra.Command {
	var f harena.Filter
	var labels pairsValue
	cmd := &cobra.Command{
		Use: "ps", Short: "List sandboxes", Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			f.Labels = labels.m
			list, err := c.Sandboxes(cmd.Context(), f)
			if err != nil {
				return err
			}
			if a.json {
				return printList(a, list)
			}
			var rows [][]string
			for _, s := range list {
				rows = append(rows, []string{s.GetId(), s.GetState(), s.GetReason(), s.GetBackend(), s.GetImage(), s.GetJob(), pairs(s.GetLabels()), age(s.GetCreated())})
			}
			return a.table("SANDBOX STATE REASON BACKEND IMAGE JOB LABELS AGE", rows)
		},
	}
	cmd.Flags().BoolVarP(&f.All, "all", "a", false, "also those that ended within the last hour")
	cmd.Flags().VarP(&labels, "label", "l", "only those with the label; may be repeated")
	cmd.Flags().StringVar(&f.Job, "job", "", "only those of the job")
	return cmd
}

func (a *app) showCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show SANDBOX", Short: "Show all about a sandbox, as JSON", Args: exactly(1, "a sandbox"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			sb, err := c.GetSandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.printMessage(sb.Info())
		},
	}
}

func (a *app) stopCommand() *cobra.Command {
	var o harena.StopOptions
	var grace durationValue
	var labels pairsValue
	var job string
	cmd := &cobra.Command{
		Use: "stop SANDBOX... | --job J | --label K=V", Short: "Stop sandboxes",
		Long: "Stop sandboxes and remove their writable state. Stopping what has stopped is no error.",
	}
	cmd.Flags().Var(&grace, "grace", "SIGTERM first, SIGKILL after this time (default SIGKILL at once)")
	cmd.Flags().BoolVar(&o.Remove, "rm", false, "also forget their records")
	cmd.Flags().VarP(&labels, "label", "l", "all with the label; may be repeated")
	cmd.Flags().StringVar(&job, "job", "", "all of the job")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 && job == "" && len(labels.m) == 0 {
			return invalid("give IDs, --job or --label", "no sandbox was selected")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		o.Grace = grace.d
		outcomes, err := c.StopSandboxes(cmd.Context(), &harenav1.Selector{Ids: args, Job: job, Labels: labels.m}, o)
		if err != nil {
			return err
		}
		return a.outcomes(outcomes)
	}
	return cmd
}

// outcomes prints what became of each sandbox; any failure is the command's.
func (a *app) outcomes(list []*harenav1.Outcome) error {
	failed := false
	for _, o := range list {
		err := harena.OutcomeError(o)
		if err != nil {
			failed = true
			a.complain(err)
		} else if !a.json {
			fmt.Fprintln(a.Stdout, o.GetSandboxId())
		}
	}
	if a.json {
		if err := printList(a, list); err != nil {
			return err
		}
	}
	if failed {
		return &ExitError{exitFailure}
	}
	return nil
}
