package launch

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/confine"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// initConfig is what the program of PID 1 depends on.
type initConfig struct {
	root     *os.File // the overlay, a detached mount
	dev      *os.File // /dev, the same
	hostname string
	shmBytes int64
	// controllers are the v1 hierarchies to show at /sys/fs/cgroup, as comma-separated lists; none: cgroup2.
	controllers []string
}

// noDomain is the kernel's own default (UTS_DOMAINNAME).
const noDomain = "(none)"

// inside opens directories of the image: hostile, so no symbolic link is followed.
const inside = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS

// builder composes PID 1's program.
type builder struct {
	*zygote.Program
	// fs, target and src are used again by each mount.
	fs, target, src zygote.Slot
}

// initProgram makes a new set of namespaces into the sandbox. It runs before anything untrusted, in a
// process that sees the node's mounts until pivot_root; it fails on the first surprise.
func initProgram(c initConfig) *zygote.Program {
	b := &builder{Program: zygote.NewProgram()}
	root, dev := b.File(c.root), b.File(c.dev)
	b.fs, b.target, b.src = b.NewSlot(), b.NewSlot(), b.NewSlot()

	b.Root()
	// The namespace's root is PID 1's group, the parent of every command's.
	b.Call("cgroup-namespace", unix.SYS_UNSHARE, unix.CLONE_NEWCGROUP)

	b.Call("private-mounts", unix.SYS_MOUNT, 0, "/", 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	b.Call("attach-root", unix.SYS_MOVE_MOUNT, root, "", atCwd, "/", unix.MOVE_MOUNT_F_EMPTY_PATH)
	b.Call("enter-root", unix.SYS_FCHDIR, root)

	// While the node's own are still in sight: the kernel gives a user namespace a new procfs or sysfs only
	// then (mount_too_revealing in fs/namespace.c).
	proc := b.mount("proc", "proc", root, "proc", confine.ProcAttrs, nil)
	sys := b.mount("sys", "sysfs", root, "sys", confine.SysAttrs, nil)
	b.openat("dev", root, "dev", unix.O_PATH|unix.O_DIRECTORY)
	b.move("dev", dev)
	b.close(b.target)
	b.sub("pts", "devpts", dev, confine.PtsAttrs, confine.PtsOptions)
	shm := []confine.Option{{Key: "mode", Value: "1777"}, {Key: "size", Value: fmt.Sprint(c.shmBytes)}}
	b.sub("shm", "tmpfs", dev, confine.ShmAttrs, shm)
	b.sub("mqueue", "mqueue", dev, confine.MqueueAttrs, nil)

	b.network()
	for _, s := range confine.Sysctls {
		b.openat("sysctl "+s[0], proc, "sys/"+s[0], unix.O_WRONLY).Unless(unix.ENOENT, func() {
			b.Call("sysctl "+s[0], unix.SYS_WRITE, b.target, s[1], len(s[1]))
			b.close(b.target)
		})
	}
	for _, m := range confine.MaskedProc {
		b.mask(proc, sys, dev, m)
	}
	for _, m := range confine.MaskedSys {
		b.mask(sys, sys, dev, m)
	}
	for _, path := range confine.ReadOnlyProc {
		b.readOnly(proc, path)
	}
	// After the masks, which use the directory below.
	b.cgroups(sys, c.controllers)

	b.Call("hostname", unix.SYS_SETHOSTNAME, c.hostname, len(c.hostname))
	b.Call("domainname", unix.SYS_SETDOMAINNAME, noDomain, len(noDomain)) // a new namespace has the node's
	b.Call("pivot-root", unix.SYS_PIVOT_ROOT, ".", ".")
	b.Call("leave-node", unix.SYS_UMOUNT2, ".", unix.MNT_DETACH)
	b.Call("chdir", unix.SYS_CHDIR, "/")
	return b.Program
}

// atCwd is AT_FDCWD as a system call argument.
const atCwd = ^uint64(99)

// mount makes a file system, attaches it to a directory and returns the slot of the mount.
func (b *builder) mount(name, fstype string, dir zygote.Slot, path string, attrs int, options []confine.Option) zygote.Slot {
	m := b.NewSlot()
	b.openat(name, dir, path, unix.O_PATH|unix.O_DIRECTORY)
	b.Call(name, unix.SYS_FSOPEN, fstype, unix.FSOPEN_CLOEXEC).Into(b.fs)
	b.attach(name, m, attrs, options)
	return m
}

// sub makes a directory in dev and mounts on it, unless the kernel lacks the file system.
func (b *builder) sub(name, fstype string, dev zygote.Slot, attrs int, options []confine.Option) {
	b.Call(name, unix.SYS_FSOPEN, fstype, unix.FSOPEN_CLOEXEC).Into(b.fs).Unless(unix.ENODEV, func() {
		b.Call(name, unix.SYS_MKDIRAT, dev, name, 0o755)
		b.openat(name, dev, name, unix.O_PATH|unix.O_DIRECTORY)
		b.attach(name, b.src, attrs, options)
		b.close(b.src)
	})
}

// attach mounts the file system in b.fs on b.target and leaves the mount in m.
func (b *builder) attach(name string, m zygote.Slot, attrs int, options []confine.Option) {
	for _, o := range options {
		if o.Value == "" {
			b.Call(name, unix.SYS_FSCONFIG, b.fs, unix.FSCONFIG_SET_FLAG, o.Key, 0, 0)
		} else {
			b.Call(name, unix.SYS_FSCONFIG, b.fs, unix.FSCONFIG_SET_STRING, o.Key, o.Value, 0)
		}
	}
	b.Call(name, unix.SYS_FSCONFIG, b.fs, unix.FSCONFIG_CMD_CREATE, 0, 0, 0)
	b.Call(name, unix.SYS_FSMOUNT, b.fs, unix.FSMOUNT_CLOEXEC, attrs).Into(m)
	b.move(name, m)
	b.close(b.fs)
	b.close(b.target)
}

// move attaches the detached mount in m to b.target.
func (b *builder) move(name string, m zygote.Slot) {
	b.Call(name, unix.SYS_MOVE_MOUNT, m, "", b.target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// openat opens a path below dir into b.target.
func (b *builder) openat(name string, dir zygote.Slot, path string, flags uint64) zygote.Call {
	how := make([]byte, 0, unix.SizeofOpenHow)
	for _, v := range []uint64{flags | unix.O_CLOEXEC | unix.O_NOFOLLOW, 0, inside} {
		how = appendUint64(how, v)
	}
	return b.Call(name, unix.SYS_OPENAT2, dir, path, how, len(how)).Into(b.target)
}

func (b *builder) close(s zygote.Slot) { b.Call("close", unix.SYS_CLOSE, s) }

// network brings the loopback interface up.
func (b *builder) network() {
	// struct ifreq: the name, then the flags.
	ifreq := make([]byte, 40)
	copy(ifreq, "lo")
	ifreq[unix.IFNAMSIZ] = unix.IFF_UP
	b.Call("loopback", unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0).Into(b.src)
	b.Call("loopback", unix.SYS_IOCTL, b.src, unix.SIOCSIFFLAGS, ifreq)
	b.close(b.src)
}

// mask covers a path below dir, if there is one. The cover of directories is a directory of sysfs that the kernel
// keeps empty for ever, as a mount point: it costs no file system of its own.
func (b *builder) mask(dir, sys, dev zygote.Slot, m confine.Masked) {
	name := "mask " + m.Path
	b.openat(name, dir, m.Path, unix.O_PATH).Unless(unix.ENOENT, func() {
		if m.Dir {
			b.Call(name, unix.SYS_OPEN_TREE, sys, "fs/cgroup", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC).Into(b.src)
		} else {
			b.Call(name, unix.SYS_OPEN_TREE, dev, "null", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC).Into(b.src)
		}
		b.move(name, b.src)
		b.close(b.src)
		b.close(b.target)
	})
}

// readOnly covers a path below dir by a read-only view of itself, if there is one.
func (b *builder) readOnly(dir zygote.Slot, path string) {
	name := "read-only " + path
	b.openat(name, dir, path, unix.O_PATH).Unless(unix.ENOENT, func() {
		b.Call(name, unix.SYS_OPEN_TREE, b.target, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH).Into(b.src)
		b.attrs(name, b.src, unix.MOUNT_ATTR_RDONLY)
		b.move(name, b.src)
		b.close(b.src)
		b.close(b.target)
	})
}

// attrs adds attributes to a mount.
func (b *builder) attrs(name string, m zygote.Slot, set uint64) {
	var attr []byte // struct mount_attr
	for _, v := range []uint64{set, 0, 0, 0} {
		attr = appendUint64(attr, v)
	}
	b.Call(name, unix.SYS_MOUNT_SETATTR, m, "", unix.AT_EMPTY_PATH, attr, len(attr))
}

// cgroups shows the sandbox's own groups, read-only: programs size themselves by the limits there.
func (b *builder) cgroups(sys zygote.Slot, controllers []string) {
	if len(controllers) == 0 {
		b.close(b.mount("cgroup", "cgroup2", sys, "fs/cgroup", confine.CgroupAttrs, nil))
		return
	}
	top := b.mount("cgroup", "tmpfs", sys, "fs/cgroup", confine.CgroupAttrs&^unix.MOUNT_ATTR_RDONLY, []confine.Option{{Key: "mode", Value: "755"}})
	m := b.NewSlot()
	for _, c := range controllers {
		b.Call("cgroup "+c, unix.SYS_MKDIRAT, top, c, 0o755)
		b.openat("cgroup "+c, top, c, unix.O_PATH|unix.O_DIRECTORY)
		b.Call("cgroup "+c, unix.SYS_FSOPEN, "cgroup", unix.FSOPEN_CLOEXEC).Into(b.fs)
		b.attach("cgroup "+c, m, confine.CgroupAttrs, splitOptions(c))
		b.close(m)
	}
	b.attrs("cgroup", top, unix.MOUNT_ATTR_RDONLY)
}

// splitOptions are the mount options for a v1 hierarchy's controllers.
func splitOptions(controllers string) []confine.Option {
	var out []confine.Option
	for _, c := range strings.Split(controllers, ",") {
		out = append(out, confine.Option{Key: c})
	}
	return out
}
