package confine

import "golang.org/x/sys/unix"

// Masked is a path that is covered by nothing: an empty read-only directory, or /dev/null.
type Masked struct {
	Path string // below its root
	Dir  bool
}

// MaskedProc are Docker's masks below /proc (oci/defaults.go).
var MaskedProc = []Masked{
	{"acpi", true},
	{"asound", true},
	{"interrupts", false},
	{"kcore", false},
	{"keys", false},
	{"latency_stats", false},
	{"sched_debug", false},
	{"scsi", true},
	{"timer_list", false},
	{"timer_stats", false},
	// Beyond Docker: names of every task that lately waited, and the node's memory layout.
	{"kpagecgroup", false},
	{"kpagecount", false},
	{"kpageflags", false},
}

// MaskedSys are Docker's masks below /sys, but cpu*/thermal_throttle: a mount for every
// processor, to hide counters, would be most of a sandbox's mounts on a big node.
var MaskedSys = []Masked{
	{"devices/virtual/powercap", true},
	{"firmware", true},
}

// ReadOnlyProc are Docker's read-only paths below /proc. All of /sys is read-only.
var ReadOnlyProc = []string{"bus", "fs", "irq", "sys", "sysrq-trigger"}

// Sysctls are written below /proc/sys before it becomes read-only. The first two are Docker's since 20.10; the last
// leaves no nested user namespace even to a process that got around the system call filter.
var Sysctls = [][2]string{
	{"net/ipv4/ip_unprivileged_port_start", "0"},
	{"net/ipv4/ping_group_range", "0 65535"},
	{"user/max_user_namespaces", "0"},
}

// Device is a character device.
type Device struct {
	Name         string
	Major, Minor uint32
}

// Devices exist inside: Docker's, without console. Linux's numbers for them are fixed (admin-guide/devices.txt).
var Devices = []Device{{"full", 1, 7}, {"null", 1, 3}, {"random", 1, 8}, {"tty", 5, 0}, {"urandom", 1, 9}, {"zero", 1, 5}}

// DevLinks are symbolic links in /dev.
var DevLinks = [][2]string{
	{"/proc/self/fd", "fd"},
	{"/proc/self/fd/0", "stdin"},
	{"/proc/self/fd/1", "stdout"},
	{"/proc/self/fd/2", "stderr"},
	{"pts/ptmx", "ptmx"},
}

// Attributes of mounts inside (mount_setattr(2)), Docker's. The root is the only one with setuid programs; it
// is nodev because device nodes in a layer would be live.
const (
	RootAttrs   = unix.MOUNT_ATTR_NODEV
	ProcAttrs   = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	SysAttrs    = ProcAttrs | unix.MOUNT_ATTR_RDONLY
	CgroupAttrs = SysAttrs
	DevAttrs    = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_STRICTATIME
	PtsAttrs    = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	ShmAttrs    = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	MqueueAttrs = ShmAttrs
)

// Option is a mount option; Value is "" for a flag.
type Option struct{ Key, Value string }

// Options of mounts inside.
var (
	DevOptions = []Option{{"mode", "755"}, {"size", "65536k"}}
	// Group 5 is tty in every distribution. Terminals are few on a node, 3,072 (kernel.pty.max less pty.reserve).
	PtsOptions = []Option{{"newinstance", ""}, {"ptmxmode", "0666"}, {"mode", "0620"}, {"gid", "5"}, {"max", "256"}}
	// OverlayOptions turn off what reads trusted.overlay.* of layers (redirect, metacopy) or ties an upper
	// to one node or costs a write to it (index, uuid). xino keeps inode numbers of the layers apart. Volatile: without it
	// the end of every sandbox, and syncfs inside, write all dirty data of the node's disk (ovl_sync_fs syncs the whole file
	// system of the upper). A sandbox ends with the machine's boot, so its files need no sync of their own.
	OverlayOptions = []Option{
		{"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "nofollow"}, {"uuid", "null"}, {"xino", "auto"}, {"volatile", ""},
	}
)
