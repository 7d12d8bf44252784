package scenario

import (
	"strings"
	"testing"
	"time"
)

// Every command that the README shows works as it is written.
func TestReadme(t *testing.T) {
	needOwn(t)
	blocks, err := readmeBlocks()
	if err != nil {
		t.Fatal(err)
	}
	wants := map[string][]string{
		"cli":  {"0\n", "out\n", "err\n", "exit status 3", "42\n", "begun\n", "exit status 124", "hello\n", "running", "sandbox.created", "clean"},
		"life": {"42\n", "sha256:", "stored of", "\n/srv\n", "[s] python3 answer.py", "answer:1"},
		"api":  {`"running"`, `"sandboxes"`},
	}
	if len(blocks) != len(wants) {
		t.Errorf("%d tested blocks, %d are known here", len(blocks), len(wants))
	}
	for name, want := range wants {
		// The import at the top made this suite's image; once is enough.
		var script []string
		for line := range strings.Lines(blocks[name]) {
			if !strings.HasPrefix(line, "harena layer import") {
				script = append(script, line)
			}
		}
		out, err := the.shell(within(t, 3*time.Minute), strings.Join(script, ""))
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: %q is not in the output:\n%s", name, w, out)
			}
		}
	}
}
