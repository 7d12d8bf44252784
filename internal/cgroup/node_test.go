package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// These tests work on the node's own hierarchies, whatever they are: v1, v2 or hybrid.

func TestMain(m *testing.M) {
	switch os.Getenv("CGROUP_TEST_ROLE") {
	case "memory":
		eat()
	case "forks":
		fork()
	}
	os.Exit(m.Run())
}

// eat touches memory until it is killed.
func eat() {
	var hold [][]byte
	for {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		hold = append(hold, b)
		if len(hold) > 512 {
			os.Exit(3) // no limit held
		}
	}
}

// fork starts children until it is refused.
func fork() {
	for range 64 {
		if err := exec.Command("sleep", "100").Start(); err != nil {
			os.Exit(4)
		}
	}
	os.Exit(3)
}

func testRoot(t testing.TB) *Root {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("cgroups need root")
	}
	r, err := Open(fmt.Sprintf("harena-test%d", os.Getpid()))
	if errs.Is(err, errs.Unsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		ids, err := r.Groups()
		if err != nil {
			t.Error(err)
		}
		for _, id := range ids {
			g := r.Group(id)
			if err := g.Kill(); err != nil {
				t.Error(err)
			}
			if err := g.Remove(ctx); err != nil {
				t.Error(err)
			}
		}
		if err := r.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	return r
}

// start runs a process in the group's workload: v2 by clone, v1 by attaching
// a shell that then execs.
func start(t testing.TB, p Paths, role string, argv ...string) *exec.Cmd {
	t.Helper()
	d, err := os.Open(string(p.Work))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	cmd := exec.Command("sh", append([]string{"-c", `read go; exec "$@"`, "sh"}, argv...)...)
	cmd.Env = append(os.Environ(), "CGROUP_TEST_ROLE="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd())}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, v1 := range p.V1 {
		if err := Dir(v1).Attach(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

func create(t testing.TB, r *Root, l Limits) (*Group, Paths) {
	t.Helper()
	if err := l.need(r.Missing()); err != nil {
		t.Skip(err)
	}
	g := r.Group("g")
	p, err := g.Create(l)
	if err != nil {
		t.Fatal(err)
	}
	return g, p
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestMemoryIsLimitedAndCounted(t *testing.T) {
	g, p := create(t, testRoot(t), Limits{Memory: 32 << 20})
	cmd := start(t, p, "memory", os.Args[0])
	err := cmd.Wait()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != unix.SIGKILL {
		t.Errorf("the memory hog ended with %v, not killed", err)
	}
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.OOMKills == 0 {
		t.Error("no out-of-memory kill was counted")
	}
	if n, err := OOMKills(p.Work, p.V1); err != nil || n != u.OOMKills {
		t.Errorf("the supervisor counts %d, %v", n, err)
	}
	if u.CPUNanos == 0 {
		t.Error("no CPU time was counted")
	}
}

func TestPidsAreLimitedAndCounted(t *testing.T) {
	g, p := create(t, testRoot(t), Limits{Pids: 24})
	cmd := start(t, p, "forks", os.Args[0])
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 4 && cmd.ProcessState.ExitCode() != 2 {
		// 2: the Go runtime itself was refused a thread.
		t.Errorf("the fork bomb ended with %v", err)
	}
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.PidsHits == 0 || u.Pids == 0 {
		t.Errorf("usage %+v counts no refused fork, or no process", u)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Dir.WaitEmpty(deadline(t)); err != nil {
		t.Fatal(err)
	}
}

func TestCPUIsLimited(t *testing.T) {
	r := testRoot(t)
	_, p := create(t, r, Limits{CPU: 0.5})
	want := map[string]string{string(p.Dir) + "/cpu.max": "50000 100000", r.v1[cpu] + "/g/cpu.cfs_quota_us": "50000"}
	seen := 0
	for file, value := range want {
		if s, err := (osFS{}).read(file); err == nil {
			seen++
			if strings.TrimSpace(s) != value {
				t.Errorf("%s is %q, want %q", file, s, value)
			}
		}
	}
	if seen != 1 {
		t.Errorf("%d of the places for a CPU limit exist, want 1", seen)
	}
}

func TestFreezeAndKill(t *testing.T) {
	g, p := create(t, testRoot(t), Limits{})
	// A command in a group of its own, as the supervisor makes them.
	child := p.Work + "/c1"
	if err := child.Make(); err != nil {
		t.Fatal(err)
	}
	sub := p
	sub.Work = child
	cmd := start(t, sub, "", "sh", "-c", "sleep 100 & sleep 100")
	if err := p.Dir.Freeze(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if s, err := (osFS{}).read(string(child) + "/cgroup.events"); err != nil || !strings.Contains(s, "frozen 1") {
		t.Errorf("events of a frozen command: %q, %v", s, err)
	}
	// A frozen group can be killed.
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}
	if err := p.Dir.WaitEmpty(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(deadline(t)); err != nil {
		t.Fatal(err)
	}
	for _, d := range append([]string{string(p.Dir)}, p.V1...) {
		if _, err := os.Stat(d); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", d, err)
		}
	}
	if _, err := g.Usage(); !errs.Is(err, errs.NotFound) {
		t.Errorf("usage of a removed group: %v", err)
	}
}

func TestThaw(t *testing.T) {
	_, p := create(t, testRoot(t), Limits{})
	cmd := start(t, p, "", "true")
	if err := p.Dir.Freeze(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.Dir.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestThawEndsReclaim: swap that was open when a Reclaim was killed is closed again, where there is a limit to keep.
func TestThawEndsReclaim(t *testing.T) {
	r := testRoot(t)
	if !slices.Contains(r.v2, memory) || !r.swap {
		t.Skip("only on v2 with swap accounting is swap opened")
	}
	for _, l := range []Limits{{Memory: 32 << 20}, {Pids: 10}} {
		g, p := create(t, r, l)
		name := string(p.Dir) + "/memory.swap.max"
		if err := (osFS{}).write(name, "max"); err != nil {
			t.Fatal(err)
		}
		if err := g.Thaw(); err != nil {
			t.Fatal(err)
		}
		want := "max"
		if l.Memory > 0 {
			want = "0"
		}
		if got, err := (osFS{}).read(name); err != nil || strings.TrimSpace(got) != want {
			t.Errorf("%+v: memory.swap.max is %q, %v; want %s", l, got, err, want)
		}
		if err := g.Remove(deadline(t)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFreezeGivesUpAndThaws(t *testing.T) {
	_, p := create(t, testRoot(t), Limits{})
	start(t, p, "", "sleep", "100")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	// Freezing takes effect when the process next passes the kernel's signal
	// check, so it may also be complete at the first look.
	if err := p.Dir.Freeze(ctx); err == nil {
		t.Skip("the process froze at once")
	}
	if s, err := (osFS{}).read(string(p.Dir) + "/cgroup.freeze"); err != nil || strings.TrimSpace(s) != "0" {
		t.Errorf("cgroup.freeze is %q, %v after a freeze that failed", s, err)
	}
}

func TestRemoveWaitsForTheDying(t *testing.T) {
	g, p := create(t, testRoot(t), Limits{})
	start(t, p, "", "sleep", "100")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := g.Remove(ctx); !errs.Is(err, errs.Timeout) {
		t.Errorf("remove of a group in use: %v, want timeout", err)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(deadline(t)); err != nil {
		t.Error(err)
	}
	if err := g.Remove(deadline(t)); err != nil {
		t.Errorf("second remove: %v", err)
	}
}

func TestSignalReachesTheTree(t *testing.T) {
	_, p := create(t, testRoot(t), Limits{})
	cmd := start(t, p, "", "sleep", "100")
	if err := p.Dir.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != unix.SIGTERM {
		t.Errorf("ended with %v, want SIGTERM", cmd.ProcessState)
	}
}

func BenchmarkCreateRemove(b *testing.B) {
	r := testRoot(b)
	g := r.Group("g")
	for b.Loop() {
		if _, err := g.Create(Limits{CPU: 2, Memory: 1 << 30, Pids: 1024}); err != nil {
			b.Fatal(err)
		}
		if err := g.Remove(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

func TestPrivateMount(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	done := make(chan error)
	go func() {
		// The thread's mount namespace ends with it: the goroutine never unlocks.
		runtime.LockOSThread()
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
				return err
			}
			if err := mountPrivate(); err != nil {
				return err
			}
			if _, err := (osFS{}).read(PrivateMount + "/cgroup.subtree_control"); err != nil {
				return err
			}
			// Whatever options the hierarchy has, they survive.
			info, err := os.ReadFile("/proc/thread-self/mountinfo")
			if err != nil {
				return err
			}
			before := parseLayout(string(info), "").Options
			if err := favorMoves(PrivateMount, before); errors.Is(err, unix.EINVAL) {
				return nil // before Linux 6.0
			} else if err != nil {
				return err
			}
			if info, err = os.ReadFile("/proc/thread-self/mountinfo"); err != nil {
				return err
			}
			after := parseLayout(string(info), "").Options
			for _, o := range append(before, "favordynmods") {
				if !slices.Contains(after, o) {
					return fmt.Errorf("option %s is missing in %v", o, after)
				}
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
