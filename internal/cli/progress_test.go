package cli

import (
	"bytes"
	"fmt"
	"testing"
)

// A log is not flooded: a bootstrap reports some hundred packages within seconds.
func TestProgressWithoutATerminalIsShort(t *testing.T) {
	var out bytes.Buffer
	p := (&app{Options: Options{Stderr: &out}}).newProgress()
	for i := range 200 {
		p.report("fetching", fmt.Sprintf("package %d", i), int64(i), 200)
	}
	p.drawn = p.drawn.Add(-relist)
	p.report("fetching", "package 7", 50<<20, 200<<20) // what goes on tells how far it got
	p.report("storing", "x", 0, 0)
	p.report("done", "", 0, 0)
	p.end()
	if got, want := out.String(), "fetching: package 0\nfetching: package 7 50.0 MiB of 200.0 MiB (25%)\nstoring: x\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
