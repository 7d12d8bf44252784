package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Group is one sandbox's groups on all hierarchies.
type Group struct {
	r  *Root
	id string
}

// Paths are the directories that a supervisor needs to place processes.
type Paths struct {
	Dir    Dir // everything of the sandbox is below
	Work   Dir // the workload: its children are made by the supervisor
	Zygote Dir
	Files  Dir
	// V1 are the v1 groups that zygote and workload join, FilesV1 those of file workers.
	V1, FilesV1 []string
}

// Paths names the directories, whether they exist or not.
func (g *Group) Paths() Paths {
	dir := path.Join(g.r.dir, g.id)
	p := Paths{Dir: Dir(dir), Work: Dir(dir + "/work"), Zygote: Dir(dir + "/zygote"), Files: Dir(dir + "/files")}
	for _, c := range wanted {
		if g.r.v1[c] == "" {
			continue
		}
		d := path.Join(g.r.v1[c], g.id)
		p.V1 = append(p.V1, d)
		if c == memory {
			p.FilesV1 = append(p.FilesV1, d)
		}
	}
	return p
}

// op is one planned effect: make dir, or write value to dir/file.
type op struct {
	dir, file, value string
}

// cpuPeriod is the kernel's default (default_cfs_period) and what Docker uses; µs.
const cpuPeriod = 100_000

// minQuota is the least quota that the kernel takes (min_cfs_quota_period); µs.
const minQuota = 1000

// On v1 what waits in sockets is not part of the memory limit, and without a limit of its own not even counted: it could
// take the memory that the node has for TCP altogether (net.ipv4.tcp_mem).
const (
	socketLimit = "memory.kmem.tcp.limit_in_bytes"
	minSockets  = 16 << 20
)

// plan lists, in order, what makes a group with its limits.
func (g *Group) plan(l Limits) []op {
	p, r := g.Paths(), g.r
	v2 := func(c string) bool { return slices.Contains(r.v2, c) }
	v1 := func(c string) string { return path.Join(r.v1[c], g.id) }
	dir, work := string(p.Dir), string(p.Work)
	quota := strconv.FormatInt(max(minQuota, int64(math.Ceil(l.CPU*cpuPeriod))), 10)

	ops := []op{{dir: dir}}
	// Zygote and file workers are in the limits of memory and CPU, but not in that of processes: a fork bomb must not keep
	// them from forking. Work has all limits, since it is what programs inside see at /sys/fs/cgroup, and adapt to.
	var below []string
	var inside []op
	if v2(memory) && l.Memory > 0 {
		limit := strconv.FormatInt(l.Memory, 10)
		ops = append(ops, op{dir, "memory.max", limit})
		if r.swap {
			ops = append(ops, op{dir, "memory.swap.max", "0"})
		}
		below, inside = append(below, "+memory"), append(inside, op{work, "memory.max", limit})
	}
	if v2(cpu) && l.CPU > 0 {
		limit := quota + " " + strconv.Itoa(cpuPeriod)
		ops = append(ops, op{dir, "cpu.max", limit})
		below, inside = append(below, "+cpu"), append(inside, op{work, "cpu.max", limit})
	}
	if v2(pids) && l.Pids > 0 {
		below, inside = append(below, "+pids"), append(inside, op{work, "pids.max", strconv.FormatInt(l.Pids, 10)})
	}
	if len(below) > 0 {
		ops = append(ops, op{dir, "cgroup.subtree_control", strings.Join(below, " ")})
	}
	ops = append(ops, op{dir: string(p.Zygote)}, op{dir: string(p.Files)}, op{dir: work})
	ops = append(ops, inside...)
	for _, c := range wanted {
		if r.v1[c] != "" {
			ops = append(ops, op{dir: v1(c)})
		}
	}
	if r.v1[memory] != "" && l.Memory > 0 {
		limit := strconv.FormatInt(l.Memory, 10)
		ops = append(ops, op{v1(memory), "memory.limit_in_bytes", limit})
		if r.swap {
			// Memory and swap together; it may not be below limit_in_bytes, hence after it.
			ops = append(ops, op{v1(memory), "memory.memsw.limit_in_bytes", limit})
		}
		if r.sockets {
			ops = append(ops, op{v1(memory), socketLimit, strconv.FormatInt(max(l.Memory/4, minSockets), 10)})
		}
	}
	if r.v1[cpu] != "" && l.CPU > 0 {
		// A new group's period is cpuPeriod already.
		ops = append(ops, op{v1(cpu), "cpu.cfs_quota_us", quota})
	}
	if r.v1[pids] != "" && l.Pids > 0 {
		// One more for the zygote, which is in the same v1 group as the workload.
		ops = append(ops, op{v1(pids), "pids.max", strconv.FormatInt(l.Pids+1, 10)})
	}
	return ops
}

// Create makes the groups with their limits. On error nothing is left. Errors:
// unsupported (the node lacks a controller), exists.
func (g *Group) Create(l Limits) (Paths, error) {
	if err := l.need(g.r.missing); err != nil {
		return Paths{}, err
	}
	p := g.Paths()
	if _, err := g.r.fs.read(string(p.Dir) + "/cgroup.procs"); err == nil {
		return Paths{}, errs.E(errs.Exists, "cgroup of sandbox %s exists already", g.id)
	}
	for _, o := range g.plan(l) {
		if err := g.r.apply(o); err != nil {
			ctx, cancel := context.WithTimeout(context.Background(), removeGrace)
			defer cancel()
			err = fmt.Errorf("make cgroups of sandbox %s: %w", g.id, err)
			return Paths{}, errors.Join(err, g.Remove(ctx))
		}
	}
	return p, nil
}

func (r *Root) apply(o op) error {
	if o.file == "" {
		return r.fs.mkdir(o.dir)
	}
	return r.fs.write(path.Join(o.dir, o.file), o.value)
}

// SetLimits changes the limits of a live group.
func (g *Group) SetLimits(l Limits) error {
	if err := l.need(g.r.missing); err != nil {
		return err
	}
	var all error
	for _, o := range g.plan(l) {
		if o.file == "" || o.file == "cgroup.subtree_control" {
			continue
		}
		all = errors.Join(all, g.r.apply(o))
	}
	return all
}

// Procs lists every process of the sandbox on any hierarchy, which is more
// than those below Paths().Dir when a start was cut short.
func (g *Group) Procs() ([]int, error) {
	p := g.Paths()
	all, err := p.Dir.Tree()
	for _, d := range p.V1 {
		more, merr := Dir(d).Tree()
		all = append(all, more...)
		err = errors.Join(err, merr)
	}
	slices.Sort(all)
	return slices.Compact(all), err
}

// Kill kills every process of the sandbox: below Dir at once, and any
// that is only on a v1 hierarchy.
func (g *Group) Kill() error {
	p := g.Paths()
	err := p.Dir.Kill()
	for _, d := range p.V1 {
		// Before the kill above is complete these are mostly the same
		// processes; SIGKILL twice does no harm.
		err = errors.Join(err, Dir(d).Signal(unix.SIGKILL))
	}
	return err
}

// Remove removes the groups; it waits for dying processes until ctx ends. No error when there are none.
func (g *Group) Remove(ctx context.Context) error {
	p := g.Paths()
	err := p.Dir.Remove(ctx)
	for _, d := range p.V1 {
		err = errors.Join(err, Dir(d).Remove(ctx))
	}
	return err
}

// Usage are counters since the group was made.
type Usage struct {
	Memory   int64 // bytes now
	CPUNanos int64
	Pids     int64 // processes and threads now
	OOMKills int64 // processes killed for want of memory
	PidsHits int64 // forks refused by the pids limit
}

// Usage reads the counters; not-found when the group does not exist.
func (g *Group) Usage() (Usage, error) {
	p, r := g.Paths(), g.r
	dir, work := string(p.Dir), string(p.Work)
	// A cgroup2 group always counts CPU time, with or without the controller.
	stat, err := osFS{}.read(dir + "/cpu.stat")
	if gone(err) {
		return Usage{}, errs.E(errs.NotFound, "sandbox %s has no cgroup", g.id)
	}
	u := Usage{CPUNanos: field(stat, "usage_usec") * 1000}
	all := err
	num := func(name string) int64 {
		n, err := number(name)
		// A controller without a limit has no file at this level.
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = errors.Join(all, err)
		}
		return n
	}
	key := func(name, k string) int64 {
		s, err := osFS{}.read(name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = errors.Join(all, err)
		}
		return field(s, k)
	}
	switch d := path.Join(r.v1[memory], g.id); {
	case slices.Contains(r.v2, memory):
		u.Memory = num(dir + "/memory.current")
		u.OOMKills = key(dir+"/memory.events", "oom_kill")
	case r.v1[memory] != "":
		u.Memory = num(d + "/memory.usage_in_bytes")
		u.OOMKills = key(d+"/memory.oom_control", "oom_kill")
	}
	switch d := path.Join(r.v1[pids], g.id); {
	case slices.Contains(r.v2, pids):
		u.Pids = num(work + "/pids.current")
		u.PidsHits = key(work+"/pids.events", "max")
	case r.v1[pids] != "":
		// Without the zygote, which is ours.
		u.Pids = max(0, num(d+"/pids.current")-1)
		u.PidsHits = key(d+"/pids.events", "max")
	}
	return u, all
}
