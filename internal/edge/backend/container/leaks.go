package container

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/sandbox"
)

func (b *Backend) controlDir() cgroup.Dir { return cgroup.Dir(b.cgroups.Control()) }

// Leaks implements backend.Backend.
func (b *Backend) Leaks(live map[sandbox.ID]bool) ([]backend.Leak, error) {
	groups, err := b.leakedGroups(live)
	if err != nil {
		return nil, err
	}
	supervisors, err := b.leakedSupervisors(live)
	if err != nil {
		return nil, err
	}
	mounts, err := b.leakedMounts()
	if err != nil {
		return nil, err
	}
	out := append(append(groups, supervisors...), mounts...)
	old, err := b.oldGuests()
	for _, dir := range old {
		out = append(out, backend.Leak{Kind: "directory", Name: dir, Release: func() error { return os.RemoveAll(dir) }})
	}
	return out, err
}

// leakedGroups are cgroups of no live sandbox, with what runs in them.
func (b *Backend) leakedGroups(live map[sandbox.ID]bool) ([]backend.Leak, error) {
	names, err := b.cgroups.Groups()
	if err != nil {
		return nil, err
	}
	var out []backend.Leak
	for _, name := range names {
		id := sandbox.ID(name)
		if live[id] {
			continue
		}
		g := b.cgroups.Group(name)
		procs, err := g.Procs()
		if err != nil {
			return nil, err
		}
		l := backend.Leak{Kind: "cgroup", Name: string(g.Paths().Dir), Release: func() error { return b.Destroy(context.Background(), id) }}
		if len(procs) > 0 {
			l.Kind, l.Name = "process", fmt.Sprintf("%d processes in %s", len(procs), l.Name)
		}
		if _, perr := sandbox.ParseID(name); perr != nil {
			// Not a sandbox's, yet below ours: nobody but us makes groups there.
			l.Release = func() error {
				ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
				defer cancel()
				if err := g.Kill(); err != nil {
					return err
				}
				return g.Remove(ctx)
			}
		}
		out = append(out, l)
	}
	return out, nil
}

// lookAgain is how long a process may take that is ending.
const lookAgain = 50 * time.Millisecond

// leakedSupervisors are supervisors of no live sandbox, and of no pool of this process.
func (b *Backend) leakedSupervisors(live map[sandbox.ID]bool) ([]backend.Leak, error) {
	suspects, err := b.strangers(live)
	if err != nil || len(suspects) == 0 {
		return nil, err
	}
	// A pool whose server was killed, or a child that was being forked as its supervisor was killed, ends by
	// itself at once: only what is there twice is a leak.
	time.Sleep(lookAgain)
	again, err := b.strangers(live)
	var out []backend.Leak
	for _, s := range again {
		if !slices.Contains(suspects, s) {
			continue
		}
		l := backend.Leak{Kind: "pool", Name: fmt.Sprintf("supervisor %d of an earlier server", s.pid)}
		if s.id != "" {
			l = backend.Leak{Kind: "process", Name: fmt.Sprintf("supervisor %d of sandbox %s", s.pid, s.id)}
		}
		l.Release = func() error { return endFound(s) }
		out = append(out, l)
	}
	return out, err
}

// strangers are processes in the supervisors' cgroup that neither a live sandbox nor the pool has.
func (b *Backend) strangers(live map[sandbox.ID]bool) ([]found, error) {
	b.pool.starts.Lock()
	defer b.pool.starts.Unlock()
	all, err := b.scan()
	owned := b.pool.pids()
	for _, s := range all {
		if live[s.id] {
			owned[s.pid] = true
		}
	}
	// The zygote of a supervisor in the pool is its child, as is what a supervisor is just forking.
	return slices.DeleteFunc(all, func(s found) bool { return owned[s.pid] || owned[parentOf(s.pid)] }), err
}

// parentOf returns the parent of pid, 0 when it is gone; proc_pid_stat(5).
func parentOf(pid int) int {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The second field is the name in parentheses, which may hold any character.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 2 {
		return 0
	}
	ppid, _ := strconv.Atoi(f[1])
	return ppid
}

// endFound ends a supervisor that was found, unless it has ended and its ID belongs to another process.
func endFound(s found) error {
	p, err := openProcess(s.pid)
	if err != nil {
		return nil // it ended
	}
	defer p.release()
	if sandboxOf(s.pid) != s.id {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	return p.end(ctx)
}

// leakedMounts are mounts below the sandboxes' directories: a sandbox's mounts
// are in its own namespace, so there is none unless something went wrong.
func (b *Backend) leakedMounts() ([]backend.Leak, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []backend.Leak
	for _, point := range mountsBelow(string(info), filepath.Join(b.cfg.Dir, "sandboxes")) {
		out = append(out, backend.Leak{Kind: "mount", Name: point, Release: func() error { return unix.Unmount(point, unix.MNT_DETACH) }})
	}
	return out, nil
}

func mountsBelow(mountinfo, dir string) []string {
	var out []string
	for line := range strings.Lines(mountinfo) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		point := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(f[4])
		if strings.HasPrefix(point, dir+"/") {
			out = append(out, point)
		}
	}
	return out
}
