// Package cli is the command line of Harena's clients. It uses the SDK only;
// commands that run servers are added by the program that composes them.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// Exit statuses that are not a command's own.
const (
	exitFailure = 125
	exitSignal  = 128 // plus the signal's number
)

// Options is what a command line works with.
type Options struct {
	Version string
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	// Commands are added beside the clients' own.
	Commands []*cobra.Command
	// OfflineDoctor inspects a data directory that no server holds; nil: not possible.
	OfflineDoctor func(ctx context.Context, dataDir string) (*harenav1.DoctorResponse, error)
	// Client overrides how the client is made; nil: from the environment and the profile.
	Client func(profile string) (*harena.Client, error)
}

// ExitError ends the program with a status and without a message.
type ExitError struct{ Code int }

// Error implements error.
func (e *ExitError) Error() string { return fmt.Sprintf("exit status %d", e.Code) }

// app is what the commands share.
type app struct {
	Options
	json    bool
	profile string
}

// Main runs a command line and returns the exit status.
func Main(ctx context.Context, args []string, o Options) int {
	a := &app{Options: o}
	root := a.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var exit *ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.Code
	}
	a.complain(err)
	return exitFailure
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "harena",
		Short:         "Sandboxes for agents",
		Long:          "Harena makes sandboxes for agents from layers and runs commands in them.\n\nStart a node with `harena up`, make a layer with `harena layer import`, then `harena run --image NAME -- CMD...`.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return errors.New(goNumber.ReplaceAllString(err.Error(), "it is not a number, or too large"))
	})
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print JSON for machines")
	root.PersistentFlags().StringVar(&a.profile, "profile", "", "file with url and token; without it HARENA_URL and HARENA_TOKEN count, then ~/.config/harena/client.json")
	root.AddCommand(a.Commands...)
	root.AddCommand(
		a.runCommand(), a.createCommand(), a.execCommand(), a.commandsCommand(), a.attachCommand(), a.killCommand(), a.shellCommand(),
		a.cpCommand(), a.snapshotCommand(), a.forkCommand(), a.logCommand(), a.replayCommand(), a.sessionCommand(), a.watchCommand(), a.psCommand(), a.showCommand(), a.stopCommand(),
		a.pauseCommand(), a.resumeCommand(), a.jobCommand(),
		a.layerCommand(), a.eventsCommand(), a.fleetCommand(), a.doctorCommand(), a.versionCommand(), a.benchCommand(),
	)
	a.addLater(root)
	return root
}

// goNumber is what strconv says of numbers.
var goNumber = regexp.MustCompile(`strconv\.\w+: parsing ".*": (invalid syntax|value out of range)`)

// client makes the client for a command.
func (a *app) client() (*harena.Client, error) {
	if a.Client != nil {
		return a.Client(a.profile)
	}
	return harena.FromEnv(harena.WithProfile(a.profile))
}

// complain prints an error in one line.
func (a *app) complain(err error) {
	fmt.Fprintf(a.Stderr, "harena: %s\n", printable(oneLine(err.Error())))
}

// warn prints a remark in one line.
func (a *app) warn(message string) {
	fmt.Fprintf(a.Stderr, "harena: warning: %s\n", printable(oneLine(message)))
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// invalid is the error of a command line that makes no sense.
func invalid(hint, format string, args ...any) error {
	return &harena.Error{Kind: harena.KindInvalid, Message: fmt.Sprintf(format, args...), Hint: hint}
}

// terminal returns the file behind s if it is a terminal.
func terminal(s any) (*os.File, bool) {
	f, ok := s.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}

// exactly is cobra.ExactArgs with an error that says what is expected.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return invalid("see --help", "expected %s, got %d arguments", what, len(args))
		}
		return nil
	}
}
