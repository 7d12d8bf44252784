package scenario

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// footprint is what a node takes of its machine, as the kernel counts it and not as Harena does.
type footprint struct {
	memory map[string]int64 // proportional set size, bytes
	counts map[string]int
}

func (f footprint) String() string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(f.memory)) {
		parts = append(parts, fmt.Sprintf("%s %.1f MiB", k, float64(f.memory[k])/(1<<20)))
	}
	for _, k := range slices.Sorted(maps.Keys(f.counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, f.counts[k]))
	}
	return strings.Join(parts, ", ")
}

// What a footprint may be more than an earlier one. Memory: garbage that is not collected yet, what a server keeps of a bounded
// number of past things; whoever keeps a kilobyte of each of 20,000 is found. Counts: idle connections, threads of the Go
// runtime, and supervisors that are kept ready after a burst: up to 32, of some 16 descriptors and 5 threads.
const (
	moreMemory = 12 << 20
	morePool   = 32
)

var moreCounts = map[string]int{
	"server's descriptors": 12 + 3*morePool, "server's threads": 12, "supervisors": morePool, "supervisors' descriptors": 16 * morePool,
	"supervisors' threads": 5 * morePool, "zygotes": morePool, "zygotes' descriptors": 6 * morePool, "zygotes' threads": morePool,
}

// memoryOver says in what f has grown against an earlier footprint.
func (f footprint) memoryOver(was footprint) (over []string) {
	for _, k := range slices.Sorted(maps.Keys(f.memory)) {
		if n := f.memory[k]; n > was.memory[k]+moreMemory {
			over = append(over, fmt.Sprintf("memory of %s: %.1f MiB, was %.1f", k, float64(n)/(1<<20), float64(was.memory[k])/(1<<20)))
		}
	}
	return over
}

func (f footprint) countsOver(was footprint) (over []string) {
	for _, k := range slices.Sorted(maps.Keys(f.counts)) {
		if n := f.counts[k]; n > was.counts[k]+moreCounts[k] {
			over = append(over, fmt.Sprintf("%s: %d, was %d", k, n, was.counts[k]))
		}
	}
	return over
}

// edgeID is the name of the node's cgroups.
func (o *ownNode) edgeID(t *testing.T) string {
	t.Helper()
	var n struct {
		Edge string `json:"edge"`
	}
	b, err := os.ReadFile(filepath.Join(o.dir, "node.json"))
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err != nil || n.Edge == "" {
		t.Fatalf("%s, %v", b, err)
	}
	return n.Edge
}

// footprint looks once.
func (o *ownNode) footprint(t *testing.T) footprint {
	t.Helper()
	f := footprint{memory: map[string]int64{}, counts: map[string]int{}}
	group := "/harena-" + o.edgeID(t)
	server := o.cmd.Process.Pid
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		pid, _ := strconv.Atoi(filepath.Base(p))
		kind := "server"
		if pid != server {
			in, err := os.ReadFile(p + "/cgroup")
			if err != nil || !bytes.Contains(in, []byte(group)) {
				continue
			}
			kind = "workloads"
			switch exe, _ := os.Readlink(p + "/exe"); {
			case strings.HasPrefix(exe, o.dir):
				kind = "supervisors"
			case strings.HasPrefix(exe, "/memfd:"):
				kind = "zygotes"
			}
		}
		rollup, err := os.ReadFile(p + "/smaps_rollup")
		if err != nil {
			continue // it has ended
		}
		pss := statField(rollup, "Pss:") << 10
		switch kind {
		case "server":
			f.memory[kind] = pss
		case "supervisors":
			f.memory["largest supervisor"] = max(pss, f.memory["largest supervisor"])
		}
		of := kind + "' "
		if kind == "server" {
			of = "server's "
		} else {
			f.counts[kind]++
		}
		status, _ := os.ReadFile(p + "/status")
		f.counts[of+"threads"] += int(statField(status, "Threads:"))
		fds, _ := os.ReadDir(p + "/fd")
		f.counts[of+"descriptors"] += len(fds)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	f.counts["mounts"] = bytes.Count(mounts, []byte(o.dir))
	for line := range bytes.Lines(mounts) {
		// id parent major:minor root mountpoint options… - type source superoptions
		fields := bytes.Fields(line)
		if i := slices.IndexFunc(fields, func(b []byte) bool { return string(b) == "-" }); i > 0 && bytes.HasPrefix(fields[i+1], []byte("cgroup")) {
			f.counts["cgroups"] += directories(string(fields[4]) + group)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		if b, _ := os.ReadFile(l); bytes.HasPrefix(b, []byte(o.dir)) {
			f.counts["loop devices"]++
		}
	}
	for _, dir := range []string{"sandboxes", "trash", "lost", "mounts", "jobs", "layers/tmp", "guest"} {
		entries, _ := os.ReadDir(filepath.Join(o.dir, dir))
		f.counts["entries of "+dir] = len(entries)
	}
	for _, dir := range []string{"layers/objects", "layers/manifests", "layers/tags", "cache"} {
		f.counts["files of "+dir] = files(filepath.Join(o.dir, dir))
	}
	return f
}

// statField finds "KEY NUMBER" in a file of /proc.
func statField(b []byte, key string) int64 {
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte(key)); ok {
			if f := bytes.Fields(rest); len(f) > 0 {
				n, _ := strconv.ParseInt(string(f[0]), 10, 64)
				return n
			}
		}
	}
	return 0
}

// directories counts dir and what directories are below.
func directories(dir string) (n int) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			n++
		}
		return nil //nolint:nilerr // what goes away meanwhile does not count
	})
	return n
}

// files counts what is below dir and no directory.
func files(dir string) (n int) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return nil //nolint:nilerr // what goes away meanwhile does not count
	})
	return n
}

// settled is the least that the node takes within a while in which nothing is asked of it; it returns earlier when that is
// no more than was allows in every respect. Memory that a collector of garbage has not looked at yet, a pool that shrinks,
// and what is removed in the background come to rest in that time.
func (o *ownNode) settled(t *testing.T, limit time.Duration, enough func(footprint) []string) footprint {
	t.Helper()
	least := o.footprint(t)
	for deadline := time.Now().Add(slowly(limit)); time.Now().Before(deadline); {
		if enough != nil && len(enough(least)) == 0 {
			break
		}
		time.Sleep(time.Second)
		now := o.footprint(t)
		for k, n := range now.memory {
			least.memory[k] = min(n, cmp.Or(least.memory[k], n))
		}
		for k, n := range now.counts {
			if old, ok := least.counts[k]; ok {
				n = min(n, old)
			}
			least.counts[k] = n
		}
		for k := range least.counts {
			if _, ok := now.counts[k]; !ok {
				delete(least.counts, k)
			}
		}
	}
	return least
}
