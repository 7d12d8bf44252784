package scenario

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// limitsOf reads the limits of a sandbox from the node's cgroups, v1 and v2.
func limitsOf(t *testing.T, id string) map[string]string {
	t.Helper()
	limits := map[string]string{}
	for _, dir := range []string{"/sys/fs/cgroup/harena-*", "/sys/fs/cgroup/unified/harena-*", "/sys/fs/cgroup/memory/harena-*"} {
		for _, file := range []string{"memory.max", "memory.high", "memory.swap.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.soft_limit_in_bytes"} {
			found, _ := filepath.Glob(filepath.Join(dir, id, file))
			for _, name := range found {
				text, err := os.ReadFile(name)
				if err != nil {
					t.Fatal(err)
				}
				limits[name] = strings.TrimSpace(string(text))
			}
		}
	}
	if len(limits) == 0 {
		t.Skip("the groups of the node's sandboxes are not where this test looks")
	}
	return limits
}

// TestLimitsOutliveAKilledServer: whatever pausing does to limits, they are as before when the sandbox runs again, also when the server is killed
// while memory is taken, and when it is killed again while that is taken up.
func TestLimitsOutliveAKilledServer(t *testing.T) {
	own := needOwn(t)
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Memory: 512 << 20} })
	b.start(&harenav1.Command{Shell: `{ head -c 67108864 /dev/urandom; : > /tmp/full; while [ ! -e /tmp/go ]; do sleep 0.1; done; } | tail -c 67108864 | wc -c`})
	eventually(t, "it holds memory", time.Minute, func() bool { return b.sh("test -e /tmp/full").GetExitCode() == 0 })
	before := limitsOf(t, b.id)
	// Where swap is opened for the time of a pause, the server is killed when that is seen; elsewhere at some moment.
	var swap string
	for name := range before {
		if filepath.Base(name) == "memory.swap.max" {
			swap = name
		}
	}
	for round := range 3 {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = the.sandboxes.Pause(within(t, 2*time.Minute), connect.NewRequest(&harenav1.PauseRequest{Selector: b.selector()}))
		}()
		seen := false
		for end := time.Now().Add(slowly(5 * time.Second)); !seen && time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
			select {
			case <-ended:
				end = time.Now()
			default:
			}
			if swap == "" {
				state := b.get().GetState()
				seen = state == "pausing" || state == "paused"
			} else if text, err := os.ReadFile(swap); err == nil {
				seen = strings.TrimSpace(string(text)) != before[swap]
			}
		}
		t.Logf("round %d: killed while limits differ: %v", round, seen && swap != "")
		own.kill()
		<-ended
		for kills := range 2 {
			if err := own.start(); err != nil {
				t.Fatal(err)
			}
			if kills == 0 {
				time.Sleep(20 * time.Millisecond)
				own.kill()
			}
		}
		eventually(t, "it is paused, or runs", time.Minute, func() bool { s := b.get().GetState(); return s == "paused" || s == "running" })
		b.must("true") // resumes it
		if after := limitsOf(t, b.id); !maps.Equal(before, after) {
			t.Fatalf("round %d: limits were %v, are %v", round, before, after)
		}
	}
	b.must(": > /tmp/go")
	doctor(t)
}

// compiled compiles a program of testdata, for any image.
func compiled(t *testing.T, source string) []byte {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "program")
	if out, err := exec.Command("gcc", "-O1", "-Wall", "-Werror", "-static", "-o", bin, "testdata/"+source).CombinedOutput(); err != nil {
		t.Fatalf("compile %s: %v\n%s", source, err, out)
	}
	text, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestMemoryBeyondTheLimit: a program that touches more than --memory is killed, which its result says; the sandbox goes on.
// Its program is static and small, so that there are no pages of files for it to lose first (docs/second-kernel.md).
func TestMemoryBeyondTheLimit(t *testing.T) {
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Memory: 64 << 20} })
	b.write("/hog", compiled(t, "hog.c"))
	b.must("chmod 755 /hog; echo kept > /kept")
	for range 2 {
		out := b.run(&harenav1.Command{Argv: []string{"/hog", "128"}, Timeout: patience(60)})
		if out.GetSignal() != "SIGKILL" || !out.GetOomKilled() || out.GetTimedOut() {
			t.Errorf("128 MiB below a limit of 64: %v %q", out.Result, out.stdout)
		}
	}
	if out := b.run(&harenav1.Command{Argv: []string{"/hog", "32"}}); out.GetExitCode() != 0 || out.GetOomKilled() {
		t.Errorf("32 MiB below a limit of 64: %v", out.Result)
	}
	if got := b.must("cat /kept"); got != "kept" {
		t.Errorf("its file has %q", got)
	}
	eventually(t, "both kills are counted", 20*time.Second, func() bool { return b.get().GetOomKills() == 2 })
}

// TestLimitsAreSeenInside, where programs look to size their heaps and pools.
func TestLimitsAreSeenInside(t *testing.T) {
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Memory: 96 << 20, Cpu: 1.5, Pids: 77} })
	got := strings.Fields(b.must("cd /sys/fs/cgroup; cat memory.max memory/memory.limit_in_bytes 2>/dev/null; cat cpu.max cpu/cpu.cfs_quota_us cpu,cpuacct/cpu.cfs_quota_us 2>/dev/null | head -n 1; true"))
	if len(got) < 2 || got[0] != fmt.Sprint(96<<20) || got[1] != "150000" {
		t.Errorf("memory and CPU limits inside: %q", got)
	}
}
