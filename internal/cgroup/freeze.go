package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// held are the groups that a freeze stops: the workload with all commands, and file workers. The zygote is not among them: a
// killed PID 1 ends only when the zygote has reaped what it forked into the pid namespace, and a fork that it makes meanwhile
// is stopped before its first instruction, because the group that it is born into is frozen.
func (p Paths) held() []Dir { return []Dir{p.Work, p.Files} }

// Freeze stops the workload and the file workers and returns when all are stopped. On error they run again. Idempotent.
//
// A process that waits in the kernel and cannot be woken (for a FUSE server that does not answer, say) does not freeze;
// then ctx's deadline ends the attempt. Errors: timeout, not-found.
func (g *Group) Freeze(ctx context.Context) error {
	for _, d := range g.Paths().held() {
		if err := (osFS{}).write(path.Join(string(d), "cgroup.freeze"), "1"); err != nil {
			if gone(err) {
				err = errs.E(errs.NotFound, "sandbox %s has no cgroup", g.id)
			}
			return errors.Join(err, g.Thaw())
		}
	}
	for _, d := range g.Paths().held() {
		err := d.wait(ctx, "frozen", "1")
		if err == nil {
			continue
		}
		if errs.Is(err, errs.Timeout) {
			err = errs.E(errs.Timeout, "sandbox %s could not be frozen in time%s: %w", g.id, blocked(d), err).
				WithHint("a process in it waits for something that does not answer, such as a FUSE server; end that process, or try again")
		}
		return errors.Join(err, g.Thaw())
	}
	return nil
}

// Thaw undoes Freeze, and what a Reclaim may have left that did not come to its end. Idempotent; also without the group.
func (g *Group) Thaw() error {
	all := g.closeSwap()
	for _, d := range g.Paths().held() {
		all = errors.Join(all, d.Thaw())
	}
	return all
}

// Frozen reports whether the workload is stopped, or about to be.
func (g *Group) Frozen() (bool, error) {
	s, err := osFS{}.read(path.Join(string(g.Paths().Work), "cgroup.freeze"))
	if gone(err) {
		return false, nil
	}
	return strings.TrimSpace(s) == "1", err
}

// blocked names, for people, the processes below d that wait in the kernel.
func blocked(d Dir) string {
	procs, _ := d.Tree()
	var names []string
	for _, pid := range procs {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			continue
		}
		// pid (name) state …; a name may have parentheses and anything else, so it is not shown.
		if i := strings.LastIndexByte(string(stat), ')'); i > 0 && strings.HasPrefix(string(stat[i:]), ") D") {
			names = append(names, strconv.Itoa(pid))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(" (host processes %s wait in the kernel)", strings.Join(names[:min(len(names), 8)], ", "))
}
