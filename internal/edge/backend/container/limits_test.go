package container

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/guestconn"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

// create makes a sandbox that goes with the test.
func create(t testing.TB, b *Backend, c backend.Config) {
	t.Helper()
	if _, err := b.Create(soon(t), c); err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := b.Destroy(ctx, c.ID); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
}

// opened is a backend that closes with the test, after what the test makes in it.
func opened(t testing.TB, n *node) *Backend {
	t.Helper()
	b := n.open(t)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return b
}

func client(t testing.TB, b *Backend) *http.Client {
	t.Helper()
	transport := guestconn.NewTransport(b.Dial)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// run runs a shell command in the sandbox. Its output is what went to standard output, then what went to standard
// error: between the two there is no order.
func run(t testing.TB, b *Backend, id sandbox.ID, script string) (output string, r *harenav1.Result) {
	t.Helper()
	api := harenav1connect.NewExecServiceClient(client(t, b), guestconn.URL(id))
	stream, err := api.Run(soon(t), connect.NewRequest(&harenav1.RunRequest{SandboxId: string(id), Command: &harenav1.Command{Shell: script}}))
	if err != nil {
		t.Fatalf("run: %v", err)
	}
	defer stream.Close()
	var stdout, stderr strings.Builder
	for stream.Receive() {
		o := stream.Msg().GetOutput()
		stdout.Write(o.GetStdout())
		stderr.Write(o.GetStderr())
		if o.GetResult() != nil {
			r = o.GetResult()
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatalf("run %q: %v", script, err)
	}
	return stdout.String() + stderr.String(), r
}

func TestCommandInside(t *testing.T) {
	n := newNode(t)
	b := opened(t, n)
	c := n.config(t)
	create(t, b, c)
	out, r := run(t, b, c.ID, "id -u; echo problem >&2; exit 3")
	if out != "0\nproblem\n" || r.GetExitCode() != 3 {
		t.Errorf("output %q, result %v", out, r)
	}
	resp, err := client(t, b).Get(guestconn.URL(c.ID) + "/v1/sandboxes/" + string(c.ID) + "/files?path=/etc/passwd")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("reading a file: %s", resp.Status)
	}
}

func TestMemoryLimitHoldsAndIsCounted(t *testing.T) {
	n := newNode(t)
	b := opened(t, n)
	c, other := n.config(t), n.config(t)
	c.Spec.Limits.Memory = 32 << 20
	create(t, b, c)
	create(t, b, other)
	_, r := run(t, b, c.ID, "dd if=/dev/zero of=/dev/null bs=200M count=1")
	if r.GetExitCode() == 0 {
		t.Errorf("a command used 200 MiB under a limit of 32 MiB: %v", r)
	}
	until(t, "the kill is counted", func() bool {
		u, err := b.Usage(c.ID)
		return err == nil && u.OOMKills > 0
	})
	// It goes on, and so does its neighbour.
	for _, id := range []sandbox.ID{c.ID, other.ID} {
		if out, _ := run(t, b, id, "echo fine"); out != "fine\n" {
			t.Errorf("sandbox %s after the kill: %q", id, out)
		}
	}
	if u, err := b.Usage(other.ID); err != nil || u.OOMKills != 0 || u.MemoryBytes == 0 || u.CPUNanos == 0 || u.Pids == 0 {
		t.Errorf("usage of the neighbour: %+v, %v", u, err)
	}
}

func TestPidsLimitHoldsAndIsCounted(t *testing.T) {
	n := newNode(t)
	b := opened(t, n)
	c := n.config(t)
	c.Spec.Limits.Pids = 16
	create(t, b, c)
	_, r := run(t, b, c.ID, "i=0; while [ $i -lt 64 ]; do sleep 100 & i=$((i+1)); done")
	if r.GetExitCode() == 0 {
		t.Errorf("64 processes started under a limit of 16: %v", r)
	}
	u, err := b.Usage(c.ID)
	if err != nil || u.PidsHits == 0 || u.Pids == 0 || u.Pids > 16 {
		t.Errorf("usage %+v, %v", u, err)
	}
}

func TestShutdownAsksThenKills(t *testing.T) {
	n := newNode(t)
	b := opened(t, n)
	c := n.config(t)
	create(t, b, c)
	mark := filepath.Join(c.Dir, "upper", "data", "root", "asked")
	api := harenav1connect.NewExecServiceClient(client(t, b), guestconn.URL(c.ID))
	script := "trap 'echo > /root/asked; exit' TERM; echo > /root/ready; while :; do sleep 0.01; done"
	if _, err := api.Start(soon(t), connect.NewRequest(&harenav1.StartRequest{SandboxId: string(c.ID), Command: &harenav1.Command{Shell: script}})); err != nil {
		t.Fatal(err)
	}
	until(t, "the command traps the signal", func() bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(mark), "ready"))
		return err == nil
	})
	guest := guestv1connect.NewGuestServiceClient(client(t, b), guestconn.URL(c.ID))
	if _, err := guest.Shutdown(soon(t), connect.NewRequest(&guestv1.ShutdownRequest{GraceMillis: 20_000})); err != nil {
		t.Fatal(err)
	}
	<-b.Exited(c.ID)
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("the command was not asked to end: %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(c.Dir, claim.ExitFile)); err != nil || !strings.Contains(string(text), `"shutdown"`) {
		t.Errorf("exit file %s, %v", text, err)
	}
	if procs, err := b.cgroups.Group(string(c.ID)).Procs(); err != nil || len(procs) != 0 {
		t.Errorf("processes %v are left, %v", procs, err)
	}
}

// TestIdleCost reports what one idle sandbox costs the node. It asserts only what would be a blunder.
func TestIdleCost(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const count = 20
	n := newNode(t)
	b := opened(t, n)
	before := kernelMemory(t)
	var pss int64
	for range count {
		c := n.config(t)
		create(t, b, c)
	}
	time.Sleep(5 * time.Second) // supervisors give memory back after 3 s
	after := kernelMemory(t)
	for id, x := range b.boxes {
		pids := []int{x.proc.pid}
		procs, err := b.cgroups.Group(string(id)).Procs()
		if err != nil {
			t.Fatal(err)
		}
		for _, pid := range append(pids, procs...) {
			one := smaps(t, pid)
			pss += one
			if len(b.boxes) > 0 && x == firstBox(b) {
				t.Logf("process %d (%s): PSS %d KiB", pid, comm(pid), one>>10)
			}
		}
	}
	t.Logf("idle sandbox: PSS %d KiB, kernel %d KiB", pss/count>>10, (after-before)/count>>10)
	if perSandbox := pss / count; perSandbox > 20<<20 {
		t.Errorf("an idle sandbox costs %d MiB", perSandbox>>20)
	}
}

func firstBox(b *Backend) *box {
	var first *box
	for _, x := range b.boxes {
		if first == nil || x.proc.pid < first.proc.pid {
			first = x
		}
	}
	return first
}

func comm(pid int) string {
	s, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return strings.TrimSpace(string(s))
}

// smaps is a process's proportional share of memory, in bytes.
func smaps(t testing.TB, pid int) int64 {
	t.Helper()
	s, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	if err != nil {
		t.Fatal(err)
	}
	return kilobytes(string(s), "Pss:")
}

// kernelMemory is what the kernel itself uses, as far as it tells: slab, stacks, page tables, per-CPU; bytes.
func kernelMemory(t testing.TB) int64 {
	t.Helper()
	s, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	var sum int64
	for _, key := range []string{"SUnreclaim:", "KernelStack:", "PageTables:", "Percpu:"} {
		sum += kilobytes(string(s), key)
	}
	return sum
}

func kilobytes(text, key string) int64 {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n << 10
		}
	}
	return 0
}
