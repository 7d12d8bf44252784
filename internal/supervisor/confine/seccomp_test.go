package confine

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

// call is what the kernel shows a filter, struct seccomp_data.
type call struct {
	nr, arch uint32
	args     [6]uint64
}

// evaluate interprets a filter as seccomp does: words are loaded in the machine's order.
func evaluate(t *testing.T, c call) uint32 {
	t.Helper()
	data := make([]byte, 64)
	binary.LittleEndian.PutUint32(data, c.nr)
	binary.LittleEndian.PutUint32(data[4:], c.arch)
	for i, a := range c.args {
		binary.LittleEndian.PutUint64(data[16+8*i:], a)
	}
	code, a := Filter(), uint32(0)
	for pc := 0; pc < len(code); pc++ {
		i := code[pc]
		branch := func(yes bool) {
			if yes {
				pc += int(i.Jt)
			} else {
				pc += int(i.Jf)
			}
		}
		switch i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			a = binary.LittleEndian.Uint32(data[i.K:])
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			branch(a == i.K)
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			branch(a >= i.K)
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			branch(a&i.K != 0)
		case unix.BPF_JMP | unix.BPF_JA:
			pc += int(i.K)
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= i.K
		case unix.BPF_RET | unix.BPF_K:
			return i.K
		default:
			t.Fatalf("instruction %d: unknown code %#x", pc, i.Code)
		}
	}
	t.Fatal("the program has no end")
	return 0
}

func errno(e unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(e) }

const native = unix.AUDIT_ARCH_X86_64

// TestEveryCall compares the compiled search with the table, call by call.
func TestEveryCall(t *testing.T) {
	want := map[uint32]action{}
	for a, list := range table {
		for _, nr := range list {
			if _, twice := want[uint32(nr)]; twice {
				t.Errorf("call %d is in the table twice", nr)
			}
			if nr > newest {
				t.Errorf("call %d is above newest", nr)
			}
			want[uint32(nr)] = a
		}
	}
	for nr := range uint32(1200) {
		got := evaluate(t, call{nr: nr, arch: native})
		switch a := want[nr]; {
		case nr > newest, a == missing:
			if got != errno(unix.ENOSYS) {
				t.Errorf("call %d: %#x, want ENOSYS", nr, got)
			}
		case a == deny:
			if got != errno(unix.EPERM) {
				t.Errorf("call %d: %#x, want EPERM", nr, got)
			}
		case a == allow:
			if got != unix.SECCOMP_RET_ALLOW {
				t.Errorf("call %d: %#x, want allowed", nr, got)
			}
		}
	}
	for _, c := range []call{
		{nr: unix.SYS_GETPID, arch: unix.AUDIT_ARCH_I386},
		{nr: unix.SYS_GETPID, arch: unix.AUDIT_ARCH_AARCH64},
		{nr: 0x40000000 | unix.SYS_GETPID, arch: native},
		{nr: 0x40000000 | unix.SYS_IOCTL, arch: native},
		{nr: 0xffffffff, arch: native},
	} {
		if got := evaluate(t, c); got != errno(unix.ENOSYS) {
			t.Errorf("%+v: %#x, want ENOSYS", c, got)
		}
	}
}

// TestRows is the table against Docker's defaults, row by row: what a container of Docker, with the capabilities
// kept here, gets for the call; and ours where it differs on purpose.
func TestRows(t *testing.T) {
	const ok, eperm, enosys = "allow", "EPERM", "ENOSYS"
	names := map[uint32]string{
		unix.SECCOMP_RET_ALLOW: ok, errno(unix.EPERM): eperm, errno(unix.ENOSYS): enosys,
		errno(unix.ENOMEM): "ENOMEM", errno(unix.EINVAL): "EINVAL", errno(unix.EAFNOSUPPORT): "EAFNOSUPPORT", errno(unix.EPROTONOSUPPORT): "EPROTONOSUPPORT",
	}
	for _, r := range []struct {
		name         string
		nr           uint32
		args         [6]uint64
		docker, ours string
	}{
		{"clone of a thread", unix.SYS_CLONE, [6]uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, ok, ok},
		{"clone of a process", unix.SYS_CLONE, [6]uint64{uint64(unix.SIGCHLD)}, ok, ok},
		{"clone, new user namespace", unix.SYS_CLONE, [6]uint64{unix.CLONE_NEWUSER}, eperm, eperm},
		{"clone, new mount namespace", unix.SYS_CLONE, [6]uint64{unix.CLONE_NEWNS | unix.CLONE_VM}, eperm, eperm},
		{"clone, new cgroup namespace", unix.SYS_CLONE, [6]uint64{unix.CLONE_NEWCGROUP}, eperm, eperm},
		{"clone, flag hidden by high bits", unix.SYS_CLONE, [6]uint64{1<<40 | unix.CLONE_NEWPID}, eperm, eperm},
		{"clone3", unix.SYS_CLONE3, [6]uint64{}, enosys, enosys},
		{"unshare", unix.SYS_UNSHARE, [6]uint64{}, eperm, eperm},
		{"setns", unix.SYS_SETNS, [6]uint64{}, eperm, eperm},
		{"mount", unix.SYS_MOUNT, [6]uint64{}, eperm, eperm},
		{"ptrace", unix.SYS_PTRACE, [6]uint64{}, ok, ok},
		{"process_vm_readv", unix.SYS_PROCESS_VM_READV, [6]uint64{}, ok, ok},
		{"process_vm_writev", unix.SYS_PROCESS_VM_WRITEV, [6]uint64{}, ok, ok},
		{"kcmp", unix.SYS_KCMP, [6]uint64{}, eperm, eperm},
		{"pidfd_getfd", unix.SYS_PIDFD_GETFD, [6]uint64{}, eperm, eperm},
		{"chroot", unix.SYS_CHROOT, [6]uint64{}, ok, ok},
		{"name_to_handle_at", unix.SYS_NAME_TO_HANDLE_AT, [6]uint64{}, ok, ok},
		{"open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, [6]uint64{}, eperm, eperm},
		{"io_uring_setup", unix.SYS_IO_URING_SETUP, [6]uint64{}, eperm, eperm},
		{"userfaultfd", unix.SYS_USERFAULTFD, [6]uint64{}, eperm, eperm},
		{"bpf", unix.SYS_BPF, [6]uint64{}, eperm, eperm},
		{"perf_event_open", unix.SYS_PERF_EVENT_OPEN, [6]uint64{}, eperm, eperm},
		{"keyctl", unix.SYS_KEYCTL, [6]uint64{}, eperm, eperm},
		{"add_key", unix.SYS_ADD_KEY, [6]uint64{}, eperm, eperm},
		{"request_key", unix.SYS_REQUEST_KEY, [6]uint64{}, eperm, eperm},
		{"mbind", unix.SYS_MBIND, [6]uint64{}, eperm, eperm},
		{"syslog", unix.SYS_SYSLOG, [6]uint64{}, eperm, eperm},
		{"kexec_file_load", unix.SYS_KEXEC_FILE_LOAD, [6]uint64{}, eperm, eperm},
		{"open_tree_attr", unix.SYS_OPEN_TREE_ATTR, [6]uint64{}, eperm, eperm},
		{"landlock_restrict_self", unix.SYS_LANDLOCK_RESTRICT_SELF, [6]uint64{}, ok, ok},
		{"mseal", unix.SYS_MSEAL, [6]uint64{}, ok, ok},
		{"futex_wait", unix.SYS_FUTEX_WAIT, [6]uint64{}, ok, ok},
		{"statmount", unix.SYS_STATMOUNT, [6]uint64{}, ok, enosys},
		{"listmount", unix.SYS_LISTMOUNT, [6]uint64{}, ok, enosys},
		{"memfd_secret", unix.SYS_MEMFD_SECRET, [6]uint64{}, ok, enosys},
		{"personality of Linux", unix.SYS_PERSONALITY, [6]uint64{0}, ok, ok},
		{"personality asked for", unix.SYS_PERSONALITY, [6]uint64{0xffffffff}, ok, ok},
		{"personality without randomisation", unix.SYS_PERSONALITY, [6]uint64{0x0040000}, eperm, eperm},
		{"socket UNIX", unix.SYS_SOCKET, [6]uint64{unix.AF_UNIX}, ok, ok},
		{"socket INET6", unix.SYS_SOCKET, [6]uint64{unix.AF_INET6}, ok, ok},
		{"socket INET, TCP", unix.SYS_SOCKET, [6]uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP}, ok, ok},
		{"socket INET6, ICMPv6", unix.SYS_SOCKET, [6]uint64{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_ICMPV6}, ok, ok},
		{"socket INET, SCTP", unix.SYS_SOCKET, [6]uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, ok, "EPROTONOSUPPORT"},
		{"socket INET6, L2TP", unix.SYS_SOCKET, [6]uint64{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_L2TP}, ok, "EPROTONOSUPPORT"},
		{"socket INET, SMC", unix.SYS_SOCKET, [6]uint64{unix.AF_INET, unix.SOCK_STREAM, 256}, ok, "EPROTONOSUPPORT"},
		{"mmap", unix.SYS_MMAP, [6]uint64{3: unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE}, ok, ok},
		{"mmap of huge pages", unix.SYS_MMAP, [6]uint64{3: unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_HUGETLB}, ok, "ENOMEM"},
		{"memfd_create", unix.SYS_MEMFD_CREATE, [6]uint64{1: unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING}, ok, ok},
		{"memfd_create of huge pages", unix.SYS_MEMFD_CREATE, [6]uint64{1: unix.MFD_HUGETLB | 21<<26}, ok, enosys},
		{"prctl PR_SET_NAME", unix.SYS_PRCTL, [6]uint64{unix.PR_SET_NAME}, ok, ok},
		{"prctl PR_SCHED_CORE", unix.SYS_PRCTL, [6]uint64{unix.PR_SCHED_CORE}, ok, "EINVAL"},
		{"socket VSOCK", unix.SYS_SOCKET, [6]uint64{unix.AF_VSOCK}, eperm, "EAFNOSUPPORT"},
		{"socket ALG", unix.SYS_SOCKET, [6]uint64{unix.AF_ALG}, ok, "EAFNOSUPPORT"},
		{"socket PACKET", unix.SYS_SOCKET, [6]uint64{unix.AF_PACKET}, ok, "EAFNOSUPPORT"},
		{"socket TIPC", unix.SYS_SOCKET, [6]uint64{unix.AF_TIPC}, ok, "EAFNOSUPPORT"},
		{"netlink ROUTE", unix.SYS_SOCKET, [6]uint64{unix.AF_NETLINK, 0, unix.NETLINK_ROUTE}, ok, ok},
		{"netlink NETFILTER", unix.SYS_SOCKET, [6]uint64{unix.AF_NETLINK, 0, unix.NETLINK_NETFILTER}, ok, "EPROTONOSUPPORT"},
		{"netlink AUDIT", unix.SYS_SOCKET, [6]uint64{unix.AF_NETLINK, 0, unix.NETLINK_AUDIT}, ok, "EPROTONOSUPPORT"},
		{"ioctl TCGETS", unix.SYS_IOCTL, [6]uint64{0, unix.TCGETS}, ok, ok},
		{"ioctl TIOCSTI", unix.SYS_IOCTL, [6]uint64{0, unix.TIOCSTI}, ok, eperm},
		{"ioctl TIOCSTI, high bits", unix.SYS_IOCTL, [6]uint64{0, 1<<32 | unix.TIOCSTI}, ok, eperm},
		{"ioctl TIOCLINUX", unix.SYS_IOCTL, [6]uint64{0, 0x541c}, ok, eperm},
		{"ioctl TIOCSCTTY", unix.SYS_IOCTL, [6]uint64{0, unix.TIOCSCTTY}, ok, ok},
		{"ioctl FITRIM", unix.SYS_IOCTL, [6]uint64{0, 0xc0185879}, ok, eperm},
		{"ioctl FIFREEZE", unix.SYS_IOCTL, [6]uint64{0, 0xc0045877}, ok, eperm},
		{"ioctl EXT4_IOC_MOVE_EXT", unix.SYS_IOCTL, [6]uint64{0, 0xc028660f}, ok, eperm},
		{"ioctl XFS_IOC_EXCHANGE_RANGE", unix.SYS_IOCTL, [6]uint64{0, 0x40285881}, ok, eperm},
		{"ioctl FICLONE", unix.SYS_IOCTL, [6]uint64{0, unix.FICLONE}, ok, ok},
		{"ioctl FIDEDUPERANGE", unix.SYS_IOCTL, [6]uint64{0, unix.FIDEDUPERANGE}, ok, ok},
		{"ioctl BTRFS_IOC_SNAP_DESTROY", unix.SYS_IOCTL, [6]uint64{0, 0x5000940f}, ok, eperm},
		{"ioctl FS_IOC_SETFLAGS", unix.SYS_IOCTL, [6]uint64{0, unix.FS_IOC_SETFLAGS}, ok, ok},
	} {
		if got := names[evaluate(t, call{nr: r.nr, arch: native, args: r.args})]; got != r.ours {
			t.Errorf("%s: %s, want %s (Docker: %s)", r.name, got, r.ours, r.docker)
		}
	}
}

func TestFilterFits(t *testing.T) {
	// BPF_MAXINSNS (linux/bpf_common.h).
	if n := len(Filter()); n > 4096 {
		t.Errorf("%d instructions", n)
	} else {
		t.Logf("%d instructions", n)
	}
}

// TestCapabilities is Docker's default set, and what differs.
func TestCapabilities(t *testing.T) {
	docker := map[string]int{
		"CHOWN": unix.CAP_CHOWN, "DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "FSETID": unix.CAP_FSETID, "FOWNER": unix.CAP_FOWNER,
		"MKNOD": unix.CAP_MKNOD, "NET_RAW": unix.CAP_NET_RAW, "SETGID": unix.CAP_SETGID, "SETUID": unix.CAP_SETUID,
		"SETFCAP": unix.CAP_SETFCAP, "SETPCAP": unix.CAP_SETPCAP, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
		"SYS_CHROOT": unix.CAP_SYS_CHROOT, "KILL": unix.CAP_KILL, "AUDIT_WRITE": unix.CAP_AUDIT_WRITE,
	}
	want := uint64(0)
	for name, c := range docker {
		if name != "NET_RAW" {
			want |= 1 << c
		}
	}
	if Capabilities != want {
		t.Errorf("capabilities %#x, want %#x", Capabilities, want)
	}
	if FileCapabilities&^Capabilities != 0 {
		t.Errorf("file workers have %#x beyond the workload", FileCapabilities&^Capabilities)
	}
}

// TestMasks: Docker's lists (moby oci/defaults.go) are complete but for what is named.
func TestMasks(t *testing.T) {
	masked := map[string]bool{}
	for _, m := range MaskedProc {
		masked["/proc/"+m.Path] = true
	}
	for _, m := range MaskedSys {
		masked["/sys/"+m.Path] = true
	}
	for _, p := range []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
		"/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
	} {
		if !masked[p] {
			t.Errorf("%s is not masked", p)
		}
	}
	readOnly := map[string]bool{}
	for _, p := range ReadOnlyProc {
		readOnly[p] = true
	}
	for _, p := range []string{"bus", "fs", "irq", "sys", "sysrq-trigger"} {
		if !readOnly[p] {
			t.Errorf("/proc/%s is not read-only", p)
		}
	}
}
