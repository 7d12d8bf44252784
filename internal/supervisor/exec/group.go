package exec

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/cgroup"
)

// group is the cgroup of one command.
type group struct {
	path cgroup.Dir
	dir  *os.File
}

// removeWait is for processes that were killed and are still in the kernel.
const removeWait = 10 * time.Second

func makeGroup(parent cgroup.Dir, name string) (*group, error) {
	p := cgroup.Dir(path.Join(string(parent), name))
	if err := p.Make(); err != nil {
		return nil, fmt.Errorf("make cgroup of a command: %w", err)
	}
	dir, err := os.Open(string(p))
	if err != nil {
		return nil, errors.Join(err, os.Remove(string(p)))
	}
	return &group{path: p, dir: dir}, nil
}

// remove waits for processes that are still dying.
func (g *group) remove() error {
	g.dir.Close()
	ctx, cancel := context.WithTimeout(context.Background(), removeWait)
	defer cancel()
	return g.path.Remove(ctx)
}

// waitEmpty returns when no process is left in the group, however long that
// takes, without polling: cgroup.events reports a change with POLLPRI.
func (g *group) waitEmpty(ctx context.Context) error {
	events, err := unix.Openat(int(g.dir.Fd()), "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("watch cgroup: %w", err)
	}
	defer unix.Close(events)
	// The runtime's poller does not ask for POLLPRI, but it can wait for an epoll instance that does.
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("watch cgroup: %w", err)
	}
	if err = unix.SetNonblock(ep, true); err == nil {
		err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, events, &unix.EpollEvent{Events: unix.EPOLLPRI})
	}
	if err != nil {
		unix.Close(ep)
		return fmt.Errorf("watch cgroup: %w", err)
	}
	f := os.NewFile(uintptr(ep), "epoll")
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		for {
			// Reading the file arms its next notification, so it comes before the wait.
			empty, err := emptyNow(events)
			if empty || err != nil {
				failed = err
				return true
			}
			var ev [1]unix.EpollEvent
			if n, err := unix.EpollWait(int(fd), ev[:], 0); n <= 0 && err != unix.EINTR {
				return false
			}
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return errors.Join(err, failed)
}

func emptyNow(events int) (bool, error) {
	var buf [128]byte
	n, err := unix.Pread(events, buf[:], 0)
	if err == unix.ENODEV {
		return true, nil // removed
	}
	if err != nil {
		return false, fmt.Errorf("read cgroup.events: %w", err)
	}
	return strings.Contains(string(buf[:n]), "populated 0"), nil
}

// signalRounds bounds the search for processes that were forked while the
// others were being signalled.
const signalRounds = 16

// signal sends sig to every process in the group once. SIGKILL is atomic; any
// other signal can miss a child that is born after the last round.
func (g *group) signal(sig unix.Signal) error {
	if sig == unix.SIGKILL {
		return g.path.Kill()
	}
	return g.signalOthers(sig, 0)
}

// signalOthers sends sig to every process but one.
func (g *group) signalOthers(sig unix.Signal, but int) error {
	done := map[int]bool{but: true}
	var failed error
	for range signalRounds {
		pids, err := g.path.Tree()
		if err != nil {
			return err
		}
		fresh := 0
		for _, pid := range pids {
			if done[pid] {
				continue
			}
			done[pid] = true
			fresh++
			failed = errors.Join(failed, g.signalOne(pid, sig))
		}
		if fresh == 0 {
			break
		}
	}
	return failed
}

// signalOne signals a process of the group and no other: a number that was
// listed may belong to another process by now.
func (g *group) signalOne(pid int, sig unix.Signal) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return nil
	}
	if err != nil {
		return fmt.Errorf("pidfd of process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	// Seen in the group after the descriptor was taken: either that is the
	// process, or it has ended and the signal goes nowhere.
	if pids, err := g.path.Tree(); err != nil || !slices.Contains(pids, pid) {
		return err
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && err != unix.ESRCH {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	return nil
}
