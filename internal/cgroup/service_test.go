package cgroup

import (
	"os"
	"slices"
	"testing"
)

func TestServiceKeepsItsMemory(t *testing.T) {
	for _, c := range []struct {
		controllers []string
		want        string
	}{{[]string{"cpu", "memory", "pids"}, "4096"}, {[]string{"cpu", "pids"}, ""}} {
		m := newModel("/c", true, c.controllers...)
		r, err := open(m, Layout{Bases: []string{"/c"}}, "harena-x")
		if err != nil {
			t.Fatal(err)
		}
		dir, err := r.Service(4096)
		if err != nil || dir != "/c/harena-x/blobd" {
			t.Fatalf("%s, %v", dir, err)
		}
		for _, d := range []string{"/c/harena-x", dir} {
			if got := m.groups[d].files["memory.min"]; got != c.want {
				t.Errorf("%v: memory.min of %s is %q, want %q", c.controllers, d, got, c.want)
			}
		}
	}
}

// On the node: it is there, is no sandbox's, and goes with the edge's groups.
func TestServiceOnNode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("cgroups need root")
	}
	r, err := Open("harena-test-service")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := r.Service(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := r.Groups()
	if err != nil || slices.Contains(ids, "blobd") {
		t.Errorf("groups of sandboxes: %v, %v", ids, err)
	}
	if err := r.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("it is left: %v", err)
	}
}
