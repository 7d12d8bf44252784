package datadir

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Mount is one line of /proc/self/mountinfo (proc_pid_mountinfo(5)).
type Mount struct {
	ID      int
	Point   string
	Options string
	Shared  bool
	Type    string
	Source  string // a device, or what the file system says
}

// Mounts lists the mounts of this process's mount namespace, in the kernel's order: of two on one point the later is on top.
func Mounts() ([]Mount, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	return parseMounts(b), nil
}

func parseMounts(b []byte) []Mount {
	var mounts []Mount
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		before, after, found := strings.Cut(lines.Text(), " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if !found || len(fields) < 6 || len(rest) < 2 {
			continue
		}
		id, err := strconv.Atoi(fields[0])
		if err != nil {
			continue
		}
		m := Mount{ID: id, Point: unescape(fields[4]), Options: fields[5], Type: rest[0], Source: unescape(rest[1])}
		for _, tag := range fields[6:] {
			m.Shared = m.Shared || strings.HasPrefix(tag, "shared:")
		}
		mounts = append(mounts, m)
	}
	return mounts
}

// unescape undoes the kernel's octal escapes of blanks and backslashes.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

func (m Mount) has(option string) bool {
	for o := range strings.SplitSeq(m.Options, ",") {
		if o == option {
			return true
		}
	}
	return false
}

// bindMount mounts the directory on itself, private, nosuid and nodev, unless that was done since the machine booted.
// Uppers keep canonical IDs: a setuid-root file made inside would be one for the node's users too.
//
// What lies on top of the directory is ours when node.json says that we made one in this boot and it is not what lay there before.
// It is never mounted over again: one that was left half made is made whole.
func (d *Dir) bindMount() error {
	top, err := topMount(d.path)
	if err != nil {
		return err
	}
	ours := top.ID != 0 && d.node.Bind != nil && d.node.Bind.Boot == d.boot && d.node.Bind.Below != top.ID
	if !ours {
		changed := d.node
		changed.Bind = &bind{Boot: d.boot, Below: top.ID}
		if err := d.saveNode(changed); err != nil {
			return err
		}
		if err := unix.Mount(d.path, d.path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return d.mountFault(err)
		}
	}
	d.bound = true
	if ours && top.has("nosuid") && top.has("nodev") && !top.Shared {
		return nil
	}
	for _, flags := range []uintptr{unix.MS_PRIVATE | unix.MS_REC, unix.MS_BIND | unix.MS_REMOUNT | unix.MS_NOSUID | unix.MS_NODEV} {
		if err := unix.Mount("", d.path, "", flags, ""); err != nil {
			if !ours {
				_ = unix.Unmount(d.path, unix.MNT_DETACH)
			}
			return d.mountFault(err)
		}
	}
	return nil
}

func (d *Dir) mountFault(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return errs.E(errs.Precondition, "cannot mount %s on itself: no permission", d.path).WithHint("run as root, with CAP_SYS_ADMIN")
	}
	return fmt.Errorf("mount %s on itself: %w", d.path, err)
}

// topMount returns the mount that is seen at path, one without an ID when nothing is mounted there.
func topMount(path string) (Mount, error) {
	mounts, err := Mounts()
	if err != nil {
		return Mount{}, err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		if mounts[i].Point == path {
			return mounts[i], nil
		}
	}
	return Mount{}, nil
}
