package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// openLevels is how deep a walk descends with a descriptor a level; deeper directories wait, each with one.
	openLevels = 64
	// maxWaiting bounds those. A tree that has more is made to be hard to measure.
	maxWaiting  = 4096
	blockOfStat = 512 // stat(2)
	// fileCost is what a file counts for at least: file systems such as ext4 have so many inodes and no more.
	fileCost = 4096
)

// ErrTooDeep says that a tree cannot be measured within reason.
var ErrTooDeep = errs.E(errs.Capacity, "directories are nested too deeply to be measured")

// Measure adds up the blocks of a tree that others change meanwhile, of every file 4 KiB at least. It follows nothing; a file
// with several names counts once.
func Measure(ctx context.Context, path string) (int64, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", path, err)
	}
	m := &measure{ctx: ctx, linked: make(map[linkKey]bool), waiting: []int{fd}}
	defer func() {
		for _, fd := range m.waiting {
			unix.Close(fd)
		}
	}()
	for len(m.waiting) > 0 {
		fd := m.waiting[len(m.waiting)-1]
		m.waiting = m.waiting[:len(m.waiting)-1]
		if err := m.directory(fd, 0); err != nil {
			return 0, err
		}
	}
	return m.bytes, nil
}

type linkKey struct {
	dev uint64
	ino uint64
}

type measure struct {
	ctx     context.Context
	bytes   int64
	linked  map[linkKey]bool
	waiting []int
}

// directory takes over fd.
func (m *measure) directory(fd, depth int) error {
	f := os.NewFile(uintptr(fd), "directory")
	defer f.Close()
	for {
		names, err := f.Readdirnames(512)
		for _, name := range names {
			if err := m.entry(fd, name, depth); err != nil {
				return err
			}
		}
		if m.ctx.Err() != nil {
			return context.Cause(m.ctx)
		}
		if err != nil || len(names) == 0 {
			return nil // the end, or a directory that was removed meanwhile
		}
	}
}

func (m *measure) entry(dir int, name string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT); err != nil {
		return nil //nolint:nilerr // it was removed meanwhile
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		key := linkKey{st.Dev, st.Ino}
		if m.linked[key] {
			return nil
		}
		m.linked[key] = true
	}
	m.bytes += max(st.Blocks*blockOfStat, fileCost)
	if kind != unix.S_IFDIR {
		return nil
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return err
	case err != nil:
		return nil //nolint:nilerr // it was removed meanwhile
	case depth < openLevels:
		return m.directory(fd, depth+1)
	case len(m.waiting) == maxWaiting:
		unix.Close(fd)
		return ErrTooDeep
	}
	m.waiting = append(m.waiting, fd)
	return nil
}

// Unlinked adds up the blocks of files without a name that processes hold open or mapped on an overlay: a tree does not
// show them. A file that several hold counts once.
func Unlinked(pids []int) int64 {
	seen := make(map[linkKey]bool)
	var total int64
	for _, pid := range pids {
		for _, kind := range []string{"fd", "map_files"} {
			dir := filepath.Join("/proc", strconv.Itoa(pid), kind)
			f, err := os.Open(dir)
			if err != nil {
				continue // it ended
			}
			names, _ := f.Readdirnames(-1)
			f.Close()
			for _, name := range names {
				total += unlinked(filepath.Join(dir, name), seen)
			}
		}
	}
	return total
}

// unlinked asks no file system that might not answer: sizes come from what the kernel has in memory.
func unlinked(link string, seen map[linkKey]bool) int64 {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, link, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS, &st); err != nil {
		return 0
	}
	key := linkKey{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino}
	if st.Nlink != 0 || st.Mode&unix.S_IFMT != unix.S_IFREG || seen[key] {
		return 0
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(link, &fs); err != nil || fs.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return 0 // memory: memfd, tmpfs
	}
	seen[key] = true
	return max(int64(st.Blocks)*blockOfStat, fileCost)
}
