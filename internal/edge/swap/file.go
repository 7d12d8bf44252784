package swap

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// ensureFile makes the node's swap file have a size; 0 removes it.
func (s *Swap) ensureFile(size int64) error {
	page := int64(os.Getpagesize())
	size = size / page * page
	path := filepath.Join(s.dir, fileName)
	st, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && size > 0 && st.Size() == size && labelOf(path) == s.label("f") {
		active, err := s.sys.list()
		if err != nil {
			return err
		}
		if slices.ContainsFunc(active, func(a area) bool { return sameFile(a.path, st) }) {
			return nil
		}
		return swapOn(path, filePriority) // after a reboot, or a kill just before
	}
	if err == nil {
		if err := swapOff(path); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if size == 0 {
		return nil
	}
	if err = s.makeFile(path, size); err == nil {
		err = swapOn(path, filePriority)
	}
	if err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// sameFile: the kernel shows the path by which it was switched on; the data directory may have been reached another way.
func sameFile(path string, st fs.FileInfo) bool {
	other, err := os.Lstat(path)
	return err == nil && os.SameFile(other, st)
}

func (s *Swap) makeFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // synced by label
	// btrfs wants it not copied on write, which can be said of an empty file only; others do not know the flag.
	if flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS); err == nil {
		_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|noCopyOnWrite)
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	switch {
	case errors.Is(err, unix.ENOSPC):
		return errs.E(errs.Capacity, "the disk has no room for a swap file of %d MiB", size>>20).WithHint("free some, or ask for less with --swap")
	case errors.Is(err, unix.EOPNOTSUPP):
		return errs.E(errs.Unsupported, "the file system of %s cannot hold a swap file", s.dir).WithHint("use --zram")
	case err != nil:
		return fmt.Errorf("allocate the swap file: %w", err)
	}
	return label(path, size, s.label("f"))
}

// noCopyOnWrite is FS_NOCOW_FL (include/uapi/linux/fs.h).
const noCopyOnWrite = 0x00800000
