package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Statuses of a check.
const (
	statusOK          = "ok"
	statusDegraded    = "degraded"
	statusUnsupported = "unsupported"
	statusUnverified  = "unverified"
	statusFailed      = "failed"
	statusLeaked      = "leaked"
)

// leakKinds are looked for always, so that a clean node says so.
var leakKinds = []string{"process", "cgroup", "mount", "directory"}

// Doctor says what the node supports, what is degraded or unverified, and what leaked. It changes nothing.
func (e *Edge) Doctor(ctx context.Context) *harenav1.DoctorResponse {
	snap, _ := e.sampler.get(true)
	checks := e.checkData()
	checks = append(checks, checkMachine(snap, e.cfg.Limits)...)
	for _, b := range e.cfg.Backends {
		checks = append(checks, b.Checks(ctx)...)
	}
	checks = append(checks, e.cfg.Layers.Checks(ctx)...)
	checks = append(checks, e.diskChecks()...)
	if e.cfg.Checks != nil {
		checks = append(checks, e.cfg.Checks()...)
	}
	leaks, err := e.lasting()
	return diagnose(append(checks, checkLeaks(leaks, err)...))
}

func diagnose(checks []*harenav1.Check) *harenav1.DoctorResponse {
	resp := &harenav1.DoctorResponse{Checks: checks, Clean: true}
	for _, c := range checks {
		if c.GetStatus() == statusFailed || c.GetStatus() == statusLeaked {
			resp.Clean = false
		}
	}
	return resp
}

// lasting lists leaks that are there twice: what a creation or a stop under way makes or leaves is not one.
func (e *Edge) lasting() ([]backend.Leak, error) {
	first, err1 := e.found()
	if len(first) == 0 {
		return nil, err1
	}
	second, err2 := e.found()
	both := slices.DeleteFunc(first, func(l backend.Leak) bool {
		return !slices.ContainsFunc(second, func(m backend.Leak) bool { return l.Kind == m.Kind && l.Name == m.Name })
	})
	return both, errors.Join(err1, err2)
}

func (e *Edge) found() ([]backend.Leak, error) {
	leaks, err := e.leaks()
	names, derr := os.ReadDir(filepath.Join(e.records.root, "sandboxes"))
	for _, n := range names {
		e.mu.RLock()
		known := e.boxes[sandbox.ID(n.Name())] != nil
		e.mu.RUnlock()
		if !known {
			leaks = append(leaks, backend.Leak{Kind: "directory", Name: filepath.Join("sandboxes", n.Name())})
		}
	}
	return leaks, errors.Join(err, derr)
}

func (e *Edge) checkData() []*harenav1.Check {
	info, err := datadir.Inspect(e.dir.Path())
	if err != nil {
		return []*harenav1.Check{{Name: "data", Status: statusFailed, Detail: err.Error()}}
	}
	return checkDir(info)
}

// checkDir looks at a data directory.
func checkDir(info datadir.Info) []*harenav1.Check {
	mount := &harenav1.Check{Name: "data.mount", Status: statusOK, Detail: info.Path + " is mounted nosuid and nodev"}
	if !info.Bound {
		mount.Status, mount.Detail = statusFailed, info.Path+" is not mounted nosuid and nodev: setuid files made in sandboxes are live on the node"
		mount.Hint = "start `harena up` again as root"
	}
	rights := &harenav1.Check{Name: "data.mode", Status: statusOK, Detail: "0700"}
	if st, err := os.Stat(info.Path); err != nil || st.Mode().Perm() != 0o700 {
		rights.Status, rights.Detail, rights.Hint = statusFailed, "others than root may enter "+info.Path, "chmod 0700 "+info.Path
	}
	checks := []*harenav1.Check{mount, rights}
	if lost, err := os.ReadDir(filepath.Join(info.Path, "lost")); err == nil && len(lost) > 0 {
		checks = append(checks, &harenav1.Check{
			Name: "data.records", Status: statusDegraded, Detail: fmt.Sprintf("%d sandboxes had records that could not be read", len(lost)),
			Hint: "look into " + filepath.Join(info.Path, "lost") + " and remove it",
		})
	} else {
		checks = append(checks, &harenav1.Check{Name: "data.records", Status: statusOK, Detail: "all can be read"})
	}
	return checks
}

// checkMachine compares what is left of the machine with what is kept in reserve.
func checkMachine(s admission.Snapshot, l admission.Limits) []*harenav1.Check {
	room := &harenav1.Check{Name: "capacity", Status: statusOK, Detail: admission.Explain(s, admission.Load{RangesFree: 1}, l)}
	if err := admission.Decide(s, admission.Load{RangesFree: 1}, l, admission.Ask{Memory: sandbox.DefaultMemory}); err != nil {
		room.Status, room.Detail = statusDegraded, "new sandboxes are refused: "+err.Error()
	}
	fds := &harenav1.Check{Name: "edge.fds", Status: statusOK, Detail: fmt.Sprintf("%d of %d file descriptors are open", s.FDs, s.FDsMax)}
	switch {
	case s.FDs < 0 || s.FDsMax <= 0:
		fds.Status, fds.Detail = statusUnverified, "the number of open file descriptors cannot be read"
	case s.FDs > s.FDsMax*8/10:
		fds.Status, fds.Hint = statusDegraded, "raise the limit of open files of harena"
	}
	psi := &harenav1.Check{Name: "pressure", Status: statusOK, Detail: explainPressure(s.Pressure)}
	if len(s.Pressure) == 0 {
		psi.Status, psi.Detail = statusUnsupported, "the kernel does not report pressure; admission does without"
		psi.Hint = "boot with psi=1"
	}
	return []*harenav1.Check{room, fds, psi}
}

// explainPressure lists what waits for what: 0 to 100 percent of the time, averaged over ten seconds.
func explainPressure(pressure map[string]float64) string {
	var parts []string
	for _, resource := range slices.Sorted(maps.Keys(pressure)) {
		parts = append(parts, fmt.Sprintf("%s %.0f%%", resource, pressure[resource]))
	}
	return "time in which tasks waited: " + strings.Join(parts, ", ")
}

// checkLeaks makes one check of each kind of leak.
func checkLeaks(leaks []backend.Leak, err error) []*harenav1.Check {
	byKind := map[string][]string{}
	for _, l := range leaks {
		byKind[l.Kind] = append(byKind[l.Kind], l.Name)
	}
	kinds := slices.Clone(leakKinds)
	for kind := range byKind {
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	var checks []*harenav1.Check
	for _, kind := range kinds {
		c := &harenav1.Check{Name: "leak." + plural(kind), Status: statusOK, Detail: "none"}
		if names := byKind[kind]; len(names) > 0 {
			slices.Sort(names)
			c.Status, c.Detail = statusLeaked, fmt.Sprintf("%d: %s", len(names), strings.Join(names[:min(len(names), 5)], ", "))
			c.Hint = "start `harena up` again: it removes what belongs to nobody"
		}
		checks = append(checks, c)
	}
	if err != nil {
		checks = append(checks, &harenav1.Check{Name: "leak.scan", Status: statusUnverified, Detail: err.Error()})
	}
	return checks
}

func plural(kind string) string {
	switch kind {
	case "process":
		return "processes"
	case "directory":
		return "directories"
	}
	return kind + "s"
}
