package container

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/backendtest"
	"github.com/harena-dev/harena/internal/sandbox"
)

// shared is what all tests use: the real guest binary, and a layer with busybox.
var shared struct {
	guest, layer string
	bases        atomic.Uint32
}

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if dir := os.Getenv("HELPER_EDGE_SHARED"); dir != "" {
		shared.guest, shared.layer = filepath.Join(dir, "harena-guest"), filepath.Join(dir, "layer")
		shared.bases.Store(4096)
		return m.Run()
	}
	if os.Getuid() != 0 {
		return m.Run()
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-container-shared-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := prepareShared(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// prepareShared builds the guest as `make build` does, and a layer of one static busybox.
func prepareShared(dir string) error {
	shared.guest, shared.layer = filepath.Join(dir, "harena-guest"), filepath.Join(dir, "layer")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", shared.guest, "github.com/harena-dev/harena/cmd/harena-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the guest: %w\n%s", err, out)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("these tests need busybox-static: %w", err)
	}
	text, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	for _, d := range []string{"bin", "etc", "proc", "sys", "dev", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(shared.layer, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(shared.layer, "bin/busybox"), text, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"sh", "sleep", "cat", "echo", "true", "dd", "tail", "head", "id"} {
		if err := os.Symlink("busybox", filepath.Join(shared.layer, "bin", name)); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(shared.layer, "etc/passwd"), []byte("root:x:0:0:root:/root:/bin/sh\n"), 0o644)
}

// node is an edge's part of this machine for one test.
type node struct {
	dir   string
	edge  sandbox.EdgeID
	guest string
	fault func(string) error
}

func newNode(t testing.TB) *node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("containers need root")
	}
	edge, err := sandbox.NewEdgeID(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	// Not t.TempDir: its path has the test's name, and this one may be needed after a failed clean-up.
	dir, err := os.MkdirTemp("/var/tmp", "harena-container-")
	if err != nil {
		t.Fatal(err)
	}
	n := &node{dir: dir, edge: edge, guest: shared.guest}
	t.Cleanup(func() { n.sweep(t) })
	return n
}

// sweep removes everything of the node; what it has to kill fails the test.
func (n *node) sweep(t testing.TB) {
	b := n.open(t)
	leaks, err := b.Leaks(nil)
	if err != nil {
		t.Errorf("leaks: %v", err)
	}
	for _, l := range leaks {
		t.Errorf("left over: %s %s", l.Kind, l.Name)
		if err := l.Release(); err != nil {
			t.Errorf("release %s: %v", l.Name, err)
		}
	}
	if err := b.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := b.cgroups.Remove(ctx); err != nil {
		t.Errorf("remove cgroups: %v", err)
	}
	if err := os.RemoveAll(n.dir); err != nil {
		t.Errorf("remove data directory: %v", err)
	}
}

func (n *node) open(t testing.TB) *Backend {
	t.Helper()
	b, err := New(Config{
		Dir: n.dir, EdgeID: n.edge, GuestBinary: n.guest, Pool: 2, Fault: n.fault,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (n *node) config(t testing.TB) backend.Config {
	t.Helper()
	id, err := sandbox.NewID(n.edge, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(n.dir, "sandboxes", string(id))
	for _, d := range []string{"upper/data", "upper/work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	spec, err := sandbox.Normalize(&harenav1.SandboxSpec{Image: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return backend.Config{ID: id, Spec: spec, Dir: dir, Lowers: []string{shared.layer}, IDBase: 1<<30 + shared.bases.Add(1)*65536}
}

func TestConformance(t *testing.T) {
	n := newNode(t)
	backendtest.Run(t, backendtest.Harness{
		Open:   func(t *testing.T) backend.Backend { return n.open(t) },
		Config: func(t *testing.T) backend.Config { return n.config(t) },
		Kill: func(t *testing.T, b backend.Backend, id sandbox.ID) {
			x := b.(*Backend).boxes[id]
			if err := x.proc.kill(); err != nil {
				t.Fatal(err)
			}
		},
	})
}
