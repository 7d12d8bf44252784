package admission

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

func roomy() Snapshot {
	return Snapshot{
		MemoryTotal: 16 << 30, MemoryAvailable: 8 << 30, DiskTotal: 100 << 30, DiskFree: 50 << 30, InodesFree: 1 << 20,
		Pids: 500, PidsMax: 32768, FDs: 50, FDsMax: 65536, Pressure: map[string]float64{"memory": 0, "io": 1, "cpu": 99},
	}
}

func TestDecide(t *testing.T) {
	full := Load{Sandboxes: 10, RangesFree: 100}
	tests := []struct {
		name   string
		change func(*Snapshot, *Load, *Limits)
		limit  string // "" when it is admitted
	}{
		{"roomy; cpu pressure is no reason", func(*Snapshot, *Load, *Limits) {}, ""},
		{"count", func(_ *Snapshot, l *Load, m *Limits) { l.Sandboxes = m.Sandboxes }, "sandboxes of this node"},
		{"last one", func(_ *Snapshot, l *Load, m *Limits) { l.Sandboxes = m.Sandboxes - 1 }, ""},
		{"no count limit", func(_ *Snapshot, l *Load, m *Limits) { l.Sandboxes, m.Sandboxes = 9999, 0 }, ""},
		{"ranges", func(_ *Snapshot, l *Load, _ *Limits) { l.RangesFree = 0 }, "host ID ranges of this node"},
		{"memory", func(s *Snapshot, _ *Load, m *Limits) { s.MemoryAvailable = m.MemoryReserve }, "available memory of this node"},
		{"memory, just enough", func(s *Snapshot, _ *Load, m *Limits) { s.MemoryAvailable = m.MemoryReserve + memoryEach }, ""},
		{"memory, promised to the ones before", func(s *Snapshot, l *Load, m *Limits) {
			s.MemoryAvailable, l.Recent = m.MemoryReserve+memoryEach, 1
		}, "available memory of this node"},
		{"memory unknown", func(s *Snapshot, _ *Load, _ *Limits) { s.MemoryAvailable = -1 }, ""},
		{"disk", func(s *Snapshot, _ *Load, m *Limits) { s.DiskFree = m.DiskReserve - 1 }, "free disk of this node"},
		{"inodes", func(s *Snapshot, _ *Load, _ *Limits) { s.InodesFree = 5 }, "free inodes of this node"},
		{"inodes unknown", func(s *Snapshot, _ *Load, _ *Limits) { s.InodesFree = -1 }, ""},
		{"pids", func(s *Snapshot, _ *Load, _ *Limits) { s.Pids = s.PidsMax - 100 }, "free process IDs of this node"},
		{"fds", func(s *Snapshot, _ *Load, _ *Limits) { s.FDs = s.FDsMax + 5 }, "free file descriptors of the edge"},
		{"memory pressure", func(s *Snapshot, _ *Load, _ *Limits) { s.Pressure["memory"] = 51 }, "memory pressure of this node"},
		{"io pressure", func(s *Snapshot, _ *Load, _ *Limits) { s.Pressure["io"] = 96 }, "io pressure of this node"},
		{"no pressure numbers", func(s *Snapshot, _ *Load, _ *Limits) { s.Pressure = nil }, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s, load := roomy(), full
			limits := Defaults(s)
			test.change(&s, &load, &limits)
			err := Decide(s, load, limits, Ask{Memory: 2 << 30})
			if test.limit == "" {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			var e *errs.Error
			if !errors.As(err, &e) || e.Kind != errs.Capacity || e.Limit == nil {
				t.Fatalf("error is %v, want capacity with a limit", err)
			}
			if e.Limit.Name != test.limit || e.Limit.Value == "" || e.Limit.Asked == "" || e.Hint == "" {
				t.Errorf("limit is %+v with hint %q, want %s", e.Limit, e.Hint, test.limit)
			}
		})
	}
}

func TestDecideOnMoreThanTheNodeHas(t *testing.T) {
	s, load := roomy(), Load{RangesFree: 1}
	if err := Decide(s, load, Defaults(s), Ask{Memory: s.MemoryTotal + 1}); !errs.Is(err, errs.Capacity) {
		t.Errorf("more memory than there is: %v", err)
	}
	if err := Decide(s, load, Defaults(s), Ask{Memory: s.MemoryTotal}); err != nil {
		t.Errorf("all memory that there is: %v", err)
	}
	s.MemoryTotal = 1 << 30
	if err := Decide(s, load, Defaults(s), Ask{Memory: 2 << 30}); err != nil {
		t.Errorf("the default on a small node: %v", err)
	}
}

func TestProbeOfThisMachine(t *testing.T) {
	p := Probe{Dir: t.TempDir()}
	s := p.Snapshot()
	if s.MemoryTotal <= 0 || s.MemoryAvailable <= 0 || s.MemoryAvailable > s.MemoryTotal {
		t.Errorf("memory: %d of %d", s.MemoryAvailable, s.MemoryTotal)
	}
	if s.DiskFree <= 0 || s.DiskFree > s.DiskTotal || s.Pids <= 0 || s.PidsMax <= s.Pids || s.Cores < 1 {
		t.Errorf("snapshot: %+v", s)
	}
	before := s.FDs
	f, err := os.Open(p.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if after := p.Snapshot().FDs; after <= before {
		t.Errorf("%d descriptors with one more open, %d before", after, before)
	}
	if p.OOMKills() < 0 {
		t.Error("the OOM counter cannot be read")
	}
}

func TestProbeOfOddProc(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"meminfo":         "MemTotal: 100 kB\nMemFree: junk\n",
		"pressure/memory": "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=3.00 avg60=0 avg300=0 total=1\n",
		"pressure/io":     "nonsense\n",
		"vmstat":          "nr_free 1\noom_kill 7\nlast 2\n",
		"loadavg":         "0.0 0.0\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := Probe{Dir: "/nonexistent", Proc: dir}
	s := p.Snapshot()
	if s.MemoryTotal != 100<<10 || s.MemoryAvailable != -1 || s.DiskFree != -1 || s.Pids != -1 || s.FDs != -1 {
		t.Errorf("snapshot: %+v", s)
	}
	if len(s.Pressure) != 1 || s.Pressure["memory"] != 12.5 {
		t.Errorf("pressure: %v", s.Pressure)
	}
	if n := p.OOMKills(); n != 7 {
		t.Errorf("OOM kills: %d", n)
	}
	if err := Decide(s, Load{RangesFree: 1}, Defaults(s), Ask{}); err != nil {
		t.Errorf("a node that cannot tell refuses: %v", err)
	}
	if line := Explain(s, Load{}, Limits{}); !strings.HasPrefix(line, "admission: ") {
		t.Error(line)
	}
}
