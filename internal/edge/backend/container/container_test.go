package container

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/backendtest"
	"github.com/harena-dev/harena/internal/sandbox"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "supervise" {
		if err := standInMain(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
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
	guest, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Not t.TempDir: its path has the test's name, and this one may be needed after a failed clean-up.
	dir, err := os.MkdirTemp("/var/tmp", "harena-container-")
	if err != nil {
		t.Fatal(err)
	}
	n := &node{dir: dir, edge: edge, guest: guest}
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
	return backend.Config{ID: id, Spec: spec, Dir: dir, IDBase: 1 << 30}
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
