package layer

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// MountMode is how a node mounts EROFS images that are files.
type MountMode string

// The modes, best first.
const (
	// ModeDirect reads files past their own page cache, so that content is cached once.
	ModeDirect MountMode = "file-direct"
	// ModeFile caches content in the file and in EROFS.
	ModeFile MountMode = "file"
	// ModeLoop goes through loop devices: kernels before 6.12 or without CONFIG_EROFS_FS_BACKED_BY_FILE.
	ModeLoop MountMode = "loop"
)

// image is the files that make one file system.
type image struct {
	meta  string
	blobs []string // in the order of the device slots
}

// mountImage returns a detached mount of an image: read-only and nodev. It is not
// nosuid: programs in a sandbox get their setuid bits through it.
func mountImage(img image, mode MountMode) (mountFD int, err error) {
	paths := append([]string{img.meta}, img.blobs...)
	if mode == ModeLoop {
		for i, p := range paths {
			dev, err := attachLoop(p)
			if err != nil {
				return -1, err
			}
			defer dev.Close() // autoclear: the device goes with its last user
			paths[i] = dev.Name()
		}
	}
	fd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen erofs: %w", err)
	}
	defer unix.Close(fd)
	key := "source"
	for _, p := range paths {
		path, done, err := shortPath(p)
		if err != nil {
			return -1, err
		}
		defer done() // the kernel opens it at create
		if err := unix.FsconfigSetString(fd, key, path); err != nil {
			return -1, fmt.Errorf("fsconfig erofs %s=%s: %w", key, path, err)
		}
		key = "device" // once for each slot, in their order
	}
	if mode == ModeDirect {
		if err := unix.FsconfigSetFlag(fd, "directio"); err != nil {
			return -1, fmt.Errorf("fsconfig erofs directio: %w", err)
		}
	}
	if err := unix.FsconfigSetFlag(fd, "ro"); err != nil {
		return -1, fmt.Errorf("fsconfig erofs ro: %w", err)
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return -1, fmt.Errorf("fsconfig create erofs: %w%s", err, fsMessage(fd))
	}
	mfd, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return -1, fmt.Errorf("fsmount erofs: %w", err)
	}
	return mfd, nil
}

// fsMessage reads what the kernel says about a failed fsconfig.
func fsMessage(fd int) string {
	b := make([]byte, 1024)
	if n, err := unix.Read(fd, b); err == nil && n > 0 {
		return fmt.Sprintf(" (%s)", b[:n])
	}
	return ""
}

// maxOption is the longest value that fsconfig takes (256 with the final NUL).
const maxOption = 255

// shortPath returns a path to the same file that fits an option.
func shortPath(path string) (short string, done func(), err error) {
	if len(path) <= maxOption {
		return path, func() {}, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", nil, err
	}
	return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())), func() { f.Close() }, nil
}

// attachLoop makes a read-only loop device of a file.
func attachLoop(path string) (*os.File, error) {
	backing, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	const attempts = 100 // others take free devices at the same time
	for range attempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{
			Fd: uint32(backing.Fd()), Size: 4096,
			Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO},
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("configure loop device %d: %w", n, err)
		}
	}
	return nil, errs.E(errs.Capacity, "no free loop device after %d attempts", attempts)
}

// probeMounts finds the best mode in which this kernel mounts and reads an
// image that lies in dir. probe is an image whose file "probe" holds content.
func probeMounts(img image, content []byte) (MountMode, error) {
	var failures []error
	for _, mode := range []MountMode{ModeDirect, ModeFile, ModeLoop} {
		err := tryMode(img, mode, content)
		if err == nil {
			return mode, nil
		}
		failures = append(failures, fmt.Errorf("%s: %w", mode, err))
	}
	return "", errs.E(errs.Unsupported, "this kernel cannot mount EROFS images: %w", errors.Join(failures...)).
		WithHint("use Linux 6.12 or newer with CONFIG_EROFS_FS_BACKED_BY_FILE, or load the modules erofs and loop")
}

func tryMode(img image, mode MountMode, content []byte) error {
	mfd, err := mountImage(img, mode)
	if err != nil {
		return err
	}
	defer unix.Close(mfd)
	fd, err := unix.Openat(mfd, "probe", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	f := os.NewFile(uintptr(fd), "probe")
	defer f.Close()
	// Read back: a file system below that has no direct I/O shows it here only.
	got := make([]byte, len(content)+1)
	n, err := f.Read(got)
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if string(got[:n]) != string(content) {
		return errors.New("read back other content")
	}
	return nil
}

// attach puts a detached mount at dir.
func attach(mountFD int, dir string) error {
	if err := unix.MoveMount(mountFD, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move mount to %s: %w", dir, err)
	}
	return nil
}

// moveMountBeneath is MOVE_MOUNT_BENEATH of linux/mount.h.
const moveMountBeneath = 0x200

// replaceMount puts a detached mount in the place of the one at dir. Who looks dir up finds one or the other: the new one
// goes beneath the old one (move_mount(2), Linux 6.5), which then leaves.
func replaceMount(fd int, dir string) error {
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH|moveMountBeneath); err != nil {
		return fmt.Errorf("move_mount beneath %s: %w", dir, err)
	}
	if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

// detach unmounts dir, also when something is open below it, and removes the directory.
func detach(dir string) error {
	// More than one mount is there when this ended in the midst of replaceMount.
	for {
		err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// makePrivate makes dir a mount of its own whose mounts reach no other namespace.
func makePrivate(dir string) error {
	err := unix.Mount("", dir, "", unix.MS_PRIVATE, "")
	if errors.Is(err, unix.EINVAL) { // not a mount yet
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", dir, err)
		}
		err = unix.Mount("", dir, "", unix.MS_PRIVATE, "")
	}
	if err != nil {
		return fmt.Errorf("make %s private: %w", dir, err)
	}
	return nil
}
