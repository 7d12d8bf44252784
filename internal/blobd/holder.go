package blobd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/fuseblob"
)

// What daemon and holder say to each other: one datagram each, over a SOCK_SEQPACKET socket, with a descriptor where said.
const (
	sayTake = "take" // daemon: give me the connection; answered by sayKeep with a descriptor, or sayNone
	sayKeep = "keep" // daemon: keep this (with a descriptor); answered by sayNone
	sayBeat = "beat" // daemon: I serve; not answered
	sayDrop = "drop" // daemon: let go and end; not answered
	sayOpen = "open" // daemon: open a file of the connection, which I serve; not answered
	sayNone = "none"
)

type note struct {
	Say    string          `json:"say"`
	Params fuseblob.Params `json:"params,omitzero"`
	Pid    int             `json:"pid,omitempty"`
}

const beatEvery = time.Second

// holder keeps a connection to the kernel while daemons come and go, and starts one when nobody else does (successor.go). It does
// nothing else, so that nothing makes it end.
type holder struct {
	patience time.Duration
	mounted  string // where the connection is
	opening  atomic.Bool

	mu     sync.Mutex
	fd     int // -1: none
	params fuseblob.Params
	served *net.UnixConn // the daemon that serves
	peer   int           // pidfd of it, or of the last one
	// beat is when one last said that it serves. Asking for the connection is not enough: daemons that end at once would have readers wait for ever.
	beat  time.Time
	ended chan struct{}

	program   *program // of the last one
	successor *successor
	nextStart time.Time     // zero: none is missing
	backoff   time.Duration // until the start after the next
}

// Hold is the holder's process: it returns when a daemon says so, when no daemon came in time, or when none has served for the
// configured patience; the descriptor is closed by then.
func Hold(ctx context.Context, c Config) error {
	c = c.WithDefaults()
	l, err := listenAt("unixpacket", c.holderSocket())
	if err != nil {
		return err
	}
	defer l.Close()
	h := &holder{patience: c.Patience, mounted: c.mountPoint(), fd: -1, peer: -1, beat: time.Now(), ended: make(chan struct{})}
	h.backoff = h.firstBackoff()
	defer h.release()
	go func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			go h.serve(conn)
		}
	}()
	watch := time.NewTicker(max(10*time.Millisecond, min(c.Patience/10, time.Second)))
	defer watch.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-h.ended:
			h.recall()
			return nil
		case now := <-watch.C:
			h.succeed(now)
			if h.expired() {
				return errs.E(errs.Timeout, "no daemon has served for %v: readers get EIO", c.Patience)
			}
		}
	}
}

func (h *holder) firstBackoff() time.Duration { return min(firstBackoff, h.patience/4) }

func beatInterval(patience time.Duration) time.Duration { return min(beatEvery, patience/5) }

// expired tells whether patience has run out. A daemon that is there and does not serve is killed then: it has a descriptor, too.
func (h *holder) expired() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	limit := h.patience
	if h.served != nil {
		limit += 3 * beatInterval(h.patience) // it may have come a moment ago
	}
	if time.Since(h.beat) < limit {
		return false
	}
	if h.peer >= 0 {
		_ = unix.PidfdSendSignal(h.peer, unix.SIGKILL, nil, 0)
		waitEnd(h.peer, leaveTime)
	}
	return true
}

func (h *holder) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.program.close()
	h.program = nil
	for _, fd := range []*int{&h.fd, &h.peer} {
		if *fd >= 0 {
			_ = unix.Close(*fd)
			*fd = -1
		}
	}
}

func (h *holder) serve(conn *net.UnixConn) {
	defer conn.Close()
	for {
		n, fd, err := receive(conn)
		if err != nil {
			h.gone(conn)
			return
		}
		if h.handle(conn, n, fd) != nil {
			return
		}
	}
}

func (h *holder) gone(conn *net.UnixConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.served == conn {
		h.served = nil
	}
}

// handle owns fd.
func (h *holder) handle(conn *net.UnixConn, n note, fd int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if fd >= 0 && n.Say != sayKeep {
		_ = unix.Close(fd)
	}
	switch n.Say {
	case sayTake:
		h.serving(conn)
		if h.fd < 0 {
			return send(conn, note{Say: sayNone, Pid: os.Getpid()}, -1)
		}
		return send(conn, note{Say: sayKeep, Params: h.params, Pid: os.Getpid()}, h.fd)
	case sayKeep:
		if fd < 0 {
			return errs.E(errs.Invalid, "nothing to keep")
		}
		if h.fd >= 0 {
			_ = unix.Close(h.fd)
		}
		h.fd, h.params, h.beat = fd, n.Params, time.Now()
		h.serving(conn)
		return send(conn, note{Say: sayNone, Pid: os.Getpid()}, -1)
	case sayBeat:
		if h.served == conn {
			h.beat, h.backoff = time.Now(), h.firstBackoff()
		}
	case sayOpen:
		if h.opening.CompareAndSwap(false, true) { // else one waits for this daemon, too
			go h.open()
		}
	case sayDrop:
		select {
		case <-h.ended:
		default:
			close(h.ended)
		}
	}
	return nil
}

// open has the kernel learn what is not there (fuseblob.Prime). The daemon does not: killed in the middle, it would wait for
// itself, and not end. This thread may wait as long, for the next daemon, and has no descriptors that would
// keep a connection alive or, in a child between fork and exec, be closed there.
func (h *holder) open() {
	defer h.opening.Store(false)
	runtime.LockOSThread() // for good: the thread ends with this goroutine
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_UNSHARE); err != nil {
		fmt.Fprintln(os.Stderr, "the holder cannot open a file of the connection:", err)
		return
	}
	if err := fuseblob.Prime(h.mounted); err != nil {
		fmt.Fprintln(os.Stderr, "the holder:", err)
	}
}

// serving makes conn's process the one that serves; mu is held.
func (h *holder) serving(conn *net.UnixConn) {
	if h.served == conn {
		return
	}
	h.served = conn
	if h.peer >= 0 {
		_ = unix.Close(h.peer)
		h.peer = -1
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			h.met(int(cred.Pid))
		}
	})
}

// met notes who serves; mu is held.
func (h *holder) met(pid int) {
	if s := h.successor; s != nil && s.cmd.Process.Pid == pid {
		h.successor = nil
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	h.peer = pidfd
	p, err := programOf(pid, pidfd)
	if err != nil {
		fmt.Fprintln(os.Stderr, "the holder cannot tell how to start blobd again:", err)
		return
	}
	h.program.close()
	h.program = p
}

func send(conn *net.UnixConn, n note, fd int) error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	if err := conn.SetWriteDeadline(time.Now().Add(leaveTime)); err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix(b, rights, nil)
	return err
}

func receive(conn *net.UnixConn) (note, int, error) {
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(b, oob)
	if err != nil {
		return note{}, -1, err
	}
	fd := -1
	messages, _ := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m)
		for _, f := range fds {
			if fd < 0 {
				fd = f
				unix.CloseOnExec(f)
			} else {
				_ = unix.Close(f)
			}
		}
	}
	if n == 0 {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return note{}, -1, net.ErrClosed
	}
	var m note
	if err := json.Unmarshal(b[:n], &m); err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return note{}, -1, fmt.Errorf("decode a message between daemon and holder: %w", err)
	}
	return m, fd, nil
}

// holding is the daemon's side.
type holding struct {
	config  Config
	command []string

	mu   sync.Mutex
	conn *net.UnixConn
	pid  int
}

// take asks the holder, if there is one, for the connection; fd is -1 when there is none.
func (h *holding) take() (fd int, p fuseblob.Params, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	conn, err := dialAt("unixpacket", h.config.holderSocket())
	if err != nil {
		return -1, p, nil // there is no holder
	}
	n, fd, err := ask(conn, note{Say: sayTake}, -1)
	if err != nil {
		conn.Close()
		return -1, p, err
	}
	h.conn, h.pid = conn, n.Pid
	return fd, n.Params, nil
}

func ask(conn *net.UnixConn, n note, fd int) (note, int, error) {
	if err := send(conn, n, fd); err != nil {
		return note{}, -1, err
	}
	if err := conn.SetReadDeadline(time.Now().Add(leaveTime)); err != nil {
		return note{}, -1, err
	}
	return receive(conn)
}

// keep gives a connection to the holder, which is started if there is none.
func (h *holding) keep(fd int, p fuseblob.Params) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn == nil {
		if err := h.start(); err != nil {
			return err
		}
	}
	n, _, err := ask(h.conn, note{Say: sayKeep, Params: p}, fd)
	if err != nil {
		h.lost()
		return err
	}
	h.pid = n.Pid
	return nil
}

func (h *holding) lost() {
	if h.conn != nil {
		h.conn.Close()
	}
	h.conn, h.pid = nil, 0
}

// start starts a holder and connects to it; mu is held.
func (h *holding) start() error {
	if conn, err := dialAt("unixpacket", h.config.holderSocket()); err == nil {
		h.conn = conn
		return nil
	}
	cmd := exec.Command(h.command[0], h.command[1:]...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errs.E(errs.Precondition, "cannot start the holder of blobd: %w", err)
	}
	go func() { _ = cmd.Wait() }()
	for end := time.Now().Add(startTime); ; time.Sleep(retryEvery) {
		conn, err := dialAt("unixpacket", h.config.holderSocket())
		if err == nil {
			h.conn, h.pid = conn, cmd.Process.Pid
			return nil
		}
		if time.Now().After(end) {
			_ = cmd.Process.Kill()
			return errs.E(errs.Timeout, "the holder of blobd does not answer: %w", err)
		}
	}
}

// open has the holder open a file of the connection.
func (h *holding) open() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn != nil {
		_ = send(h.conn, note{Say: sayOpen}, -1) // that it is gone is noticed at the next beat
	}
}

// beat tells the holder that this process serves; an error means that the holder is gone.
func (h *holding) beat() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn == nil {
		return net.ErrClosed
	}
	if err := send(h.conn, note{Say: sayBeat}, -1); err != nil {
		h.lost()
		return err
	}
	return nil
}

func (h *holding) process() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pid
}

// dismissHolder ends a holder, and with it the connection if nobody else has it.
func dismissHolder(c Config) error {
	conn, err := dialAt("unixpacket", c.holderSocket())
	if err != nil {
		return nil
	}
	defer conn.Close()
	var pid int
	if raw, err := conn.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				pid = int(cred.Pid)
			}
		})
	}
	if err := send(conn, note{Say: sayDrop}, -1); err != nil || pid <= 1 {
		return err
	}
	return endProcess(pid, leaveTime)
}

// short returns a path to the same socket that fits sockaddr_un's 108 bytes.
func short(path string) (string, func(), error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path), func() { dir.Close() }, nil
}

func dialAt(network, path string) (*net.UnixConn, error) {
	name, done, err := short(path)
	if err != nil {
		return nil, err
	}
	defer done()
	return net.DialUnix(network, nil, &net.UnixAddr{Name: name, Net: network})
}

// listenAt listens in place of whatever a dead process left there: under another name first, so that the name always answers.
func listenAt(network, path string) (*net.UnixListener, error) {
	name, done, err := short(path)
	if err != nil {
		return nil, errs.E(errs.Precondition, "cannot listen on %s: %w", path, err)
	}
	defer done()
	fresh := name + "." + strconv.Itoa(os.Getpid())
	_ = os.Remove(fresh)
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: fresh, Net: network})
	if err != nil {
		return nil, errs.E(errs.Precondition, "cannot listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Rename(fresh, name); err != nil {
		l.Close()
		return nil, errs.E(errs.Precondition, "cannot listen on %s: %w", path, err)
	}
	return l, nil
}

// unmountAll removes all mounts on dir, also dead ones.
func unmountAll(dir string) error {
	const most = 64
	for range most {
		err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	return errs.E(errs.Internal, "more than %d mounts on %s", most, dir)
}
