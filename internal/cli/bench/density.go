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

// density fills the node with idle sandboxes. It reports what one costs all-in
// (PSS of its processes, and kernel memory) and whether creating one costs more
// when many are live.
func density(ctx context.Context, r *runner) (results []Result, err error) {
	n := r.n(500)
	var all []*harena.Sandbox
	defer func() {
		_, rerr := removeAll(ctx, all, 8)
		err = errors.Join(err, rerr)
	}()
	before, err := readMemory()
	if err != nil {
		return nil, err
	}
	marks := map[int]bool{1: true, 100: true, n: true}
	const samples = 20
	for len(all) < n {
		sb, err := r.sandbox(ctx)
		if err != nil {
			return nil, fmt.Errorf("with %d live: %w", len(all), err)
		}
		all = append(all, sb)
		if live := len(all); marks[live] {
			var cost []time.Duration
			for range samples {
				created, _, extra, err := r.firstOutput(ctx)
				if err != nil {
					return nil, err
				}
				cost = append(cost, created)
				if err := extra.Remove(ctx); err != nil {
					return nil, err
				}
			}
			results = append(results, summarise(fmt.Sprintf("create_with_%d_live", live), cost, 0))
			r.progress("%d live", live)
		}
	}
	// Start-up work is over and idle shrinking has run: what is left is the standing cost.
	select {
	case <-time.After(10 * time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	after, err := readMemory()
	if err != nil {
		return nil, err
	}
	// Each of them still answers.
	for _, sb := range []*harena.Sandbox{all[0], all[len(all)/2], all[len(all)-1]} {
		if res, err := sb.Run(ctx, harena.Cmd{Argv: []string{"echo", "alive"}}); err != nil || string(res.Stdout) != "alive\n" {
			return nil, fmt.Errorf("an idle sandbox does not answer: %v: %w", res, err)
		}
	}
	perBox := func(name string, from, to int64) Result {
		mb := round(float64(to-from) / float64(n) / (1 << 20))
		return Result{Name: name, Unit: "MiB", N: n, P50: mb, P90: mb, P99: mb}
	}
	return append(results,
		perBox("idle_memory", before.pss+before.kernel, after.pss+after.kernel),
		perBox("idle_pss", before.pss, after.pss),
		perBox("idle_kernel", before.kernel, after.kernel)), nil
}

type memory struct{ pss, kernel int64 }

// readMemory reads what Harena's own processes and the kernel use on this machine.
func readMemory() (memory, error) {
	var m memory
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(info)) {
		name, rest, _ := strings.Cut(line, ":")
		switch name {
		// Reclaimable slab is cache of files and not a cost of a sandbox.
		case "SUnreclaim", "KernelStack", "PageTables", "Percpu":
			m.kernel += kib(rest)
		}
	}
	rollups, err := filepath.Glob("/proc/[0-9]*/smaps_rollup")
	if err != nil {
		return m, err
	}
	for _, path := range rollups {
		if !ours(filepath.Dir(path)) {
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile
		}
		for line := range strings.Lines(string(b)) {
			if name, rest, _ := strings.Cut(line, ":"); name == "Pss" {
				m.pss += kib(rest)
			}
		}
	}
	return m, nil
}

// ours reports whether a process is in a control group of Harena's.
func ours(proc string) bool {
	b, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	return err == nil && strings.Contains(string(b), "/harena-")
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
