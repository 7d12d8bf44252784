package scenario

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// attacker compiles testdata/attack.c and lays it over the image as a toolkit.
func attacker(t *testing.T) *box {
	t.Helper()
	if the.backend != "container" {
		t.Skip("these are the container's walls; a VM has others")
	}
	bin := filepath.Join(t.TempDir(), "attack")
	if out, err := exec.Command("gcc", "-O1", "-Wall", "-Werror", "-static", "-o", bin, "testdata/attack.c").CombinedOutput(); err != nil {
		t.Fatalf("compile the attacker: %v: %s", err, out)
	}
	code, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	importTar(t, "attack-tools", "toolkit", map[string]string{"opt/attack": string(code)})
	return create(t, func(s *harenav1.SandboxSpec) { s.Toolkits = []string{"attack-tools"} })
}

// Rows of the table of what an attacker that is root inside tries on PID 1, the
// only process of Harena's that it can see.
func TestNothingOfHarenasCanBeReached(t *testing.T) {
	b := attacker(t)
	out := b.run(&harenav1.Command{Argv: []string{"/opt/attack", "process", "1"}, Timeout: patience(30)})
	if out.GetExitCode() != 0 {
		t.Errorf("PID 1 can be reached:\n%s%s", out.stdout, out.stderr)
	}
	for _, script := range []string{
		"kill -STOP 1; kill -KILL 1; sleep 0.2; echo still", // signals from inside its namespace do not touch PID 1
		"cat /proc/1/environ 2>&1 | grep -c harena || true",
	} {
		if got := b.must(script); got != "still" && got != "0" {
			t.Errorf("%s: %q", script, got)
		}
	}
}

// A child of ours is catchable between its fork and its exec: nothing may come of it.
func TestStartingCommandsCannotBeTaken(t *testing.T) {
	b := attacker(t)
	hunt := b.start(&harenav1.Command{Argv: []string{"/opt/attack", "hunt", strconv.Itoa(count(4, 40))}, Timeout: patience(120)})
	for range count(300, 3000) {
		if _, err := b.try(within(t, time.Minute), &harenav1.Command{Argv: []string{"/bin/true"}, Timeout: patience(20)}); err != nil {
			t.Fatalf("an exec during the hunt: %v", explain(err))
		}
	}
	out := b.follow(&harenav1.ConnectRequest{CommandId: hunt})
	if out.GetExitCode() != 0 {
		t.Errorf("the hunter got something: %s", out.stdout)
	}
	// A hunter that stops what it sees delays its victim at most: others go on, and nothing of ours is wedged.
	stopper := b.start(&harenav1.Command{Argv: []string{"/opt/attack", "stop", "3"}, Timeout: patience(60)})
	for range 50 {
		_, _ = b.try(within(t, time.Minute), &harenav1.Command{Argv: []string{"/bin/true"}, Timeout: seconds(2)})
	}
	b.follow(&harenav1.ConnectRequest{CommandId: stopper})
	b.must("true")
}

func TestKernelInterfacesAreClosed(t *testing.T) {
	b := attacker(t)
	out := b.run(&harenav1.Command{Argv: []string{"/opt/attack", "kernel"}, Timeout: patience(30)})
	if out.GetExitCode() != 0 {
		t.Errorf("open interfaces:\n%s", out.stdout)
	}
}

func TestMountsShowNoPathOfTheNode(t *testing.T) {
	b := create(t)
	for _, file := range []string{"/proc/self/mountinfo", "/proc/self/mounts", "/proc/1/mountinfo", "/proc/self/cgroup", "/proc/1/cgroup"} {
		got := b.must("cat " + file)
		for _, secret := range []string{"harena", "/var/", b.id, "sandboxes", "upper/data"} {
			if strings.Contains(got, secret) {
				t.Errorf("%s shows %q:\n%s", file, secret, got)
			}
		}
	}
}

func TestSensitiveFilesAreMasked(t *testing.T) {
	b := create(t)
	for _, p := range []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/acpi", "/sys/firmware"} {
		if got := b.must("if [ -d " + p + " ]; then ls -A " + p + "; else head -c 100 " + p + " 2>/dev/null; fi; true"); got != "" {
			t.Errorf("%s shows %q", p, got)
		}
	}
	for _, script := range []string{
		"echo 1 > /proc/sys/kernel/core_pattern", "echo b > /proc/sysrq-trigger", "echo 1 > /proc/sys/vm/drop_caches",
		"umount /proc", "mount -t tmpfs x /mnt", "mount -o remount,rw /sys", "mount --bind /etc /mnt", "umount -l /proc/kcore", "unshare -Ur true", "unshare -m true",
		"mknod /tmp/disk b 254 0", "mknod /tmp/null c 1 3", "chroot /proc/1/root true && cat /proc/1/root/etc/shadow.none", "hostname other", "date -s 2001-01-01", "dmesg",
		"ip link add d0 type dummy", "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'", "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
		"python3 -c 'import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)'",
		"nsenter -t 1 -a true", "swapoff -a && false", "modprobe dummy", "kexec -l x",
	} {
		if out := b.sh(script); out.GetExitCode() == 0 {
			t.Errorf("%s worked: %q", script, out.stdout)
		}
	}
	if got := b.must("ls /sys/class/net; cat /proc/net/dev | wc -l"); !strings.HasPrefix(got, "lo\n") {
		t.Errorf("network devices: %q", got)
	}
	b.must("python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", 0)); c = socket.create_connection(s.getsockname()); print(1)'") // loopback is up
	for _, dev := range []string{"null", "zero", "full", "random", "urandom", "tty", "pts/ptmx", "shm", "fd/0", "stdin", "stdout", "stderr"} {
		b.must("test -e /dev/" + dev + " || test -L /dev/" + dev)
	}
	if got := b.must("ls /dev | tr '\\n' ' '"); strings.Contains(got, "sda") || strings.Contains(got, "vda") || strings.Contains(got, "kmsg") || strings.Contains(got, "console") {
		t.Errorf("devices: %s", got)
	}
}

func TestDevStdoutWorksForUsers(t *testing.T) {
	b := create(t)
	b.must("useradd ann")
	out := b.run(&harenav1.Command{Shell: "echo out > /dev/stdout; echo err > /dev/stderr; echo out2 > /proc/self/fd/1", User: "ann"})
	same(t, "stdout", out.stdout, []byte("out\nout2\n"))
	same(t, "stderr", out.stderr, []byte("err\n"))
}

func TestSandboxesDoNotShare(t *testing.T) {
	a, b := create(t), create(t)
	a.must("echo a > /tmp/x; echo a > /dev/shm/x; echo a >> /etc/passwd")
	if got := b.must("ls /tmp/x /dev/shm/x 2>/dev/null; tail -n 1 /etc/passwd; true"); strings.Contains(got, "x\n") || got == "a" {
		t.Errorf("b sees what a wrote: %q", got)
	}
	if a.must("hostname") == b.must("hostname") {
		t.Error("both have one host name")
	}
	for _, ns := range []string{"user", "pid", "mnt", "net", "ipc", "uts", "cgroup"} {
		if x, y := a.must("readlink /proc/self/ns/"+ns), b.must("readlink /proc/self/ns/"+ns); x == y {
			t.Errorf("one %s namespace: %s", ns, x)
		}
	}
	if x, y := a.must("cat /proc/self/uid_map"), b.must("cat /proc/self/uid_map"); x == y {
		t.Errorf("one range of host IDs: %q", x)
	}
}

// The data directory holds setuid files with canonical IDs: nobody but root may reach it.
func TestDataDirectoryIsClosed(t *testing.T) {
	own := needOwn(t)
	b := create(t)
	b.must("cp /bin/true /tmp/su && chmod 4755 /tmp/su")
	info, err := os.Stat(own.dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%s has mode %v, %v", own.dir, info.Mode(), err)
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	found := false
	for _, line := range strings.Split(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 5 && f[4] == own.dir {
			found = strings.Contains(f[5], "nosuid") && strings.Contains(f[5], "nodev")
		}
	}
	if !found {
		t.Errorf("%s is not mounted nosuid,nodev", own.dir)
	}
}

func TestHostileImageCannotAimTheLauncher(t *testing.T) {
	importTarLinks(t, "hostile-links", map[string]string{"etc": "/opt/elsewhere"}, map[string]string{
		"proc": "/etc", "dev": "/root", "sys": "/", "tmp/a": "/proc/self/root",
	})
	res, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{
		Image: the.image, Backend: the.backend, Toolkits: []string{"hostile-links"}}}))
	if err == nil { // either it is refused, or it is confined: the node is what must not change
		_ = stop(within(t, time.Minute), res.Msg.GetSandbox().GetId())
	} else if k := kind(err); k == "internal" || k == "" {
		t.Errorf("%v", explain(err))
	}
	if _, err := os.Stat("/opt/elsewhere"); err == nil {
		t.Error("the launcher wrote to the node")
	}
	doctor(t)
}
