package files

import (
	"encoding/binary"
	"errors"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// failCode tells apart what an errno cannot say.
type failCode byte

const (
	failErrno      failCode = iota // errno says it
	failNotRegular                 // content was asked of something else than a regular file
	failKernelFS                   // procfs, sysfs …
	failBadTar                     // text says what is wrong with the archive
	failOutside                    // an entry of an archive leads outside
	failMount                      // a mount point is in the way
	failChanged                    // what was worked on was swapped meanwhile
	failDeep                       // nested too deeply
	failShrunk                     // a file became shorter while it was read
	failAborted                    // the service asked for the end
	failInternal                   // the worker is wrong
	failCodes                      // how many there are
)

// maxFailText bounds what a failure says beyond its code.
const maxFailText = 1024

// failure is how a worker says that an operation failed. Text is about what in
// the operation it was: a path below the one asked for, or a reason.
type failure struct {
	code  failCode
	errno syscall.Errno
	text  string
}

func (f *failure) Error() string {
	return strings.TrimSpace(f.text + " " + f.errno.Error())
}

// fail gives err, which may be an errno, the form that crosses the pipe.
func fail(err error, text string) *failure {
	var f *failure
	if errors.As(err, &f) {
		return f
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return &failure{errno: errno, text: text}
	}
	return &failure{code: failInternal, text: text + ": " + err.Error()}
}

func (f *failure) encode() []byte {
	b := make([]byte, headerSize, headerSize+len(f.text))
	b[0] = byte(f.code)
	binary.BigEndian.PutUint32(b[1:], uint32(f.errno))
	return append(b, f.text[:min(len(f.text), maxFailText)]...)
}

// decodeFailure reads what a worker sent; nil when it is malformed.
func decodeFailure(b []byte) *failure {
	if len(b) < headerSize || len(b) > headerSize+maxFailText || b[0] >= byte(failCodes) {
		return nil
	}
	errno := binary.BigEndian.Uint32(b[1:])
	if errno > 4095 { // MAX_ERRNO of include/linux/err.h
		return nil
	}
	return &failure{code: failCode(b[0]), errno: syscall.Errno(errno), text: string(b[headerSize:])}
}

// toErr is what the caller is told. path is the path that was asked for.
func (f *failure) toErr(path string) error {
	subject := show(path)
	if f.text != "" && f.code != failInternal {
		subject += " (" + show(f.text) + ")"
	}
	var e *errs.Error
	switch f.code {
	case failErrno:
		e = errnoErr(f.errno, subject)
	case failNotRegular:
		e = errs.E(errs.Precondition, "%s is not a regular file", subject)
	case failKernelFS:
		e = errs.E(errs.Denied, "%s is on a file system of the kernel", subject).
			WithHint("files of /proc, /sys and the like are reached by a command inside, such as `cat`")
	case failBadTar:
		e = errs.E(errs.Invalid, "the archive for %s is not usable", subject)
	case failOutside:
		e = errs.E(errs.Invalid, "the archive for %s has an entry that leads outside", subject).
			WithHint("names must be relative, without .., and must not pass through symbolic links that leave the directory")
	case failMount:
		e = errs.E(errs.Precondition, "%s is a mount point or has one below", subject).WithHint("unmount it by a command inside")
	case failChanged:
		e = errs.E(errs.Precondition, "%s changed while it was worked on", subject).WithHint("try again")
	case failDeep:
		e = errs.E(errs.Precondition, "%s is nested too deeply", subject)
	case failShrunk:
		e = errs.E(errs.Precondition, "%s became shorter while it was read", subject).WithHint("try again when nothing writes to it")
	case failAborted:
		e = errs.E(errs.Cancelled, "%s was left as it was: the transfer ended early", subject)
	default:
		e = errs.E(errs.Internal, "file worker failed on %s: %s", subject, show(f.text))
	}
	return e.On("path %s", show(path))
}

// show quotes a path for a message and keeps it short.
func show(path string) string {
	const most = 200
	if len(path) > most {
		cut := most
		for cut > most-utf8.UTFMax && !utf8.RuneStart(path[cut]) {
			cut--
		}
		path = path[:cut] + "…"
	}
	clean := utf8.ValidString(path) && !strings.ContainsFunc(path, func(r rune) bool {
		return r < ' ' || r == 0x7f || r == '"' || r == utf8.RuneError
	})
	if clean {
		return path
	}
	return quote(path)
}

func errnoErr(errno syscall.Errno, subject string) *errs.Error {
	switch errno {
	case unix.ENOENT:
		return errs.E(errs.NotFound, "%s does not exist", subject)
	case unix.EACCES, unix.EPERM:
		return errs.E(errs.Denied, "permission denied: %s", subject).WithHint("name another user, such as root")
	case unix.EROFS:
		return errs.E(errs.Denied, "%s is on a read-only file system", subject)
	case unix.EEXIST:
		return errs.E(errs.Exists, "%s exists already", subject)
	case unix.ENOTEMPTY:
		return errs.E(errs.Precondition, "%s is a directory that is not empty", subject).WithHint("remove it recursively first")
	case unix.EISDIR:
		return errs.E(errs.Precondition, "%s is a directory", subject)
	case unix.ENOTDIR:
		return errs.E(errs.Precondition, "%s, or a part of its path, is not a directory", subject)
	case unix.ELOOP:
		return errs.E(errs.Precondition, "%s leads through too many symbolic links", subject)
	case unix.ENAMETOOLONG:
		return errs.E(errs.Invalid, "%s is too long a name", subject).WithHint("a name may have 255 bytes, a path 4095")
	case unix.ENOSPC, unix.EDQUOT:
		return errs.E(errs.Capacity, "no space left in the sandbox for %s", subject).Exhausts("disk of the sandbox").
			WithHint("remove files inside, or create the sandbox with a larger disk limit")
	case unix.ENOMEM:
		return errs.E(errs.Capacity, "no memory left in the sandbox for %s", subject).Exhausts("memory of the sandbox").WithHint("file operations count against the sandbox's memory limit")
	case unix.EBUSY:
		return errs.E(errs.Precondition, "%s is in use, or is a mount point", subject).
			WithHint("a file that is a mount point cannot be replaced; write to it by a command inside")
	case unix.EXDEV:
		return errs.E(errs.Precondition, "%s is on another file system", subject)
	case unix.EINVAL:
		return errs.E(errs.Invalid, "the file system refuses this for %s: invalid argument", subject)
	}
	return errs.E(errs.Precondition, "%s: %s", subject, errno.Error())
}
