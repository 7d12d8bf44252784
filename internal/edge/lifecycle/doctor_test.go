package lifecycle

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/memory"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

func byName(resp *harenav1.DoctorResponse) map[string]*harenav1.Check {
	m := map[string]*harenav1.Check{}
	for _, c := range resp.GetChecks() {
		m[c.GetName()] = c
	}
	return m
}

func TestDoctor(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	w.create()
	for _, name := range []string{"leak.processes", "leak.cgroups", "leak.mounts", "leak.directories", "capacity", "edge.fds"} {
		if c := byName(e.Doctor(t.Context()))[name]; c.GetStatus() != "ok" {
			t.Errorf("%s: %v", name, c)
		}
	}
	// A sandbox that no record names, and a directory.
	stray, _ := sandbox.NewID(e.ID(), e.cfg.Rand)
	if _, err := memory.New(w.node, memory.Options{}).Create(t.Context(), backend.Config{ID: stray, Dir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(w.path, "sandboxes", "stray"), 0o700); err != nil {
		t.Fatal(err)
	}
	resp := e.Doctor(t.Context())
	checks := byName(resp)
	if resp.GetClean() || checks["leak.processes"].GetStatus() != "leaked" || !strings.Contains(checks["leak.processes"].GetDetail(), string(stray)) {
		t.Errorf("a leaked sandbox: %v", checks["leak.processes"])
	}
	if c := checks["leak.directories"]; c.GetStatus() != "leaked" || c.GetHint() == "" {
		t.Errorf("a leaked directory: %v", c)
	}
	// The next server removes both.
	e = w.restart()
	checks = byName(e.Doctor(t.Context()))
	if checks["leak.processes"].GetStatus() != "ok" || checks["leak.directories"].GetStatus() != "ok" || w.node.Len() != 1 {
		t.Errorf("after a restart: %v, %d sandboxes", checks, w.node.Len())
	}
	w.machine.set(func(n *nodeFake) { n.snap.FDs, n.snap.MemoryAvailable = 1<<20-1, 1 })
	checks = byName(e.Doctor(t.Context()))
	if checks["edge.fds"].GetStatus() != "degraded" || checks["capacity"].GetStatus() != "degraded" {
		t.Errorf("a node at its limits: %v", checks)
	}
}

func TestCheckMachine(t *testing.T) {
	unknown := admission.Probe{Dir: "/nonexistent", Proc: "/nonexistent"}.Snapshot()
	for _, c := range checkMachine(unknown, admission.Limits{}) {
		want := map[string]string{"capacity": "ok", "edge.fds": "unverified", "pressure": "unsupported"}[c.GetName()]
		if c.GetStatus() != want || c.GetDetail() == "" {
			t.Errorf("%v, want %s", c, want)
		}
	}
}

func TestPressureIsExplained(t *testing.T) {
	want := "time in which tasks waited: cpu 94%, io 3%, memory 0%"
	if got := explainPressure(map[string]float64{"memory": 0, "io": 3.36, "cpu": 94.29}); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestDoctorOffline(t *testing.T) {
	if _, err := DoctorOffline(t.Context(), t.TempDir()); !errs.Is(err, errs.NotFound) {
		t.Errorf("no data directory: %v", err)
	}
	w := newWorld(t)
	w.up()
	live := w.create()
	w.stop(w.create().GetId())
	resp, err := DoctorOffline(t.Context(), w.path)
	if err != nil {
		t.Fatal(err)
	}
	if c := byName(resp)["server"]; !strings.Contains(c.GetDetail(), "pid") {
		t.Errorf("while a server runs: %v", c)
	}
	w.down()
	if resp, err = DoctorOffline(t.Context(), w.path, memory.New(w.node, memory.Options{})); err != nil {
		t.Fatal(err)
	}
	if c := byName(resp)["data.mount"]; c.GetStatus() != "failed" {
		t.Errorf("a sandbox lives on an unprotected directory: %v", c)
	}
	for name, c := range byName(resp) {
		if strings.HasPrefix(name, "leak.") && c.GetStatus() != "ok" {
			t.Errorf("a sandbox that lives on is a leak: %v", c)
		}
	}
	// Without its record it is one.
	if err := os.RemoveAll(filepath.Join(w.path, "sandboxes", live.GetId(), recordName)); err != nil {
		t.Fatal(err)
	}
	if resp, err = DoctorOffline(t.Context(), w.path, memory.New(w.node, memory.Options{})); err != nil {
		t.Fatal(err)
	}
	checks := byName(resp)
	if resp.GetClean() || checks["leak.processes"].GetStatus() != "leaked" || checks["leak.directories"].GetStatus() != "leaked" {
		t.Errorf("a sandbox without a record: %v", checks)
	}
}

// TestDoctorAfterDown: a node that went down is clean, also with records of what was stopped.
func TestDoctorAfterDown(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	w.stop(w.create().GetId())
	if err := e.StopAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.down()
	resp, err := DoctorOffline(t.Context(), w.path, memory.New(w.node, memory.Options{}))
	if err != nil || !resp.GetClean() {
		t.Errorf("after down: %v, %v", resp, err)
	}
}

// TestScanProcesses looks at a /proc made up.
func TestScanProcesses(t *testing.T) {
	proc := t.TempDir()
	const live, dead = "eeeeeeaaaaaaaaaaaaaa", "eeeeeebbbbbbbbbbbbbb"
	for pid, group := range map[string]string{
		"10": "0::/harena-eeeeee/" + live + "/work/init\n", "11": "5:memory:/harena-eeeeee/" + dead + "\n0::/\n",
		"12": "0::/harena-eeeeee/control\n", "13": "0::/harena-ffffff/" + dead + "\n", "14": "0::/user.slice\n",
		"15": "0::/harena-eeeeee/" + dead + "\n", // a zombie
	} {
		stat := pid + " (x" + pid + ") S 1 1 1"
		if pid == "15" {
			stat = "15 (S ) S) Z 1 1 1"
		}
		if err := os.MkdirAll(filepath.Join(proc, pid), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string]string{"cgroup": group, "stat": stat} {
			if err := os.WriteFile(filepath.Join(proc, pid, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := scanner{info: datadir.Info{Edge: "eeeeee"}, owned: map[sandbox.ID]bool{live: true}, proc: proc}
	leaks, err := s.processes()
	if err != nil || len(leaks) != 1 || !strings.HasPrefix(leaks[0].Name, "11 (x11)") {
		t.Errorf("with a sandbox alive: %v, %v", leaks, err)
	}
	s.owned = nil
	if leaks, err = s.processes(); err != nil || len(leaks) != 3 {
		t.Errorf("with none alive: %v, %v", leaks, err)
	}
	s.info.ServerPid = "12"
	if leaks, err = s.processes(); err != nil || len(leaks) != 2 {
		t.Errorf("with a server: %v, %v", leaks, err)
	}
}
