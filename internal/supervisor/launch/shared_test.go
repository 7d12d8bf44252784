package launch_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// printed are the lines "name value" of a command's output.
func printed(out string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		m[name] = value
	}
	return m
}

// TestCommandsInheritNothing: a command gets what is decided for it, whatever the node's daemon was started with.
func TestCommandsInheritNothing(t *testing.T) {
	t.Setenv("HARENA_TOKEN", "secret")
	node, err := os.ReadFile("/proc/self/oom_score_adj")
	mustDo(t, err)
	if string(node) == "0\n" { // 0 can be come back to without CAP_SYS_RESOURCE
		mustDo(t, os.WriteFile("/proc/self/oom_score_adj", []byte("100"), 0))
		defer func() { mustDo(t, os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0)) }()
	}
	lower := withAttack(t)
	// A thread's priority goes to the process that it starts.
	runtime.LockOSThread()
	mustDo(t, unix.Setpriority(unix.PRIO_PROCESS, 0, 5))
	b := start(t, options{lowers: []string{lower}})
	mustDo(t, unix.Setpriority(unix.PRIO_PROCESS, 0, 0))
	runtime.UnlockOSThread()
	s := b.spec(t, "/bin/attack", "self")
	s.Stdin = nil
	got := b.run(t, s)
	want := map[string]string{
		"fd0": "0x8000", "fd1": "0x1", "fd2": "0x1", "umask": "022", "session": "own", "tty": "ENXIO", "parent": "0", "nice": "0",
		"scheduler": "0", "io-priority": "0", "personality": "0", "securebits": "0", "no-new-privs": "0", "death-signal": "0", "env:PATH=/bin": "",
	}
	seen := printed(got.out)
	for name, v := range seen {
		if strings.HasPrefix(name, "rlimit") {
			continue
		}
		if w, ok := want[name]; !ok || v != w {
			t.Errorf("%s: %q, want %q", name, v, w)
		}
	}
	for name := range want {
		if _, ok := seen[name]; !ok {
			t.Errorf("%s is not there: %s", name, got.out)
		}
	}
	for resource, want := range map[int]string{
		unix.RLIMIT_CORE: "1 1", unix.RLIMIT_NICE: "0 0", unix.RLIMIT_RTPRIO: "0 0", unix.RLIMIT_MSGQUEUE: "819200 819200", unix.RLIMIT_FSIZE: "-1 -1",
	} {
		if got := seen["rlimit"+strconv.Itoa(resource)]; got != want {
			t.Errorf("resource limit %d: %s, want %s", resource, got, want)
		}
	}
	if got := b.sh(t, "cat /proc/self/oom_score_adj /proc/sys/kernel/domainname; echo -1 2>/dev/null > /proc/self/oom_score_adj && echo lowered; echo 5 2>/dev/null > /proc/1/oom_score_adj && echo raised"); got != "0\n(none)\n" {
		t.Errorf("got %q", got)
	}
	if got := procFile(t, b.ZygotePid(), "oom_score_adj"); got != "0\n" {
		t.Errorf("the zygote has %q", got)
	}
}

// hold starts a command that takes something for as long as the sandbox lives, and returns what it printed up to "held".
func (b *bed) hold(t *testing.T, s zygote.Spec) map[string]string {
	t.Helper()
	r, w, err := os.Pipe()
	mustDo(t, err)
	defer func() { mustDo(t, r.Close()) }()
	s.Stdout = w
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err = b.Spawner().Spawn(ctx, s)
	mustDo(t, err, w.Close(), r.SetReadDeadline(time.Now().Add(30*time.Second)))
	var out strings.Builder
	for in := bufio.NewScanner(r); in.Scan(); {
		if in.Text() == "held" {
			return printed(out.String())
		}
		fmt.Fprintln(&out, in.Text())
	}
	t.Fatalf("%q ended early: %q", s.Argv, out.String())
	return nil
}

// TestCountersAreTheSandboxes: what the kernel counts by user is counted for each sandbox alone, and of what it counts for
// the node, one sandbox cannot take all. Queued signals of the node's root are what its daemons' timers need.
func TestCountersAreTheSandboxes(t *testing.T) {
	lower := withAttack(t)
	a, b := start(t, options{lowers: []string{lower}}), start(t, options{lowers: []string{lower}})
	held := a.hold(t, a.spec(t, "/bin/attack", "hold"))
	t.Logf("one sandbox holds %v", held)
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	mustDo(t, err)
	mustDo(t, unix.Close(fd))
	free := printed(b.run(t, b.spec(t, "/bin/attack", "counters")).out)
	for _, name := range []string{"inotify", "mqueues", "signals", "terminals"} {
		if held[name] == "0" || held[name] == "" || held[name] != free[name] {
			t.Errorf("%s: one sandbox gets %q, the next %q", name, held[name], free[name])
		}
	}
	if held["terminals"] != "256" {
		t.Errorf("one sandbox has %s terminals", held["terminals"])
	}
	// The node's root has none of these in use.
	for line := range strings.Lines(procFile(t, os.Getpid(), "status")) {
		var n, limit int
		if k, _ := fmt.Sscanf(line, "SigQ: %d/%d", &n, &limit); k == 2 && n > limit/2 {
			t.Errorf("the node's root has %d of %d signals queued", n, limit)
		}
	}
}

// TestDevicesAreTheSandboxes: an inode in common could be watched (inotify) and locked (flock) by one for all.
func TestDevicesAreTheSandboxes(t *testing.T) {
	a, b := start(t, options{}), start(t, options{})
	const look = "stat -L -c %d:%i /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/stdin /proc/keys"
	ids := func(b *bed) []string {
		s := b.spec(t, "/bin/sh", "-c", look)
		s.Stdin = nil
		return strings.Fields(b.run(t, s).out)
	}
	one, other := ids(a), ids(b)
	if len(one) != 8 || len(other) != 8 {
		t.Fatalf("devices are %q and %q", one, other)
	}
	for i := range one {
		if slices.Contains(other, one[i]) {
			t.Errorf("device %s is in both", one[i])
		}
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		var st unix.Stat_t
		mustDo(t, unix.Stat(filepath.Join("/dev", name), &st))
		if slices.Contains(one, fmt.Sprintf("%d:%d", st.Dev, st.Ino)) {
			t.Errorf("/dev/%s is the node's inode", name)
		}
	}
	if got := a.sh(t, "stat -c %t:%T /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty; head -c 3 /dev/urandom > /dev/null && echo works"); got != "1:3\n1:5\n1:7\n1:8\n1:9\n5:0\nworks\n" {
		t.Errorf("devices are %q", got)
	}
	if mounts := a.sh(t, "cat /proc/self/mountinfo"); strings.Contains(mounts, "devtmpfs") || strings.Contains(mounts, "nr_inodes") {
		t.Errorf("the node's devices are mounted:\n%s", mounts)
	}
}

// TestSocketMemoryCounts: what waits in sockets is bounded with the rest of a sandbox's memory.
func TestSocketMemoryCounts(t *testing.T) {
	const limit = 128 << 20
	b := start(t, options{lowers: []string{withAttack(t)}, limits: cgroup.Limits{Memory: limit}})
	r := b.run(t, b.spec(t, "/bin/attack", "sockets", "200"))
	n, err := strconv.Atoi(printed(r.out)["queued"])
	t.Logf("%d MiB in sockets", n>>20)
	if r.Signal == 0 && (err != nil || n == 0 || n > limit) { // v2 may kill it
		t.Errorf("200 connections hold %d MiB: %+v", n>>20, r)
	}
}

// TestAttributesSetInside: overlayfs believes nothing that inside can set, and a file capability gives no more than
// commands may have.
func TestAttributesSetInside(t *testing.T) {
	lower := withAttack(t)
	mustDo(t, os.MkdirAll(filepath.Join(lower, "data/d"), 0o755), os.WriteFile(filepath.Join(lower, "data/d/f"), []byte("below\n"), 0o644))
	// A v2 capability: cap_chown, permitted and effective.
	v2 := []byte{1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	mustDo(t, unix.Setxattr(filepath.Join(lower, "data/d/f"), "security.capability", v2, 0))
	b := start(t, options{lowers: []string{lower}})
	b.sh(t, "touch /data/d/f")
	up := make([]byte, 64)
	if n, err := unix.Getxattr(filepath.Join(b.launch.GetUpper(), "data/d/f"), "security.capability", up); err != nil || !slices.Equal(up[:n], v2) {
		t.Errorf("a file capability after copy-up: %v, %v", up[:max(n, 0)], err)
	}
	b.sh(t, "cp /bin/busybox /data/tool; chmod 755 /data/tool")
	for _, path := range []string{"/data/d", "/data/d/f", "/data/tool"} {
		for name, got := range outcomes(t, b.run(t, b.spec(t, "/bin/attack", "xattrs", path))) {
			want := "EPERM"
			if strings.HasPrefix(name, "user.") {
				want = "OK"
			} else if name == "security.capability" && path != "/data/d" {
				want = "OK"
			} else if strings.HasPrefix(name, "trusted.overlay.") && got == "EOPNOTSUPP" {
				want = got
			} else if path == "/data/d" && name == "security.capability" {
				want = got // of no meaning on a directory
			}
			if got != want {
				t.Errorf("%s of %s: %s, want %s", name, path, got, want)
			}
		}
	}
	if got := b.sh(t, "cat /data/d/f; ls /data/d"); got != "below\nf\n" {
		t.Errorf("user.overlay.* changed the layers: %q", got)
	}
	// cap_sys_admin is not in the bounding set: the program that insists on it does not run.
	s := b.spec(t, "busybox", "grep", "CapEff", "/proc/self/status")
	s.Paths, s.UID, s.GID = []string{"/data/tool"}, 1000, 1000
	if got := b.run(t, s); got.ExecErrno != int(unix.EPERM) {
		t.Errorf("a file capability beyond the bounding set: %+v", got)
	}
}
