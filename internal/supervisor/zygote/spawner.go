package zygote

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// Limits of the kernel on what execve(2) takes, on 4 KiB pages.
const (
	// maxString is MAX_ARG_STRLEN (include/uapi/linux/binfmts.h), with the NUL.
	maxString = 32 * 4096
	// maxArgs is a quarter of the stack limit that commands start with, less room for the
	// path and the kernel's own data.
	maxArgs   = confine.StackLimit/4 - 8192
	maxGroups = 64
)

// signalWithin bounds the wait for a zygote that is frozen or throttled with its sandbox.
const signalWithin = 10 * time.Second

var _ Spawner = (*Zygote)(nil)

// Spawn implements Spawner.
func (z *Zygote) Spawn(ctx context.Context, s Spec) (Process, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	z.mu.Lock()
	joined, idBase := z.joined, z.idBase
	z.mu.Unlock()
	if !joined {
		return nil, errs.E(errs.Precondition, "the sandbox runs no commands")
	}
	// The zygote is root of the sandbox only, and clone3 asks for what writing
	// cgroup.procs needs. Inside, cgroupfs is read-only.
	if err := unix.Fchownat(int(s.Cgroup.Fd()), "cgroup.procs", idBase, idBase, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, fmt.Errorf("give the command's cgroup to the sandbox: %w", err)
	}
	for _, f := range []*os.File{s.Stdin, s.Stdout, s.Stderr, s.Extra} {
		if f == nil {
			continue
		}
		// Go's own pipes are non-blocking, which programs do not expect.
		if err := unix.SetNonblock(int(f.Fd()), false); err != nil {
			return nil, fmt.Errorf("standard streams: %w", err)
		}
	}
	c, err := z.fork(ctx, spawnProgram(s))
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (s *Spec) validate() error {
	if len(s.Paths) == 0 || len(s.Argv) == 0 || s.Cgroup == nil || s.Stdout == nil || s.Stderr == nil {
		return errs.E(errs.Invalid, "a command needs a path, an argv[0], standard output and error, and a cgroup")
	}
	if len(s.Groups) > maxGroups {
		return errs.OverLimit(errs.Invalid, "supplementary groups of a command", maxGroups, len(s.Groups))
	}
	total := 0
	for what, list := range map[string][]string{"argument": s.Argv, "environment variable": s.Env, "path": s.Paths} {
		for _, v := range list {
			if strings.IndexByte(v, 0) >= 0 {
				return errs.E(errs.Invalid, "%s %.80q has a NUL byte", what, v).
					WithHint("pass binary data on stdin or in a file")
			}
			if len(v) >= maxString {
				return errs.OverLimit(errs.Invalid, "bytes of one "+what, maxString-1, len(v)).
					WithHint("pass long data on stdin or in a file")
			}
			if what != "path" {
				total += len(v) + 1 + 8
			}
		}
	}
	if total > maxArgs {
		return errs.OverLimit(errs.Invalid, "bytes of arguments and environment", maxArgs, total).
			WithHint("pass long data on stdin or in a file")
	}
	if strings.IndexByte(s.Cwd, 0) >= 0 {
		return errs.E(errs.Invalid, "working directory %.80q has a NUL byte", s.Cwd)
	}
	return nil
}

// spawnProgram is what a new child does to become the command. The order matters:
//   - seccomp while CAP_SYS_ADMIN in the sandbox's user namespace is effective: it then needs no
//     no_new_privs, which would break sudo. Nothing after it is refused by the filter.
//   - groups, then user IDs, then capabilities: each needs what the next gives up.
//   - chdir as the target user, whose permissions count.
//   - close_range last: a failure is reported on a descriptor that it closes at exec.
func spawnProgram(s Spec) *Program {
	p := NewProgram()
	p.Clone = cloneFork
	p.IntoCgroup(p.File(s.Cgroup))
	p.Call("setsid", unix.SYS_SETSID)
	if s.Stdin == nil {
		null := p.NewSlot()
		p.Call("stdin", unix.SYS_OPENAT, atCwd, fmt.Sprintf("/proc/self/fd/%d", nullFd), unix.O_RDONLY|unix.O_CLOEXEC).Into(null)
		p.Call("stdin", unix.SYS_DUP3, null, 0, 0)
	} else {
		p.Call("stdio", unix.SYS_DUP3, p.File(s.Stdin), 0, 0)
	}
	p.Call("stdio", unix.SYS_DUP3, p.File(s.Stdout), 1, 0)
	p.Call("stdio", unix.SYS_DUP3, p.File(s.Stderr), 2, 0)
	if s.Terminal {
		p.Call("terminal", unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0)
	}
	p.Call("cgroup-namespace", unix.SYS_SETNS, cgroupNsFd, unix.CLONE_NEWCGROUP)
	if s.NoNewPrivs {
		p.Call("no-new-privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	p.Seccomp()
	capabilities := uint64(0)
	if s.UID == 0 {
		capabilities = confine.Capabilities
	}
	p.Identity(s.UID, s.GID, s.Groups, capabilities)
	switch {
	case s.Cwd == "":
	case s.CwdOrRoot: // the zygote is in "/"
		p.Call("chdir", unix.SYS_CHDIR, s.Cwd).Unless(Any, nil)
	default:
		p.Call("chdir", unix.SYS_CHDIR, s.Cwd)
	}
	p.Call("descriptors", unix.SYS_CLOSE_RANGE, 3, ^uint32(0), unix.CLOSE_RANGE_CLOEXEC)
	if s.Extra != nil {
		// By way of a number that is surely another one: dup3 to itself fails. What 3 is until here is not needed any more.
		high := p.NewSlot()
		p.Call("stdio", unix.SYS_FCNTL, p.File(s.Extra), unix.F_DUPFD_CLOEXEC, 64).Into(high)
		p.Call("stdio", unix.SYS_DUP3, high, 3, 0)
	}
	p.Call("signals", unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, make([]byte, 8), 0, 8)
	p.Exec(s.Paths, s.Argv, s.Env)
	return p
}

var _ Process = (*child)(nil)

// Pid implements Process.
func (c *child) Pid() int { return c.inside }

// Wait implements Process.
func (c *child) Wait(ctx context.Context) (Exit, error) {
	select {
	case <-c.ended:
	default:
		select {
		case <-c.ended:
		case <-ctx.Done():
			return Exit{}, ctx.Err()
		}
	}
	if c.lost {
		return c.exit, c.z.endedError()
	}
	return c.exit, nil
}

// Signal implements Process.
func (c *child) Signal(sig int) error {
	err := c.signal(-c.pid, sig)
	var s *StepError
	if errors.As(err, &s) && s.Step == "kill" && s.Errno == unix.ESRCH {
		// It has not made its own process group yet.
		err = c.signal(c.pid, sig)
	}
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ECHILD) || errs.Is(err, errs.Precondition) {
		return nil
	}
	if errors.Is(err, unix.EINVAL) {
		return errs.E(errs.Invalid, "signal %d does not exist", sig)
	}
	return err
}

// signal has the zygote send the signal: only the parent can know that the
// process ID still names its child.
func (c *child) signal(pid, sig int) error {
	select {
	case <-c.ended:
		return nil
	default:
	}
	p := NewProgram()
	p.Call("wait", unix.SYS_WAITID, unix.P_PID, c.pid, 0, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, 0)
	p.Call("kill", unix.SYS_KILL, pid, sig)
	ctx, cancel := context.WithTimeout(context.Background(), signalWithin)
	defer cancel()
	return c.z.Run(ctx, p)
}

func (c *child) kill() { _ = c.signal(c.pid, int(syscall.SIGKILL)) }
