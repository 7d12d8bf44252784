package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// overlay mounts the sandbox's root file system, detached: lowers (uppermost first) and the writable
// layer, all mapped to the sandbox's IDs. Every directory is a detached clone, so that the
// mount's options show no path of the node.
//
// The caller calls release when the start is over, even after an error: closing a detached mount waits for an RCU grace period.
func overlay(lowers []string, upper, work string, userns *os.File, idBase int) (_ *os.File, release func(), err error) {
	var opened []int
	release = func() {
		for _, fd := range opened {
			_ = unix.Close(fd)
		}
	}
	keep := func(fd int, err error) (int, error) {
		if err == nil {
			opened = append(opened, fd)
		}
		return fd, err
	}
	l, err := clones(lowers, upper, work, userns, keep)
	if err != nil {
		return nil, release, err
	}
	m, err := mountOverlay(l, l.byDescriptor, func(create func() error) error { return asOwner(idBase, create) }, keep)
	// Descriptors are taken since Linux 6.13, those of detached mounts since 6.15.
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EBADF) {
		m, err = mountAttached(l, idBase, keep)
	}
	if err != nil {
		return nil, release, err
	}
	return os.NewFile(uintptr(m), "overlay"), release, nil
}

// mountAttached is for kernels that take no descriptors of detached mounts.
func mountAttached(l *layers, idBase int, keep func(int, error) (int, error)) (m int, err error) {
	err = onThread(func() error {
		if err := l.attach(); err != nil {
			return err
		}
		m, err = mountOverlay(l, l.byName, func(create func() error) error { return withFsIDs(idBase, create) }, keep)
		return err
	})
	return m, err
}

// layers are detached clones of the directories of an overlay.
type layers struct {
	lowers     []int
	writable   int // parent of the two
	upper      string
	work       string
	lowerPaths []string // for errors
}

func clones(lowers []string, upper, work string, userns *os.File, keep func(int, error) (int, error)) (*layers, error) {
	if filepath.Dir(upper) != filepath.Dir(work) {
		return nil, errs.E(errs.Internal, "upper %s and work %s have no common parent", upper, work)
	}
	l := &layers{upper: upper, work: work, lowerPaths: lowers}
	for _, lower := range lowers {
		fd, err := keep(idmapped(lower, userns))
		if err != nil {
			return nil, err
		}
		l.lowers = append(l.lowers, fd)
	}
	var err error
	l.writable, err = keep(idmapped(filepath.Dir(upper), userns))
	return l, err
}

// byDescriptor names the directories to the kernel by descriptors: the options show "/" for a layer, and the names of upper and work.
func (l *layers) byDescriptor(fs int, keep func(int, error) (int, error)) error {
	set := func(key string, fd int, name string) error {
		if err := unix.FsconfigSetFd(fs, key, fd); err != nil {
			return overlayError(fs, fmt.Sprintf("%s of %s", key, name), err)
		}
		return nil
	}
	for i, fd := range l.lowers {
		if err := set("lowerdir+", fd, l.lowerPaths[i]); err != nil {
			return err
		}
	}
	for _, d := range [][2]string{{"upperdir", l.upper}, {"workdir", l.work}} {
		fd, err := keep(unix.Openat(l.writable, filepath.Base(d[1]), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0))
		if err != nil {
			return fmt.Errorf("open %s: %w", d[1], err)
		}
		if err := set(d[0], fd, d[1]); err != nil {
			return err
		}
	}
	return nil
}

// attach attaches the clones, in a mount namespace of the calling thread's own, to a file system that nobody
// else sees, and makes that the working directory: older kernels take mounts of the caller's namespace only.
// The namespace and what is attached in it end with the thread.
func (l *layers) attach() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	// Else what is mounted here would be mounted on the node too, where systemd shares all mounts.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	place := filepath.Dir(l.upper)
	if err := unix.Mount("tmpfs", place, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=64k,mode=700"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", place, err)
	}
	if err := unix.Chdir(place); err != nil {
		return fmt.Errorf("enter %s: %w", place, err)
	}
	for i, fd := range append(slices.Clone(l.lowers), l.writable) {
		name := strconv.Itoa(i)
		if err := unix.Mkdir(name, 0o700); err != nil {
			return fmt.Errorf("make mount point: %w", err)
		}
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, name, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("attach a layer: %w", err)
		}
	}
	return nil
}

// byName names the attached directories by paths from the working directory, which is what the options show.
func (l *layers) byName(fs int, _ func(int, error) (int, error)) error {
	writable := strconv.Itoa(len(l.lowers)) + "/"
	var options [][2]string
	for i := range l.lowers {
		options = append(options, [2]string{"lowerdir+", strconv.Itoa(i)})
	}
	options = append(options, [2]string{"upperdir", writable + filepath.Base(l.upper)}, [2]string{"workdir", writable + filepath.Base(l.work)})
	for _, o := range options {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return overlayError(fs, o[0], err)
		}
	}
	return nil
}

// mountOverlay makes the mount of directories that name tells the kernel; asOwner calls with the file system IDs of the sandbox's root.
func mountOverlay(l *layers, name func(fs int, keep func(int, error) (int, error)) error, asOwner func(func() error) error, keep func(int, error) (int, error)) (int, error) {
	fs, err := keep(unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC))
	if err != nil {
		return -1, errs.E(errs.Unsupported, "this kernel has no overlayfs: %w", err).WithHint("load the module overlay")
	}
	if err := name(fs, keep); err != nil {
		return -1, err
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
	if err := clearVolatile(l.writable, filepath.Base(l.work)); err != nil {
		return -1, err
	}
	if err := unix.FsconfigSetString(fs, "source", "overlay"); err != nil {
		return -1, overlayError(fs, "source", err)
	}
	if err := asOwner(func() error { return unix.FsconfigCreate(fs) }); err != nil {
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
	if len(lines) == 0 {
		return fmt.Errorf("overlay %s: %w", what, err)
	}
	return fmt.Errorf("overlay %s: %w (%s)", what, err, strings.Join(lines, "; "))
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

// onThread calls f on a thread of its own, which ends afterwards.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			result <- f()
			return // a thread that is still locked ends with its goroutine
		}
		// The main thread never ends: another one, while this one is held.
		err := onThread(f)
		runtime.UnlockOSThread()
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
