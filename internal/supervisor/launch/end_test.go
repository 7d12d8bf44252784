package launch_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/launch"
)

// TestEnds: whatever kills the zygote or PID 1 ends the sandbox, every process in it, and every call.
func TestEnds(t *testing.T) {
	for name, kill := range map[string]func(*bed) error{
		"zygote":   func(b *bed) error { return unix.Kill(b.ZygotePid(), unix.SIGKILL) },
		"PID 1":    func(b *bed) error { return unix.Kill(b.InitPid(), unix.SIGKILL) },
		"workload": func(b *bed) error { return b.groups.Work.Kill() },
		"close":    func(b *bed) error { return b.Close() },
	} {
		t.Run(strings.ReplaceAll(name, " ", ""), func(t *testing.T) {
			b := start(t, options{})
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			p, err := b.Spawner().Spawn(ctx, b.spec(t, "/bin/sh", "-c", "setsid sleep 100 & sleep 100"))
			mustDo(t, err)
			mustDo(t, kill(b))
			select {
			case <-b.Done():
			case <-ctx.Done():
				t.Fatal("Done is not closed")
			}
			if b.Reason() == "" {
				t.Error("no reason")
			}
			if e, err := p.Wait(ctx); e.Signal != 9 || ctx.Err() != nil {
				t.Errorf("a running command: %+v, %v", e, err)
			}
			if err := b.groups.Work.WaitEmpty(ctx); err != nil {
				t.Errorf("processes are left: %v", err)
			}
			if _, err := b.Spawner().Spawn(ctx, b.spec(t, "/bin/true")); !errs.Is(err, errs.Precondition) {
				t.Errorf("spawn after the end: %v", err)
			}
			if name != "close" {
				null, err := os.Open("/dev/null")
				mustDo(t, err)
				if _, err := b.StartFileWorker(ctx, 0, 0, nil, null, null); !errs.Is(err, errs.Precondition) {
					t.Errorf("file worker after the end: %v", err)
				}
				mustDo(t, null.Close())
			}
		})
	}
}

// TestHostileImages: an image cannot redirect a mount or a write of ours.
func TestHostileImages(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"proc is a link": func(d string) error {
			return replace(filepath.Join(d, "proc"), func(p string) error { return os.Symlink("/etc", p) })
		},
		"sys is a relative link": func(d string) error {
			return replace(filepath.Join(d, "sys"), func(p string) error { return os.Symlink("../../etc", p) })
		},
		"dev is a file": func(d string) error {
			return replace(filepath.Join(d, "dev"), func(p string) error { return os.WriteFile(p, nil, 0o644) })
		},
		"etc is a link": func(d string) error {
			mustDo(t, os.RemoveAll(filepath.Join(d, "etc")))
			return os.Symlink("/var/tmp", filepath.Join(d, "etc"))
		},
	} {
		lower := busyboxLayer(t)
		mustDo(t, spoil(lower))
		l, paths := newLaunch(t, options{lowers: []string{lower}})
		p, err := launch.Prepare(nil)
		mustDo(t, err)
		_, err = p.Launch(context.Background(), l)
		if !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		mustDo(t, p.Close())
		if procs, err := paths.Dir.Tree(); err != nil || len(procs) > 0 {
			t.Errorf("%s: processes %v are left, %v", name, procs, err)
		}
	}

	// Links where files are to be written are replaced, not followed; missing directories are made.
	lower := busyboxLayer(t)
	victim := filepath.Join(scratch(t), "victim")
	mustDo(t, os.WriteFile(victim, []byte("mine"), 0o666))
	for _, n := range []string{"hosts", "resolv.conf", "hostname"} {
		mustDo(t, os.Symlink(victim, filepath.Join(lower, "etc", n)))
	}
	mustDo(t, os.Chmod(filepath.Join(lower, "etc"), 0o711), os.Remove(filepath.Join(lower, "dev")), os.Remove(filepath.Join(lower, "sys")))
	b := start(t, options{lowers: []string{lower}})
	if got := b.sh(t, "cat /etc/hostname; stat -c %a /etc; ls /dev/null; ls -d /sys/class"); got != "arena\n711\n/dev/null\n/sys/class\n" {
		t.Errorf("got %q", got)
	}
	if got, err := os.ReadFile(victim); err != nil || string(got) != "mine" {
		t.Errorf("a file of the node was written: %q, %v", got, err)
	}
}

func replace(path string, with func(string) error) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	return with(path)
}

// TestFilesOnly starts on the layer of an earlier sandbox, which may have spoiled it, and runs nothing.
func TestFilesOnly(t *testing.T) {
	b := start(t, options{})
	b.sh(t, "echo kept > /etc/hosts; rm /etc/resolv.conf; ln -s /nowhere /etc/resolv.conf; sync; sync /etc/hosts")
	// The end of a sandbox must not wait until the node's disk has taken all that was written to it.
	if got := b.sh(t, "cat /proc/mounts"); !strings.Contains(strings.SplitN(got, "\n", 2)[0], "volatile") {
		t.Errorf("the root is not volatile: %s", got)
	}
	mustDo(t, b.Close())
	upper := b.launch
	again := start(t, options{lowers: b.launch.GetLowers(), edit: func(l *guestv1.Launch) {
		l.Upper, l.Work, l.IdBase, l.FilesOnly = upper.GetUpper(), upper.GetWork(), upper.GetIdBase(), true
	}})
	if _, err := again.Spawner().Spawn(context.Background(), again.spec(t, "/bin/true")); !errs.Is(err, errs.Precondition) {
		t.Errorf("spawn: %v", err)
	}
	fd, err := unix.Openat(int(again.Root.Fd()), "etc/hosts", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	f := os.NewFile(uintptr(fd), "hosts")
	buf := make([]byte, 10)
	n, _ := f.Read(buf)
	mustDo(t, f.Close())
	if string(buf[:n]) != "kept\n" {
		t.Errorf("/etc/hosts is %q", buf[:n])
	}
}

// TestFailedLaunchLeavesNothing fails a launch at several points.
func TestFailedLaunchLeavesNothing(t *testing.T) {
	lower := busyboxLayer(t)
	for name, spoil := range map[string]func(*guestv1.Launch){
		"no lower":    func(l *guestv1.Launch) { l.Lowers = append(l.Lowers, "/nowhere") },
		"no upper":    func(l *guestv1.Launch) { l.Upper += "x" },
		"no work":     func(l *guestv1.Launch) { l.Work += "x" },
		"no cgroup":   func(l *guestv1.Launch) { l.Cgroups.Tracking += "/x/y" },
		"bad v1":      func(l *guestv1.Launch) { l.Cgroups.V1 = []string{"/nowhere"} },
		"bad ID base": func(l *guestv1.Launch) { l.IdBase = 4294967295 },
		"hostname":    func(l *guestv1.Launch) { l.Hostname = strings.Repeat("x", 100) },
	} {
		l, paths := newLaunch(t, options{lowers: []string{lower}})
		spoil(l)
		p, err := launch.Prepare(nil)
		mustDo(t, err)
		if _, err := p.Launch(context.Background(), l); err == nil {
			t.Errorf("%s: no error", name)
		}
		mustDo(t, p.Close(), p.Close())
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := paths.Dir.WaitEmpty(ctx); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	// A cancelled one.
	l, _ := newLaunch(t, options{lowers: []string{lower}})
	p, err := launch.Prepare(nil)
	mustDo(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := p.Launch(ctx, l); !errs.Is(err, errs.Cancelled) {
		t.Errorf("cancelled: %v", err)
	}
	mustDo(t, p.Close())
}

// TestTerminal opens a terminal of the sandbox's own devpts from outside, as a command's.
func TestTerminal(t *testing.T) {
	b := start(t, options{})
	master, err := unix.Openat(int(b.Devpts.Fd()), "ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	m := os.NewFile(uintptr(master), "ptmx")
	defer func() { mustDo(t, m.Close()) }()
	mustDo(t, unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0))
	slave, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		t.Fatal(errno)
	}
	s := os.NewFile(slave, "pts")
	mustDo(t, s.Chown(int(b.base+1000), int(b.base+5)))
	spec := b.spec(t, "/bin/sh", "-c", "tty; echo x > /dev/tty; ls -ln /dev/pts/0 | head -c 30")
	spec.UID, spec.GID, spec.Terminal = 1000, 1000, true
	spec.Stdin, spec.Stdout, spec.Stderr = s, s, s
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	p, err := b.Spawner().Spawn(ctx, spec)
	mustDo(t, err, s.Close())
	e, err := p.Wait(ctx)
	mustDo(t, err)
	buf := make([]byte, 1000)
	n, _ := m.Read(buf)
	for _, want := range []string{"/dev/pts/0\r\n", "\r\nx\r\n", "crw"} {
		if !strings.Contains(string(buf[:n]), want) {
			t.Errorf("%+v: %q lacks %q", e, buf[:n], want)
		}
	}
}

// TestMemoryOfTheZygote holds the idle cost of a sandbox's own two processes.
func TestMemoryOfTheZygote(t *testing.T) {
	b := start(t, options{})
	b.sh(t, "true")
	total := 0
	for _, pid := range []int{b.ZygotePid(), b.InitPid()} {
		for line := range strings.Lines(procFile(t, pid, "smaps_rollup")) {
			var kb int
			if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kb); n == 1 {
				total += kb
			}
		}
	}
	t.Logf("zygote and PID 1: %d KiB PSS", total)
	if total == 0 || total > 100 {
		t.Errorf("zygote and PID 1 have %d KiB PSS, want at most 100", total)
	}
}

// TestCgroupNamespace: commands see their own group below the sandbox's, and limits where programs look.
func TestCgroupNamespace(t *testing.T) {
	b := start(t, options{limits: cgroup.Limits{Memory: 512 << 20, CPU: 1.5, Pids: 77}})
	got := b.sh(t, "cat /proc/self/cgroup")
	if strings.Contains(got, "harena") || strings.Contains(got, "..") {
		t.Errorf("the node's groups are visible:\n%s", got)
	}
	if len(b.groups.V1) > 0 {
		if got := b.sh(t, "cat /sys/fs/cgroup/memory/memory.limit_in_bytes"); got != fmt.Sprintln(512<<20) {
			t.Errorf("memory limit inside: %q", got)
		}
		return
	}
	if got := b.sh(t, "cd /sys/fs/cgroup && cat memory.max cpu.max pids.max"); got != fmt.Sprintf("%d\n150000 100000\n77\n", 512<<20) {
		t.Errorf("limits inside: %q", got)
	}
}
