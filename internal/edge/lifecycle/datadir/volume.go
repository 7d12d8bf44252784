package datadir

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// volumeName is the file that holds a data directory's own file system. It is mounted on the directory that it lies
	// in, which hides it until it is unmounted.
	volumeName = "volume.btrfs"
	// MinVolume is the smallest volume: btrfs keeps some hundred MiB to itself.
	MinVolume = 1 << 30

	// sharedGroups is the size from which data and metadata have block groups of their own. In a smaller volume metadata get none when
	// data was allocated in all chunks, half used or not: then nothing can even be removed.
	sharedGroups = 50 << 30

	iocResize = 0x50009403 // BTRFS_IOC_RESIZE, include/uapi/linux/btrfs.h
)

// ValidSize checks the size asked of a volume; 0 asks for none.
func ValidSize(size int64) error {
	if size != 0 && size < MinVolume {
		return errs.E(errs.Invalid, "--data-size asks for a volume of %d bytes; it needs at least %d", size, int64(MinVolume)).
			WithHint("ask for 1g or more, such as --data-size 50g")
	}
	return nil
}

// openVolume mounts the directory's own file system, making it first if a size is asked for. It does nothing when there
// is none and none is wanted.
func (d *Dir) openVolume() error {
	size := d.opts.Size
	// Two servers that start at once wait for each other here; later the lock file is in the volume.
	dir, err := os.Open(d.path)
	if err != nil {
		return d.fault("open the data directory", err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", d.path, err)
	}
	mounted, err := volumeMounted(d.path)
	if err != nil {
		return err
	}
	if mounted {
		return d.checkMountedSize(size)
	}
	img := d.file(volumeName)
	switch fi, err := os.Lstat(img); {
	case err == nil && !fi.Mode().IsRegular():
		return errs.E(errs.Precondition, "%s is not a file", img).On("data directory %s", d.path).WithHint("move it away")
	case err == nil:
		return d.mountVolume(img, fi.Size(), size)
	case !errors.Is(err, os.ErrNotExist):
		return d.fault("look for the volume", err)
	case size == 0:
		return nil
	}
	if _, err := os.Lstat(d.file("version.json")); err == nil {
		return errs.E(errs.Precondition, "%s is in use without a volume; --data-size can only make a new one", d.path).
			On("data directory %s", d.path).WithHint("name a new directory with --data, or leave out --data-size")
	}
	if err := adoptable(d.path); err != nil {
		return err
	}
	if err := d.makeVolume(img, size); err != nil {
		return err
	}
	return d.mountVolume(img, size, size)
}

// volumeMounted tells whether what is seen at path is the volume that was mounted there.
func volumeMounted(path string) (bool, error) {
	mounts, err := Mounts()
	if err != nil {
		return false, err
	}
	for _, m := range mounts {
		if m.Point == path && m.Type == "btrfs" && backedBy(m.Source) == filepath.Join(path, volumeName) {
			return true, nil
		}
	}
	return false, nil
}

// backedBy returns the path of a loop device's file as it was when the device was made, "" for other devices.
func backedBy(device string) string {
	b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device), "loop/backing_file"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (d *Dir) checkMountedSize(size int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(d.path, &st); err != nil {
		return d.fault("look at the volume", err)
	}
	if have := int64(st.Blocks) * st.Bsize; size != 0 && size != have {
		return errs.E(errs.Precondition, "the volume of %s is mounted with %d bytes, --data-size asks for %d", d.path, have, size).
			On("data directory %s", d.path).WithHint("run `harena down --data %s` first; a volume can grow, never shrink", d.path)
	}
	return nil
}

// makeVolume makes the file with its file system. All its space is reserved: a loop device over a full disk loses writes.
func (d *Dir) makeVolume(img string, size int64) (err error) {
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return errs.E(errs.Precondition, "--data-size needs mkfs.btrfs, which is not installed").WithHint("install btrfs-progs")
	}
	// Under another name until it is whole: a start that was cut short begins anew.
	tmp := img + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return d.fault("make the volume", err)
	}
	defer func() {
		f.Close()
		if err != nil {
			_ = os.Remove(tmp)
		}
	}()
	if err := reserve(f, size); err != nil {
		return d.reserveFault(size, err)
	}
	// Not discarding keeps the space reserved. One copy of the metadata: both would lie on the same disk.
	args := []string{"-q", "-f", "-K", "-m", "single", "-d", "single"}
	if size < sharedGroups {
		args = append(args, "--mixed")
	}
	if out, err := exec.Command(mkfs, append(args, tmp)...).CombinedOutput(); err != nil {
		return errs.E(errs.Precondition, "mkfs.btrfs could not make the volume: %w: %.500s", err, out).On("data directory %s", d.path)
	}
	if err := f.Sync(); err != nil {
		return d.fault("write the volume", err)
	}
	return d.fault("make the volume", os.Rename(tmp, img))
}

func reserve(f *os.File, size int64) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return f.Truncate(size) // the file system cannot promise space
	}
	return err
}

// reserveFault says of a volume that the disk has no room for how large it may be.
func (d *Dir) reserveFault(size int64, err error) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EFBIG) {
		return d.fault("reserve the volume's space", err)
	}
	return errs.E(errs.Capacity, "cannot reserve a volume of %d bytes: %w", size, err).On("data directory %s", d.path).
		WithHint("its size is taken from the disk of --data at once: ask for less than `df` shows as available there")
}

// mountVolume attaches the file to a loop device, and mounts it. The device goes with the mount.
func (d *Dir) mountVolume(img string, have, want int64) (err error) {
	if want != 0 && want < have {
		return errs.E(errs.Precondition, "the volume of %s has %d bytes, --data-size asks for %d: it cannot shrink", d.path, have, want).
			On("data directory %s", d.path).WithHint("leave out --data-size, or ask for more")
	}
	if want > have {
		f, err := os.OpenFile(img, os.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return d.fault("open the volume", err)
		}
		err = reserve(f, want)
		f.Close()
		if err != nil {
			return d.reserveFault(want, err)
		}
	}
	device, err := losetup("--find", "--show", "--nooverlap", img)
	if err != nil {
		return errs.E(errs.Precondition, "no loop device can be made of %s: %w", img, err).WithHint("the kernel's loop module is needed")
	}
	// While it is mounted this only marks it to go with its last user.
	defer func() { _, derr := losetup("--detach", device); err = errors.Join(err, derr) }()
	// One that is still attached, for somebody else's mount of before, has the size that the file had then.
	if _, err := losetup("--set-capacity", device); err != nil {
		return errs.E(errs.Precondition, "the loop device %s does not take the size of %s: %w", device, img, err)
	}
	// Past the page cache of the file below, where that can be: what is cached twice is paid twice.
	_, _ = losetup("--direct-io=on", device)
	if err := unix.Mount(device, d.path, "btrfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "nodiscard"); err != nil {
		return errs.E(errs.Precondition, "the volume %s cannot be mounted: %w", img, err).On("data directory %s", d.path).
			WithHint("the kernel needs btrfs; `btrfs check %s` tells whether the volume is whole", img)
	}
	// Also when an earlier start made the file larger and did not get here.
	if err := growToMax(d.path); err != nil {
		return errors.Join(err, unix.Unmount(d.path, unix.MNT_DETACH))
	}
	return nil
}

func losetup(args ...string) (string, error) {
	out, err := exec.Command("losetup", args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("losetup %s: %w: %.200s", args[0], err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// growToMax makes a btrfs as large as its device.
func growToMax(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var args struct {
		fd   int64
		name [4088]byte
	}
	copy(args.name[:], "1:max")
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), iocResize, uintptr(unsafe.Pointer(&args))); errno != 0 {
		return fmt.Errorf("grow the volume: %w", errno)
	}
	return nil
}

// closeVolume unmounts the volume of a node that went down. Lazily, because the lock was opened through it.
func (d *Dir) closeVolume() error {
	mounted, err := volumeMounted(d.path)
	if err != nil || !mounted {
		return err
	}
	if err := unix.Unmount(d.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount the volume of %s: %w", d.path, err)
	}
	return nil
}
