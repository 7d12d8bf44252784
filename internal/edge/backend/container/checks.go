package container

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/supervisor/launch"
)

// probeIDs are host IDs for trials: the last below the first slot, which no sandbox is given.
const probeIDs = 1<<29 - 1<<16

// Checks implements backend.Backend. What sandboxes depend on is tried, not guessed.
func (b *Backend) Checks(context.Context) []*harenav1.Check {
	// Trials use names of their own, but not of each call.
	b.checking.Lock()
	defer b.checking.Unlock()
	probe := launch.Probe{Dir: b.cfg.Dir, Layer: b.anyLayer(), Group: b.cgroups.Control(), IDBase: probeIDs}
	return append([]*harenav1.Check{b.cgroupCheck()}, launch.Checks(probe)...)
}

func (b *Backend) cgroupCheck() *harenav1.Check {
	c := &harenav1.Check{Name: "cgroup", Status: "ok", Detail: b.cgroups.Describe()}
	switch missing := b.cgroups.Missing(); {
	case len(missing) > 0:
		c.Status = "unsupported"
		c.Hint = "sandboxes cannot be limited in " + strings.Join(missing, ", ") + "; enable the cgroup controllers"
	case !b.cgroups.SwapLimited() && hasSwap():
		c.Status = "degraded"
		c.Hint = "a sandbox may use swap beyond its memory limit; boot with swapaccount=1, or without swap"
	}
	return c
}

// hasSwap reports whether any swap space is in use; proc_swaps(5): the first line is a heading.
func hasSwap() bool {
	text, err := os.ReadFile("/proc/swaps")
	return err == nil && strings.Count(string(text), "\n") > 1
}

// anyLayer is the mount of some layer, "" when there is none yet.
func (b *Backend) anyLayer() string {
	dir := filepath.Join(b.cfg.Dir, "mounts")
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) == 0 {
		return ""
	}
	return filepath.Join(dir, entries[0].Name())
}
