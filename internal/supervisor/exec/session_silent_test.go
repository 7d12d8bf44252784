package exec

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"

	"connectrpc.com/connect"
)

// Whatever a command does to its shell, it ends with a result: the shell goes on, or the session ends and says why.
func TestSessionWhoseShellWasChanged(t *testing.T) {
	const goesOn, ends = "", "ended"
	withShells(t, func(t *testing.T, r *rig) {
		bash := r.s.cfg.shells[0].paths[0] == "/bin/bash"
		both := map[string]string{
			"eval() { :; }":   goesOn, // sh refuses such a function
			"printf() { :; }": goesOn,
			"trap() { :; }":   goesOn,
			"exec() { :; }":   goesOn,
			"alias printf=: command=: builtin=: eval=: '{=:'":                        goesOn,
			"PROMPT_COMMAND='exit 9'; PS0='$(exit 9)'; IFS=0123456789; set -f -u -C": goesOn,
			"trap '' INT TERM PIPE; trap 'echo trapped' EXIT":                        goesOn,
			"exec 2>&- 0<&-":     goesOn,
			"f() { exit 7; }; f": ends,
			"set -e; false":      ends,
			"kill $$; sleep 5":   ends,
			"kill -9 $$":         ends,
			"set -n":             ends,
			"ulimit -n 0":        ends,
			"i=3; while [ $i -lt 300 ]; do eval \"exec $i>&-\" 2>/dev/null; i=$((i+1)); done":        ends,
			"i=3; while [ $i -lt 300 ]; do eval \"exec $i>/dev/null\" 2>/dev/null; i=$((i+1)); done": ends,
		}
		if bash {
			both["command() { :; }"] = goesOn
			both["builtin() { :; }"] = ends
			both["enable -n builtin"] = ends
			both["printf() { exit 4; }; readonly -f printf"] = goesOn
			both["shopt -s extdebug; trap false DEBUG"] = ends
			both["shopt -s expand_aliases; alias '{'='#'"] = ends
			both["i=3; while [ $i -lt 300 ]; do eval \"exec $i>/dev/null\" 2>/dev/null; i=$((i+1)); done"] = goesOn // it keeps its own
		} else {
			both["command() { :; }"] = ends
			both["alias command=:; unalias -a"] = goesOn
		}
		t.Run("cases", func(t *testing.T) {
			for text, want := range both {
				t.Run(text, func(t *testing.T) {
					t.Parallel()
					name := fmt.Sprintf("s%x", sha256.Sum256([]byte(text)))[:16]
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
					defer cancel()
					first, err := r.tryRun(ctx, in(name, text))
					if err != nil || first.result == nil {
						t.Fatalf("no result: %v", err)
					}
					second, err := r.tryRun(ctx, in(name, `echo "$((6*7))"`))
					switch {
					case errs.Is(err, errs.Precondition): // the first ended it
						if want != ends || !strings.Contains(first.result.GetMessage(), "has ended") {
							t.Errorf("ended: %v, %v", first.result, err)
						}
					case err != nil || second.result == nil:
						t.Fatalf("no result of the next command: %v", err)
					case want == goesOn:
						if string(second.stdout) != "42\n" || second.result.GetExitCode() != 0 {
							t.Errorf("the next command: %q, %v", second.stdout, second.result)
						}
					case !strings.Contains(second.result.GetMessage(), "has ended"):
						t.Errorf("it goes on: %v, then %q, %v", first.result, second.stdout, second.result)
					}
					if _, err := r.client.CloseSession(ctx, connect.NewRequest(&harenav1.CloseSessionRequest{Name: name})); err != nil {
						t.Error(err)
					}
				})
			}
		})
	})
}

// Watching a shell is not noticed by commands that take long, whatever they are.
func TestSessionThatIsWatched(t *testing.T) {
	withShells(t, func(t *testing.T, r *rig) {
		long := "X=1; sleep 1.2; cat; # " + strings.Repeat("x", 50000) + "\nsleep 0.2; echo $X"
		r.check(long, "1\n", "", 0)
		if o := r.run(in("s", "exec sh -c 'sleep 2.5; echo end'")); string(o.stdout) != "end\n" || o.result.GetExitCode() != 0 {
			t.Errorf("%q, %v", o.stdout, o.result)
		}
	})
}
