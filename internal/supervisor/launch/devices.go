package launch

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// devices makes the file system of /dev, detached. Only the node can: what a user namespace mounts has no
// device nodes. The inodes are the sandbox's alone, as Docker's are: on the node's own, everybody could watch and
// lock what everybody uses.
func devices(owner int) (_ *os.File, err error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs) //nolint:errcheck // configured and used up
	for _, o := range append([]confine.Option{{Key: "source", Value: "none"}}, confine.DevOptions...) {
		if err := unix.FsconfigSetString(fs, o.Key, o.Value); err != nil {
			return nil, fmt.Errorf("/dev: option %s: %w", o.Key, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("/dev: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, confine.DevAttrs)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	dev := os.NewFile(uintptr(fd), "dev")
	defer func() {
		if err != nil {
			_ = dev.Close()
		}
	}()
	for _, d := range confine.Devices {
		err := unix.Mknodat(fd, d.Name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.Major, d.Minor)))
		if err == nil { // whatever the umask is
			err = unix.Fchmodat(fd, d.Name, 0o666, 0)
		}
		if err = errors.Join(err, unix.Fchownat(fd, d.Name, owner, owner, unix.AT_SYMLINK_NOFOLLOW)); err != nil {
			return nil, fmt.Errorf("/dev/%s: %w", d.Name, err)
		}
	}
	for _, l := range confine.DevLinks {
		err := unix.Symlinkat(l[0], fd, l[1])
		if err = errors.Join(err, unix.Fchownat(fd, l[1], owner, owner, unix.AT_SYMLINK_NOFOLLOW)); err != nil {
			return nil, fmt.Errorf("/dev/%s: %w", l[1], err)
		}
	}
	if err := unix.Fchownat(fd, "", owner, owner, unix.AT_EMPTY_PATH); err != nil { // it is O_PATH
		return nil, fmt.Errorf("/dev: %w", err)
	}
	return dev, nil
}
