// Package disk makes the directories of writable layers and bounds what can be written to them.
//
// Where the file system of the data directory has quotas, the kernel bounds each layer exactly, and who exceeds the
// bound sees EDQUOT (or ENOSPC): ModeSubvolume on btrfs, ModeProject on ext4 and XFS. Elsewhere (ModeWatch) layers are
// measured often enough, see Watch.
package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Mode is how layers are bounded.
type Mode string

// The modes, best first.
const (
	// ModeSubvolume makes each layer a btrfs subvolume with a quota group.
	ModeSubvolume Mode = "subvolume"
	// ModeProject gives each layer a project ID with a quota.
	ModeProject Mode = "project"
	// ModeWatch measures layers.
	ModeWatch Mode = "watch"
)

// Disk makes writable layers below one directory. Its methods may be called concurrently.
type Disk struct {
	root string
	mode Mode
	// reflinks: the file system shares the blocks of copies.
	reflinks bool
	sysfs    string // of the quota groups
	owned    bool   // the volume is Harena's alone

	mu      sync.Mutex // guards the following; project IDs are chosen one at a time
	project uint32     // chosen last
	pool    int64      // the limit of all layers as it was set last; negative: there is none
	leave   int64      // what layers leave free together
}

// Open finds out what the file system of root offers. Quota groups are switched on where owned says that the volume is
// there for Harena alone; on another btrfs they are used when they are on.
func Open(root string, owned bool) (*Disk, error) {
	d := &Disk{root: root, mode: ModeWatch, owned: owned, pool: -1}
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return nil, fmt.Errorf("look at the file system of %s: %w", root, err)
	}
	var err error
	switch {
	case st.Type == unix.BTRFS_SUPER_MAGIC:
		err = d.openBtrfs(st, owned)
	case d.projectsEnforced():
		d.mode = ModeProject
	}
	if err != nil {
		return nil, err
	}
	d.reflinks, err = probeReflinks(root)
	return d, err
}

// Mode tells how layers are bounded.
func (d *Disk) Mode() Mode { return d.mode }

// Reflinks tells whether copies of files share their blocks.
func (d *Disk) Reflinks() bool { return d.reflinks }

// Make makes the directory path, mode 0700, which may grow to limit bytes. It is removed like any directory, and
// faster by Erase.
func (d *Disk) Make(path string, limit int64) (err error) {
	if d.mode == ModeSubvolume {
		return d.makeSubvolume(path, limit)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	if d.mode == ModeProject {
		if err := d.makeProject(path, limit); err != nil {
			return errors.Join(err, os.Remove(path))
		}
	}
	return nil
}

// SetLimit changes the bound of a directory that Make made. In ModeWatch there is nothing to change.
func (d *Disk) SetLimit(path string, limit int64) error {
	switch d.mode {
	case ModeSubvolume:
		return d.limitSubvolume(path, limit)
	case ModeProject:
		return d.limitProject(path, limit)
	}
	return nil
}

// Used returns the bytes that a directory holds, from the quota's own count; false in ModeWatch.
func (d *Disk) Used(path string) (int64, bool) {
	var n int64
	var err error
	switch d.mode {
	case ModeSubvolume:
		n, err = d.usedSubvolume(path)
	case ModeProject:
		n, err = d.usedProject(path)
	default:
		return 0, false
	}
	return n, err == nil
}

// Copy makes to a read-only copy of a directory that Make made, at one instant and whatever its size, if Copies. Erase removes it.
// Most of its time goes into writing what is not on disk yet: a copy made just before makes the next one quick.
func (d *Disk) Copy(path, to string) error {
	if !d.Copies() {
		return fmt.Errorf("copy %s: %w", path, unix.EOPNOTSUPP)
	}
	return copySubvolume(path, to)
}

// Copies tells whether Copy works here.
func (d *Disk) Copies() bool { return d.mode == ModeSubvolume }

// Erase removes parent/name at once, with all in it, when it is a subvolume. It reports whether it did; what is none is
// left as it is.
func Erase(parent int, name string) bool { return destroySubvolume(parent, name) == nil }

// probeReflinks clones a byte.
func probeReflinks(root string) (bool, error) {
	var files [2]*os.File
	for i := range files {
		fd, err := unix.Open(root, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("make a file in %s: %w", root, err)
		}
		files[i] = os.NewFile(uintptr(fd), "probe")
		defer files[i].Close()
	}
	if _, err := files[0].Write([]byte{1}); err != nil {
		return false, fmt.Errorf("write a file in %s: %w", root, err)
	}
	return unix.IoctlFileClone(int(files[1].Fd()), int(files[0].Fd())) == nil, nil
}

// inDirectory opens the directory of path and returns its last part, checked, for calls that take a name in a directory.
func inDirectory(path string) (*os.File, string, error) {
	dir, name := filepath.Split(path)
	if name == "" || name == "." || name == ".." || strings.ContainsRune(name, 0) {
		return nil, "", fmt.Errorf("%q names no directory: %w", path, unix.EINVAL)
	}
	f, err := os.Open(dir)
	return f, name, err
}
