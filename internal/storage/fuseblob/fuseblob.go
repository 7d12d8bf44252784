// Package fuseblob serves read-only files of fixed content to the kernel: a small FUSE server whose connection outlives the
// process that serves it.
//
// It has one directory. A file's name, node ID and size are given by the caller and must be the same in every process that
// serves a connection; its content never changes. There are no handles: OPEN is answered with ENOSYS, so that a successor
// has none to know of. Connections are handed on as a descriptor of /dev/fuse with the Params that were agreed on; the
// successor calls Resend, and what its predecessor had read but not answered comes again (FUSE_NOTIFY_RESEND, Linux 6.9).
//
// Passthrough (FUSE_PASSTHROUGH) is left out: it cannot be switched on for an open file, EROFS holds its devices open for
// the life of a mount, and what is complete before it is mounted needs no FUSE at all.
//
// The protocol is that of include/uapi/linux/fuse.h; Documentation/filesystems/fuse.
package fuseblob

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// maxBackground is how many asynchronous requests (read-ahead, direct I/O) the kernel sends at once; its default is 12.
const maxBackground = 512

// File is what the kernel is told of a file.
type File struct {
	Name string // no "/", at most 255 bytes
	Node uint64 // above 2
	Size int64
}

// Files is what a connection shows. Methods are called concurrently.
type Files interface {
	// Lookup finds a file by its name, Node by its node ID. What Node does not know any more is gone for those that have it open.
	Lookup(name string) (File, bool)
	Node(id uint64) (File, bool)
	// List returns all files that Lookup finds, in a stable order.
	List() []File
	// ReadAt fills p, which lies within the file, from offset off. The call ends when ctx does. Any error is EIO to the
	// reader.
	ReadAt(ctx context.Context, node uint64, p []byte, off int64) error
	// Ready reports whether ReadAt would wait for nothing but the local disk.
	Ready(node uint64, n int, off int64) bool
}

// Params are what kernel and server agreed on when the connection was made. A successor needs them.
type Params struct {
	Minor     uint32 `json:"minor"`
	Flags     uint64 `json:"flags"`
	Readahead uint32 `json:"readahead"`
	// Device is the number of the mounted file system; 0: not known.
	Device uint64 `json:"device,omitempty"`
}

// Resends reports whether requests that a dead server left behind can be had again. Without, they hang until the connection is aborted.
func (p Params) Resends() bool { return p.Flags&flagHasResend != 0 }

// Conn is a connection to the kernel.
type Conn struct {
	fd     int
	params Params
}

// Mount makes a connection and mounts it on dir, read-only, for all users of this mount namespace. Precondition: something is
// wrong with dir; unsupported: the kernel has no FUSE, or an old one.
func Mount(dir, source string, readahead int) (_ *Conn, err error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.E(errs.Unsupported, "cannot open /dev/fuse: %w", err).WithHint("run as root on a kernel with CONFIG_FUSE_FS, or load the module fuse")
	}
	c := &Conn{fd: fd}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if err := c.mount(dir, source); err != nil {
		return nil, err
	}
	if err := c.negotiate(uint32(readahead)); err != nil {
		return nil, errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
	}
	if err := setReadahead(dir, readahead); err != nil {
		return nil, errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
	}
	c.params.Device, _ = deviceAt(dir)
	return c, nil
}

func (c *Conn) mount(dir, source string) error {
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=%d", c.fd, maxRead)
	if err := unix.Mount(source, dir, "fuse", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return errs.E(errs.Precondition, "cannot mount on %s: %w", dir, err)
	}
	return nil
}

// MountedOn tells whether what is mounted on dir is this connection's file system, without asking its server.
func (c *Conn) MountedOn(dir string) bool {
	d, err := deviceAt(dir)
	return err == nil && (c.params.Device == 0 || d == c.params.Device)
}

// MountAgain mounts the same file system on dir when somebody has detached it (umount -l) and others still use it: a
// descriptor that is connected gives its superblock again (fuse_get_tree in fs/fuse/inode.c).
func (c *Conn) MountAgain(dir, source string) error {
	if err := c.mount(dir, source); err != nil {
		return err
	}
	if !c.MountedOn(dir) {
		return errors.Join(errs.E(errs.Internal, "another file system came to be on %s", dir), unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
	}
	return nil
}

// deviceAt returns the device number of what is mounted on dir. The kernel knows it without its server (AT_STATX_DONT_SYNC, no fields).
func deviceAt(dir string) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_DONT_SYNC|unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st); err != nil {
		return 0, fmt.Errorf("look at %s: %w", dir, err)
	}
	return unix.Mkdev(st.Dev_major, st.Dev_minor), nil
}

// Resume takes over a connection whose descriptor and parameters another process held.
func Resume(fd int, p Params) *Conn { return &Conn{fd: fd, params: p} }

// Params are what was agreed on.
func (c *Conn) Params() Params { return c.params }

// FD is the descriptor of the connection, which stays c's.
func (c *Conn) FD() int { return c.fd }

// Close closes the descriptor. The connection ends, and what reads through it gets EIO, when no other process has one.
func (c *Conn) Close() { _ = unix.Close(c.fd) }

// Resend makes the kernel send all requests again that were read and not answered. For who has just taken over.
func (c *Conn) Resend() error {
	if !c.params.Resends() {
		return errs.E(errs.Unsupported, "this kernel cannot send requests again (FUSE_NOTIFY_RESEND)").WithHint("use Linux 6.9 or newer")
	}
	b := make([]byte, outHeaderLen)
	order.PutUint32(b, outHeaderLen)
	order.PutUint32(b[4:], notifyResend)
	if _, err := unix.Write(c.fd, b); err != nil {
		return fmt.Errorf("ask for unanswered requests: %w", err)
	}
	return nil
}

// negotiate answers INIT, which the kernel sends first.
func (c *Conn) negotiate(readahead uint32) error {
	buf := make([]byte, requestBuffer)
	for {
		n, err := readRequest(c.fd, buf)
		if err != nil {
			return fmt.Errorf("wait for the kernel's first message: %w", err)
		}
		r, err := parse(buf[:n])
		if err != nil {
			return err
		}
		out := make([]byte, outHeaderLen, outHeaderLen+initOutLen)
		switch {
		case r.op != opInit || r.init.major < protocolMajor || r.init.major == protocolMajor && r.init.minor < minProtocolMinor:
			header(out, len(out), int32(unix.EPROTO), r.unique)
			_, _ = unix.Write(c.fd, out)
			return errs.E(errs.Unsupported, "the kernel speaks FUSE %d.%d, operation %d", r.init.major, r.init.minor, r.op).WithHint("use Linux 5.4 or newer")
		case r.init.major > protocolMajor:
			// The kernel takes the lower major and sends INIT again.
			out = order.AppendUint32(out, protocolMajor)
			out = append(out, make([]byte, initOutLen-4)...)
		default:
			c.params = Params{Minor: min(r.init.minor, protocolMinor), Flags: r.init.flags & wantedFlags, Readahead: readahead}
			out = appendInitOut(out, c.params)
		}
		header(out, len(out), 0, r.unique)
		if _, err := unix.Write(c.fd, out); err != nil {
			return fmt.Errorf("answer the kernel's first message: %w", err)
		}
		if r.init.major == protocolMajor {
			return nil
		}
	}
}

// setReadahead sets how far the kernel reads ahead in files below dir. A file system mounted from such a file takes it over when it is
// mounted, not later.
func setReadahead(dir string, bytes int) error {
	// The root is known to the kernel: it asks the server nothing for this, or one that does not serve yet would hang it.
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	defer unix.Close(fd)
	dev, err := deviceOf(fd)
	if err != nil {
		return err
	}
	path := filepath.Join("/sys/class/bdi", dev, "read_ahead_kb")
	if err := os.WriteFile(path, []byte(strconv.Itoa(bytes>>10)), 0); err != nil {
		return fmt.Errorf("set read-ahead: %w", err)
	}
	return nil
}

const (
	probeName = ".probe"
	probeID   = 2
)

func probe() File { return File{Name: probeName, Node: probeID} }

// Prime opens and closes an empty file of a connection that is being served, so that the kernel learns what is not there and
// never asks again. Without it, the first close of a file would wait for a daemon: also that in an exec between fork and
// program of any process that has one open, which then can neither go on nor be looked at in /proc.
func Prime(dir string) error {
	fd, err := unix.Open(filepath.Join(dir, probeName), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a file of %s: %w", dir, err)
	}
	return unix.Close(fd)
}

// deviceOf returns MAJOR:MINOR of the file system of a descriptor without asking that file system.
func deviceOf(fd int) (string, error) {
	info, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return "", err
	}
	var id string
	for line := range strings.Lines(string(info)) {
		if v, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			id = strings.TrimSpace(v)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == id {
			return f[2], nil
		}
	}
	return "", errs.E(errs.Internal, "mount %s is not in mountinfo", id)
}

// answerTime bounds everything that is done for one request beside the caller's own deadline: the kernel waits for ever.
const answerTime = 10 * time.Minute
