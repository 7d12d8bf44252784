package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

// process is a supervisor, a child of this process or not, held by a pidfd: its ID cannot be reused under us.
type process struct {
	pid   int
	pidfd *os.File // in the runtime's poller, so that a wait holds no thread
	child bool
	// channel is the claim channel of a pooled supervisor.
	channel *os.File

	ended    chan struct{} // closed when the process has ended, and was reaped if a child
	released chan struct{} // closed by release
	once     sync.Once
}

// newProcess takes pidfd over and starts to watch it.
func newProcess(pid, pidfd int, child bool) (*process, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return nil, err
	}
	p := &process{
		pid: pid, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), child: child,
		ended: make(chan struct{}), released: make(chan struct{}),
	}
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		p.pidfd.Close()
		return nil, err
	}
	go func() {
		over := false
		rerr := raw.Read(func(fd uintptr) bool {
			over = p.collect(int(fd))
			return over
		})
		if rerr == nil && over {
			close(p.ended)
			p.pidfd.Close()
		}
	}()
	return p, nil
}

// collect reports whether the process has ended, and reaps a child.
func (p *process) collect(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 0); err != nil || n == 0 {
		return false
	}
	if p.child {
		for {
			err := unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED|unix.WNOHANG, nil)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
	return true
}

// wait returns true when the process has ended, false when it was released.
func (p *process) wait() bool {
	select {
	case <-p.ended:
		return true
	case <-p.released:
		return false
	}
}

func (p *process) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// release stops watching; the process goes on.
func (p *process) release() {
	p.once.Do(func() {
		close(p.released)
		p.pidfd.Close()
	})
}

// end kills the process and waits for its end.
func (p *process) end(ctx context.Context) error {
	if p.channel != nil {
		p.channel.Close()
	}
	if err := p.kill(); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
		return errs.E(errs.Timeout, "supervisor %d was killed and has not ended: %w", p.pid, ctx.Err())
	}
}

// kill sends SIGKILL; no error when the process has ended.
func (p *process) kill() error {
	raw, err := p.pidfd.SyscallConn()
	if err == nil {
		var kerr error
		if err = raw.Control(func(fd uintptr) { kerr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err == nil {
			err = kerr
		}
	}
	// The pidfd is closed after the end is told.
	if err == nil || errors.Is(err, unix.ESRCH) || !p.alive() {
		return nil
	}
	return fmt.Errorf("kill supervisor %d: %w", p.pid, err)
}

// starter starts supervisors.
type starter struct {
	guest   string   // path of harena-guest
	control *os.File // their cgroup
}

// env keeps a supervisor small: the Go runtime allocates for each core that it may use, before main. A second one costs 280
// KiB and makes commands no faster; transfers of files, which gain from it, switch it on.
func (s starter) env() []string {
	return []string{"GOMAXPROCS=1", "GOGC=off", "GOMEMLIMIT=256MiB", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
}

// start starts a supervisor and returns at once; ready waits for it.
func (s starter) start() (*process, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make claim channel: %w", err)
	}
	theirs, ours := pair[0], os.NewFile(uintptr(pair[1]), "claim")
	defer unix.Close(theirs)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		ours.Close()
		return nil, err
	}
	defer null.Close()

	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir:   "/",
		Env:   s.env(),
		Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), claim.FD: uintptr(theirs)},
		// A session of its own: the terminal's signals are for the edge.
		Sys: &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(s.control.Fd()), PidFD: &pidfd},
	}
	pid, _, err := syscall.StartProcess(s.guest, []string{"harena-guest", "supervise"}, attr)
	// A child that another thread forked while the binary was being installed
	// may hold it open for writing until it execs.
	for i := 0; errors.Is(err, unix.ETXTBSY) && i < 20; i++ {
		time.Sleep(5 * time.Millisecond)
		pid, _, err = syscall.StartProcess(s.guest, []string{"harena-guest", "supervise"}, attr)
	}
	if err != nil {
		ours.Close()
		return nil, startError(err)
	}
	p, err := newProcess(pid, pidfd, true)
	if err != nil {
		ours.Close()
		return nil, errors.Join(err, syscall.Kill(pid, unix.SIGKILL))
	}
	p.channel = ours
	return p, nil
}

func startError(err error) error {
	kind := errs.Internal
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		kind = errs.Capacity
	}
	return errs.E(kind, "start a supervisor: %w", err)
}

// ready waits until the supervisor says that it can be claimed.
func (p *process) ready(timeout time.Duration) error {
	if err := p.channel.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	var r guestv1.LaunchResult
	if err := claim.Read(p.channel, &r); err != nil {
		return fmt.Errorf("supervisor %s did not become ready: %w", strconv.Itoa(p.pid), err)
	}
	if r.GetError() != "" {
		return launchError(r.GetError())
	}
	return p.channel.SetReadDeadline(time.Time{})
}
