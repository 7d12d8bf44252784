package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// overlay mounts the sandbox's root file system, detached: lowers (uppermost first) and the writable
// layer, all mapped to the sandbox's IDs. Every directory is passed by a descriptor of a detached clone, so that the
// mount's options show no path of the node: only "/" for a layer, and the names of upper and work.
//
// The caller calls release when the start is over, even after an error: closing a detached mount waits for an RCU grace period.
func overlay(lowers []string, upper, work string, userns *os.File, idBase int) (_ *os.File, release func(), err error) {
	var opened []int
	release = func() {
		for _, fd := range opened {
			_ = unix.Close(fd)
		}
	}
	m, err := mountOverlay(lowers, upper, work, userns, idBase, &opened)
	if err != nil {
		return nil, release, err
	}
	return os.NewFile(uintptr(m), "overlay"), release, nil
}

func mountOverlay(lowers []string, upper, work string, userns *os.File, idBase int, opened *[]int) (int, error) {
	if filepath.Dir(upper) != filepath.Dir(work) {
		return -1, errs.E(errs.Internal, "upper %s and work %s have no common parent", upper, work)
	}
	keep := func(fd int, err error) (int, error) {
		if err == nil {
			*opened = append(*opened, fd)
		}
		return fd, err
	}

	fs, err := keep(unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC))
	if err != nil {
		return -1, errs.E(errs.Unsupported, "this kernel has no overlayfs: %w", err).WithHint("load the module overlay")
	}
	set := func(key string, fd int, name string) error {
		if err := unix.FsconfigSetFd(fs, key, fd); err != nil {
			return overlayError(fs, fmt.Sprintf("%s of %s", key, name), err)
		}
		return nil
	}
	for _, lower := range lowers {
		fd, err := keep(idmapped(lower, userns))
		if err != nil {
			return -1, err
		}
		if err := set("lowerdir+", fd, lower); err != nil {
			return -1, err
		}
	}
	writable, err := keep(idmapped(filepath.Dir(upper), userns))
	if err != nil {
		return -1, err
	}
	for _, d := range [][2]string{{"upperdir", upper}, {"workdir", work}} {
		fd, err := keep(unix.Openat(writable, filepath.Base(d[1]), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0))
		if err != nil {
			return -1, fmt.Errorf("open %s: %w", d[1], err)
		}
		if err := set(d[0], fd, d[1]); err != nil {
			return -1, err
		}
	}
	for _, o := range confine.OverlayOptions {
		if o.Value == "" {
			err = unix.FsconfigSetFlag(fs, o.Key)
		} else {
			err = unix.FsconfigSetString(fs, o.Key, o.Value)
		}
		if err != nil {
			return -1, overlayError(fs, o.Key, err)
		}
	}
	if err := clearVolatile(writable, filepath.Base(work)); err != nil {
		return -1, err
	}
	if err := unix.FsconfigSetString(fs, "source", "overlay"); err != nil {
		return -1, overlayError(fs, "source", err)
	}
	if err := asOwner(idBase, func() error { return unix.FsconfigCreate(fs) }); err != nil {
		return -1, overlayError(fs, "mount", err)
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, confine.RootAttrs)
	if err != nil {
		return -1, overlayError(fs, "mount", err)
	}
	return m, nil
}

// clearVolatile removes the mark that a volatile overlay leaves in its work directory: with it the kernel refuses another
// mount, since a loss of power may have torn the files. The edge starts on a used layer only to read what is left there.
func clearVolatile(parent int, work string) error {
	mark := work + "/work/incompat/volatile"
	for _, m := range []struct {
		path  string
		flags int
	}{{mark + "/dirty", 0}, {mark, unix.AT_REMOVEDIR}} {
		err := unix.Unlinkat(parent, m.path, m.flags)
		if errors.Is(err, unix.ENOENT) {
			return nil // a new layer
		}
		if err != nil {
			return fmt.Errorf("prepare %s for another mount: %w", work, err)
		}
	}
	return nil
}

// idmapped is a detached clone of the mount at dir, mapped to the user namespace's IDs.
func idmapped(dir string, userns *os.File) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("clone mount of %s: %w", dir, err)
	}
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		_ = unix.Close(fd)
		if errors.Is(err, unix.EINVAL) {
			return -1, errs.E(errs.Unsupported, "the file system of %s cannot be mounted with mapped IDs: %w", dir, err).
				WithHint("put the data directory on ext4, xfs, btrfs or tmpfs; `harena doctor` checks it")
		}
		return -1, fmt.Errorf("map IDs of %s: %w", dir, err)
	}
	return fd, nil
}

// overlayError adds what the kernel logged for the mount.
func overlayError(fs int, what string, err error) error {
	buf := make([]byte, 512)
	var lines []string
	for len(lines) < 8 {
		n, rerr := unix.Read(fs, buf)
		if rerr != nil || n == 0 {
			break
		}
		lines = append(lines, strings.TrimSpace(string(buf[:n])))
	}
	detail := strings.Join(lines, "; ")
	if errors.Is(err, unix.EINVAL) && strings.Contains(detail, "lowerdir+") {
		return errs.E(errs.Unsupported, "overlay %s: %w (%s)", what, err, detail).WithHint("Linux 6.13 or newer is needed")
	}
	return fmt.Errorf("overlay %s: %w (%s)", what, err, detail)
}

// asOwner calls f on a thread whose file system IDs are those of the sandbox's root and whose capabilities are
// complete. Overlayfs keeps the credentials of its mounter for its own work on the writable
// layer; with the node's IDs, which the mapped layer does not have, it would be read-only.
func asOwner(id int, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := withFsIDs(id, f)
		// A thread that could not be restored is not used again: it ends with the goroutine.
		if uid, uerr := unix.SetfsuidRetUid(-1); uerr == nil && uid == 0 {
			if gid, gerr := unix.SetfsgidRetGid(-1); gerr == nil && gid == 0 {
				runtime.UnlockOSThread()
			}
		}
		result <- err
	}()
	return <-result
}

func withFsIDs(id int, f func() error) error {
	defer func() { _, _ = unix.SetfsgidRetGid(0) }()
	defer func() { _, _ = unix.SetfsuidRetUid(0) }()
	if err := unix.Setfsgid(id); err != nil {
		return os.NewSyscallError("setfsgid", err)
	}
	if err := unix.Setfsuid(id); err != nil {
		return os.NewSyscallError("setfsuid", err)
	}
	// Leaving ID 0 drops the file system capabilities from the effective set (capabilities(7)).
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	for i := range data {
		data[i].Effective = data[i].Permitted
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return os.NewSyscallError("capset", err)
	}
	return f()
}
