package harena_test

import (
	"context"
	"fmt"
	"log"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// A sandbox is made, used and stopped; address and token come from the environment or the profile.
func Example() {
	ctx := context.Background()
	client, err := harena.FromEnv()
	if err != nil {
		log.Fatal(err)
	}
	sb, err := client.CreateSandbox(ctx, harena.Spec{Image: "debian:12"})
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Stop(ctx) //nolint:errcheck // the idle time-out stops it otherwise
	res, err := sb.RunShell(ctx, "echo hello world")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.ExitCode, string(res.Stdout))
}
