package confine

import (
	"sync"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data (include/uapi/linux/seccomp.h), little-endian.
const (
	offNr   = 0
	offArch = 4
	offArgs = 16
)

const (
	retAllow = unix.SECCOMP_RET_ALLOW
	retErrno = unix.SECCOMP_RET_ERRNO
)

// Filter returns the seccomp program. It never changes; callers do not write to it.
var Filter = sync.OnceValue(compile)

// compile turns the table into classic BPF (seccomp(2), bpf(4)): a binary search over ranges of calls with one action, at whose
// leaves arguments are looked at.
func compile() []unix.SockFilter {
	code := []unix.SockFilter{
		load(offArch),
		jump(unix.BPF_JEQ, unix.AUDIT_ARCH_X86_64, 1, 0),
		ret(retErrno | uint32(unix.ENOSYS)),
		load(offNr),
	}
	return append(code, search(ranges())...)
}

// span is calls from first up to the next span's first.
type span struct {
	first uint32
	do    action
}

// ranges lists the table's spans in order.
func ranges() []span {
	byNr := make([]action, newest+1)
	for a, list := range table {
		for _, nr := range list {
			byNr[nr] = a
		}
	}
	var out []span
	for nr, a := range byNr {
		if len(out) == 0 || out[len(out)-1].do != a {
			out = append(out, span{uint32(nr), a})
		}
	}
	return append(out, span{newest + 1, missing})
}

// search emits a binary search for the call in the accumulator. The last span covers calls of the x32 ABI too, which set bit 30.
func search(s []span) []unix.SockFilter {
	if len(s) == 1 {
		return leaf(s[0].do)
	}
	mid := len(s) / 2
	low, high := search(s[:mid]), search(s[mid:])
	var code []unix.SockFilter
	if len(low) <= 255 {
		code = append(code, jump(unix.BPF_JGE, s[mid].first, uint8(len(low)), 0))
	} else {
		// Conditional jumps reach 255 instructions.
		code = append(code, jump(unix.BPF_JGE, s[mid].first, 0, 1), always(uint32(len(low))))
	}
	return append(append(code, low...), high...)
}

func leaf(a action) []unix.SockFilter {
	eperm := ret(retErrno | uint32(unix.EPERM))
	switch a {
	case allow:
		return []unix.SockFilter{ret(retAllow)}
	case missing:
		return []unix.SockFilter{ret(retErrno | uint32(unix.ENOSYS))}
	case argClone:
		return []unix.SockFilter{load(arg(0)), jump(unix.BPF_JSET, namespaceFlags, 0, 1), eperm, ret(retAllow)}
	case argPersonality:
		return append(append([]unix.SockFilter{load(arg(0))}, oneOf(personalities, ret(retAllow))...), eperm)
	case argSocket:
		// What the kernel says without the protocol: sudo's and PAM's audit code then goes on.
		noProtocol := ret(retErrno | uint32(unix.EPROTONOSUPPORT))
		inet := append([]unix.SockFilter{load(arg(2))}, oneOf(inetProtocols, ret(retAllow))...)
		inet = append(inet, noProtocol)
		code := append([]unix.SockFilter{load(arg(0))}, oneOf([]uint32{unix.AF_UNIX}, ret(retAllow))...)
		code = append(code, jump(unix.BPF_JEQ, unix.AF_INET, 1, 0), jump(unix.BPF_JEQ, unix.AF_INET6, 0, uint8(len(inet))))
		code = append(code, inet...)
		code = append(code, jump(unix.BPF_JEQ, unix.AF_NETLINK, 1, 0), ret(retErrno|uint32(unix.EAFNOSUPPORT)), load(arg(2)))
		code = append(code, oneOf(netlinkProtocols, ret(retAllow))...)
		return append(code, noProtocol)
	case argMmap: // as when no such page is free
		return []unix.SockFilter{load(arg(3)), jump(unix.BPF_JSET, unix.MAP_HUGETLB, 0, 1), ret(retErrno | uint32(unix.ENOMEM)), ret(retAllow)}
	case argMemfd: // as of a kernel without hugetlbfs
		return []unix.SockFilter{load(arg(1)), jump(unix.BPF_JSET, unix.MFD_HUGETLB, 0, 1), ret(retErrno | uint32(unix.ENOSYS)), ret(retAllow)}
	case argPrctl: // as of a kernel without core scheduling
		return []unix.SockFilter{load(arg(0)), jump(unix.BPF_JEQ, unix.PR_SCHED_CORE, 0, 1), ret(retErrno | uint32(unix.EINVAL)), ret(retAllow)}
	case argIoctl:
		code := append([]unix.SockFilter{load(arg(1))}, oneOf(deniedIoctls, eperm)...)
		code = append(code, and(0xffff))
		code = append(code, oneOf(deniedFileIoctls, eperm)...)
		code = append(code, oneOf(allowedBtrfs, ret(retAllow))...)
		code = append(code, and(0xff00), jump(unix.BPF_JEQ, btrfsType<<8, 0, 1), eperm)
		return append(code, ret(retAllow))
	}
	return []unix.SockFilter{eperm}
}

// oneOf does then when the accumulator is one of values, else goes on.
func oneOf(values []uint32, then unix.SockFilter) []unix.SockFilter {
	var code []unix.SockFilter
	for i, v := range values {
		last := len(values) - 1
		if i < last {
			code = append(code, jump(unix.BPF_JEQ, v, uint8(last-i), 0))
		} else {
			code = append(code, jump(unix.BPF_JEQ, v, 0, 1), then)
		}
	}
	return code
}

// arg is the offset of the low half of an argument. The calls filtered here take 32 bits of it.
func arg(i int) uint32 { return offArgs + 8*uint32(i) }

func load(off uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
}

func jump(op uint16, k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jt: yes, Jf: no}
}

func always(skip uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: skip}
}

func and(mask uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask}
}

func ret(v uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v}
}
