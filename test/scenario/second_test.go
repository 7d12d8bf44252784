package scenario

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// secondNode starts a node beside the suite's own, with flags of `harena up`, and imports busybox as bb:1 unless it has
// it. It goes, with all that it had, when the test ends.
func secondNode(t *testing.T, flags ...string) *ownNode {
	t.Helper()
	if the.own == nil {
		t.Skip("starts a node of its own, which belongs on the machine of the suite's own node")
	}
	return secondNodeIn(t, "/var/tmp", flags...)
}

// secondNodeIn keeps the node's directory in a directory of the caller's.
func secondNodeIn(t *testing.T, parent string, flags ...string) *ownNode {
	t.Helper()
	dir, err := os.MkdirTemp(parent, "harena-second-")
	if err != nil {
		t.Fatal(err)
	}
	o := &ownNode{dir: dir, flags: flags}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the second node says: %s", o.logTail())
		}
		if o.cmd != nil && o.exited != nil {
			if out, err := exec.Command(program("harena"), "down", "--data", dir).CombinedOutput(); err != nil {
				t.Errorf("harena down: %v: %s", err, out)
			}
			select {
			case <-o.exited:
			case <-time.After(slowly(30 * time.Second)):
				t.Error("the second node still runs long after harena down")
				o.kill()
			}
		}
		if o.alive != nil {
			_, _ = o.alive.WriteString("\n")
			_ = o.watchdog.Wait()
		}
		if o.log != nil {
			_ = o.log.Close() // it may be all that keeps the parent's file system busy
		}
		_ = os.Remove(dir + ".log")
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := o.watch(); err != nil {
		t.Fatal(err)
	}
	if err := o.start(); err != nil {
		t.Fatal(err)
	}
	return o
}

// cli runs a command of the CLI against the node.
func (o *ownNode) cli(t *testing.T, args ...string) cliResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), slowly(2*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, program("harena"), args...)
	cmd.Env = append(os.Environ(), "HARENA_URL="+o.url, "HARENA_TOKEN="+o.token)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cliResult{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// must runs a command of the CLI that has to succeed, and returns what it printed, without the last newline.
func (o *ownNode) must(t *testing.T, args ...string) string {
	t.Helper()
	r := o.cli(t, args...)
	if r.code != 0 {
		t.Fatalf("harena %s: exit %d: %s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return strings.TrimSuffix(r.stdout, "\n")
}

// busyboxTree makes the smallest base: a static busybox with its names.
func busyboxTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"bin", "etc", "tmp", "root"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	program, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal("busybox-static is needed: ", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/busybox"), program, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "cat", "dd", "echo", "ls", "mkdir", "rm", "sleep", "sha256sum", "df", "head", "true", "touch", "wc", "seq", "grep", "find", "cp", "mv", "ln", "date", "sync", "kill", "ps"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
