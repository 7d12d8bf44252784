package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Dir is a cgroup directory, on the cgroup2 hierarchy unless a method says
// otherwise. Methods treat a directory that does not exist as empty.
type Dir string

// Make creates the directory; no error when it exists.
func (d Dir) Make() error { return osFS{}.mkdir(string(d)) }

// Kill sends SIGKILL to every process in d and below, at once and against
// forks (cgroup.kill, since Linux 5.14).
func (d Dir) Kill() error { return d.writeIfThere("cgroup.kill", "1") }

// Signal sends sig to every process in d and below. Unlike Kill it can miss a
// process that is being forked.
func (d Dir) Signal(sig unix.Signal) error {
	procs, err := d.Tree()
	for _, pid := range procs {
		if kerr := unix.Kill(pid, sig); kerr != nil && kerr != unix.ESRCH && err == nil {
			err = kerr
		}
	}
	return err
}

// Freeze stops every process in d and below and returns when all are stopped.
// On error they run again: a process that waits in the kernel (on a FUSE
// server that does not answer, say) cannot be frozen, and ctx's deadline ends the attempt.
func (d Dir) Freeze(ctx context.Context) error {
	if err := (osFS{}).write(path.Join(string(d), "cgroup.freeze"), "1"); err != nil {
		return err
	}
	err := d.wait(ctx, "frozen", "1")
	if err != nil {
		if terr := d.Thaw(); terr != nil {
			return errors.Join(err, terr)
		}
	}
	return err
}

// Thaw undoes Freeze.
func (d Dir) Thaw() error { return d.writeIfThere("cgroup.freeze", "0") }

// Populated reports whether a process lives in d or below. Zombies do not count.
func (d Dir) Populated() (bool, error) {
	s, err := osFS{}.read(path.Join(string(d), "cgroup.events"))
	if gone(err) {
		return false, nil
	}
	return field(s, "populated") != 0, err
}

// WaitEmpty returns when no process lives in d or below.
func (d Dir) WaitEmpty(ctx context.Context) error { return d.wait(ctx, "populated", "0") }

// wait polls cgroup.events. Its POLLPRI notifications are held back for up to
// 10 ms (CGROUP_FILE_NOTIFY_MIN_INTV), longer than a killed tree takes to die,
// so a short sleep that grows is both faster and simpler.
func (d Dir) wait(ctx context.Context, key, value string) error {
	want := key + " " + value
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		s, err := osFS{}.read(path.Join(string(d), "cgroup.events"))
		if gone(err) && key == "populated" {
			return nil
		}
		if err != nil {
			return err
		}
		if strings.Contains(s, want) {
			return nil
		}
		if err := sleep(ctx, pause); err != nil {
			return errs.E(errs.Timeout, "processes in cgroup %s did not become %q in time: %w", path.Base(string(d)), want, err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Procs lists the processes in d itself; v1 and v2.
func (d Dir) Procs() ([]int, error) {
	s, err := osFS{}.read(path.Join(string(d), "cgroup.procs"))
	if gone(err) {
		return nil, nil
	}
	var out []int
	for _, f := range strings.Fields(s) {
		// 0 is a process of a pid namespace that is not ours.
		if pid, cerr := strconv.Atoi(f); cerr == nil && pid > 0 {
			out = append(out, pid)
		}
	}
	return out, err
}

// Tree lists the processes in d and below; v1 and v2.
func (d Dir) Tree() ([]int, error) {
	out, err := d.Procs()
	if err != nil {
		return nil, err
	}
	children, err := d.Children()
	for _, c := range children {
		below, cerr := Dir(path.Join(string(d), c)).Tree()
		out = append(out, below...)
		err = errors.Join(err, cerr)
	}
	return out, err
}

// Children lists the names of d's child groups; v1 and v2.
func (d Dir) Children() ([]string, error) {
	names, err := osFS{}.dirs(string(d))
	if gone(err) {
		return nil, nil
	}
	return names, err
}

// Attach moves a process into d; v1 and v2.
func (d Dir) Attach(pid int) error {
	return osFS{}.write(path.Join(string(d), "cgroup.procs"), strconv.Itoa(pid))
}

// Remove removes d and what is below it; v1 and v2. It waits for processes
// that are still dying, until ctx ends.
func (d Dir) Remove(ctx context.Context) error {
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		err := d.removeOnce()
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		if serr := sleep(ctx, pause); serr != nil {
			procs, _ := d.Tree()
			return errs.E(errs.Timeout, "cgroup %s is still in use by processes %v: %w", d, procs, err)
		}
	}
}

func (d Dir) removeOnce() error {
	// Most groups have no children: try first, look later.
	err := osFS{}.rmdir(string(d))
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	children, cerr := d.Children()
	if cerr != nil {
		return cerr
	}
	for _, c := range children {
		if err := Dir(path.Join(string(d), c)).removeOnce(); err != nil {
			return err
		}
	}
	return osFS{}.rmdir(string(d))
}

func (d Dir) writeIfThere(file, value string) error {
	err := osFS{}.write(path.Join(string(d), file), value)
	if gone(err) {
		return nil
	}
	return err
}

// gone: the group does not exist, or it was removed while its file was open.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// field finds "key number" in a flat keyed file, 0 when it is not there.
func field(s, key string) int64 {
	for line := range strings.Lines(s) {
		if rest, ok := strings.CutPrefix(line, key+" "); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
			return n
		}
	}
	return 0
}

// number reads a file that holds one number.
func number(name string) (int64, error) {
	s, err := osFS{}.read(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return n, nil
}

// OOMKills counts the processes of a sandbox that the kernel killed for want of
// memory. It is for the supervisor, which knows the workload's group and its
// v1 groups only.
func OOMKills(work Dir, v1 []string) (int64, error) {
	s, err := osFS{}.read(path.Join(path.Dir(string(work)), "memory.events"))
	for i := 0; gone(err) && i < len(v1); i++ {
		s, err = osFS{}.read(path.Join(v1[i], "memory.oom_control"))
	}
	if gone(err) {
		return 0, nil
	}
	return field(s, "oom_kill"), err
}
