package exec

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func TestStreamsAreKeptApart(t *testing.T) {
	r := newRig(t, nil)
	o := r.shell("echo out; echo err >&2; exit 3")
	if string(o.stdout) != "out\n" || string(o.stderr) != "err\n" || o.result.GetExitCode() != 3 {
		t.Errorf("got %q, %q, exit %d", o.stdout, o.stderr, o.result.GetExitCode())
	}
	steps := map[string]bool{}
	for _, step := range o.result.GetTimings() {
		steps[step.GetStep()] = true
	}
	for _, want := range []string{"resolve", "spawn", "first_output", "total"} {
		if !steps[want] {
			t.Errorf("no timing %q in %v", want, o.result.GetTimings())
		}
	}
	if rec := o.result.GetStdout(); rec.GetTotal() != 4 || rec.GetRecorded() != 4 || rec.GetDropped() != 0 {
		t.Errorf("stdout record %v", rec)
	}
}

func TestExitStatus(t *testing.T) {
	r := newRig(t, nil)
	dir := t.TempDir()
	noexec := filepath.Join(dir, "noexec")
	if err := os.WriteFile(noexec, []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name    string
		cmd     *harenav1.Command
		code    int32
		signal  string
		message string
	}{
		{"zero", shell("true"), 0, "", ""},
		{"status", shell("exit 200"), 200, "", ""},
		{"signal", shell("kill -TERM $$"), 143, "SIGTERM", ""},
		{"killed", shell("kill -KILL $$"), 137, "SIGKILL", ""},
		{"no such program", &harenav1.Command{Argv: []string{"no-such-program"}}, 127, "", `"no-such-program" not found in PATH`},
		{"no such path", &harenav1.Command{Argv: []string{"/no/such"}}, 127, "", `"/no/such" not found`},
		{"not executable", &harenav1.Command{Argv: []string{noexec}}, 126, "", "permission denied"},
		{"a directory", &harenav1.Command{Argv: []string{dir}}, 126, "", "permission denied"},
		{"no such cwd", &harenav1.Command{Shell: "true", Cwd: "/no/dir"}, 126, "", `cannot enter working directory "/no/dir"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			res := r.run(tt.cmd).result
			if res.GetExitCode() != tt.code || res.GetSignal() != tt.signal || !strings.Contains(res.GetMessage(), tt.message) {
				t.Errorf("got %d %q %q", res.GetExitCode(), res.GetSignal(), res.GetMessage())
			}
		})
	}
}

func TestEnvironmentUserAndDirectory(t *testing.T) {
	r := newRig(t, func(c *Config) {
		c.Defaults = &harenav1.ProcessDefaults{Env: map[string]string{"FROM": "sandbox", "BOTH": "sandbox"}}
	})
	o := r.run(&harenav1.Command{
		Shell: `id -u; id -g; pwd; echo "$FROM $BOTH ${EMPTY-unset} $HOME $HOSTNAME"; echo to-dev-stdout >/dev/stdout`,
		User:  "4242", Cwd: "/usr", Env: map[string]string{"BOTH": "command", "EMPTY": ""},
	})
	want := "4242\n4243\n/usr\nsandbox command  / testedaaaaaa\nto-dev-stdout\n"
	if string(o.stdout) != want || len(o.stderr) > 0 {
		t.Errorf("got %q and %q, want %q", o.stdout, o.stderr, want)
	}
	if o := r.run(&harenav1.Command{Shell: "pwd", User: "homeless"}); string(o.stdout) != "/\n" {
		t.Errorf("without a home: %q", o.stdout)
	}
	_, err := r.tryRun(context.Background(), &harenav1.Command{Shell: "true", User: "nobody-at-all"})
	wantKind(t, err, errs.Invalid, "nobody-at-all")
}

func TestRefusedRequests(t *testing.T) {
	r := newRig(t, nil)
	tests := []struct {
		name string
		cmd  *harenav1.Command
		kind errs.Kind
		text string
	}{
		{"nothing", &harenav1.Command{}, errs.Invalid, "exactly one of"},
		{"both", &harenav1.Command{Shell: "x", Argv: []string{"x"}}, errs.Invalid, "exactly one of"},
		{"NUL", &harenav1.Command{Argv: []string{"a\x00b"}}, errs.Invalid, "NUL"},
		{"empty program", &harenav1.Command{Argv: []string{"", "x"}}, errs.Invalid, "empty"},
		{"long argument", &harenav1.Command{Argv: []string{"echo", strings.Repeat("x", 128<<10)}}, errs.Invalid, " is 131071, asked 131072"},
		{"many arguments", &harenav1.Command{Argv: strings.Split(strings.Repeat(strings.Repeat("x", 99)+",", 11000), ",")}, errs.Invalid, "bytes of arguments"},
		{"environment", &harenav1.Command{Shell: "x", Env: map[string]string{"A": strings.Repeat("x", 200<<10)}}, errs.Invalid, "environment"},
		{"relative cwd", &harenav1.Command{Shell: "x", Cwd: "tmp"}, errs.Invalid, "absolute"},
		{"stdin", &harenav1.Command{Shell: "x", Stdin: make([]byte, 1<<20+1)}, errs.Invalid, "bytes of stdin"},
		{"max_output", &harenav1.Command{Shell: "x", MaxOutput: 1<<30 + 1}, errs.Invalid, "max_output"},
		{"negative max_output", &harenav1.Command{Shell: "x", MaxOutput: -1}, errs.Invalid, "negative"},
		{"timeout", &harenav1.Command{Shell: "x", Timeout: durationpb.New(0)}, errs.Invalid, "not positive"},
		{"op_id", &harenav1.Command{Shell: "x", OpId: "a\nb"}, errs.Invalid, "printable"},
		{"pty", &harenav1.Command{Shell: "x", Pty: &harenav1.Pty{}}, errs.Unsupported, "devpts"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := r.tryRun(context.Background(), tt.cmd)
			wantKind(t, err, tt.kind, tt.text)
		})
	}
	if n, _ := r.s.Running(); n != 0 {
		t.Errorf("%d commands run", n)
	}
}

// Not one of these bytes may be changed, lost or moved.
func TestBytesSurvive(t *testing.T) {
	r := newRig(t, nil)
	all := make([]byte, 0, 4096)
	for i := range 256 {
		all = append(all, byte(i), '\n', 0, '\n', '\n')
	}
	all = append(all, "\xff\xfe\xc3\n\xe2\x82"...) // invalid and cut short
	o := r.run(&harenav1.Command{Argv: []string{"cat"}, Stdin: all})
	if !bytes.Equal(o.stdout, all) {
		t.Errorf("%d bytes came back, sent %d", len(o.stdout), len(all))
	}
	// A character that is written in two halves.
	o = r.shell(`printf '\342\202'; sleep 0.05; printf '\254\n\n\n'`)
	if string(o.stdout) != "€\n\n\n" {
		t.Errorf("split character: %q", o.stdout)
	}
	o = r.run(&harenav1.Command{ArgvBytes: [][]byte{[]byte("printf"), []byte("%s"), []byte("\xff\xfe")}})
	if string(o.stdout) != "\xff\xfe" {
		t.Errorf("argument that is not UTF-8: %q", o.stdout)
	}
	o = r.shell("cat <<'EOF'\n$HOME \"quoted\" `x`\n\n  indented\nEOF\necho end")
	if want := "$HOME \"quoted\" `x`\n\n  indented\nend\n"; string(o.stdout) != want {
		t.Errorf("heredoc: %q", o.stdout)
	}
}

func TestTimeoutKillsTheWholeTree(t *testing.T) {
	r := newRig(t, nil)
	start := time.Now()
	o := r.run(&harenav1.Command{Shell: "echo partial; sleep 100 & setsid sleep 100", Timeout: durationpb.New(2 * time.Second)})
	if d := time.Since(start); d < 2*time.Second || d > 30*time.Second {
		t.Errorf("took %v", d)
	}
	res := o.result
	if !res.GetTimedOut() || res.GetExitCode() != 124 || res.GetDetached() || string(o.stdout) != "partial\n" {
		t.Errorf("got %v and %q", res, o.stdout)
	}
	eventually(t, "nothing is left running", func() bool {
		procs, err := r.groups.Tree()
		children, cerr := r.groups.Children()
		return err == nil && cerr == nil && len(procs) == 0 && len(children) == 0
	})
}

func TestOutputOfAnInstantExitIsNeverLost(t *testing.T) {
	r := newRig(t, nil)
	for i := range 200 {
		o := r.run(&harenav1.Command{Argv: []string{"echo", fmt.Sprint("line ", i)}})
		if want := fmt.Sprintf("line %d\n", i); string(o.stdout) != want {
			t.Fatalf("run %d: %q", i, o.stdout)
		}
	}
	// As much as a pipe holds, written by a process that is gone when it is read.
	for range 20 {
		if o := r.shell("head -c 65536 /dev/zero"); len(o.stdout) != 65536 {
			t.Fatalf("%d bytes", len(o.stdout))
		}
	}
}

func TestDaemonDoesNotHoldTheCall(t *testing.T) {
	r := newRig(t, nil)
	release := filepath.Join(t.TempDir(), "release")
	o := r.shell("echo before; (while [ ! -e %s ]; do sleep 0.02; done; echo after) & echo main", release)
	if !o.result.GetDetached() || string(o.stdout) != "before\nmain\n" {
		t.Fatalf("got %v, %q", o.result, o.stdout)
	}
	if st := r.info(o.id).GetState(); st != "detached" {
		t.Errorf("state %q", st)
	}
	if n, _ := r.s.Running(); n != 0 {
		t.Errorf("%d commands run", n)
	}
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the command ends", func() bool { return r.info(o.id).GetState() == "ended" })
	if c := r.connect(o.id); string(c.stdout) != "before\nmain\nafter\n" {
		t.Errorf("record: %q", c.stdout)
	}

	// One that gave its streams back is not waited for, but it is found and killed.
	o = r.shell("setsid sleep 100 >/dev/null 2>&1 </dev/null &")
	if o.result.GetDetached() {
		t.Error("detached, though nobody holds a stream")
	}
	eventually(t, "the daemon shows", func() bool { return r.info(o.id).GetState() == "detached" })
	if err := r.signal(o.id, "KILL", true); err != nil {
		t.Error(err)
	}
	eventually(t, "the daemon ends", func() bool { return r.info(o.id).GetState() == "ended" })

	// A child that never stops printing does not hold the result either.
	o = r.shell("yes & echo main")
	if !o.result.GetDetached() {
		t.Error("not detached")
	}
	if err := r.signal(o.id, "", false); err != nil {
		t.Error(err)
	}
	eventually(t, "the printing child ends", func() bool { return r.info(o.id).GetState() == "ended" })
}

func TestManyQuickCommands(t *testing.T) {
	n := 1000
	if testing.Short() {
		n = 100
	}
	r := newRig(t, nil)
	r.shell("true") // opens the connection
	leaks(t, "running commands", func() {
		for range n {
			if o := r.run(&harenav1.Command{Argv: []string{"true"}}); o.result.GetExitCode() != 0 {
				t.Fatalf("exit %v", o.result)
			}
		}
	})
	if z := zombies(t); z > 0 {
		t.Errorf("%d zombies", z)
	}
}

// zombies counts children of this process that ended and were not reaped.
func zombies(t *testing.T) int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if f[0] == "Z" && f[1] == fmt.Sprint(os.Getpid()) {
			n++
		}
	}
	return n
}
