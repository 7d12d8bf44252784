package lifecycle

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/disk"
	"github.com/harena-dev/harena/internal/sandbox"
)

// diskSlack is what a failed sandbox may exceed its bound by: serving its files needs a directory or two.
const diskSlack = 16 << 20

// On a volume of its own a node keeps room for itself, see disk.Pool.
const (
	poolMargin   = 16 << 20 // above it, for a new sandbox
	balanceEvery = 2 * time.Second
	settleWithin = 3 * time.Second
)

// keepRoom has all sandboxes leave room for the node whatever else is written.
func (e *Edge) keepRoom(ctx context.Context) {
	tick := time.NewTicker(balanceEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := e.disk.Balance(); err != nil {
			e.log.Error("the limit of all writable layers could not be set", "err", err)
		}
	}
}

// room is the state of the machine; on a full volume after what was erased has come back.
func (e *Edge) room(ctx context.Context) admission.Snapshot {
	s, _ := e.sampler.get(false)
	if e.left == 0 || s.DiskFree < 0 || s.DiskFree >= e.cfg.Limits.DiskReserve {
		return s
	}
	if err := e.disk.Settle(ctx, e.left+poolMargin, settleWithin); err != nil {
		e.log.Warn("the disk's free space could not be brought up to date", "err", err)
	}
	s, _ = e.sampler.get(true)
	return s
}

// lister is what a backend can do whose processes are the node's own.
type lister interface {
	// Processes lists the host's IDs of the processes that work in the sandbox.
	Processes(id sandbox.ID) ([]int, error)
}

func (s records) upper(id sandbox.ID) string { return filepath.Join(s.dir(id), "upper") }

// openDisk finds out how writable layers are bounded here.
func (e *Edge) openDisk() (err error) {
	if e.disk, err = disk.Open(e.dir.Path(), e.dir.OwnVolume()); err != nil {
		return e.records.fault("look at the disk", err)
	}
	e.records.disk = e.disk
	if e.left, err = e.disk.Pool(e.cfg.Limits.DiskReserve); err != nil {
		return e.records.fault("keep room on the disk", err)
	}
	if e.left > 0 {
		// When sandboxes have used up what they may, there is room for the node, and none for another sandbox.
		e.sampler.kept = e.left + poolMargin - e.cfg.Limits.DiskReserve
	}
	if e.disk.Mode() == disk.ModeWatch {
		e.watch = disk.NewWatch(e.dir.Path(), e.overDisk)
	}
	return nil
}

// watchDisk begins to watch a running sandbox's writable layer where the file system does not bound it.
func (e *Edge) watchDisk(b *box, be backend.Backend, found bool) {
	if e.watch == nil {
		return
	}
	var seen int64
	t := disk.Target{
		Key: string(b.id), Path: e.records.upper(b.id), Limit: b.record().Spec.GetLimits().GetDisk(),
		Pids: func() []int {
			if l, ok := be.(lister); ok {
				pids, _ := l.Processes(b.id)
				return pids
			}
			return nil
		},
		Busy: func() bool {
			u, err := be.Usage(b.id)
			busy := err != nil || u.CPUNanos != seen
			seen = u.CPUNanos
			return busy
		},
	}
	if found {
		e.watch.Adopt(t)
	} else {
		e.watch.Add(t)
	}
}

// unwatchDisk ends it.
func (e *Edge) unwatchDisk(id sandbox.ID) {
	if e.watch != nil {
		e.watch.Remove(string(id))
	}
}

// overDisk ends a sandbox that has written more than it may.
func (e *Edge) overDisk(key string, used int64) {
	if !e.begin() {
		return // the next start finds it
	}
	go func() {
		defer e.work.Done()
		b, err := e.find(sandbox.ID(key))
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(e.ctx, patience)
		defer cancel()
		if b.take(ctx) != nil {
			return
		}
		defer b.give()
		if !b.state().Live() || b.isGone() {
			return
		}
		limit := b.record().Spec.GetLimits().GetDisk()
		message := fmt.Sprintf("its files took %d bytes, its disk limit is %d", used, limit)
		e.event("sandbox.disk-full", b.record(), message, map[string]string{"used": fmt.Sprint(used), "limit": fmt.Sprint(limit)})
		u := backend.Usage{}
		if be, err := e.backend(b.record().Spec.GetBackend()); err == nil {
			u, _ = be.Usage(b.id)
		}
		if err := e.fail(ctx, b, sandbox.ReasonDiskFull, message, u); err != nil {
			e.log.Error("a sandbox with too many files could not be ended", "sandbox", b.id, "err", err)
		}
	}()
}

// lookDisk tells once when a sandbox comes to its bound, where the file system holds it there.
func (e *Edge) lookDisk(b *box) {
	if e.watch != nil || b.diskTold.Load() {
		return
	}
	r := b.record()
	limit := r.Spec.GetLimits().GetDisk()
	used, ok := e.disk.Used(e.records.upper(b.id))
	// Within a hundredth: space is given out in blocks.
	if !ok || used < limit-limit/100 || b.diskTold.Swap(true) {
		return
	}
	e.event("sandbox.disk-full", r, fmt.Sprintf("its files take %d bytes, its disk limit is %d: it cannot write more", used, limit),
		map[string]string{"used": fmt.Sprint(used), "limit": fmt.Sprint(limit)})
}

// diskChecks is the doctor's part about disks.
func (e *Edge) diskChecks() []*harenav1.Check {
	limit := &harenav1.Check{Name: "disk.limit", Status: "ok"}
	switch e.disk.Mode() {
	case disk.ModeSubvolume:
		limit.Detail = "btrfs quota groups bound writable layers"
	case disk.ModeProject:
		limit.Detail = "project quotas bound writable layers"
	default:
		limit.Status = "degraded"
		limit.Detail = "writable layers are measured: a sandbox that exceeds its disk limit is ended a moment later"
		limit.Hint = "`harena up --data-size SIZE` on a new directory makes a volume with quotas; or put the data on btrfs with quotas, or on ext4 or XFS mounted with prjquota"
	}
	clone := &harenav1.Check{Name: "disk.reflink", Status: "ok", Detail: "copies share blocks: sandboxes are frozen briefly for snapshots and forks"}
	if !e.disk.Reflinks() {
		clone.Status, clone.Detail = "degraded", "copies do not share blocks: sandboxes are frozen while their files are read for snapshots and forks"
		clone.Hint = "keep the data on btrfs or XFS, or start with --data-size on a new directory"
	}
	return []*harenav1.Check{limit, clone}
}
