package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/sandbox"
)

// DoctorOffline is Doctor for a data directory whose server does not run: from its records, /proc and the cgroup hierarchies
// it finds what belongs to no sandbox. Sandboxes that live on without a server are no leak. It changes nothing. not-found: no
// node was ever started there.
func DoctorOffline(ctx context.Context, dir string, backends ...backend.Backend) (*harenav1.DoctorResponse, error) {
	info, err := datadir.Inspect(dir)
	if err != nil {
		return nil, err
	}
	server := &harenav1.Check{Name: "server", Status: statusOK, Detail: "does not run"}
	if info.ServerPid != "" {
		server.Detail = "runs with pid " + info.ServerPid
		server.Hint = "ask it: this look from outside may take work under way for leaks"
	}
	recs, odd, torn, err := records{root: info.Path}.load()
	if err != nil {
		return nil, err
	}
	owned := owners(recs, info.Boot)
	checks := []*harenav1.Check{server}
	for _, c := range checkDir(info) {
		// Without anything that a sandbox wrote there is nothing to protect against, as after `harena down`.
		if c.GetName() == "data.mount" && c.GetStatus() == statusFailed && info.ServerPid == "" && !anyUpper(recs) {
			c.Status, c.Detail, c.Hint = statusOK, "not mounted: no sandbox's files are left", ""
		}
		checks = append(checks, c)
	}
	snap := admission.Probe{Dir: info.Path}.Snapshot()
	checks = append(checks, checkMachine(snap, admission.Defaults(snap))...)
	var leaks []backend.Leak
	for _, name := range append(odd, torn...) {
		leaks = append(leaks, backend.Leak{Kind: "directory", Name: filepath.Join("sandboxes", name)})
	}
	scan := scanner{info: info, owned: owned, proc: "/proc"}
	mounts, merr := scan.mounts()
	groups, gerr := scan.cgroups()
	processes, perr := scan.processes()
	leaks = append(append(append(leaks, mounts...), groups...), processes...)
	failed := []error{merr, gerr, perr}
	live := map[sandbox.ID]bool{}
	for id := range owned {
		live[id] = true
	}
	for _, b := range backends {
		checks = append(checks, b.Checks(ctx)...)
		if info.ServerPid != "" {
			continue // its pool is the server's
		}
		found, err := b.Leaks(live)
		failed = append(failed, err)
		for _, l := range found {
			if !known(leaks, l) {
				leaks = append(leaks, l)
			}
		}
	}
	return diagnose(append(checks, checkLeaks(leaks, errors.Join(failed...))...)), nil
}

// anyUpper reports whether a sandbox's writable layer is there. Stopped ones have none.
func anyUpper(recs []*Record) bool {
	return slices.ContainsFunc(recs, func(r *Record) bool { return r.State != sandbox.Stopped })
}

func known(leaks []backend.Leak, l backend.Leak) bool {
	for _, k := range leaks {
		if k.Kind == l.Kind && k.Name == l.Name {
			return true
		}
	}
	return false
}

// owners are the sandboxes that may hold something of the machine in this boot. Pure.
func owners(recs []*Record, boot string) map[sandbox.ID]bool {
	owned := map[sandbox.ID]bool{}
	for _, r := range recs {
		if r.Boot == boot && (r.State.Live() || r.Config.IDBase != 0) {
			owned[r.ID()] = true
		}
	}
	return owned
}

// scanner finds what a node left on the machine, from the names that things of an edge have.
type scanner struct {
	info  datadir.Info
	owned map[sandbox.ID]bool
	proc  string
}

// mounts finds mounts of layers that do not exist, and mounts below a sandbox that does not live. Layers that exist are kept
// mounted for the next sandbox, also between two servers.
func (s scanner) mounts() ([]backend.Leak, error) {
	all, err := datadir.Mounts()
	if err != nil {
		return nil, err
	}
	var leaks []backend.Leak
	for _, m := range all {
		rel, below := strings.CutPrefix(m.Point, s.info.Path+"/")
		if !below {
			continue
		}
		parts := strings.Split(rel, "/")
		if len(parts) < 2 {
			continue
		}
		switch parts[0] {
		case "mounts":
			if !s.exists(parts[1]) {
				leaks = append(leaks, backend.Leak{Kind: "mount", Name: rel})
			}
		case "sandboxes":
			if !s.owned[sandbox.ID(parts[1])] {
				leaks = append(leaks, backend.Leak{Kind: "mount", Name: rel})
			}
		}
	}
	return leaks, nil
}

// exists tells whether there is a layer with these hexadecimal digits.
func (s scanner) exists(digest string) bool {
	if len(digest) < 2 {
		return false
	}
	_, err := os.Lstat(filepath.Join(s.info.Path, "layers", "manifests", digest[:2], digest+".json"))
	return err == nil
}

// cgroups finds groups of sandboxes that do not live, in every hierarchy.
func (s scanner) cgroups() ([]backend.Leak, error) {
	all, err := datadir.Mounts()
	if err != nil {
		return nil, err
	}
	var leaks []backend.Leak
	seen := map[string]bool{}
	for _, m := range all {
		if m.Type != "cgroup" && m.Type != "cgroup2" || seen[m.Point] {
			continue
		}
		seen[m.Point] = true
		root := filepath.Join(m.Point, s.root())
		names, err := os.ReadDir(root)
		if err != nil {
			continue // nothing of this edge there
		}
		for _, n := range names {
			if n.IsDir() && n.Name() != "control" && !s.owned[sandbox.ID(n.Name())] {
				leaks = append(leaks, backend.Leak{Kind: "cgroup", Name: filepath.Join(root, n.Name())})
			}
		}
	}
	return leaks, nil
}

func (s scanner) root() string { return "harena-" + string(s.info.Edge) }

// processes finds processes in groups of sandboxes that do not live; and supervisors, when there is neither a server nor a
// sandbox that they could be for.
func (s scanner) processes() ([]backend.Leak, error) {
	names, err := os.ReadDir(s.proc)
	if err != nil {
		return nil, fmt.Errorf("read processes: %w", err)
	}
	marker := "/" + s.root() + "/"
	var leaks []backend.Leak
	for _, n := range names {
		if _, err := strconv.Atoi(n.Name()); err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(s.proc, n.Name(), "cgroup"))
		if err != nil {
			continue // it has ended
		}
		_, rest, found := strings.Cut(string(b), marker)
		if !found {
			continue
		}
		group, _, _ := strings.Cut(strings.TrimSpace(rest), "/")
		group, _, _ = strings.Cut(group, "\n")
		if group == "control" && (s.info.ServerPid != "" || len(s.owned) > 0) || s.owned[sandbox.ID(group)] {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(s.proc, n.Name(), "stat"))
		if err != nil {
			continue
		}
		if comm, alive := parseStat(string(stat)); alive {
			leaks = append(leaks, backend.Leak{Kind: "process", Name: fmt.Sprintf("%s (%s) of %s", n.Name(), comm, group)})
		}
	}
	return leaks, nil
}

// parseStat returns a process's name, and whether it is alive: one that has ended holds nothing, and waits for its parent
// only. proc_pid_stat(5): the name, in parentheses, may hold any character. Pure.
func parseStat(stat string) (comm string, alive bool) {
	begin, end := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
	if begin < 0 || end < begin {
		return "", false
	}
	state := strings.TrimSpace(stat[end+1:])
	return stat[begin+1 : end], state != "" && !strings.ContainsAny(state[:1], "ZX")
}
