package blobd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// succeedAfter is how long a holder leaves it to the node to start another daemon: the node may be replacing it by a new build.
	succeedAfter = 2 * time.Second
	firstBackoff = time.Second
)

// program is how a daemon was started: enough to start another when the node, too, is gone.
type program struct {
	exe       *os.File // also when the file was replaced or removed since
	args, env []string
}

// programOf looks at the process of a pidfd.
func programOf(pid, pidfd int) (_ *program, err error) {
	dir := "/proc/" + strconv.Itoa(pid)
	exe, err := unix.Open(dir+"/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the program of process %d: %w", pid, err)
	}
	p := &program{exe: os.NewFile(uintptr(exe), dir+"/exe")}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.args, err = readStrings(dir + "/cmdline"); err != nil {
		return nil, err
	}
	if p.env, err = readStrings(dir + "/environ"); err != nil {
		return nil, err
	}
	// Its number may have been another's by then.
	if !alive(pidfd) || len(p.args) == 0 {
		return nil, fmt.Errorf("process %d: %w", pid, unix.ESRCH)
	}
	return p, nil
}

func readStrings(path string) ([]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read how a daemon was started: %w", err)
	}
	if len(b) == 0 {
		return nil, nil
	}
	return strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00"), nil
}

func (p *program) close() {
	if p != nil {
		p.exe.Close()
	}
}

// start starts it again, with this process's output and in its cgroup.
func (p *program) start() (*exec.Cmd, error) {
	cmd := &exec.Cmd{
		Path: "/proc/self/fd/" + strconv.Itoa(int(p.exe.Fd())), Args: p.args, Env: p.env, Dir: "/",
		Stdout: os.Stdout, Stderr: os.Stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	return cmd, cmd.Start()
}

// alive tells whether the process of a pidfd has not ended; -1 is none.
func alive(pidfd int) bool {
	if pidfd < 0 {
		return false
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return n == 0 && (err == nil || errors.Is(err, unix.EINTR))
}

// successor is a daemon that the holder has started and that has not asked for the connection yet.
type successor struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// succeed starts a daemon when there is none and nobody else has started one for some time. It is called now and then.
func (h *holder) succeed(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fd < 0 || h.program == nil || alive(h.peer) {
		h.nextStart = time.Time{}
		return
	}
	if s := h.successor; s != nil {
		select {
		case <-s.ended:
			h.successor = nil
		default:
			return
		}
	}
	if h.nextStart.IsZero() {
		h.nextStart = now.Add(min(succeedAfter, h.patience/4))
	}
	if now.Before(h.nextStart) {
		return
	}
	h.nextStart = now.Add(h.backoff)
	h.backoff = min(2*h.backoff, maxBackoff)
	cmd, err := h.program.start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "the holder cannot start blobd:", err)
		return
	}
	s := &successor{cmd, make(chan struct{})}
	h.successor = s
	go func() {
		_ = cmd.Wait()
		close(s.ended)
	}()
}

// recall ends a successor that has not asked for the connection: without a holder it would make another.
func (h *holder) recall() {
	h.mu.Lock()
	s := h.successor
	h.successor = nil
	h.mu.Unlock()
	if s != nil {
		_ = s.cmd.Process.Kill()
		<-s.ended
	}
}
