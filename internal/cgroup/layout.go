// Package cgroup limits, counts, tracks, freezes and kills the processes of
// sandboxes, on nodes with cgroup v1, v2, or both (hybrid).
//
// Tracking, killing and freezing always use a cgroup2 hierarchy: on a v2 node
// the only one, on a hybrid node the one beside the v1 controllers, and on a
// v1 node one that is mounted privately. Limits use, controller by controller,
// v2 files or a v1 hierarchy, whichever holds the controller. What the node
// has is probed, never guessed from versions.
//
//	<cgroup2>/harena-<edge>/control       the supervisors
//	                       /blobd         what serves layers of a remote store; v2: memory.min
//	<cgroup2>/harena-<edge>/<ID>/         v2: memory.max, memory.swap.max, cpu.max
//	                            /zygote  /files
//	                            /work/    v2: pids.max; memory.max and cpu.max again, seen inside
//	<v1 controller>/harena-<edge>/<ID>/   v1: the limits
package cgroup

import (
	"path"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// PrivateMount is where a cgroup2 hierarchy is mounted on a node that has none.
// All nodes on one kernel share it, and it stays: supervisors use it.
const PrivateMount = "/run/harena/cgroup2"

// The controllers whose limits a sandbox has.
const (
	cpu    = "cpu"
	memory = "memory"
	pids   = "pids"
)

var wanted = []string{cpu, memory, pids}

// Layout is where a node keeps its hierarchies. It is plain data.
type Layout struct {
	// Bases are cgroup2 directories that could hold ours, best first. Empty:
	// the node has no writable cgroup2 mount.
	Bases []string
	// Options are those of the mounted cgroup2 hierarchy, such as nsdelegate.
	Options []string
	// V1 maps a wanted controller to the mount of its v1 hierarchy.
	V1 map[string]string
}

// parseLayout reads /proc/self/mountinfo and /proc/self/cgroup (proc(5),
// cgroups(7)).
//
// The mount's own root is preferred as base, as Docker's cgroupfs driver does:
// what lies below the edge's own group would be killed with the service that
// runs it. The edge's own group is the second choice, for a delegated subtree.
func parseLayout(mountinfo, self string) Layout {
	l := Layout{V1: map[string]string{}}
	var v2 string
	for line := range strings.Lines(mountinfo) {
		pre, post, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(pre), strings.Fields(post)
		if !ok || len(f) < 6 || len(g) < 3 {
			continue
		}
		dir, writable := unescape(f[4]), !slices.Contains(strings.Split(f[5], ","), "ro")
		switch g[0] {
		case "cgroup2":
			// Several mounts of cgroup2 show one hierarchy; the first is as good as any.
			if writable && v2 == "" {
				v2 = dir
				l.Options = slices.DeleteFunc(strings.Split(strings.TrimSpace(g[2]), ","), func(o string) bool { return o == "rw" || o == "ro" })
			}
		case "cgroup":
			for _, opt := range strings.Split(g[2], ",") {
				if writable && slices.Contains(wanted, opt) && l.V1[opt] == "" {
					l.V1[opt] = dir
				}
			}
		}
	}
	if v2 == "" {
		return l
	}
	l.Bases = []string{v2}
	for line := range strings.Lines(self) {
		if own, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && own != "/" && !strings.Contains(own, "..") {
			l.Bases = append(l.Bases, path.Join(v2, own))
		}
	}
	return l
}

// unescape undoes mountinfo's octal escapes of space, tab, newline and backslash.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// split decides which controllers are used through v2 and which through v1,
// given the content of the base's cgroup.controllers.
func (l Layout) split(controllers string) (v2 []string, v1 map[string]string, missing []string) {
	have := strings.Fields(controllers)
	v1 = map[string]string{}
	for _, c := range wanted {
		switch {
		case slices.Contains(have, c):
			v2 = append(v2, c)
		case l.V1[c] != "":
			v1[c] = l.V1[c]
		default:
			missing = append(missing, c)
		}
	}
	return v2, v1, missing
}

// Limits bound one sandbox. Zero means no limit.
type Limits struct {
	CPU    float64 // cores
	Memory int64   // bytes, swap included (there is none)
	Pids   int64   // processes and threads
}

func (l Limits) need(missing []string) error {
	for _, c := range missing {
		if c == cpu && l.CPU > 0 || c == memory && l.Memory > 0 || c == pids && l.Pids > 0 {
			return errs.E(errs.Unsupported, "this node cannot limit %s: it has no %s cgroup controller", c, c).
				WithHint("enable the controller (kernel command line cgroup_enable=%s), or mount its hierarchy", c)
		}
	}
	return nil
}
