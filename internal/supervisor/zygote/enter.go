package zygote

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// enterFlags: all namespaces of the sandbox but its pid namespace, whose
// members could otherwise see, stop and signal the process, and its cgroup namespace.
const enterFlags = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

// Entry is a process of ours that is to work inside a sandbox.
type Entry struct {
	Init     *os.File // pidfd of the sandbox's PID 1
	UID, GID uint32
	Groups   []uint32
	// Program is executed with Argv and Env.
	Program   *os.File
	Argv, Env []string
	// Stdin and Stdout become descriptors 0 and 1, Root 3. Descriptor 2 is /dev/null.
	Stdin, Stdout, Root *os.File
	Cgroup              *os.File // cgroup2 directory to start in
	// V1Tasks are open tasks files of v1 groups to join.
	V1Tasks []*os.File
}

// Enter starts the process, as a child of the caller.
func (i *Image) Enter(ctx context.Context, e Entry) (_ *os.Process, err error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close() //nolint:errcheck // a duplicate of nothing
	proc, conn, err := i.exec([]*os.File{e.Stdin, e.Stdout, null, e.Root},
		&syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(e.Cgroup.Fd())})
	if err != nil {
		return nil, err
	}
	defer conn.Close() //nolint:errcheck // used up
	defer func() {
		if err != nil {
			_ = proc.Kill()
			_, _ = proc.Wait()
		}
	}()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	p := enterProgram(e)
	if err := transmit(conn, 0, p); err != nil {
		return nil, errors.Join(ctx.Err(), fmt.Errorf("send to zygote: %w", err))
	}
	// The exec closes the other end; an answer is a failure.
	b := make([]byte, answerSize)
	n, err := conn.Read(b)
	if errors.Is(err, io.EOF) || err == nil && n == 0 {
		return proc, nil
	}
	if err != nil {
		return nil, errors.Join(ctx.Err(), fmt.Errorf("enter the sandbox: %w", err))
	}
	failed := &StepError{Step: "enter", Errno: syscall.Errno(binary.NativeEndian.Uint32(b[16:]))}
	if i := int(binary.NativeEndian.Uint32(b[4:])); i < len(p.steps) {
		failed.Step = p.steps[i].Name
	}
	if failed.Errno == unix.ESRCH {
		return nil, errs.E(errs.Precondition, "the sandbox has ended: %w", failed)
	}
	return nil, fmt.Errorf("enter the sandbox: %w", failed)
}

// enterProgram is what the process does before it becomes e.Program. Its capabilities
// are those that file operations need, for root; and nothing it executes can have more.
func enterProgram(e Entry) *Program {
	p := NewProgram()
	for _, f := range e.V1Tasks {
		p.Call("cgroup", unix.SYS_WRITE, p.File(f), "0", 1)
	}
	p.Call("setns", unix.SYS_SETNS, p.File(e.Init), enterFlags)
	p.undumpable()
	for c := range 64 {
		if confine.FileCapabilities&(1<<c) == 0 {
			p.Call("bounding-set", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0).Unless(unix.EINVAL, nil)
		}
	}
	p.Call("no-new-privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	p.Seccomp()
	capabilities := uint64(0)
	if e.UID == 0 {
		capabilities = confine.FileCapabilities
	}
	p.Identity(e.UID, e.GID, e.Groups, capabilities)
	p.Call("chdir", unix.SYS_CHDIR, "/")
	p.Call("descriptors", unix.SYS_CLOSE_RANGE, 4, ^uint32(0), unix.CLOSE_RANGE_CLOEXEC)
	p.Call("signals", unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, make([]byte, 8), 0, 8)
	p.Call("exec", unix.SYS_EXECVEAT, p.File(e.Program), "", p.Strings(e.Argv), p.Strings(e.Env), unix.AT_EMPTY_PATH)
	return p
}
