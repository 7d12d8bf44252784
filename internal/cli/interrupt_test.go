package cli_test

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/cli"
	"github.com/harena-dev/harena/sdk/go/harena"
	"github.com/harena-dev/harena/sdk/go/harenatest"
)

// interrupting sends this process a signal while a command's start is under way.
type interrupting struct{ http.RoundTripper }

func (i interrupting) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/Run") {
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGINT)
		time.Sleep(100 * time.Millisecond)
	}
	return i.RoundTripper.RoundTrip(r)
}

// TestInterruptedStart: a signal that comes before the command has started reaches it, so that nothing is left running.
func TestInterruptedStart(t *testing.T) {
	f := start(t)
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	c, err := harena.New(harena.WithURL(f.client.URL()), harena.WithToken(harenatest.Token), harena.WithTransport(interrupting{transport}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var out, errOut bytes.Buffer
	code := cli.Main(ctx, []string{"exec", f.sandbox, "--", "block"}, cli.Options{
		Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errOut,
		Client: func(string) (*harena.Client, error) { return c, nil },
	})
	if code != 130 || out.String() != "SIGINT\n" {
		t.Errorf("exit status %d, %q, %q", code, out.String(), errOut.String())
	}
}
