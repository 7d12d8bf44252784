package launch_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// buildAttack compiles the attacker.
func buildAttack(t testing.TB) string {
	t.Helper()
	requireRoot(t)
	out := filepath.Join(scratch(t), "attack")
	if b, err := exec.Command("gcc", "-static", "-O1", "-Wall", "-Werror", "-o", out, "testdata/attack.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
	return out
}

// withAttack is a lower layer that has the attacker in /bin.
func withAttack(t testing.TB) string {
	lower := busyboxLayer(t)
	copyFile(t, buildAttack(t), filepath.Join(lower, "bin/attack"), 0o755)
	return lower
}

// outcomes parses what the attacker prints.
func outcomes(t testing.TB, r result) map[string]string {
	t.Helper()
	m := map[string]string{}
	for line := range strings.Lines(r.out) {
		name, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		m[name] = what
	}
	if r.Code != 0 || len(m) < 10 {
		t.Fatalf("the attacker ended early: %+v", r)
	}
	return m
}

// TestNobodyIsTraceable attacks, as root inside with all that root has there, PID 1 and a child of the
// zygote that has not executed its command yet: it is frozen there.
func TestNobodyIsTraceable(t *testing.T) {
	b := start(t, options{lowers: []string{withAttack(t)}})
	victim := b.spec(t, "/bin/echo", "hello")
	group := cgroup.Dir(victim.Cgroup.Name())
	mustDo(t, os.WriteFile(string(group)+"/cgroup.freeze", []byte("1"), 0))
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	p, err := b.Spawner().Spawn(ctx, victim)
	mustDo(t, err)
	for _, pid := range []int{1, p.Pid()} {
		if cmd := b.sh(t, fmt.Sprintf("cat /proc/%d/cmdline", pid)); cmd != "init\x00" {
			t.Errorf("process %d shows %q, want a neutral name", pid, cmd)
		}
		for name, got := range outcomes(t, b.run(t, b.spec(t, "/bin/attack", "process", strconv.Itoa(pid)))) {
			if got != "EACCES" && got != "EPERM" && got != "ESRCH" && got != "ENODATA" {
				t.Errorf("process %d: %s: %s, want denied", pid, name, got)
			}
		}
	}
	// What inside may read of it shows the sandbox, not the node.
	views := b.sh(t, fmt.Sprintf("cat /proc/%[1]d/mountinfo /proc/%[1]d/mounts /proc/%[1]d/cgroup /proc/%[1]d/status", p.Pid()))
	for _, secret := range []string{"harena", "/var/", "zygote", "ext4"} {
		if strings.Contains(views, secret) || !strings.Contains(views, "overlay") {
			t.Errorf("a starting child shows %q:\n%s", secret, views)
		}
	}
	// What inside can do to a starting child, stop it, holds up nobody else.
	b.sh(t, fmt.Sprintf("kill -STOP %d", p.Pid()))
	mustDo(t, group.Thaw())
	for range 3 {
		if got := b.sh(t, "echo ok"); got != "ok\n" {
			t.Errorf("beside a stopped child: %q", got)
		}
	}
	b.sh(t, fmt.Sprintf("kill -CONT %d", p.Pid()))
	if e, err := p.Wait(ctx); err != nil || e.Code != 0 {
		t.Errorf("after SIGCONT: %+v, %v", e, err)
	}
}

func TestPid1IgnoresSignals(t *testing.T) {
	b := start(t, options{})
	b.sh(t, "for s in 1 2 9 15 19 11 6; do kill -$s 1; done")
	if got := b.sh(t, "echo alive"); got != "alive\n" {
		t.Errorf("got %q", got)
	}
	select {
	case <-b.Done():
		t.Errorf("ended: %s", b.Reason())
	default:
	}
}

// TestCalls holds what a system call answers inside, as root.
func TestCalls(t *testing.T) {
	b := start(t, options{lowers: []string{withAttack(t)}})
	got := outcomes(t, b.run(t, b.spec(t, "/bin/attack", "calls")))
	want := map[string]string{
		"clone3": "ENOSYS", "i386": "ENOSYS", "x32": "ENOSYS", "unknown": "ENOSYS",
		"personality-read": "OK", "af-inet": "OK", "af-unix": "OK", "netlink-route": "OK",
		"af-vsock": "EAFNOSUPPORT", "af-packet": "EAFNOSUPPORT", "af-alg": "EAFNOSUPPORT",
		"sctp": "EPROTONOSUPPORT", "mmap-huge": "ENOMEM", "memfd-huge": "ENOSYS", "sched-core": "EINVAL", "nice-negative": "EACCES",
		"netlink-audit": "EPROTONOSUPPORT", "netlink-netfilter": "EPROTONOSUPPORT",
	}
	for name, what := range got {
		w := want[name]
		if w == "" {
			w = "EPERM"
		}
		if what != w {
			t.Errorf("%s: %s, want %s", name, what, w)
		}
	}
}

// TestFilesWorker looks at a worker from the node, and for it from inside.
func TestFilesWorker(t *testing.T) {
	worker, err := os.Open(buildAttack(t))
	mustDo(t, err)
	b := start(t, options{worker: worker})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, uid := range []uint32{0, 1000} {
		null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
		mustDo(t, err)
		p, err := b.StartFileWorker(ctx, uid, uid, []uint32{7}, null, null)
		mustDo(t, err, null.Close())
		status := procFile(t, p.Pid, "status")
		id := strconv.Itoa(int(b.base + uid))
		caps := "0000000000000000"
		if uid == 0 {
			caps = "000000008000001b" // chown, dac_override, fowner, fsetid, setfcap
		}
		for _, line := range []string{
			"Uid:\t" + strings.Join([]string{id, id, id, id}, "\t"),
			"Gid:\t" + strings.Join([]string{id, id, id, id}, "\t"),
			"Groups:\t" + strconv.Itoa(int(b.base+7)),
			"CapPrm:\t" + caps, "CapEff:\t" + caps, "CapInh:\t0000000000000000", "CapAmb:\t0000000000000000",
			"CapBnd:\t000000008000001b",
			"NoNewPrivs:\t1", "Seccomp:\t2",
		} {
			if !strings.Contains(status, line) {
				t.Errorf("uid %d: status lacks %q:\n%s", uid, line, status)
			}
		}
		for ns, same := range map[string]bool{"user": true, "mnt": true, "net": true, "ipc": true, "uts": true, "pid": false} {
			theirs, own := procLink(t, b.InitPid(), "ns/"+ns), procLink(t, p.Pid, "ns/"+ns)
			if (theirs == own) != same {
				t.Errorf("uid %d: namespace %s shared with the sandbox: %v", uid, ns, theirs == own)
			}
		}
		if own, node := procLink(t, p.Pid, "ns/pid"), procLink(t, os.Getpid(), "ns/pid"); own != node {
			t.Errorf("uid %d: the worker is in another pid namespace", uid)
		}
		if got := procFile(t, p.Pid, "environ") + procFile(t, p.Pid, "cmdline"); got != "GOMAXPROCS=1\x00init\x00files\x00" {
			t.Errorf("environment and arguments are %q", got)
		}
		if got := procFile(t, p.Pid, "cgroup"); !strings.Contains(got, "/files\n") {
			t.Errorf("not in its cgroup: %s", got)
		}
		var fds []string
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid))
		mustDo(t, err)
		for _, e := range entries {
			fds = append(fds, e.Name())
		}
		if got := strings.Join(fds, " "); got != "0 1 2 3" {
			t.Errorf("descriptors are %s", got)
		}
		if got := b.sh(t, "for p in /proc/[0-9]*; do cat $p/cmdline; done"); strings.Contains(got, "files") {
			t.Errorf("the worker is visible inside: %q", got)
		}
		mustDo(t, p.Kill())
		_, err = p.Wait()
		mustDo(t, err)
	}
}

func procFile(t testing.TB, pid int, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	mustDo(t, err)
	return string(b)
}

func procLink(t testing.TB, pid int, name string) string {
	t.Helper()
	s, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, name))
	mustDo(t, err)
	return s
}

// TestFilesWorkerIsUntraceable: its program cannot be read inside, so its memory belongs to the node. The attacker is given
// what no process inside has: the worker's process ID, in the node's pid namespace.
func TestFilesWorkerIsUntraceable(t *testing.T) {
	program, err := os.Open(buildAttack(t))
	mustDo(t, err)
	mustDo(t, program.Chmod(0o111))
	b := start(t, options{worker: program})
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	mustDo(t, err)
	defer func() { mustDo(t, null.Close()) }()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	worker, err := b.StartFileWorker(ctx, 0, 0, nil, null, null)
	mustDo(t, err)
	defer func() {
		mustDo(t, worker.Kill())
		_, err := worker.Wait()
		mustDo(t, err)
	}()

	image, err := zygote.NewImage()
	mustDo(t, err)
	defer func() { mustDo(t, image.Close()) }()
	pidfd, err := unix.PidfdOpen(b.InitPid(), 0)
	mustDo(t, err)
	in := os.NewFile(uintptr(pidfd), "init")
	group, err := os.Open(b.launch.GetCgroups().GetFilesTracking())
	mustDo(t, err)
	attack, err := os.Open(buildAttack(t))
	mustDo(t, err)
	r, w, err := os.Pipe()
	mustDo(t, err)
	p, err := image.Enter(ctx, zygote.Entry{
		Init: in, Program: attack, Argv: []string{"attack", "process", strconv.Itoa(worker.Pid)},
		Stdin: null, Stdout: w, Root: b.Root, Cgroup: group,
	})
	mustDo(t, err, w.Close(), attack.Close(), group.Close(), in.Close())
	out, err := io.ReadAll(r)
	mustDo(t, err, r.Close())
	state, err := p.Wait()
	mustDo(t, err)
	got := outcomes(t, result{zygote.Exit{Code: state.ExitCode()}, string(out)})
	for name, what := range got {
		// The sandbox's /proc does not have it.
		if what != "EPERM" && what != "EACCES" && what != "ENOENT" && what != "ESRCH" {
			t.Errorf("%s: %s, want denied", name, what)
		}
	}
	for _, name := range []string{"process_vm_readv", "process_vm_writev", "ptrace-seize", "ptrace-attach", "pidfd_getfd"} {
		if got[name] != "EPERM" {
			t.Errorf("%s: %s, want EPERM: the attacker should find the process", name, got[name])
		}
	}
}

// TestZygoteIsHidden: host processes, ours first, are not visible.
func TestZygoteIsHidden(t *testing.T) {
	b := start(t, options{})
	pids := strings.Fields(b.sh(t, "ls /proc | grep '^[0-9]'"))
	if len(pids) > 5 {
		t.Errorf("%d processes are visible: %v", len(pids), pids)
	}
	if got := procLink(t, b.ZygotePid(), "ns/pid"); got != procLink(t, os.Getpid(), "ns/pid") {
		t.Errorf("the zygote is in a pid namespace of its own")
	}
	if got := procFile(t, b.ZygotePid(), "cgroup"); !strings.Contains(got, "/zygote\n") {
		t.Errorf("the zygote is in %s", got)
	}
	if got := procFile(t, b.ZygotePid(), "cmdline"); got != "init\x00" {
		t.Errorf("the zygote shows %q", got)
	}
}

// TestMaskedAndReadOnly: what /proc and /sys hold back.
func TestMaskedAndReadOnly(t *testing.T) {
	b := start(t, options{})
	for _, c := range []struct{ text, want string }{
		{"cat /proc/timer_list /proc/keys /proc/interrupts | head -c 10", ""},
		{"head -c 10 /proc/kcore", ""},
		{"ls /proc/acpi /sys/firmware | grep -v ':$' | grep .", ""},
		{"echo 1 > /proc/sys/kernel/hostname && echo written", ""},
		{"echo 1 > /proc/sys/net/ipv4/ip_forward && echo written", ""},
		{"echo 1 > /proc/sys/user/max_user_namespaces && echo written", ""},
		{"echo h > /proc/sysrq-trigger && echo written", ""},
		{"mkdir /sys/fs/cgroup/memory/x /sys/fs/cgroup/x 2>/dev/null && echo made", ""},
		{"for f in /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/*/cgroup.procs; do echo 0 > $f && echo written; done", ""},
		{"umount /proc/timer_list && echo done", ""},
		{"umount -l /proc/sys && echo done", ""},
		{"mount -o remount,rw /proc/sys && echo done", ""},
		{"mount -t proc proc /tmp && echo done", ""},
		{"cat /proc/sys/user/max_user_namespaces /proc/sys/net/ipv4/ip_unprivileged_port_start", "0\n0\n"},
		{"hostname", "arena\n"},
		{"cat /etc/hostname", "arena\n"},
		{"grep -c arena /etc/hosts", "1\n"},
		{"ip a | grep -c 'inet 127.0.0.1'", "1\n"},
		{"stat -c %a:%u:%g:%F / /etc /etc/hosts /dev/shm", "755:0:0:directory\n755:0:0:directory\n644:0:0:regular file\n1777:0:0:directory\n"},
		{"ls /dev", "fd\nfull\nmqueue\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero\n"},
	} {
		if got := b.run(t, b.spec(t, "/bin/sh", "-c", "exec 2>/dev/null; "+c.text)).out; got != c.want {
			t.Errorf("%s: %q, want %q", c.text, got, c.want)
		}
	}
}

// TestMountsShowNoPathOfTheNode reads every view of the mounts.
func TestMountsShowNoPathOfTheNode(t *testing.T) {
	b := start(t, options{})
	mounts := b.sh(t, "cat /proc/self/mountinfo /proc/self/mounts /proc/self/mountstats /proc/1/mountinfo")
	for _, part := range strings.Split(strings.Trim(b.dir+"/"+strings.Join(b.launch.GetLowers(), "/"), "/"), "/") {
		if len(part) > 5 && strings.Contains(mounts, part) {
			t.Errorf("the mounts show %q:\n%s", part, mounts)
		}
	}
	// By descriptors, or on kernels that take none by names in a place that is gone.
	if !strings.Contains(mounts, "lowerdir+=/,upperdir=/data,workdir=/work") && !strings.Contains(mounts, "lowerdir+=0,upperdir=1/data,workdir=1/work") {
		t.Errorf("unexpected root mount:\n%s", mounts)
	}
	if strings.Contains(mounts, "/var") || strings.Contains(mounts, "ext4") {
		t.Errorf("a mount of the node is left:\n%s", mounts)
	}
}
