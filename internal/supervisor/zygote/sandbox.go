package zygote

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// Descriptors that a joined zygote keeps, above any that it receives.
const (
	pidNsFd    = 40 // PIDNS in zygote.c
	cgroupNsFd = 41
	nullFd     = 43 // the sandbox's own /dev/null, O_PATH
)

const (
	// cloneFork says "fork" where Clone 0 would run in place. CLONE_CLEAR_SIGHAND only spells out what holds anyway: the
	// zygote has no handlers.
	cloneFork = unix.CLONE_CLEAR_SIGHAND
	// cloneInit: all namespaces but the cgroup namespace, which takes its root from the caller's
	// group: PID 1 makes it itself, in its own.
	cloneInit = unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	joinFlags = cloneInit
)

// Move puts the zygote into a cgroup2 directory and the v1 groups whose open tasks files are given.
//
// It forks a new zygote there in place of the old one. Moving a process by cgroup.procs takes a lock that waits for an RCU grace
// period: 0.3 ms, and above 10 ms in every tenth call on a busy node (and holds up every fork of the node meanwhile). A
// fork into a group does not take it, nor does a thread that moves itself by tasks (cgroup_procs_write_start).
func (z *Zygote) Move(ctx context.Context, group *os.File, v1Tasks []*os.File) error {
	p := NewProgram()
	p.Clone = unix.CLONE_PARENT
	p.IntoCgroup(p.File(group))
	for _, f := range v1Tasks {
		p.Call("cgroup", unix.SYS_WRITE, p.File(f), "0", 1)
	}
	p.Call("serve", opServe)
	c, err := z.fork(ctx, p)
	if err != nil {
		return err
	}
	next, err := os.FindProcess(c.pid)
	if err != nil {
		return err
	}
	z.mu.Lock()
	old := z.proc
	z.proc = next
	delete(z.byCookie, c.cookie)
	z.mu.Unlock()
	_, err = old.Wait()
	return err
}

// initSocketFd is PID 1's end of its socket, above any descriptor that it receives.
const initSocketFd = 42

// atCwd is AT_FDCWD as a system call argument.
const atCwd = ^uint64(99)

// Init is PID 1 while it is set up: it lives in its new namespaces, without an ID map, and waits for one program.
type Init struct {
	child *child
	conn  *net.UnixConn
}

// ForkInit forks PID 1 into a cgroup2 directory. Its user namespace belongs to the host ID owner.
func (z *Zygote) ForkInit(ctx context.Context, cgroup *os.File, owner int) (*Init, error) {
	own := NewProgram()
	own.neutral()
	own.actAs(owner)
	if err := z.Run(ctx, own); err != nil {
		return nil, fmt.Errorf("zygote prepares for the sandbox: %w", err)
	}
	conn, theirs, err := socketpair("init")
	if err != nil {
		return nil, err
	}
	defer theirs.Close() //nolint:errcheck // PID 1 has it
	p := NewProgram()
	p.Clone = cloneInit
	p.IntoCgroup(p.File(cgroup))
	p.Call("socket", unix.SYS_DUP3, p.File(theirs), initSocketFd, unix.O_CLOEXEC)
	p.Call("socket", unix.SYS_CLOSE, Slot(2))
	p.Call("receive", opReceive, initSocketFd)
	c, err := z.fork(ctx, p)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	z.mu.Lock()
	z.initPid = c.pid
	z.mu.Unlock()
	return &Init{c, conn}, nil
}

// neutral gives up how the node runs its supervisors, which a service manager may have set: everything
// in the sandbox inherits it.
func (p *Program) neutral() {
	p.Call("scheduler", unix.SYS_SCHED_SETSCHEDULER, 0, unix.SCHED_NORMAL, make([]byte, 4))
	p.Call("nice", unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, 0)
	p.Call("io-priority", unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, 0)
	p.Call("personality", unix.SYS_PERSONALITY, 0)
	// The node's session keyring is nothing for a sandbox; runc makes a new one too.
	p.Call("keyring", unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, 0).Unless(unix.ENOSYS, nil)
}

// ioprioWhoProcess is IOPRIO_WHO_PROCESS (include/uapi/linux/ioprio.h).
const ioprioWhoProcess = 1

// actAs makes the process a host ID in effect, with all its capabilities: the effective user owns the user namespaces
// that it makes, and what is used inside counts against the owner too (user_namespaces(7), kernel/ucount.c): inotify
// instances, queued signals, message queues, namespaces. Owned by root, one sandbox could use up the node's.
func (p *Program) actAs(id int) {
	// Entering a user namespace resets it.
	p.Call("securebits", unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, secbitNoSetuidFixup, 0, 0, 0)
	p.Call("owner", unix.SYS_SETRESGID, keepID, uint32(id), keepID)
	p.Call("owner", unix.SYS_SETRESUID, keepID, uint32(id), keepID)
	p.undumpable()
}

const (
	secbitNoSetuidFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP (include/uapi/linux/securebits.h)
	keepID              = ^uint32(0)
)

// Pid is PID 1's process ID outside.
func (i *Init) Pid() int { return i.child.pid }

// SetUp sends PID 1 its program and waits until it is carried out. The
// last steps, which make a reaper of it, are added here.
func (i *Init) SetUp(ctx context.Context, p *Program) error {
	defer i.conn.Close() //nolint:errcheck // used up
	p.Call("die-with-zygote", unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, int(unix.SIGKILL), 0, 0, 0)
	p.Call("report", unix.SYS_WRITE, initSocketFd, "r", 1)
	p.Call("close", unix.SYS_CLOSE_RANGE, 0, ^uint32(0), 0)
	p.Call("reap", opReap)
	c := i.child
	c.z.mu.Lock()
	c.names = p.names()
	c.z.mu.Unlock()

	stop := context.AfterFunc(ctx, func() { _ = i.conn.Close() })
	defer stop()
	if err := transmit(i.conn, 0, p); err != nil {
		return errors.Join(ctx.Err(), fmt.Errorf("send to PID 1: %w", err))
	}
	if _, err := i.conn.Read(make([]byte, 1)); err == nil {
		return nil
	}
	exit, err := c.Wait(ctx)
	if err != nil {
		return err
	}
	if exit.ExecErrno != 0 {
		return &StepError{exit.Stage, syscall.Errno(exit.ExecErrno)}
	}
	return fmt.Errorf("PID 1 ended while it was set up: %+v", exit)
}

// Join makes the zygote enter the sandbox of init, whose ID range begins at
// idBase. From then on it spawns commands, unless files only are wanted.
func (z *Zygote) Join(ctx context.Context, init *Init, idBase int, spawn bool) error {
	p := NewProgram()
	var opened []*os.File
	defer func() {
		for _, f := range opened {
			_ = f.Close()
		}
	}()
	pidfd, err := unix.PidfdOpen(init.Pid(), 0)
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	opened = append(opened, os.NewFile(uintptr(pidfd), "pidfd"))
	for _, ns := range []string{"pid", "cgroup"} {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", init.Pid(), ns))
		if err != nil {
			return err
		}
		opened = append(opened, f)
	}
	// All at once: a fork into the pid namespace from outside the mount namespace would show the node's mounts.
	p.Call("setns", unix.SYS_SETNS, p.File(opened[0]), joinFlags)
	p.Call("keep-pidns", unix.SYS_DUP3, p.File(opened[1]), pidNsFd, unix.O_CLOEXEC)
	p.Call("keep-cgroupns", unix.SYS_DUP3, p.File(opened[2]), cgroupNsFd, unix.O_CLOEXEC)
	p.Root()
	// Nothing untrusted has run yet, so this is the device. The node's would be one inode with all other users of it, which can be
	// watched and locked.
	null := p.NewSlot()
	p.Call("null", unix.SYS_OPENAT, atCwd, "/dev/null", unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC).Into(null)
	p.Call("null", unix.SYS_DUP3, null, nullFd, unix.O_CLOEXEC)
	p.Call("null", unix.SYS_CLOSE, null)
	// What children have in common is set once.
	for c := range 64 {
		if confine.Capabilities&(1<<c) == 0 {
			p.Call("bounding-set", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0).Unless(unix.EINVAL, nil)
		}
	}
	if err := p.rlimits(); err != nil {
		return err
	}
	p.Call("umask", unix.SYS_UMASK, 0o022)
	p.Call("chdir", unix.SYS_CHDIR, "/")
	if err := z.Run(ctx, p); err != nil {
		return fmt.Errorf("zygote joins the sandbox: %w", err)
	}
	z.mu.Lock()
	z.idBase, z.joined = idBase, spawn
	z.mu.Unlock()
	return nil
}

// Root makes the process root of the user namespace that it is in, with all capabilities there.
func (p *Program) Root() {
	p.Call("groups", unix.SYS_SETGROUPS, 0, 0)
	p.Call("gid", unix.SYS_SETRESGID, 0, 0, 0)
	p.Call("uid", unix.SYS_SETRESUID, 0, 0, 0)
	p.undumpable()
}

// undumpable follows every change of IDs: the kernel then resets the flag to
// fs.suid_dumpable, which a node may have set to 1.
func (p *Program) undumpable() {
	p.Call("undumpable", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// Identity makes the process a user, with capabilities as its permitted and effective sets. The
// inheritable and ambient sets are empty, as in Docker since 20.10.14 (CVE-2022-24769).
func (p *Program) Identity(uid, gid uint32, groups []uint32, capabilities uint64) {
	list := make([]byte, 0, 4*len(groups))
	for _, g := range groups {
		list = binary.NativeEndian.AppendUint32(list, g)
	}
	p.Call("groups", unix.SYS_SETGROUPS, len(groups), list)
	p.Call("gid", unix.SYS_SETRESGID, gid, gid, gid)
	p.Call("uid", unix.SYS_SETRESUID, uid, uid, uid)
	p.undumpable()
	e := binary.NativeEndian
	header := e.AppendUint32(nil, unix.LINUX_CAPABILITY_VERSION_3)
	header = e.AppendUint32(header, 0)
	var data []byte
	for _, half := range []uint32{uint32(capabilities), uint32(capabilities >> 32)} {
		data = e.AppendUint32(data, half) // effective
		data = e.AppendUint32(data, half) // permitted
		data = e.AppendUint32(data, 0)    // inheritable
	}
	p.Call("capabilities", unix.SYS_CAPSET, header, data)
}

// Seccomp installs the filter. It needs CAP_SYS_ADMIN in the user namespace, or no_new_privs.
func (p *Program) Seccomp() {
	filter := confine.Filter()
	var code []byte
	e := binary.NativeEndian
	for _, i := range filter {
		code = e.AppendUint16(code, i.Code)
		code = append(code, i.Jt, i.Jf)
		code = e.AppendUint32(code, i.K)
	}
	// struct sock_fprog
	prog := e.AppendUint64(nil, uint64(len(filter)))
	prog = e.AppendUint64(prog, p.Bytes(code))
	p.Call("seccomp", unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, prog)
}

func (p *Program) rlimits() error {
	for _, l := range confine.Rlimits {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.Resource, &now); err != nil {
			return os.NewSyscallError("getrlimit", err)
		}
		// Only CAP_SYS_RESOURCE outside may raise a hard limit, so the supervisor's own is the most there is.
		hard := min(l.Hard, now.Max)
		v := binary.NativeEndian.AppendUint64(nil, min(l.Soft, hard))
		v = binary.NativeEndian.AppendUint64(v, hard)
		p.Call("rlimit", unix.SYS_PRLIMIT64, 0, l.Resource, v, 0)
	}
	return nil
}
