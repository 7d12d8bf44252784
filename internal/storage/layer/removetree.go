package layer

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// removeTree removes a directory tree that may hold mounts left by an
// interrupted bootstrap. They are detached first: removing through a mounted
// /proc or /dev would reach the node's own.
func removeTree(dir string) error {
	for range 3 { // a mount may hide another
		below, err := mountsBelow(dir)
		if err != nil {
			return err
		}
		if len(below) == 0 {
			return os.RemoveAll(dir)
		}
		for i := len(below) - 1; i >= 0; i-- {
			if err := unix.Unmount(below[i].point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
				return fmt.Errorf("unmount %s: %w", below[i].point, err)
			}
		}
	}
	return fmt.Errorf("remove %s: mounts below it do not go away", dir)
}

// mountsBelow lists the mounts at or below dir, in the order of mounting.
func mountsBelow(dir string) ([]mountInfo, error) {
	all, err := readMountInfo()
	if err != nil {
		return nil, err
	}
	var below []mountInfo
	for _, m := range all {
		if m.point == dir || strings.HasPrefix(m.point, dir+"/") {
			below = append(below, m)
		}
	}
	return below, nil
}
