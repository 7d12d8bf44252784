package scenario

import (
	"context"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// doctor fails the test unless nothing is leaked or failed.
func doctor(t *testing.T) {
	t.Helper()
	var last []string
	eventually(t, "doctor is clean", 30*time.Second, func() bool {
		res, err := the.fleet.Doctor(within(t, time.Minute), connect.NewRequest(&harenav1.DoctorRequest{}))
		if err != nil {
			t.Fatal(explain(err))
		}
		last = nil
		for _, c := range res.Msg.GetChecks() {
			if s := c.GetStatus(); s == "leaked" || s == "failed" {
				last = append(last, c.GetName()+": "+c.GetDetail())
			}
		}
		if len(last) > 0 {
			t.Logf("doctor: %s", strings.Join(last, "; "))
		}
		return res.Msg.GetClean() && len(last) == 0
	})
}

func TestServerKilledAndStartedAgain(t *testing.T) {
	own := needOwn(t)
	b := create(t)
	b.write("/tmp/state", []byte("kept"))
	id := b.start(&harenav1.Command{Shell: "echo before; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo after"})
	own.kill()
	if err := own.start(); err != nil {
		t.Fatal(err)
	}
	if s := b.get(); s.GetState() != "running" {
		t.Fatalf("after the restart it is %s (%s)", s.GetState(), s.GetReason())
	}
	same(t, "file", b.read("/tmp/state"), []byte("kept"))
	b.write("/tmp/go", nil)
	out := b.follow(&harenav1.ConnectRequest{CommandId: id})
	same(t, "output across the restart", out.stdout, []byte("before\nafter\n"))
	if out.GetExitCode() != 0 {
		t.Errorf("%v", out.Result)
	}
	b.must("true")
	doctor(t)
}

// The server is killed at random moments while sandboxes are created, used and
// stopped; whatever moment it was, the next start leaves a clean node on which
// every sandbox that was running still runs.
func TestServerKilledAtAnyMoment(t *testing.T) {
	own := needOwn(t)
	keeper := create(t)
	keeper.write("/tmp/state", []byte("kept"))
	for round := range count(8, 60) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					res, err := the.sandboxes.Create(ctx, connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: the.image, Labels: map[string]string{"crash": "yes"}}}))
					if err != nil {
						continue
					}
					b := &box{t, res.Msg.GetSandbox().GetId()}
					_, _ = b.try(ctx, &harenav1.Command{Shell: "echo x > /tmp/x"})
					if rand.Intn(2) == 0 {
						_ = stop(ctx, b.id)
					}
				}
			})
		}
		time.Sleep(time.Duration(50+rand.Intn(700)) * time.Millisecond)
		own.kill()
		cancel()
		wg.Wait()
		if err := own.start(); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		list, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{}))
		if err != nil {
			t.Fatal(explain(err))
		}
		for _, s := range list.Msg.GetSandboxes() {
			if s.GetState() != "running" {
				t.Errorf("round %d: %s is %s (%s)", round, s.GetId(), s.GetState(), s.GetReason())
				continue
			}
			b := &box{t, s.GetId()}
			if got := b.must("echo usable"); got != "usable" {
				t.Errorf("round %d: %q", round, got)
			}
		}
		same(t, "state of the keeper", keeper.read("/tmp/state"), []byte("kept"))
		if (round+1)%8 == 0 { // what was left running is enough to look at
			stopCrashed(t)
		}
		doctor(t)
	}
	stopCrashed(t)
	doctor(t)
}

func stopCrashed(t *testing.T) {
	t.Helper()
	of := &harenav1.Selector{Labels: map[string]string{"crash": "yes"}}
	if _, err := the.sandboxes.Stop(within(t, 2*time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: of})); err != nil && kind(err) != "not-found" {
		t.Error(explain(err))
	}
}

func TestSupervisorKilled(t *testing.T) {
	needOwn(t)
	b := create(t)
	b.write("/tmp/state", []byte("kept"))
	b.start(&harenav1.Command{Argv: []string{"sleep", "4712"}})
	killSupervisor(t, b)
	if out, err := exec.Command("pgrep", "-f", "^sleep 4712").Output(); err == nil {
		t.Errorf("the workload lives on: %s", out)
	}
	same(t, "its files stay readable", b.read("/tmp/state"), []byte("kept"))
	if _, err := b.try(within(t, time.Minute), &harenav1.Command{Shell: "true"}); kind(err) != "precondition" {
		t.Errorf("exec in a failed sandbox: %v", err)
	}
	if err := stop(within(t, time.Minute), b.id); err != nil {
		t.Error(explain(err))
	}
	doctor(t)
}

// killSupervisor ends a sandbox's supervisor as a fault of it would, and waits until that is known.
func killSupervisor(t *testing.T, b *box) {
	t.Helper()
	killed := 0
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		exe, _ := os.Readlink(p + "/exe")
		links, _ := filepath.Glob(p + "/fd/*")
		if !strings.HasPrefix(exe, needOwn(t).dir) {
			continue
		}
		for _, l := range links {
			if target, _ := os.Readlink(l); strings.Contains(target, b.id) {
				_ = exec.Command("kill", "-9", filepath.Base(p)).Run()
				killed++
				break
			}
		}
	}
	if killed == 0 {
		t.Fatal("no supervisor of the sandbox was found")
	}
	eventually(t, "the loss is noticed", 30*time.Second, func() bool { return b.get().GetState() == "failed" })
	if s := b.get(); s.GetReason() != "supervisor-lost" {
		t.Errorf("reason %q", s.GetReason())
	}
}

func TestTerminateLeavesSandboxesRunning(t *testing.T) {
	own := needOwn(t)
	b := create(t)
	b.start(&harenav1.Command{Argv: []string{"sleep", "4713"}})
	_ = own.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-own.exited:
	case <-time.After(30 * time.Second):
		t.Fatal("the server did not end on SIGTERM")
	}
	if err := exec.Command("pgrep", "-f", "^sleep 4713").Run(); err != nil {
		t.Error("the workload did not outlive the server")
	}
	if err := own.start(); err != nil {
		t.Fatal(err)
	}
	b.must("true")
}

func TestSecondServerOnTheSameDirectory(t *testing.T) {
	own := needOwn(t)
	out, err := exec.Command(program("harena"), "up", "--data", own.dir, "--listen", "127.0.0.1:0").CombinedOutput()
	if err == nil || !strings.Contains(string(out), own.dir) {
		t.Errorf("a second server on one directory: %v, %s", err, out)
	}
}

func TestReadOnlyAndFullDirectories(t *testing.T) {
	needOwn(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=1m"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, program("harena"), "up", "--data", dir+"/data", "--listen", "127.0.0.1:0").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "read-only") || strings.Count(strings.TrimSpace(string(out)), "\n") > 3 {
		t.Errorf("a read-only directory: %v, %s", err, out)
	}
}
