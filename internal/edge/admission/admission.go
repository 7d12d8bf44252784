// Package admission decides whether a node can take one more sandbox, from what the node has left and not from what was
// promised: limits are ceilings that idle sandboxes never reach.
package admission

import (
	"fmt"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Snapshot is the state of a node at one moment. A negative number means that the node cannot tell.
type Snapshot struct {
	MemoryTotal     int64
	MemoryAvailable int64 // /proc/meminfo MemAvailable, or less where this process's cgroup allows less
	DiskTotal       int64
	DiskFree        int64
	InodesFree      int64
	Pids, PidsMax   int64 // on the whole node
	FDs, FDsMax     int64 // of this process
	Cores           float64
	// Swap of the node; and what zram devices take of memory for what is swapped to them, and what is swapped to disk.
	SwapTotal, SwapFree     int64
	ZramBytes, DiskSwapUsed int64
	// Pressure is PSI "some avg10" in percent of memory, cpu, io; nil when the kernel has none.
	Pressure map[string]float64
}

// Load is what the edge itself knows.
type Load struct {
	Sandboxes  int // live ones
	RangesFree int // host ID ranges
	// Recent is how many were admitted since the snapshot was taken: it does not show their memory yet.
	Recent int
	// Returning is memory that resumed sandboxes will touch again at any moment, in bytes.
	Returning int64
}

// Limits are what a node keeps for itself. The zero value of a field means that there is no such limit.
type Limits struct {
	Sandboxes      int
	MemoryReserve  int64 // bytes that stay available
	DiskReserve    int64
	InodesReserve  int64
	PidsReserve    int64
	FDsReserve     int64
	MemoryPressure float64 // percent
	IOPressure     float64
}

// What one sandbox costs a node at least, measured with margin: an idle one is a few MB; an edge keeps a few
// descriptors for it while it is used; it is four processes.
const (
	memoryEach = 8 << 20
	fdsEach    = 8
	pidsEach   = 8
)

// Defaults returns the limits for a node of a size.
func Defaults(s Snapshot) Limits {
	return Limits{
		Sandboxes:      4096,
		MemoryReserve:  min(max(s.MemoryTotal/20, 256<<20), 4<<30),
		DiskReserve:    min(max(s.DiskTotal/50, 64<<20), 10<<30),
		InodesReserve:  10_000,
		PidsReserve:    512,
		FDsReserve:     128,
		MemoryPressure: 50,
		IOPressure:     95,
	}
}

// Ask is what a sandbox may come to use.
type Ask struct {
	Memory int64
}

// Decide returns nil, or a capacity error that names what is short, by how much.
func Decide(s Snapshot, load Load, l Limits, a Ask) error {
	if l.Sandboxes > 0 && load.Sandboxes >= l.Sandboxes {
		return refuse("sandboxes of this node", fmt.Sprint(l.Sandboxes), fmt.Sprint(load.Sandboxes+1), "stop some, or raise the node's limit")
	}
	if load.RangesFree <= 0 {
		return refuse("host ID ranges of this node", "0 free", "1", "stop some sandboxes")
	}
	// The default is no promise: a small node takes sandboxes that did not ask for less.
	if s.MemoryTotal > 0 && a.Memory > max(s.MemoryTotal, sandbox.DefaultMemory) {
		return refuse("memory of this node", mib(s.MemoryTotal), mib(a.Memory), "ask for less memory, or use a larger node")
	}
	// A sandbox that may never use much is not asked to leave room for more.
	n := int64(load.Recent) + 1
	memory := min(a.Memory, memoryEach)*n + l.MemoryReserve + load.Returning
	checks := []struct {
		what       string
		have, want int64
		bytes      bool
		hint       string
	}{
		{"available memory of this node", s.MemoryAvailable, memory, true, "stop or pause sandboxes, or use another node"},
		{"free disk of this node", s.DiskFree, l.DiskReserve, true, "stop sandboxes, or run `harena layer gc`"},
		{"free inodes of this node", s.InodesFree, l.InodesReserve, false, "stop sandboxes that hold many files"},
		{"free process IDs of this node", room(s.PidsMax, s.Pids), l.PidsReserve + pidsEach*n, false, "stop sandboxes, or raise kernel.pid_max"},
		{"free file descriptors of the edge", room(s.FDsMax, s.FDs), l.FDsReserve + fdsEach*n, false, "raise the limit of open files of harena"},
	}
	for _, c := range checks {
		if c.have < 0 || c.have >= c.want {
			continue
		}
		have, want := fmt.Sprint(c.have), fmt.Sprint(c.want)
		if c.bytes {
			have, want = mib(c.have), mib(c.want)
		}
		return refuse(c.what, have, want, c.hint)
	}
	for _, p := range []struct {
		resource string
		limit    float64
	}{{"memory", l.MemoryPressure}, {"io", l.IOPressure}} {
		if now, known := s.Pressure[p.resource]; known && p.limit > 0 && now > p.limit {
			return refuse(p.resource+" pressure of this node", fmt.Sprintf("%.0f%%", p.limit), fmt.Sprintf("%.0f%% now", now), "wait, or use another node")
		}
	}
	return nil
}

// DecideResume returns nil, or a capacity error, for a paused sandbox of whose memory so much is in swap: it comes back into
// memory as it is touched. A paused sandbox has no claim on the memory that it gave back: others may have it now. What zram
// frees meanwhile is not counted on: it is less, and comes later.
func DecideResume(s Snapshot, returning int64, l Limits, swapped int64) error {
	if want := swapped + returning + l.MemoryReserve; s.MemoryAvailable >= 0 && s.MemoryAvailable < want {
		return refuse("available memory of this node", mib(s.MemoryAvailable), mib(want), "stop or pause other sandboxes, then try again")
	}
	return nil
}

func room(most, used int64) int64 {
	if most < 0 || used < 0 {
		return -1
	}
	return max(0, most-used)
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

func refuse(what, limit, asked, hint string) error {
	return errs.OverLimit(errs.Capacity, what, limit, asked).WithHint("%s", hint)
}

// Explain says in one line what a decision was made from.
func Explain(s Snapshot, load Load, l Limits) string {
	return fmt.Sprintf("admission: %d of %d sandboxes, %s of memory available (%s reserved), %s of disk free (%s reserved)",
		load.Sandboxes, l.Sandboxes, mib(s.MemoryAvailable), mib(l.MemoryReserve), mib(s.DiskFree), mib(l.DiskReserve))
}
