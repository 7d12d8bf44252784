// Package confine decides what a sandbox's processes may do: capabilities,
// resource limits, system calls, and what they see of /proc, /sys and /dev. It is
// pure; packages zygote and launch apply it.
//
// The bar is Docker's default profile (moby: daemon/pkg/oci/caps, profiles/seccomp,
// oci/defaults.go) inside a user namespace; every deviation is named and has its
// reason beside it.
package confine

import "golang.org/x/sys/unix"

// Capabilities is the bounding set of everything inside, and the permitted and
// effective set of its root: Docker's default without CAP_NET_RAW, with which a process
// spoofs addresses and bypasses what the node filters at higher layers.
const Capabilities uint64 = 1<<unix.CAP_AUDIT_WRITE |
	1<<unix.CAP_CHOWN |
	1<<unix.CAP_DAC_OVERRIDE |
	1<<unix.CAP_FOWNER |
	1<<unix.CAP_FSETID |
	1<<unix.CAP_KILL |
	1<<unix.CAP_MKNOD |
	1<<unix.CAP_NET_BIND_SERVICE |
	1<<unix.CAP_SETFCAP |
	1<<unix.CAP_SETGID |
	1<<unix.CAP_SETPCAP |
	1<<unix.CAP_SETUID |
	1<<unix.CAP_SYS_CHROOT

// FileCapabilities is what a file worker that acts as root has: what its
// operations need, none that changes the worker itself.
const FileCapabilities uint64 = 1<<unix.CAP_CHOWN |
	1<<unix.CAP_DAC_OVERRIDE |
	1<<unix.CAP_FOWNER |
	1<<unix.CAP_FSETID |
	1<<unix.CAP_SETFCAP

// StackLimit is the soft limit on a command's stack; it also bounds argv and environment (execve(2)).
const StackLimit = 8 << 20

// Rlimit is a resource limit, see getrlimit(2).
type Rlimit struct {
	Resource   int
	Soft, Hard uint64
}

// Rlimits are the limits that everything starts with, as far as the node's own hard limits go.
var Rlimits = []Rlimit{
	// systemd's and containerd's default. A soft limit above 1,024 breaks select(2)
	// and slows programs that close every possible descriptor.
	{unix.RLIMIT_NOFILE, 1024, 524288},
	{unix.RLIMIT_STACK, StackLimit, unix.RLIM_INFINITY},
	// No core files. The kernel ignores 0 when core_pattern names a program, which it would run as the node's root
	// on data from inside; the value 1 stops that too (fs/coredump.c).
	{unix.RLIMIT_CORE, 1, 1},
	{unix.RLIMIT_FSIZE, unix.RLIM_INFINITY, unix.RLIM_INFINITY},
	{unix.RLIMIT_CPU, unix.RLIM_INFINITY, unix.RLIM_INFINITY},
	// The kernel's defaults, whatever the service manager gave the node's daemon: no real-time scheduling, no
	// negative nice values.
	{unix.RLIMIT_NICE, 0, 0},
	{unix.RLIMIT_RTPRIO, 0, 0},
	{unix.RLIMIT_MEMLOCK, 8 << 20, 8 << 20},
	{unix.RLIMIT_MSGQUEUE, 819200, 819200},
}
