package container

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/guestconn"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

// Dial implements backend.Backend.
func (b *Backend) Dial(ctx context.Context, id sandbox.ID) (net.Conn, error) {
	b.mu.Lock()
	x := b.boxes[id]
	b.mu.Unlock()
	if x == nil {
		return nil, notAlive(id, "sandbox %s is not running", id)
	}
	conn, err := dialGuest(ctx, x.dir)
	if err != nil {
		return nil, notAlive(id, "sandbox %s does not answer: %w", id, err)
	}
	return conn, nil
}

// dialGuest connects to the socket in a sandbox's directory, by way of a
// descriptor of it: sun_path has 108 bytes, data directories may be deeper.
func dialGuest(ctx context.Context, dir string) (net.Conn, error) {
	d, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	path := "/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + claim.Socket
	return new(net.Dialer).DialContext(ctx, "unix", path)
}

func openDir(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// Recover implements backend.Backend.
func (b *Backend) Recover(ctx context.Context, c backend.Config) error {
	b.mu.Lock()
	known := b.boxes[c.ID] != nil
	b.mu.Unlock()
	if known {
		return nil
	}
	conn, err := dialGuest(ctx, c.Dir)
	if err != nil {
		return notAlive(c.ID, "the supervisor of sandbox %s is not there: %w", c.ID, err)
	}
	defer conn.Close()
	p, err := peer(conn.(*net.UnixConn))
	if err != nil {
		return notAlive(c.ID, "the supervisor of sandbox %s is gone: %w", c.ID, err)
	}
	// An answer over this connection after its pidfd was opened proves that
	// the pidfd is the supervisor's: had it died, and its ID been used again, nobody would answer.
	status, err := ask(ctx, conn, c.ID)
	switch {
	case err != nil:
		p.release()
		return notAlive(c.ID, "the supervisor of sandbox %s does not answer: %w", c.ID, err)
	case status.GetSandboxId() != string(c.ID):
		p.release()
		return notAlive(c.ID, "the supervisor in %s has sandbox %q, not %s", c.Dir, status.GetSandboxId(), c.ID)
	case !status.GetAlive():
		p.release()
		return notAlive(c.ID, "sandbox %s has ended: %s", c.ID, status.GetReason())
	}
	b.adopt(c.ID, c.Dir, p, true)
	return nil
}

// peer returns the process that listens at the other end.
func peer(conn *net.UnixConn) (*process, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	if cerr != nil {
		return nil, cerr
	}
	return openProcess(int(cred.Pid))
}

func openProcess(pid int) (*process, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	return newProcess(pid, pidfd, false)
}

// ask calls Status over one connection.
func ask(ctx context.Context, conn net.Conn, id sandbox.ID) (*guestv1.StatusResponse, error) {
	used := false
	transport := guestconn.NewTransport(func(context.Context, sandbox.ID) (net.Conn, error) {
		if used {
			return nil, errors.New("the connection was lost")
		}
		used = true
		return conn, nil
	})
	defer transport.CloseIdleConnections()
	client := guestv1connect.NewGuestServiceClient(&http.Client{Transport: transport}, guestconn.URL(id))
	r, err := client.Status(ctx, connect.NewRequest(&guestv1.StatusRequest{}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return r.Msg, nil
}

// findSupervisors finds supervisors of id that this process does not know, by
// their working directory. Normally there is none, or one.
func (b *Backend) findSupervisors(id sandbox.ID) ([]*process, error) {
	all, err := b.scan()
	var out []*process
	for _, s := range all {
		if s.id != id {
			continue
		}
		p, perr := openProcess(s.pid)
		if perr != nil {
			continue // it ended
		}
		// Again, now that the ID cannot be reused under us.
		if sandboxOf(s.pid) != id {
			p.release()
			continue
		}
		out = append(out, p)
	}
	return out, err
}

// found is a process in the supervisors' cgroup.
type found struct {
	pid int
	id  sandbox.ID // "" while it waits in a pool
}

func (b *Backend) scan() ([]found, error) {
	pids, err := b.controlDir().Procs()
	var out []found
	for _, pid := range pids {
		out = append(out, found{pid: pid, id: sandboxOf(pid)})
	}
	return out, err
}

// sandboxOf returns the sandbox whose supervisor pid is, "" for none. A
// supervisor's working directory is its sandbox's; when that was removed the kernel adds " (deleted)".
func sandboxOf(pid int) sandbox.ID {
	cwd, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/cwd")
	if err != nil {
		return ""
	}
	const deleted = " (deleted)"
	if n := len(cwd) - len(deleted); n > 0 && cwd[n:] == deleted {
		cwd = cwd[:n]
	}
	id, err := sandbox.ParseID(filepath.Base(cwd))
	if err != nil {
		return ""
	}
	return id
}
