package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From include/uapi/linux/btrfs.h.
const (
	iocSnapDestroy    = 0x5000940f // _IOW(0x94, 15, struct btrfs_ioctl_vol_args)
	iocInoLookup      = 0xd0009412 // _IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)
	iocSnapCreateV2   = 0x50009417 // _IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)
	iocSubvolCreateV2 = 0x50009418 // _IOW(0x94, 24, struct btrfs_ioctl_vol_args_v2)
	iocFSInfo         = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	iocQuotaCtl       = 0xc0109428 // _IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)
	iocQgroupLimit    = 0x8030942b // _IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)

	quotaEnable       = 1
	quotaEnableSimple = 4 // Linux 6.7: counted where extents are made, without walking back references

	subvolReadOnly         = 1 << 1
	subvolQgroupInherit    = 1 << 2
	qgroupInheritSetLimits = 1 << 0
	qgroupLimitMaxRfer     = 1 << 0

	firstFreeObject = 256 // the inode number of a subvolume's root
)

type volArgs struct {
	fd   int64
	name [4088]byte
}

type qgroupLimit struct{ flags, maxRfer, maxExcl, rsvRfer, rsvExcl uint64 }

type qgroupInherit struct {
	flags, groups, refCopies, exclCopies uint64
	limit                                qgroupLimit
}

type volArgsV2 struct {
	fd             int64
	transid, flags uint64
	size           uint64 // of inherit
	inherit        unsafe.Pointer
	_              [2]uint64
	name           [4040]byte
}

type lookupArgs struct {
	tree, object uint64
	name         [4080]byte
}

type quotaCtl struct{ cmd, status uint64 }

type qgroupLimitArgs struct {
	group uint64
	limit qgroupLimit
}

type fsInfo struct {
	maxID, devices uint64
	fsid           [16]byte
	_              [992]byte
}

func ioctl(fd int, request uint, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// openBtrfs finds the quota groups of the file system, and switches them on where that is ours to decide.
func (d *Disk) openBtrfs(_ unix.Statfs_t, owned bool) error {
	f, err := os.Open(d.root)
	if err != nil {
		return err
	}
	defer f.Close()
	var info fsInfo
	if err := ioctl(int(f.Fd()), iocFSInfo, unsafe.Pointer(&info)); err != nil {
		return fmt.Errorf("ask for the file system's ID: %w", err)
	}
	u := info.fsid
	d.sysfs = fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x/qgroups", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
	on := func() bool {
		b, err := os.ReadFile(filepath.Join(d.sysfs, "enabled"))
		return err == nil && strings.TrimSpace(string(b)) == "1"
	}
	if !on() && owned {
		err := ioctl(int(f.Fd()), iocQuotaCtl, unsafe.Pointer(&quotaCtl{cmd: quotaEnableSimple}))
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			err = ioctl(int(f.Fd()), iocQuotaCtl, unsafe.Pointer(&quotaCtl{cmd: quotaEnable}))
		}
		if err != nil {
			return fmt.Errorf("switch on the quota groups of %s: %w", d.root, err)
		}
	}
	if on() {
		d.mode = ModeSubvolume
	}
	return nil
}

func (d *Disk) makeSubvolume(path string, limit int64) error {
	parent, name, err := inDirectory(path)
	if err != nil {
		return err
	}
	defer parent.Close()
	inherit := &pooledInherit{qgroupInherit{flags: qgroupInheritSetLimits, limit: qgroupLimit{flags: qgroupLimitMaxRfer, maxRfer: uint64(limit)}}, poolGroup}
	args := &volArgsV2{flags: subvolQgroupInherit, size: uint64(unsafe.Sizeof(inherit.qgroupInherit)), inherit: unsafe.Pointer(inherit)}
	d.mu.Lock()
	if d.pool >= 0 {
		inherit.groups, args.size = 1, uint64(unsafe.Sizeof(*inherit))
	}
	d.mu.Unlock()
	if copy(args.name[:len(args.name)-1], name) != len(name) {
		return fmt.Errorf("subvolume %q: %w", name, unix.ENAMETOOLONG)
	}
	if err := ioctl(int(parent.Fd()), iocSubvolCreateV2, unsafe.Pointer(args)); err != nil {
		return fmt.Errorf("make a subvolume: %w", err)
	}
	return os.Chmod(path, 0o700)
}

// copySubvolume makes a read-only snapshot. It has what was not flushed yet too, also through mappings: the kernel writes that
// first (btrfs_start_delalloc_snapshot).
func copySubvolume(path, to string) error {
	from, _, err := subvolume(path)
	if err != nil {
		return err
	}
	defer from.Close()
	parent, name, err := inDirectory(to)
	if err != nil {
		return err
	}
	defer parent.Close()
	args := &volArgsV2{fd: int64(from.Fd()), flags: subvolReadOnly}
	if copy(args.name[:len(args.name)-1], name) != len(name) {
		return fmt.Errorf("subvolume %q: %w", name, unix.ENAMETOOLONG)
	}
	if err := ioctl(int(parent.Fd()), iocSnapCreateV2, unsafe.Pointer(args)); err != nil {
		return fmt.Errorf("copy a subvolume: %w", err)
	}
	return nil
}

func destroySubvolume(parent int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(parent, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if st.Ino != firstFreeObject || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.EINVAL
	}
	args := &volArgs{}
	if copy(args.name[:len(args.name)-1], name) != len(name) {
		return unix.ENAMETOOLONG
	}
	// On another file system this request is not known, or another's: 0x94 is btrfs' own.
	return ioctl(parent, iocSnapDestroy, unsafe.Pointer(args))
}

// subvolume returns the ID of the subvolume whose root is path, which is also that of its quota group.
func subvolume(path string) (*os.File, uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	args := &lookupArgs{object: firstFreeObject}
	if err := ioctl(int(f.Fd()), iocInoLookup, unsafe.Pointer(args)); err != nil {
		f.Close()
		return nil, 0, fmt.Errorf("ask for the ID of a subvolume: %w", err)
	}
	return f, args.tree, nil
}

func (d *Disk) limitSubvolume(path string, limit int64) error {
	f, id, err := subvolume(path)
	if err != nil {
		return err
	}
	defer f.Close()
	args := &qgroupLimitArgs{group: id, limit: qgroupLimit{flags: qgroupLimitMaxRfer, maxRfer: uint64(limit)}}
	if err := ioctl(int(f.Fd()), iocQgroupLimit, unsafe.Pointer(args)); err != nil {
		return fmt.Errorf("set the limit of a quota group: %w", err)
	}
	return nil
}

func (d *Disk) usedSubvolume(path string) (int64, error) {
	f, id, err := subvolume(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b, err := os.ReadFile(filepath.Join(d.sysfs, "0_"+strconv.FormatUint(id, 10), "referenced"))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}
