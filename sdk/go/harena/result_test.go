package harena_test

import (
	"testing"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

func TestResultIsReadable(t *testing.T) {
	for want, r := range map[string]harena.Result{
		"exit 0, after 12ms\nstdout:\nhello": {Stdout: []byte("hello\n"), Duration: 12345678 * time.Nanosecond},
		"exit 124, SIGKILL, timed out, output truncated, after 2s\nstdout:\na\nstderr:\nb": {
			ExitCode: 124, Signal: "SIGKILL", TimedOut: true, Truncated: true, Stdout: []byte("a"), Stderr: []byte("b\n"), Duration: 2 * time.Second,
		},
		"exit 127, \"x\" not found in PATH, after 0s": {ExitCode: 127, Message: `"x" not found in PATH`},
	} {
		if got := r.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
