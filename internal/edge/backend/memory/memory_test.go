package memory_test

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/backendtest"
	"github.com/harena-dev/harena/internal/edge/backend/memory"
	"github.com/harena-dev/harena/internal/sandbox"
)

func TestConformance(t *testing.T) {
	for _, persistent := range []bool{false, true} {
		name, dir := "in memory", ""
		if persistent {
			name, dir = "in files", t.TempDir()
		}
		t.Run(name, func(t *testing.T) {
			node, err := memory.NewNode(dir, nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = node.Close() })
			backendtest.Run(t, backendtest.Harness{
				Open:   func(*testing.T) backend.Backend { return memory.New(node, memory.Options{}) },
				Config: config,
				Kill:   func(_ *testing.T, _ backend.Backend, id sandbox.ID) { node.Kill(id, "") },
			})
		})
	}
}

func config(t *testing.T) backend.Config {
	t.Helper()
	id, err := sandbox.NewID("mmmmmm", rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := sandbox.Normalize(&harenav1.SandboxSpec{Image: "base"})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, d := range []string{"upper/data", "upper/work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return backend.Config{ID: id, Spec: spec, Dir: dir, IDBase: 1 << 29}
}

// TestOutlivesProcess opens the files of one node as another process would.
func TestOutlivesProcess(t *testing.T) {
	dir := t.TempDir()
	first, err := memory.NewNode(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := config(t)
	if _, err := memory.New(first, memory.Options{}).Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	_ = first.Close()
	second, err := memory.NewNode(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	b := memory.New(second, memory.Options{})
	if err := b.Recover(t.Context(), c); err != nil {
		t.Errorf("recover: %v", err)
	}
	if err := b.Destroy(t.Context(), c.ID); err != nil || second.Len() != 0 {
		t.Errorf("destroy: %v, %d left", err, second.Len())
	}
}
