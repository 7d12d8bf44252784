// Command harena is everything but what runs beside a sandbox: the servers of a
// node, and the command line of clients.
package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cli"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// version is set by the linker.
var version = "dev"

func main() {
	os.Exit(cli.Main(context.Background(), os.Args[1:], cli.Options{
		Version: version, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Commands: []*cobra.Command{upCommand(), downCommand(), blobdCommand()},
		OfflineDoctor: func(ctx context.Context, dir string) (*harenav1.DoctorResponse, error) {
			report, err := lifecycle.DoctorOffline(ctx, dir)
			return report, shown(err)
		},
	}))
}

// shown turns an error of a server's part into one that a person reads: with its hint.
func shown(err error) error {
	var e *errs.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	out := &harena.Error{Kind: harena.Kind(e.Kind), Message: err.Error(), Resource: e.Resource, Hint: e.Hint}
	return out
}
