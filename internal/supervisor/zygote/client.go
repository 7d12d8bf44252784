package zygote

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

//go:embed zygote.bin
var binaryImage []byte

// Image is the zygote's executable in a sealed memfd, mode 0500. One serves any number of zygotes.
type Image struct{ f *os.File }

// NewImage makes the memfd.
func NewImage() (*Image, error) {
	// The name is what `ls -l /proc/PID/exe` shows, on the host only.
	f, err := memfd("harena-zygote", binaryImage, unix.MFD_EXEC)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // duplicated
	// A child executes it by its number, after numbers up to 4 have become the child's own files.
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 5)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return &Image{os.NewFile(uintptr(fd), f.Name())}, nil
}

// Close releases the memfd. Zygotes go on.
func (i *Image) Close() error { return i.f.Close() }

// Zygote is a running zygote process.
//
// It reads programs from its control socket and ends with it. Once joined to a
// sandbox it is a Spawner. Safe for concurrent use.
type Zygote struct {
	proc *os.Process
	conn *net.UnixConn

	mu       sync.Mutex
	cookie   uint64
	byCookie map[uint64]*child // until it was reaped, or never was forked
	byPid    map[int]*child
	idBase   int // of the joined sandbox
	joined   bool
	initPid  int
	failure  string // of a program whose failure is the zygote's end
	reason   string // why done is closed

	done   chan struct{} // PID 1 or the zygote ended
	exited chan struct{} // the zygote was reaped
}

// child is a program that was sent: a fork and its life, or a call in place.
type child struct {
	z      *Zygote
	cookie uint64
	names  []string

	// replied is closed when the fields of the second group are set.
	replied chan struct{}
	pid     int // in the supervisor's pid namespace
	inside  int
	errno   syscall.Errno
	step    string
	// abandoned: the caller gave up before the reply; kill it when it comes.
	abandoned bool
	// becomesZygote: the child takes the zygote's place.
	becomesZygote bool

	// ended is closed when exit is final.
	ended chan struct{}
	exit  Exit
	lost  bool // the zygote died first
}

// Start starts a zygote, which waits for programs.
func (i *Image) Start() (*Zygote, error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close() //nolint:errcheck // a duplicate of nothing
	proc, conn, err := i.exec([]*os.File{null, null, null, nil}, &syscall.SysProcAttr{})
	if err != nil {
		return nil, err
	}
	z := &Zygote{
		proc: proc, conn: conn,
		byCookie: map[uint64]*child{}, byPid: map[int]*child{},
		done: make(chan struct{}), exited: make(chan struct{}),
	}
	go z.read()
	return z, nil
}

// exec starts the image with files as 0 to 3; the control socket is 4.
func (i *Image) exec(files []*os.File, sys *syscall.SysProcAttr) (*os.Process, *net.UnixConn, error) {
	conn, theirs, err := socketpair("control")
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close() //nolint:errcheck // the child has it
	sys.Setsid = true
	proc, err := os.StartProcess(fmt.Sprintf("/proc/self/fd/%d", i.f.Fd()), []string{"init"},
		&os.ProcAttr{Dir: "/", Env: []string{}, Files: append(files, theirs), Sys: sys})
	if err != nil {
		_ = conn.Close()
		return nil, nil, fmt.Errorf("start zygote: %w", err)
	}
	if err := equalOnOOM(proc.Pid); err != nil {
		_ = conn.Close()
		_ = proc.Kill()
		_, _ = proc.Wait()
		return nil, nil, fmt.Errorf("start zygote: %w", err)
	}
	return proc, conn, nil
}

// equalOnOOM undoes the protection from the kernel's OOM killer that a service manager may have given the node's
// daemon: all in the sandbox would inherit it. Docker's containers start with 0 too.
func equalOnOOM(pid int) error {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("0"), 0)
	if errors.Is(err, unix.EACCES) {
		return nil // it is above, and only CAP_SYS_RESOURCE may lower it: killed sooner than others, not later
	}
	return err
}

// socketpair is a pair of connected sockets that keep messages apart.
func socketpair(name string) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name)
	defer ours.Close() //nolint:errcheck // FileConn duplicates it
	c, err := net.FileConn(ours)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, fmt.Errorf("%s socket: %w", name, err)
	}
	return c.(*net.UnixConn), theirs, nil
}

// UserNamespace makes a user namespace with size host IDs from base, for as long as release is not called.
func (i *Image) UserNamespace(base, size int) (_ *os.File, release func(), err error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer null.Close() //nolint:errcheck // a duplicate of nothing
	ids := []syscall.SysProcIDMap{{HostID: base, Size: size}}
	proc, conn, err := i.exec([]*os.File{null, null, null, nil},
		&syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids})
	if err != nil {
		return nil, nil, err
	}
	end := func() {
		_ = conn.Close()
		_ = proc.Kill()
		_, _ = proc.Wait()
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", proc.Pid))
	if err != nil {
		end()
		return nil, nil, err
	}
	return f, func() {
		_ = f.Close()
		end()
	}, nil
}

// Pid is the zygote's process ID.
func (z *Zygote) Pid() int {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.proc.Pid
}

// Done is closed when PID 1 or the zygote has ended.
func (z *Zygote) Done() <-chan struct{} { return z.done }

// Exited is closed when the zygote process is gone.
func (z *Zygote) Exited() <-chan struct{} { return z.exited }

// Reason says why Done is closed.
func (z *Zygote) Reason() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.reason
}

// Close makes the zygote kill PID 1, and with it the sandbox, reap, and exit.
// It kills the zygote itself when that takes longer than ctx allows.
func (z *Zygote) Close(ctx context.Context) error {
	err := z.conn.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	select {
	case <-z.exited:
	case <-ctx.Done():
		// PID 1 dies with it (PR_SET_PDEATHSIG).
		z.mu.Lock()
		proc := z.proc
		z.mu.Unlock()
		err = errors.Join(err, ctx.Err(), proc.Kill())
		<-z.exited
	}
	return err
}

// Run runs a program in the zygote.
func (z *Zygote) Run(ctx context.Context, p *Program) error {
	c, err := z.send(p)
	if err != nil {
		return err
	}
	if err := z.await(ctx, c); err != nil {
		return err
	}
	if c.errno != 0 {
		return &StepError{c.step, c.errno}
	}
	return nil
}

// StepError is a step of a program that failed.
type StepError struct {
	Step  string
	Errno syscall.Errno
}

func (e *StepError) Error() string { return e.Step + ": " + e.Errno.Error() }

// Unwrap returns the errno.
func (e *StepError) Unwrap() error { return e.Errno }

// fork forks a child for a program.
func (z *Zygote) fork(ctx context.Context, p *Program) (*child, error) {
	c, err := z.send(p)
	if err != nil {
		return nil, err
	}
	if err := z.await(ctx, c); err != nil {
		return nil, err
	}
	if c.errno != 0 {
		return nil, z.forkError(c.errno)
	}
	return c, nil
}

func (z *Zygote) forkError(errno syscall.Errno) error {
	switch errno {
	case unix.EAGAIN:
		return errs.E(errs.Capacity, "the sandbox cannot start another process: %w", errno).Exhausts("processes of the sandbox").
			WithHint("its pids limit is reached; end processes in it or create it with a higher limit")
	case unix.ENOMEM:
		// Also what a pid namespace says whose PID 1 is dying.
		select {
		case <-z.done:
			return z.endedError()
		case <-time.After(100 * time.Millisecond):
		}
		return errs.E(errs.Capacity, "the sandbox cannot start another process: %w", errno).Exhausts("memory of the sandbox").
			WithHint("its memory limit is reached; end processes in it or create it with a higher limit")
	}
	return fmt.Errorf("fork into the sandbox: %w", errno)
}

func (z *Zygote) endedError() error {
	return errs.E(errs.Precondition, "the sandbox has ended: %s", z.Reason())
}

// send sends a program. The reply comes to the child it returns.
func (z *Zygote) send(p *Program) (*child, error) {
	c := &child{
		z: z, names: p.names(), becomesZygote: p.Clone&unix.CLONE_PARENT != 0,
		replied: make(chan struct{}), ended: make(chan struct{}),
	}
	z.mu.Lock()
	if z.reason != "" {
		z.mu.Unlock()
		return nil, z.endedError()
	}
	z.cookie++
	c.cookie = z.cookie
	z.byCookie[c.cookie] = c
	z.mu.Unlock()
	if err := transmit(z.conn, c.cookie, p); err != nil {
		z.mu.Lock()
		delete(z.byCookie, c.cookie)
		z.mu.Unlock()
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, net.ErrClosed) {
			<-z.exited // which follows at once
			return nil, z.endedError()
		}
		return nil, fmt.Errorf("send to zygote: %w", err)
	}
	return c, nil
}

// transmit sends a program on a control socket.
func transmit(conn *net.UnixConn, cookie uint64, p *Program) error {
	b, err := p.encode()
	if err != nil {
		return err
	}
	f, err := memfd("program", b, unix.MFD_NOEXEC_SEAL)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // in memory
	fds := []int{int(f.Fd())}
	for _, pf := range p.files {
		fd := pf.Fd()
		if int(fd) < 0 {
			return os.ErrClosed
		}
		fds = append(fds, int(fd))
	}
	msg := binary.NativeEndian.AppendUint64(nil, cookie)
	msg = binary.NativeEndian.AppendUint64(msg, uint64(len(b)))
	_, _, err = conn.WriteMsgUnix(msg, unix.UnixRights(fds...), nil)
	return err
}

// await waits for the reply to a program that was sent.
func (z *Zygote) await(ctx context.Context, c *child) error {
	select {
	case <-c.replied:
	case <-ctx.Done():
		z.mu.Lock()
		select {
		case <-c.replied:
			z.mu.Unlock()
			return nil
		default:
		}
		c.abandoned = true
		z.mu.Unlock()
		return fmt.Errorf("wait for zygote: %w", ctx.Err())
	case <-z.exited:
		select {
		case <-c.replied:
		default:
			return z.endedError()
		}
	}
	return nil
}

// answerSize is that of struct answer in zygote.c.
const answerSize = 32

// Kinds of answers.
const (
	answerReply  = 1
	answerFailed = 2
	answerExited = 3
)

// read handles answers until the zygote ends, then reaps it.
func (z *Zygote) read() {
	b := make([]byte, answerSize)
	var err error
	for {
		var n int
		if n, err = z.conn.Read(b); err != nil {
			break
		}
		if n == answerSize {
			z.handle(b)
		}
	}
	_ = z.conn.Close()
	z.mu.Lock()
	proc := z.proc
	z.mu.Unlock()
	state, werr := proc.Wait()
	reason := fmt.Sprintf("the zygote ended: %v", state)
	if werr != nil {
		reason = fmt.Sprintf("the zygote is lost: %v", werr)
	}
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		reason += fmt.Sprintf(" (%v)", err)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.failure != "" {
		reason += ": " + z.failure
	}
	z.end(reason)
	for _, c := range z.byPid {
		c.lost = true
		c.exit = Exit{Code: -1, Signal: int(unix.SIGKILL)}
		close(c.ended)
	}
	clear(z.byPid)
	clear(z.byCookie)
	close(z.exited)
}

// end closes done, once. z.mu is held.
func (z *Zygote) end(reason string) {
	if z.reason == "" {
		z.reason = reason
		close(z.done)
	}
}

func (z *Zygote) handle(b []byte) {
	e := binary.NativeEndian
	kind, step, cookie := e.Uint32(b), int(e.Uint32(b[4:])), e.Uint64(b[8:])
	errno, pid, value := int32(e.Uint32(b[16:])), int(int32(e.Uint32(b[20:]))), int64(e.Uint64(b[24:]))

	z.mu.Lock()
	defer z.mu.Unlock()
	switch c := z.byCookie[cookie]; {
	case kind == answerExited:
		z.reaped(pid, syscall.WaitStatus(errno), time.Duration(value)*time.Microsecond)
	case c == nil:
	case kind == answerFailed:
		c.exit.ExecErrno, c.exit.Stage = int(errno), c.stepName(step)
		if c.becomesZygote {
			z.failure = (&StepError{c.exit.Stage, syscall.Errno(errno)}).Error()
		}
	case kind == answerReply:
		c.pid, c.inside, c.errno = pid, int(max(value, 0)), syscall.Errno(errno)
		if errno != 0 {
			c.step = c.stepName(step)
		}
		switch {
		case pid == 0:
			delete(z.byCookie, cookie)
		case c.becomesZygote: // not its own child
		default:
			z.byPid[pid] = c
		}
		if pid != 0 && c.abandoned && !c.becomesZygote {
			go c.kill()
		}
		close(c.replied)
	}
}

func (c *child) stepName(i int) string {
	if i < len(c.names) {
		return c.names[i]
	}
	return "fork"
}

func (z *Zygote) reaped(pid int, s syscall.WaitStatus, cpu time.Duration) {
	if pid == z.initPid {
		z.end("PID 1 ended: " + describe(s))
	}
	c := z.byPid[pid]
	if c == nil {
		return
	}
	delete(z.byPid, pid)
	delete(z.byCookie, c.cookie)
	c.exit.CPU = cpu
	if s.Signaled() {
		c.exit.Code, c.exit.Signal = -1, int(s.Signal())
	} else {
		c.exit.Code = s.ExitStatus()
	}
	close(c.ended)
}

func describe(s syscall.WaitStatus) string {
	if s.Signaled() {
		return "killed by signal " + s.Signal().String()
	}
	return fmt.Sprintf("exit status %d", s.ExitStatus())
}
