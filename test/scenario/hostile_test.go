package scenario

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Each of these hurts only its own sandbox: another one on the same node keeps
// working meanwhile, and what happened is reported.

func neighbour(t *testing.T) func() {
	b := create(t)
	return func() {
		t.Helper()
		if got := b.must("echo alive"); got != "alive" {
			t.Errorf("the neighbour says %q", got)
		}
	}
}

func TestMemoryHog(t *testing.T) {
	check := neighbour(t)
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Memory: 128 << 20} })
	out := b.run(&harenav1.Command{Argv: []string{"/usr/bin/python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))"}, Timeout: patience(60)})
	if out.GetExitCode() == 0 || out.GetTimedOut() {
		t.Errorf("the hog ended with %v", out.Result)
	}
	if out.GetSignal() == "SIGKILL" && !out.GetOomKilled() {
		t.Errorf("killed, but not said to be for want of memory: %v", out.Result)
	}
	check()
	if got := b.must("echo alive"); got != "alive" {
		t.Errorf("the sandbox itself: %q", got)
	}
	eventually(t, "the kills are counted", 20*time.Second, func() bool { return b.get().GetOomKills() > 0 })
}

func TestForkBomb(t *testing.T) {
	check := neighbour(t)
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Pids: 64} })
	id := b.start(&harenav1.Command{Argv: []string{"/usr/bin/python3", "-c", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"}, Timeout: seconds(4)})
	time.Sleep(time.Second)
	check()
	// A command under the bomb either works or says what is exhausted; the file API is outside the limit.
	if _, err := b.try(within(t, time.Minute), &harenav1.Command{Argv: []string{"true"}}); err != nil && kind(err) != "capacity" {
		t.Errorf("under the bomb: %v", explain(err))
	}
	b.write("/tmp/under-the-bomb", []byte("x"))
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); !out.GetTimedOut() {
		t.Errorf("the bomb ended with %v", out.Result)
	}
	eventually(t, "the bomb is gone", 20*time.Second, func() bool {
		out, err := b.try(within(t, time.Minute), &harenav1.Command{Argv: []string{"true"}})
		return err == nil && out.GetExitCode() == 0
	})
}

func TestDescriptorAndInodeFlood(t *testing.T) {
	check := neighbour(t)
	b := create(t)
	out := b.run(&harenav1.Command{Argv: []string{"/usr/bin/python3", "-c", `
import os
n = 0
try:
    while True: os.open("/dev/null", os.O_RDONLY); n += 1
except OSError as e: print(n, e.errno)
`}, Timeout: patience(60)})
	if f := strings.Fields(string(out.stdout)); len(f) != 2 || f[1] != "24" {
		t.Errorf("descriptors: %q %q", out.stdout, out.stderr)
	}
	b.must("mkdir /flood && cd /flood && python3 -c 'for i in range(20000): open(str(i), \"w\").close()'")
	check()
	if n := b.must("ls /flood | wc -l"); n != "20000" {
		t.Errorf("%s files", n)
	}
}

func TestCPUHogLeavesRoom(t *testing.T) {
	check := neighbour(t)
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Cpu: 0.2} })
	out := b.run(&harenav1.Command{Shell: "while :; do :; done", Timeout: seconds(3)})
	check()
	// A fifth of a core for 3 s is 0.6 s; an unlimited loop would have used all 3.
	if cpu := out.GetCpuTime().AsDuration(); cpu > 1500*time.Millisecond {
		t.Errorf("used %v of CPU", cpu)
	}
}

func TestEndlessOutputNeitherGrowsMemoryNorDisk(t *testing.T) {
	own := needOwn(t)
	b := create(t)
	before := treeSize(t, own.dir+"/sandboxes/"+b.id)
	const cap = 1 << 20
	b.start(&harenav1.Command{Argv: []string{"yes"}, MaxOutput: cap, Timeout: seconds(5)})
	var most int64
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		most = max(most, treeSize(t, own.dir+"/sandboxes/"+b.id)-before)
	}
	if most > cap+(256<<10) {
		t.Errorf("%d bytes on disk for a record of %d", most, cap)
	}
}

func TestPidsOfOthersAreOutOfReach(t *testing.T) {
	b := create(t)
	other := create(t)
	other.start(&harenav1.Command{Argv: []string{"sleep", "4711"}})
	if got := b.must("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(got, "4711") || strings.Contains(got, "harena") {
		t.Errorf("visible processes: %q", got)
	}
	if n, err := strconv.Atoi(b.must("ls -d /proc/[0-9]* | wc -l")); err != nil || n > 8 {
		t.Error(fmt.Errorf("%d processes visible: %w", n, err))
	}
}
