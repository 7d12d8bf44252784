package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

type cliResult struct {
	stdout, stderr string
	code           int
}

func cliCommand(t *testing.T, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(t.Context(), slowly(2*time.Minute))
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program("harena"), args...)
	cmd.Env = append(os.Environ(), "HARENA_URL="+the.url, "HARENA_TOKEN="+the.token)
	return cmd
}

func cli(t *testing.T, stdin string, args ...string) cliResult {
	t.Helper()
	cmd := cliCommand(t, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cliResult{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

func TestRunKeepsStreamsApartAndExitsAsTheCommand(t *testing.T) {
	got := cli(t, "", "run", "--image", the.image, "--backend", the.backend, "--", "sh", "-c", "id -u; echo out; echo err >&2; exit 3")
	if got.stdout != "0\nout\n" || got.stderr != "err\n" || got.code != 3 {
		t.Errorf("%+v", got)
	}
	got = cli(t, "", "--json", "run", "--image", the.image, "--", "echo", "x")
	var result struct {
		ExitCode *int32          `json:"exit_code"`
		Stdout   string          `json:"stdout"`
		Timings  json.RawMessage `json:"timings"`
	}
	if err := json.Unmarshal([]byte(got.stdout), &result); err != nil || result.Stdout != "x\n" || len(result.Timings) == 0 {
		t.Errorf("json: %v in %s%s", err, got.stdout, got.stderr)
	}
	if list := cli(t, "", "ps", "--json"); strings.Contains(list.stdout, `"running"`) && strings.Contains(list.stdout, `"lease"`) {
		t.Errorf("run left its sandbox: %s", list.stdout)
	}
}

func TestExitStatusOfTheCLI(t *testing.T) {
	b := create(t)
	for name, c := range map[string]struct {
		args []string
		code int
	}{
		"exit code":      {[]string{"exec", b.id, "--", "sh", "-c", "exit 42"}, 42},
		"not found":      {[]string{"exec", b.id, "--", "no-such-program"}, 127},
		"not executable": {[]string{"exec", b.id, "--", "/etc/passwd"}, 126},
		"signal":         {[]string{"exec", b.id, "--", "sh", "-c", "kill -TERM $$"}, 143},
		"time-out":       {[]string{"exec", "--timeout", "1s", b.id, "--", "sleep", "100"}, 124},
		"no sandbox":     {[]string{"exec", "aaaaaaaaaaaaaaaaaaaa", "--", "true"}, 125},
		"bad flag":       {[]string{"run", "--memory", "lots", "--image", "x", "--", "true"}, 125},
		"no image":       {[]string{"run", "--image", "no-such-image", "--", "true"}, 125},
		"later":          {[]string{"net", b.id}, 125},
	} {
		got := cli(t, "", c.args...)
		if got.code != c.code {
			t.Errorf("%s: exit %d, want %d: %s%s", name, got.code, c.code, got.stdout, got.stderr)
		}
		if c.code == 125 && strings.Count(strings.TrimSpace(got.stderr), "\n") != 0 {
			t.Errorf("%s: the error has several lines: %q", name, got.stderr)
		}
	}
	if got := cli(t, "", "run", "--image", "no-such-image", "--", "true"); !strings.Contains(got.stderr, "no-such-image") || !strings.Contains(got.stderr, "layer") {
		t.Errorf("a missing image is explained as %q", got.stderr)
	}
}

func TestInputThroughTheCLI(t *testing.T) {
	b := create(t)
	if got := cli(t, "line 1\nline 2", "exec", "-i", b.id, "--", "cat"); got.stdout != "line 1\nline 2" || got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := cli(t, "ignored", "exec", b.id, "--", "cat"); got.stdout != "" || got.code != 0 {
		t.Errorf("without -i: %+v", got)
	}
	if got := cli(t, "", "exec", "--env", "A=b c", "--cwd", "/tmp", "--user", "nobody", b.id, "--", "sh", "-c", `echo "$A $(pwd) $(id -un)"`); got.stdout != "b c /tmp nobody\n" {
		t.Errorf("%+v", got)
	}
	detached := cli(t, "", "exec", "-d", b.id, "--", "sleep", "100")
	id := strings.TrimSpace(detached.stdout)
	if list := cli(t, "", "commands", b.id); !strings.Contains(list.stdout, id) {
		t.Errorf("commands: %+v, started %+v", list, detached)
	}
	if got := cli(t, "", "kill", b.id, id, "--signal", "KILL"); got.code != 0 {
		t.Errorf("kill: %+v", got)
	}
	if got := cli(t, "", "attach", b.id, id); got.code != 137 {
		t.Errorf("attach to a killed command: %+v", got)
	}
}

func TestCopyFilesAndTrees(t *testing.T) {
	b := create(t)
	src := t.TempDir()
	for name, content := range map[string]string{"a": "A", "sub/b c": "B", "sub/é": "C"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(src, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(src, name), []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("a", filepath.Join(src, "link")); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"cp", src, b.id + ":/w/tree"},
		{"cp", filepath.Join(src, "a"), b.id + ":/w/file"},
		{"cp", b.id + ":/w/tree", filepath.Join(src, "back")},
		{"cp", b.id + ":/w/file", filepath.Join(src, "file")},
	} {
		if got := cli(t, "", args...); got.code != 0 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if got := b.must("cd /w && find . | LC_ALL=C sort | tr '\\n' ' '; cat tree/a file; stat -c %a tree/a"); got != ". ./file ./tree ./tree/a ./tree/link ./tree/sub ./tree/sub/b c ./tree/sub/é AA640" {
		t.Errorf("inside: %q", got)
	}
	back, err := os.ReadFile(filepath.Join(src, "back", "sub", "b c"))
	if err != nil || string(back) != "B" {
		t.Errorf("back: %q, %v", back, err)
	}
	if link, err := os.Readlink(filepath.Join(src, "back", "link")); err != nil || link != "a" {
		t.Errorf("link: %q, %v", link, err)
	}
	if got := cli(t, "", "cp", b.id+":/no/such", src); got.code != 125 || !strings.Contains(got.stderr, "/no/such") {
		t.Errorf("a missing source: %+v", got)
	}
}

func TestListsAreJSONArrays(t *testing.T) {
	b := create(t, func(s *harenav1.SandboxSpec) { s.Labels["cli"] = "json" })
	var sandboxes []map[string]any
	got := cli(t, "", "ps", "--json", "--label", "cli=json")
	if err := json.Unmarshal([]byte(got.stdout), &sandboxes); err != nil || len(sandboxes) != 1 {
		t.Fatalf("ps: %v in %q", err, got.stdout)
	}
	for _, field := range []string{"id", "state", "backend", "image", "labels", "project", "created"} {
		if _, ok := sandboxes[0][field]; !ok {
			t.Errorf("ps: no %s in %v", field, sandboxes[0])
		}
	}
	for _, args := range [][]string{{"layer", "ls", "--json"}, {"commands", "--json", b.id}, {"events", "--json", "--sandbox", b.id}, {"fleet", "ls", "--json"}} {
		var list []any
		if got := cli(t, "", args...); json.Unmarshal([]byte(got.stdout), &list) != nil {
			t.Errorf("%v: %q", args, got.stdout+got.stderr)
		}
	}
}

func TestSandboxOfADeadClientStops(t *testing.T) {
	label := map[string]string{"dead": "client"}
	cmd := cliCommand(t, "run", "--image", the.image, "--label", "dead=client", "--", "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	count := func() int {
		res, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{Labels: label}))
		if err != nil {
			t.Fatal(explain(err))
		}
		return len(res.Msg.GetSandboxes())
	}
	eventually(t, "it runs", 30*time.Second, func() bool { return count() == 1 })
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait()
	eventually(t, "it is stopped within 30 s", 32*time.Second, func() bool { return count() == 0 })
}

func TestShellOnATerminal(t *testing.T) {
	b := create(t)
	// script(1) gives the CLI a terminal of its own, as a person has.
	cmd := cliCommand(t, "exec", "-it", b.id, "--", "sh", "-c", "tty; exit 5")
	quoted := "'" + strings.Join(cmd.Args, "' '") + "'"
	script := exec.Command("script", "-qec", quoted, "/dev/null")
	script.Env, script.Stdin = cmd.Env, strings.NewReader("")
	out, err := script.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 5 || !strings.Contains(string(out), "/dev/pts/") {
		t.Errorf("%v: %q", err, out)
	}
}
