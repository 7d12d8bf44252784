package disk

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From include/uapi/linux/{quota.h,dqblk_xfs.h,fs.h}. The XFS requests work on ext4 too.
const (
	prjQuota      = 2
	qXGetQuota    = (0x5803 << 8) | prjQuota
	qXSetQLim     = (0x5804 << 8) | prjQuota
	qXGetQStatV   = (0x5808 << 8) | prjQuota
	projEnforced  = 1 << 5 // FS_QUOTA_PDQ_ENFD
	dqInoHard     = 1 << 1 // FS_DQ_IHARD
	dqBlkHard     = 1 << 3 // FS_DQ_BHARD
	dqProject     = 2      // FS_PROJ_QUOTA
	basicBlock    = 512
	iocGetXattr   = 0x801c581f // FS_IOC_FSGETXATTR
	iocSetXattr   = 0x401c5820 // FS_IOC_FSSETXATTR
	xflagInherit  = 0x200      // FS_XFLAG_PROJINHERIT
	firstProject  = 0x48000000 // "H": far from what administrators number by hand
	projectsOfOne = 1 << 24
)

type diskQuota struct {
	version, flags       int8
	fields               uint16
	id                   uint32
	blkHard, blkSoft     uint64
	inoHard, inoSoft     uint64
	blocks, inodes       uint64
	iTimer, bTimer       int32
	iWarns, bWarns       uint16
	_                    [4]int8
	rtHard, rtSoft, rtBl uint64
	rtTimer              int32
	rtWarns              uint16
	_                    int16
	_                    [8]byte
}

type fsxattr struct {
	xflags, extsize, nextents, project, cowextsize uint32
	_                                              [8]byte
}

func quotactl(fd int, cmd int, id uint32, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), uintptr(cmd), uintptr(id), uintptr(arg), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// projectsEnforced reports whether the file system bounds projects.
func (d *Disk) projectsEnforced() bool {
	f, err := os.Open(d.root)
	if err != nil {
		return false
	}
	defer f.Close()
	var state struct {
		version int8
		_       uint8
		flags   uint16
		_       [252]byte
	}
	state.version = 1
	return quotactl(int(f.Fd()), qXGetQStatV, 0, unsafe.Pointer(&state)) == nil && state.flags&projEnforced != 0
}

// makeProject gives a new, empty directory a project ID that nothing has.
func (d *Disk) makeProject(path string, limit int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	fd := int(f.Fd())
	for range projectsOfOne {
		d.project = (d.project + 1) % projectsOfOne
		id := firstProject + d.project
		var q diskQuota
		// An ID that nothing was ever charged to is not found on XFS.
		if err := quotactl(fd, qXGetQuota, id, unsafe.Pointer(&q)); err == nil && (q.blocks > 0 || q.inodes > 0) {
			continue
		}
		if err := setProjectLimit(fd, id, limit); err != nil {
			return err
		}
		var x fsxattr
		if err := ioctl(fd, iocGetXattr, unsafe.Pointer(&x)); err != nil {
			return fmt.Errorf("read a directory's project: %w", err)
		}
		x.project, x.xflags = id, x.xflags|xflagInherit
		if err := ioctl(fd, iocSetXattr, unsafe.Pointer(&x)); err != nil {
			return fmt.Errorf("set a directory's project: %w", err)
		}
		return nil
	}
	return fmt.Errorf("every project ID is taken: %w", unix.ENOSPC)
}

func setProjectLimit(fd int, id uint32, limit int64) error {
	q := diskQuota{
		version: 1, flags: dqProject, fields: dqBlkHard | dqInoHard, id: id,
		blkHard: uint64(limit+basicBlock-1) / basicBlock, inoHard: uint64(limit+fileCost-1) / fileCost,
	}
	if err := quotactl(fd, qXSetQLim, id, unsafe.Pointer(&q)); err != nil {
		return fmt.Errorf("set the limit of a project: %w", err)
	}
	return nil
}

// projectOf opens path and returns its project.
func projectOf(path string) (*os.File, uint32, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	var x fsxattr
	if err := ioctl(int(f.Fd()), iocGetXattr, unsafe.Pointer(&x)); err != nil {
		f.Close()
		return nil, 0, fmt.Errorf("read a directory's project: %w", err)
	}
	if x.project < firstProject || x.project >= firstProject+projectsOfOne {
		f.Close()
		return nil, 0, fmt.Errorf("%s has project %d, which is none of ours", path, x.project)
	}
	return f, x.project, nil
}

func (d *Disk) limitProject(path string, limit int64) error {
	f, id, err := projectOf(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return setProjectLimit(int(f.Fd()), id, limit)
}

func (d *Disk) usedProject(path string) (int64, error) {
	f, id, err := projectOf(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var q diskQuota
	if err := quotactl(int(f.Fd()), qXGetQuota, id, unsafe.Pointer(&q)); err != nil {
		return 0, err
	}
	return int64(q.blocks) * basicBlock, nil
}
