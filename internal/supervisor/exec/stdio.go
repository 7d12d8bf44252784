package exec

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// stdio are the descriptors of one command: the command's ends, and ours.
type stdio struct {
	stdin, stdout, stderr *os.File // the command's; terminal: all the same; stdin nil: its /dev/null
	out, err              *os.File // what it prints; terminal: err is nil
	in                    *os.File // what it reads; nil: nothing
	tty                   bool
}

// closeTheirs closes the command's ends.
func (d *stdio) closeTheirs() {
	for _, f := range []*os.File{d.stdin, d.stdout, d.stderr} {
		if f != nil {
			f.Close()
		}
	}
	d.stdin, d.stdout, d.stderr = nil, nil, nil
}

func (d *stdio) closeAll() {
	d.closeTheirs()
	for _, f := range []*os.File{d.out, d.err, d.in} {
		if f != nil {
			f.Close()
		}
	}
}

// pipes makes pipes that belong to a user inside, so that it can open
// /dev/stdout. Pipes and not sockets: a socket could carry descriptors across
// the boundary. Each end is an open file description of its own.
func (s *Service) pipes(uid, gid uint32, withInput bool) (d *stdio, err error) {
	d = &stdio{}
	defer func() {
		if err != nil {
			d.closeAll()
		}
	}()
	if d.out, d.stdout, err = s.pipe(uid, gid, true); err != nil {
		return nil, err
	}
	if d.err, d.stderr, err = s.pipe(uid, gid, true); err != nil {
		return nil, err
	}
	if withInput {
		d.stdin, d.in, err = s.pipe(uid, gid, false)
	}
	return d, err
}

// pipe makes a pipe of which we keep one end, non-blocking.
func (s *Service) pipe(uid, gid uint32, keepRead bool) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, noDescriptors("make a pipe", err)
	}
	ours := fds[1]
	if keepRead {
		ours = fds[0]
	}
	err = unix.Fchown(ours, int(s.cfg.IDBase+uid), int(s.cfg.IDBase+gid))
	if err == nil {
		err = unix.SetNonblock(ours, true)
	}
	if err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("prepare a pipe: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

func noDescriptors(what string, err error) error {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return errs.E(errs.Capacity, "%s: %w", what, err).Exhausts("open files of the sandbox's supervisor").WithHint("end commands that are not needed any more")
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Default size of a terminal, and the group "tty" that every distribution gives the number 5.
const (
	defCols, defRows = 80, 24
	ttyGroup         = 5
)

// terminal opens a terminal of the sandbox's own devpts. The directory is
// visible inside, where somebody may have mounted over ptmx: what is opened is
// checked to be the multiplexer of that file system itself.
func (s *Service) terminal(uid uint32, pty *harenav1.Pty) (*stdio, error) {
	if s.cfg.Devpts == nil {
		return nil, errs.E(errs.Unsupported, "this sandbox has no terminals: it has no devpts")
	}
	fd, err := unix.Openat2(int(s.cfg.Devpts.Fd()), "ptmx", &unix.OpenHow{
		Flags:   unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH,
	})
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) { // ENOSPC: every terminal that the mount allows is in use
		return nil, errs.E(errs.Capacity, "open a terminal: %w", err).Exhausts("terminals of the sandbox").WithHint("end commands that are not needed any more")
	}
	if err != nil {
		return nil, errs.E(errs.Precondition, "open a terminal in the sandbox's devpts: %w", err)
	}
	master := os.NewFile(uintptr(fd), "ptmx")
	slave, err := openSlave(fd, int(s.cfg.IDBase+uid), int(s.cfg.IDBase+ttyGroup))
	if err == nil {
		err = setSize(fd, pty.GetCols(), pty.GetRows())
	}
	if err != nil {
		master.Close()
		if slave != nil {
			slave.Close()
		}
		return nil, err
	}
	return &stdio{stdin: slave, stdout: slave, stderr: slave, out: master, in: master, tty: true}, nil
}

func openSlave(master, uid, gid int) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(master, &st); err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	// Linux's device numbers: 5:2 is /dev/ptmx.
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != 5 || unix.Minor(st.Rdev) != 2 {
		return nil, errs.E(errs.Precondition, "the sandbox's /dev/pts/ptmx is not a terminal multiplexer")
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return nil, fmt.Errorf("unlock a terminal: %w", err)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, fmt.Errorf("open a terminal: %w", errno)
	}
	slave := os.NewFile(fd, "pts")
	err := unix.Fchown(int(fd), uid, gid)
	if err == nil {
		err = unix.Fchmod(int(fd), 0o620)
	}
	if err != nil {
		return slave, fmt.Errorf("prepare a terminal: %w", err)
	}
	return slave, nil
}

func setSize(fd int, cols, rows uint32) error {
	size := &unix.Winsize{Col: uint16(cols), Row: uint16(rows)}
	if cols == 0 {
		size.Col = defCols
	}
	if rows == 0 {
		size.Row = defRows
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size); err != nil {
		return fmt.Errorf("set the size of a terminal: %w", err)
	}
	return nil
}
