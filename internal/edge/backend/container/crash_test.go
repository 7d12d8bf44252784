package container

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/sandbox"
)

// patience bounds waits; nothing is asserted about speed.
const patience = 30 * time.Second

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func TestFaultAtEveryStepLeavesNothing(t *testing.T) {
	n := newNode(t)
	injected := errors.New("injected")
	var failing string
	n.fault = func(step string) error {
		if step == failing {
			return injected
		}
		return nil
	}
	b := n.open(t)
	defer b.Close()
	for _, failing = range []string{"cgroup", "supervisor", "send", "answer", "adopt"} {
		t.Run(failing, func(t *testing.T) {
			c := n.config(t)
			if _, err := b.Create(soon(t), c); !errors.Is(err, injected) {
				t.Errorf("create: %v, want the injected error", err)
			}
			expectNothing(t, b)
			failing = ""
			// The same ID works afterwards.
			if _, err := b.Create(soon(t), c); err != nil {
				t.Errorf("create after the fault: %v", err)
			}
			if err := b.Destroy(soon(t), c.ID); err != nil {
				t.Errorf("destroy: %v", err)
			}
		})
	}
}

func TestCancelAtEveryStepLeavesNothing(t *testing.T) {
	n := newNode(t)
	var (
		at     string
		cancel context.CancelFunc
	)
	n.fault = func(step string) error {
		if step == at {
			cancel()
		}
		return nil
	}
	b := n.open(t)
	defer b.Close()
	for _, at = range []string{"cgroup", "supervisor", "send", "answer", "adopt"} {
		ctx, c := context.WithCancel(context.Background())
		cancel = c
		if _, err := b.Create(ctx, n.config(t)); !errors.Is(err, context.Canceled) {
			t.Errorf("create cancelled at %s: %v", at, err)
		}
		cancel()
		expectNothing(t, b)
	}
}

func expectNothing(t testing.TB, b *Backend) {
	t.Helper()
	left, err := b.Leaks(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range left {
		t.Errorf("left over: %s %s", l.Kind, l.Name)
	}
}

func TestGuestThatCannotStart(t *testing.T) {
	n := newNode(t)
	real := n.guest
	n.guest = "/bin/false"
	b := n.open(t)
	if _, err := b.Create(soon(t), n.config(t)); err == nil || !strings.Contains(err.Error(), "did not become ready") {
		t.Errorf("create with a guest that exits at once: %v", err)
	}
	expectNothing(t, b)
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	n.guest = real
}

func TestManyCreatesLeaveNothing(t *testing.T) {
	count := 200
	if testing.Short() {
		count = 32
	}
	n := newNode(t)
	b := n.open(t)
	defer b.Close()
	fds := openFDs(t)
	work := make(chan int)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range work {
				c := n.config(t)
				if _, err := b.Create(soon(t), c); err != nil {
					t.Errorf("create: %v", err)
					continue
				}
				if err := b.Destroy(soon(t), c.ID); err != nil {
					t.Errorf("destroy: %v", err)
				}
			}
		})
	}
	for i := range count {
		work <- i
	}
	close(work)
	wg.Wait()
	expectNothing(t, b)
	// Each supervisor of the pool has a pidfd and a channel.
	until(t, "the edge's descriptors are back", func() bool { return openFDs(t) <= fds+2*maxPool })
}

func openFDs(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestSupervisorKilledTakesWorkloadWithIt(t *testing.T) {
	n := newNode(t)
	b := n.open(t)
	defer b.Close()
	c := n.config(t)
	if _, err := b.Create(soon(t), c); err != nil {
		t.Fatal(err)
	}
	group := b.cgroups.Group(string(c.ID))
	if procs, err := group.Procs(); err != nil || len(procs) == 0 {
		t.Fatalf("the workload is %v, %v", procs, err)
	}
	if err := unix.Kill(b.boxes[c.ID].proc.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-b.Exited(c.ID)
	if err := group.Paths().Dir.WaitEmpty(soon(t)); err != nil {
		t.Errorf("the workload outlives its supervisor: %v", err)
	}
	if err := b.Destroy(soon(t), c.ID); err != nil {
		t.Error(err)
	}
	expectNothing(t, b)
}

// TestHelperEdge is an edge in a process of its own, for the tests below.
func TestHelperEdge(t *testing.T) {
	if os.Getenv("HELPER_EDGE_DIR") == "" {
		t.Skip("a helper of other tests")
	}
	n := &node{dir: os.Getenv("HELPER_EDGE_DIR"), edge: sandbox.EdgeID(os.Getenv("HELPER_EDGE_ID")), guest: shared.guest}
	b := n.open(t)
	c := n.config(t)
	if _, err := b.Create(soon(t), c); err != nil {
		t.Fatal(err)
	}
	until(t, "the pool is full", func() bool { return len(b.pool.pids()) >= 2 })
	fmt.Printf("\nready %s\n", c.ID)
	select {} // until it is killed
}

// startEdge starts a helper edge and returns it with the sandbox it made.
func startEdge(t *testing.T, n *node) (*exec.Cmd, sandbox.ID) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperEdge$", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), "HELPER_EDGE_DIR="+n.dir, "HELPER_EDGE_ID="+string(n.edge), "HELPER_EDGE_SHARED="+filepath.Dir(shared.guest))
	cmd.Stderr = os.Stderr
	// A process group of its own, so that the test can do what Ctrl-C does.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if id, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
			return cmd, sandbox.ID(id)
		}
	}
	t.Fatalf("the helper edge did not become ready: %v", lines.Err())
	return nil, ""
}

func TestEdgeKilled(t *testing.T) {
	for name, kill := range map[string]func(*exec.Cmd) error{
		"kill -9": func(c *exec.Cmd) error { return c.Process.Kill() },
		"Ctrl-C":  func(c *exec.Cmd) error { return unix.Kill(-c.Process.Pid, unix.SIGINT) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			cmd, id := startEdge(t, n)
			if err := kill(cmd); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()

			b := n.open(t)
			defer b.Close()
			until(t, "the killed edge's pool is gone", func() bool {
				leaks, err := b.leakedSupervisors(map[sandbox.ID]bool{id: true})
				return err == nil && len(leaks) == 0
			})
			c := n.config(t)
			c.ID, c.Dir = id, strings.Replace(c.Dir, string(c.ID), string(id), 1)
			if err := b.Recover(soon(t), c); err != nil {
				t.Fatalf("recover: %v", err)
			}
			conn, err := b.Dial(soon(t), id)
			if err != nil {
				t.Fatalf("dial: %v", err)
			}
			conn.Close()
			if name == "kill -9" {
				// Destroy must not need what Recover learnt.
				p, _ := b.forget(id)
				p.release()
			}
			if err := b.Destroy(soon(t), id); err != nil {
				t.Errorf("destroy: %v", err)
			}
			expectNothing(t, b)
		})
	}
}

func TestSupervisorLeavesTerminal(t *testing.T) {
	n := newNode(t)
	b := n.open(t)
	defer b.Close()
	c := n.config(t)
	if _, err := b.Create(soon(t), c); err != nil {
		t.Fatal(err)
	}
	defer b.Destroy(soon(t), c.ID)
	pid := b.boxes[c.ID].proc.pid
	if sid, err := unix.Getsid(pid); err != nil || sid != pid {
		t.Errorf("session of the supervisor is %d, %v; want its own, %d", sid, err, pid)
	}
	for _, fd := range []string{"0", "1", "2"} {
		target, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/fd/" + fd)
		if err != nil || !strings.HasPrefix(target, n.dir) && target != os.DevNull {
			t.Errorf("descriptor %s of the supervisor is %s, %v", fd, target, err)
		}
	}
}

func TestOldGuestsAreRemovedWhenUnused(t *testing.T) {
	n := newNode(t)
	first := n.open(t)
	all := []backend.Config{n.config(t), n.config(t)}
	for _, c := range all {
		if _, err := first.Create(soon(t), c); err != nil {
			t.Fatal(err)
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	// Another binary: the same, with a byte more.
	text, err := os.ReadFile(n.guest)
	if err != nil {
		t.Fatal(err)
	}
	real := n.guest
	n.guest = n.dir + "/newer"
	if err := os.WriteFile(n.guest, append(text, 0), 0o755); err != nil {
		t.Fatal(err)
	}
	second := n.open(t)
	for _, c := range all {
		if err := second.Recover(soon(t), c); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range all {
		if _, err := os.Stat(first.guest); err != nil {
			t.Errorf("a version in use was removed: %v", err)
		}
		if err := second.Destroy(soon(t), c.ID); err != nil {
			t.Fatal(err)
		}
	}
	// At once: a server that goes on must not tell of a leak.
	if _, err := os.Stat(first.guest); !os.IsNotExist(err) {
		t.Errorf("a version that nobody uses is left: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	third := n.open(t)
	defer third.Close()
	if st, err := os.Stat(third.guest); err != nil || st.Mode().Perm() != 0o111 {
		t.Errorf("the guest binary is %v, %v", st, err)
	}
	n.guest = real
	_ = os.RemoveAll(second.guest)
}

func TestDestroyRefusesNames(t *testing.T) {
	n := newNode(t)
	b := n.open(t)
	defer b.Close()
	for _, id := range []sandbox.ID{"control", "..", "", "../../cpu"} {
		if err := b.Destroy(soon(t), id); err == nil {
			t.Errorf("destroy %q succeeded", id)
		}
	}
}
