package lifecycle

import (
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
)

// sampler reads the machine's state at most twice a second, however many sandboxes are admitted.
type sampler struct {
	node  Node
	clock Clock
	kept  int64 // free bytes of the disk that are not for sandboxes

	mu   sync.Mutex
	last admission.Snapshot
	at   time.Time
	n    int // admitted since
}

const sampleEvery = 500 * time.Millisecond

func (s *sampler) get(fresh bool) (admission.Snapshot, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.clock.Now(); fresh || s.at.IsZero() || now.Sub(s.at) >= sampleEvery || now.Before(s.at) {
		s.last, s.at, s.n = s.node.Snapshot(), now, 0
		if s.last.DiskFree >= 0 {
			s.last.DiskFree = max(s.last.DiskFree-s.kept, 0)
		}
	}
	return s.last, s.at
}

func (s *sampler) admitted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
}

func (s *sampler) recent() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n
}

// Probe says what placement decides from.
func (e *Edge) Probe() *harenav1.Edge {
	snap, at := e.sampler.get(false)
	p := &harenav1.Edge{
		Id: string(e.dir.Edge()), State: "healthy", Seen: timestamppb.New(at), Version: e.cfg.Version,
		SandboxesByBackend: map[string]int64{}, SandboxesByState: map[string]int64{},
		CpuCores: snap.Cores, MemoryBytes: snap.MemoryTotal, MemoryAvailableBytes: snap.MemoryAvailable, DiskAvailableBytes: snap.DiskFree,
		Pressure: maps.Clone(snap.Pressure), Backends: slices.Sorted(maps.Keys(e.backends)), Capacity: int32(e.cfg.Limits.Sandboxes),
	}
	if e.dir.Draining() {
		p.State = "draining"
	}
	for _, b := range e.snapshot() {
		r := b.record()
		p.SandboxesByState[string(r.State)]++
		if r.State.Live() {
			p.SandboxesByBackend[r.Spec.GetBackend()]++
		}
	}
	return p
}

// Drain makes the edge refuse new sandboxes, also after a restart; or accept them again.
func (e *Edge) Drain(on bool) (*harenav1.Edge, error) {
	if e.dir.Draining() != on {
		if err := e.dir.SetDraining(on); err != nil {
			return nil, err
		}
		kind := "edge.undrained"
		if on {
			kind = "edge.draining"
		}
		e.event(kind, nil, "", nil)
	}
	return e.Probe(), nil
}
