package blobd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Launch says how a daemon is started.
type Launch struct {
	Config
	// Command is the program and its arguments; it calls Run with Config and Version. The environment is the caller's.
	Command []string
	// Version tells builds apart: a daemon of another one is replaced, which readers notice as a short wait.
	Version string
	// Cgroup, if set, is a cgroup2 directory to start it in, outside those of sandboxes.
	Cgroup string
	Log    *slog.Logger
	// Event, if set, is called for each event, one at a time. Those that happened while nobody listened come first.
	Event func(Event)
}

const (
	startTime = 30 * time.Second // until a daemon answers
	leaveTime = 5 * time.Second  // until one that was told to end has ended
	// patrol is how often a daemon that is there is asked whether it answers. Its death is noticed at once.
	patrol     = 5 * time.Second
	maxBackoff = 5 * time.Second
)

// Start returns a client of a daemon with these settings: the one that runs, or a new one that takes its place. Until Close,
// a daemon that dies is started again.
func Start(ctx context.Context, l Launch) (*Client, error) {
	l.Config = l.WithDefaults()
	k := &keeper{launch: l, control: newControl(l.socket())}
	for _, dir := range []string{l.own(), l.mountPoint()} {
		// A dead connection is mounted there still after a crash: "exists, but cannot be looked at" is good.
		if err := os.MkdirAll(dir, 0o700); err != nil && !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, os.ErrExist) {
			return nil, errs.E(errs.Precondition, "cannot make %s: %w", dir, err)
		}
	}
	if err := k.ensure(ctx); err != nil {
		k.control.close()
		return nil, err
	}
	var run context.Context
	run, k.cancel = context.WithCancel(context.WithoutCancel(ctx))
	k.wg.Go(func() { k.keep(run) })
	if l.Event != nil {
		k.wg.Go(func() { k.listen(run) })
	}
	return &Client{control: k.control, keeper: k}, nil
}

// Close ends that the daemon is started again when it dies. It goes on.
func (c *Client) Close() {
	c.keeper.cancel()
	c.keeper.wg.Wait()
	c.control.close()
}

// Shutdown ends daemon and holder and unmounts DIR/blobfs. What is mounted from it reads EIO from then on: it is for a node
// whose sandboxes have ended.
func (c *Client) Shutdown(ctx context.Context) error {
	c.Close()
	return shutdown(ctx, c.keeper.launch.Config)
}

// Shutdown ends a daemon and holder that an earlier process left behind, if there are any. See Client.Shutdown.
func Shutdown(ctx context.Context, dir string) error {
	return shutdown(ctx, Config{Dir: dir}.WithDefaults())
}

func shutdown(ctx context.Context, c Config) error {
	ctl := newControl(c.socket())
	defer ctl.close()
	var failed []error
	if h, err := ctl.hello(ctx); err == nil {
		if err := ctl.call(ctx, "/shutdown", nil, nil); err != nil && !errors.Is(err, errNoDaemon) {
			failed = append(failed, err)
		}
		failed = append(failed, endDaemon(c, h.Pid, leaveTime))
	}
	failed = append(failed, dismissHolder(c)) // before its daemon: it would start another
	if pid := lockedBy(c); pid > 0 {          // it hangs
		failed = append(failed, endDaemon(c, pid, 0))
	}
	failed = append(failed, unmountAll(c.mountPoint()))
	for _, name := range []string{c.socket(), c.holderSocket(), c.stateFile()} {
		if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// keeper keeps a daemon running.
type keeper struct {
	launch  Launch
	control *control
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	starting sync.Mutex
}

// Settings is what a daemon that is started so answers when it is asked for its settings.
func (l Launch) Settings() string {
	b, _ := json.Marshal(l.Config) // a struct of plain fields
	return string(b)
}

// wanted tells whether a daemon is as one that this keeper would start.
func (k *keeper) wanted(h helloAnswer) bool {
	return h.Protocol == protocol && h.Version == k.launch.Version && h.Settings == k.launch.Settings()
}

// ensure returns when a daemon with our settings answers.
func (k *keeper) ensure(ctx context.Context) error {
	k.starting.Lock()
	defer k.starting.Unlock()
	h, err := k.control.hello(ctx)
	if err == nil && k.wanted(h) {
		return nil
	}
	if err == nil {
		k.launch.Log.Info("replacing blobd", "pid", h.Pid, "version", h.Version)
		// It answers no more requests of the kernel and ends; what it has not answered, its successor does.
		_ = k.control.call(ctx, "/leave", nil, nil)
		if err := endDaemon(k.launch.Config, h.Pid, leaveTime); err != nil {
			return err
		}
	} else if ctx.Err() != nil {
		return err
	}
	// Whoever holds the lock does not answer: it is starting, ending, or hangs.
	for end := time.Now().Add(leaveTime); lockedBy(k.launch.Config) > 0; time.Sleep(retryEvery) {
		if h, err := k.control.hello(ctx); err == nil && k.wanted(h) {
			return nil
		}
		if time.Now().After(end) {
			if err := endDaemon(k.launch.Config, lockedBy(k.launch.Config), 0); err != nil {
				return err
			}
		}
	}
	return k.spawn(ctx)
}

func (k *keeper) spawn(ctx context.Context) error {
	log, err := os.OpenFile(k.launch.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return errs.E(errs.Precondition, "cannot write the log of blobd: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(k.launch.Command[0], k.launch.Command[1:]...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if k.launch.Cgroup != "" {
		dir, err := os.Open(k.launch.Cgroup)
		if err != nil {
			return errs.E(errs.Precondition, "cannot open blobd's cgroup: %w", err)
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	if err := cmd.Start(); err != nil {
		return errs.E(errs.Precondition, "cannot start blobd: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // reaps it, whenever that is
	deadline := time.After(startTime)
	for {
		if h, err := k.control.hello(ctx); err == nil && k.wanted(h) {
			if h.Pid != cmd.Process.Pid { // the holder has started one, too
				_ = cmd.Process.Kill()
			}
			return nil
		}
		select {
		case err := <-ended:
			if lockedBy(k.launch.Config) > 0 { // as above; it is about to answer
				break
			}
			return errs.E(errs.Precondition, "blobd ended: %v", err).WithHint("%s says why", k.launch.logFile())
		case <-deadline:
			_ = cmd.Process.Kill()
			return errs.E(errs.Timeout, "blobd does not answer after %v", startTime).WithHint("%s may say why", k.launch.logFile())
		case <-ctx.Done():
			_ = cmd.Process.Kill()
			return ctx.Err()
		case <-time.After(retryEvery):
		}
	}
}

// keep starts a daemon whenever there is none.
func (k *keeper) keep(ctx context.Context) {
	wait := retryEvery
	for ctx.Err() == nil {
		if err := k.ensure(ctx); err != nil {
			if ctx.Err() == nil {
				k.launch.Log.Error("blobd does not run", "err", err)
			}
			sleep(ctx, wait)
			wait = min(wait*2, maxBackoff)
			continue
		}
		wait = retryEvery
		k.await(ctx)
	}
}

// await returns when the daemon that answers now has ended, or some time has passed.
func (k *keeper) await(ctx context.Context) {
	h, err := k.control.hello(ctx)
	if err != nil {
		return
	}
	fd, err := unix.PidfdOpen(h.Pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	end := time.Now().Add(patrol)
	for ctx.Err() == nil && time.Now().Before(end) {
		// Short, so that Close need not wait.
		if n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100); n > 0 {
			k.launch.Log.Warn("blobd has ended; starting it again", "pid", h.Pid)
			return
		}
	}
}

// listen passes events on.
func (k *keeper) listen(ctx context.Context) {
	for ctx.Err() == nil {
		_ = k.control.events(ctx, k.launch.Event)
		sleep(ctx, retryEvery)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// endDaemon is endProcess for one that may wait in the kernel for what it serves itself: then the connection is ended, readers get EIO.
func endDaemon(c Config, pid int, patience time.Duration) error {
	err := endProcess(pid, patience)
	if !errs.Is(err, errs.Timeout) {
		return err
	}
	abort(c.mountPoint())
	return endProcess(pid, 0)
}

// endProcess waits until a process has ended, and kills it when it has not after some time. The process is ours: it held the
// lock, or answered on the socket.
func endProcess(pid int, patience time.Duration) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if waitEnd(fd, patience) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	if !waitEnd(fd, leaveTime) {
		return errs.E(errs.Timeout, "process %d does not end", pid).WithHint("it hangs in the kernel; look at /proc/%d/stack", pid)
	}
	return nil
}

func waitEnd(pidfd int, patience time.Duration) bool {
	for end := time.Now().Add(patience); ; {
		left := max(0, time.Until(end))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if n > 0 {
			return true
		}
		if !errors.Is(err, unix.EINTR) && time.Now().After(end) {
			return false
		}
	}
}

// takeLock makes this process the daemon of a directory. The kernel lets go of it when the process ends, however that is.
func takeLock(c Config) (*os.File, error) {
	f, err := os.OpenFile(c.own()+"/lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errs.E(errs.Precondition, "cannot open the lock of blobd: %w", err)
	}
	for end := time.Now().Add(leaveTime); ; time.Sleep(retryEvery) {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			break
		}
		if time.Now().After(end) {
			f.Close()
			return nil, errs.E(errs.Precondition, "another blobd serves %s", c.Dir)
		}
	}
	if err := f.Truncate(0); err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
		if err != nil {
			f.Close()
			return nil, errs.E(errs.Capacity, "cannot write the lock of blobd: %w", err)
		}
	}
	return f, nil
}

// lockedBy returns the process that holds the lock; 0: none, or it has not said yet.
func lockedBy(c Config) int {
	f, err := os.Open(c.own() + "/lock")
	if err != nil {
		return 0
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil {
		return 0
	}
	b := make([]byte, 16)
	n, _ := f.ReadAt(b, 0)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	return pid
}
