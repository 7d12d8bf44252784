package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// density fills the node with idle sandboxes. It reports what one costs all-in (PSS of its processes, and kernel memory) and
// whether creating one costs more when many are live.
func density(ctx context.Context, r *runner) (results []Result, err error) {
	n := r.n(500)
	var all []*harena.Sandbox
	defer func() {
		_, rerr := removeAll(ctx, all, 8)
		err = errors.Join(err, rerr)
	}()
	edge, err := r.edge(ctx)
	if err != nil {
		return nil, err
	}
	before, err := settled(ctx, edge, 0)
	if err != nil {
		return nil, err
	}
	marks := map[int]bool{1: true, 100: true, n: true}
	for len(all) < n {
		sb, err := r.sandbox(ctx)
		if err != nil {
			return nil, fmt.Errorf("with %d live: %w", len(all), err)
		}
		all = append(all, sb)
		if live := len(all); marks[live] {
			cost, err := r.createCost(ctx)
			if err != nil {
				return nil, err
			}
			results = append(results, summarise(fmt.Sprintf("create_with_%d_live", live), cost, 0))
			r.progress("%d live", live)
		}
	}
	after, err := settled(ctx, edge, before.pooled)
	if err != nil {
		return nil, err
	}
	// Each of them still answers.
	for _, sb := range []*harena.Sandbox{all[0], all[len(all)/2], all[len(all)-1]} {
		if res, err := sb.Run(ctx, harena.Cmd{Argv: []string{"echo", "alive"}}); err != nil || string(res.Stdout) != "alive\n" {
			return nil, fmt.Errorf("an idle sandbox does not answer: %v: %w", res, err)
		}
	}
	perBox := func(name string, from, to int64, note string) Result {
		mb := round(float64(to-from) / float64(n) / (1 << 20))
		return Result{Name: name, Unit: "MiB", N: n, P50: mb, P90: mb, P99: mb, Note: note}
	}
	pool := ""
	if after.pooled != before.pooled {
		pool = fmt.Sprintf("%d processes wait in the pool, %d did before: the kernel's part of the difference is counted", after.pooled, before.pooled)
	}
	return append(results,
		perBox("idle_memory", before.pss+before.kernel, after.pss+after.kernel, pool),
		perBox("idle_pss", before.pss, after.pss, ""),
		perBox("idle_kernel", before.kernel, after.kernel, ""),
		perBox("idle_node", before.used, after.used, "all memory of the machine that is not free or cache: also what others took meanwhile")), nil
}

// edge returns the name of the edge that sandboxes are made on.
func (r *runner) edge(ctx context.Context) (string, error) {
	sb, err := r.sandbox(ctx)
	if err != nil {
		return "", err
	}
	return sb.ID()[:6], sb.Remove(ctx)
}

// createCost measures a few creations.
func (r *runner) createCost(ctx context.Context) ([]time.Duration, error) {
	var cost []time.Duration
	for range 20 {
		created, _, extra, err := r.firstOutput(ctx)
		if err != nil {
			return nil, err
		}
		cost = append(cost, created)
		if err := extra.Remove(ctx); err != nil {
			return nil, err
		}
	}
	return cost, nil
}

const (
	// settleTime is how long start-up work and idle shrinking take: what is left is the standing cost.
	settleTime = 10 * time.Second
	// poolTime is how long the pool of supervisors takes to shrink after a burst.
	poolTime = 90 * time.Second
)

// settled reads what edge's sandboxes use when nothing is under way any more, and the pool has as many processes as
// wanted (0: any number).
func settled(ctx context.Context, edge string, pooled int) (memory, error) {
	began := time.Now()
	for {
		select {
		case <-time.After(settleTime):
		case <-ctx.Done():
			return memory{}, ctx.Err()
		}
		m, err := readMemory(edge)
		if err != nil || pooled == 0 || m.pooled == pooled || time.Since(began) > poolTime {
			return m, err
		}
	}
}

type memory struct {
	pss    int64 // of the sandboxes' processes
	kernel int64
	used   int64 // what is neither free nor cache
	pooled int   // processes that wait for a sandbox
}

// readMemory reads what an edge's sandboxes and the kernel use on this machine.
func readMemory(edge string) (memory, error) {
	var m memory
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(info)) {
		name, rest, _ := strings.Cut(line, ":")
		switch name {
		case "MemTotal", "Shmem":
			m.used += kib(rest)
		// Reclaimable slab is cache of files and not a cost of a sandbox.
		case "MemFree", "Buffers", "Cached", "SReclaimable":
			m.used -= kib(rest)
		case "SUnreclaim", "KernelStack", "PageTables", "Percpu":
			m.kernel += kib(rest)
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return m, err
	}
	for _, proc := range procs {
		b, err := os.ReadFile(filepath.Join(proc, "cgroup"))
		if err != nil {
			continue // it ended meanwhile
		}
		cwd, _ := os.Readlink(filepath.Join(proc, "cwd"))
		switch place(string(b), cwd, edge) {
		case ofPool:
			m.pooled++
		case ofSandbox:
			m.pss += pss(proc)
		case ofOthers:
		}
	}
	return m, nil
}

type owner int

const (
	ofOthers owner = iota
	ofPool
	ofSandbox
)

// place says whose a process is by its control groups and its working directory. Supervisors share one group; one that
// keeps a sandbox is in that sandbox's directory.
func place(groups, cwd, edge string) owner {
	_, group, ok := strings.Cut(groups, "/harena-"+edge+"/")
	switch {
	case !ok:
		return ofOthers
	case !strings.HasPrefix(group, "control"), strings.Contains(cwd, "/sandboxes/"+edge):
		return ofSandbox
	}
	return ofPool
}

func pss(proc string) int64 {
	b, err := os.ReadFile(filepath.Join(proc, "smaps_rollup"))
	if err != nil {
		return 0 // it ended meanwhile
	}
	for line := range strings.Lines(string(b)) {
		if name, rest, _ := strings.Cut(line, ":"); name == "Pss" {
			return kib(rest)
		}
	}
	return 0
}

func kib(s string) int64 {
	f := strings.Fields(s)
	if len(f) == 0 {
		return 0
	}
	n, _ := strconv.ParseInt(f[0], 10, 64)
	return n << 10
}

// machine describes where this ran.
func machine() map[string]string {
	m := map[string]string{"os": runtime.GOOS, "arch": runtime.GOARCH, "cpus": strconv.Itoa(runtime.NumCPU())}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m["kernel"] = strings.TrimSpace(string(b))
	}
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		if f := strings.Fields(string(b)); len(f) > 1 {
			m["memory_kib"] = f[1]
		}
	}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if name, rest, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
				m["cpu"] = strings.TrimSpace(rest)
				break
			}
		}
	}
	return m
}
