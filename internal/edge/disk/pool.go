package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From include/uapi/linux/btrfs.h.
const (
	iocSync         = 0x9408     // _IO(0x94, 8)
	iocQgroupCreate = 0x4010942a // _IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)

	// poolGroup is the quota group of all layers together: level 1, number 1.
	poolGroup = 1<<48 | 1

	poolStep   = 4 << 20 // the least change of its limit that is worth a call
	settleStep = 200 * time.Millisecond
)

type qgroupCreateArgs struct{ create, group uint64 }

// pooledInherit has the one group that a new subvolume's group is below.
type pooledInherit struct {
	qgroupInherit
	group uint64
}

// Pool bounds all layers together, so that they leave some of the volume free: so many bytes for what the node writes itself,
// above all to remove sandboxes, and, unless data and metadata share their block groups, what btrfs takes at a time for each: data
// is not let into the last chunk that metadata may need. It returns how much they leave; Balance keeps that up to date. It does nothing, and
// returns 0, where layers are no subvolumes or the volume is not Harena's alone.
func (d *Disk) Pool(leave int64) (int64, error) {
	if d.mode != ModeSubvolume || !d.owned {
		return 0, nil
	}
	f, err := os.Open(d.root)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at the file system of %s: %w", d.root, err)
	}
	if _, err := os.Lstat(filepath.Join(filepath.Dir(d.sysfs), "features/mixed_groups")); err != nil {
		leave += chunks(int64(st.Blocks) * st.Bsize)
	}
	if err := ioctl(int(f.Fd()), iocQgroupCreate, unsafe.Pointer(&qgroupCreateArgs{create: 1, group: poolGroup})); err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, fmt.Errorf("make the quota group of all layers: %w", err)
	}
	d.mu.Lock()
	d.leave, d.pool = leave, 0
	d.mu.Unlock()
	return leave, d.Balance()
}

// chunks is a chunk of data and one of metadata of a volume of that size (fs/btrfs/volumes.c, init_alloc_chunk_ctl: a tenth, at most 1 GiB of
// data, and of metadata 256 MiB below 50 GiB, else 1 GiB).
func chunks(size int64) int64 {
	metadata := int64(1 << 30)
	if size < 50<<30 {
		metadata = 256 << 20
	}
	return min(size/10, 1<<30) + min(size/10, metadata)
}

// Balance sets the limit of all layers to the volume's size without what Pool leaves and without what else is there: image layers,
// records, a swap file, all in the top subvolume. What is free would say less: it does not count what is written and not on disk yet.
func (d *Disk) Balance() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pool < 0 {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(d.root, &st); err != nil {
		return fmt.Errorf("look at the file system of %s: %w", d.root, err)
	}
	limit := int64(st.Blocks)*st.Bsize - d.leave
	for _, name := range []string{"referenced", "rsv_data"} {
		b, err := os.ReadFile(filepath.Join(d.sysfs, "0_5", name))
		if err != nil {
			return fmt.Errorf("read the quota group of the volume: %w", err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return fmt.Errorf("read the quota group of the volume: %w", err)
		}
		limit -= n
	}
	// 0 would mean no limit.
	limit = max(limit, 1)
	if diff := limit - d.pool; diff < poolStep && diff > -poolStep {
		return nil
	}
	f, err := os.Open(d.root)
	if err != nil {
		return err
	}
	defer f.Close()
	args := &qgroupLimitArgs{group: poolGroup, limit: qgroupLimit{flags: qgroupLimitMaxRfer, maxRfer: uint64(limit)}}
	if err := ioctl(int(f.Fd()), iocQgroupLimit, unsafe.Pointer(args)); err != nil {
		return fmt.Errorf("set the limit of all layers: %w", err)
	}
	d.pool = limit
	return nil
}

// Settle waits until so many bytes are free, for a while at most: a subvolume's space comes back some time after it was erased,
// and sooner when the file system commits.
func (d *Disk) Settle(ctx context.Context, want int64, within time.Duration) error {
	if d.mode != ModeSubvolume {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	f, err := os.Open(d.root)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		if err := ioctl(int(f.Fd()), iocSync, nil); err != nil {
			return fmt.Errorf("commit the file system of %s: %w", d.root, err)
		}
		if free, err := d.free(); err != nil || free >= want {
			return errors.Join(err, d.Balance())
		}
		select {
		case <-ctx.Done():
			return d.Balance()
		case <-time.After(settleStep):
		}
	}
}

func (d *Disk) free() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(d.root, &st); err != nil {
		return 0, fmt.Errorf("look at the file system of %s: %w", d.root, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}
