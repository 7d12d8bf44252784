package confine

import "golang.org/x/sys/unix"

// action is what the filter does with a system call.
type action uint8

const (
	deny    action = iota // EPERM, Docker's default
	allow                 // Docker allows it for every container, or for the capabilities kept here
	missing               // ENOSYS: callers then fall back
	argClone
	argPersonality
	argSocket
	argIoctl
	argMmap
	argMemfd
	argPrctl
)

// newest is the highest system call that the table knows. What is newer does not exist inside,
// as with runc: a program that probes for it falls back, where EPERM would make it fail.
const newest = unix.SYS_FILE_SETATTR // Linux 6.17

// table holds every call that is not denied: moby's profiles/seccomp/default.json for x86-64, kernel 4.8 or
// newer, and the capabilities of Capabilities. Deviations:
//
//   - argSocket: families other than UNIX, INET, INET6 and parts of NETLINK do not exist. Docker excludes only AF_VSOCK.
//     Of INET those protocols exist that are not modules, which any process could make the node load: no SCTP, SMC, L2TP.
//   - argIoctl: see deniedIoctls. Docker filters none.
//   - argMmap, argMemfd: no pages of hugetlbfs, which the node reserves for others and memory limits do not cover.
//   - argPrctl: no core scheduling, by which a process keeps others off its core.
//   - the i386 and x32 ABIs do not exist: half of the kernel's entry points for nothing that runs here.
//   - memfd_secret: its pages cannot be paged out or dumped when a sandbox is paused.
//   - statmount, listmount: mount options by another way; callers read mountinfo instead.
//
// What is left out, and thus denied, for want of a capability: acct, bpf,
// clock_settime, delete_module, fanotify_init, finit_module, fsconfig, fsmount, fsopen, fspick, get_mempolicy,
// init_module, ioperm, iopl, kcmp, kexec_*, lookup_dcookie, mbind, mount, mount_setattr, move_mount,
// move_pages, open_by_handle_at, open_tree, perf_event_open, pidfd_getfd, pivot_root, process_madvise,
// quotactl, reboot, set_mempolicy, setdomainname, sethostname, setns, settimeofday, swapon, swapoff,
// syslog, umount2, unshare, vhangup; and for everyone in Docker: add_key, io_uring_*, keyctl,
// nfsservctl, request_key, sysfs, uselib, userfaultfd, ustat.
var table = map[action][]int{
	allow: {
		unix.SYS_READ, unix.SYS_WRITE, unix.SYS_OPEN, unix.SYS_CLOSE, unix.SYS_STAT, unix.SYS_FSTAT, unix.SYS_LSTAT,
		unix.SYS_POLL, unix.SYS_LSEEK, unix.SYS_MPROTECT, unix.SYS_MUNMAP, unix.SYS_BRK,
		unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_PREAD64, unix.SYS_PWRITE64,
		unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_ACCESS, unix.SYS_PIPE, unix.SYS_SELECT, unix.SYS_SCHED_YIELD,
		unix.SYS_MREMAP, unix.SYS_MSYNC, unix.SYS_MINCORE, unix.SYS_MADVISE, unix.SYS_SHMGET, unix.SYS_SHMAT,
		unix.SYS_SHMCTL, unix.SYS_DUP, unix.SYS_DUP2, unix.SYS_PAUSE, unix.SYS_NANOSLEEP, unix.SYS_GETITIMER,
		unix.SYS_ALARM, unix.SYS_SETITIMER, unix.SYS_GETPID, unix.SYS_SENDFILE, unix.SYS_CONNECT, unix.SYS_ACCEPT,
		unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_SENDMSG, unix.SYS_RECVMSG, unix.SYS_SHUTDOWN, unix.SYS_BIND,
		unix.SYS_LISTEN, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_SOCKETPAIR, unix.SYS_SETSOCKOPT,
		unix.SYS_GETSOCKOPT, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_EXECVE, unix.SYS_EXIT, unix.SYS_WAIT4,
		unix.SYS_KILL, unix.SYS_UNAME, unix.SYS_SEMGET, unix.SYS_SEMOP, unix.SYS_SEMCTL, unix.SYS_SHMDT,
		unix.SYS_MSGGET, unix.SYS_MSGSND, unix.SYS_MSGRCV, unix.SYS_MSGCTL, unix.SYS_FCNTL, unix.SYS_FLOCK,
		unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_TRUNCATE, unix.SYS_FTRUNCATE, unix.SYS_GETDENTS,
		unix.SYS_GETCWD, unix.SYS_CHDIR, unix.SYS_FCHDIR, unix.SYS_RENAME, unix.SYS_MKDIR, unix.SYS_RMDIR,
		unix.SYS_CREAT, unix.SYS_LINK, unix.SYS_UNLINK, unix.SYS_SYMLINK, unix.SYS_READLINK, unix.SYS_CHMOD,
		unix.SYS_FCHMOD, unix.SYS_CHOWN, unix.SYS_FCHOWN, unix.SYS_LCHOWN, unix.SYS_UMASK, unix.SYS_GETTIMEOFDAY,
		unix.SYS_GETRLIMIT, unix.SYS_GETRUSAGE, unix.SYS_SYSINFO, unix.SYS_TIMES, unix.SYS_PTRACE, unix.SYS_GETUID,
		unix.SYS_GETGID, unix.SYS_SETUID, unix.SYS_SETGID, unix.SYS_GETEUID, unix.SYS_GETEGID, unix.SYS_SETPGID,
		unix.SYS_GETPPID, unix.SYS_GETPGRP, unix.SYS_SETSID, unix.SYS_SETREUID, unix.SYS_SETREGID,
		unix.SYS_GETGROUPS, unix.SYS_SETGROUPS, unix.SYS_SETRESUID, unix.SYS_GETRESUID, unix.SYS_SETRESGID,
		unix.SYS_GETRESGID, unix.SYS_GETPGID, unix.SYS_SETFSUID, unix.SYS_SETFSGID, unix.SYS_GETSID,
		unix.SYS_CAPGET, unix.SYS_CAPSET, unix.SYS_RT_SIGPENDING, unix.SYS_RT_SIGTIMEDWAIT,
		unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_SIGSUSPEND, unix.SYS_SIGALTSTACK, unix.SYS_UTIME, unix.SYS_MKNOD,
		unix.SYS_STATFS, unix.SYS_FSTATFS, unix.SYS_GETPRIORITY, unix.SYS_SETPRIORITY, unix.SYS_SCHED_SETPARAM,
		unix.SYS_SCHED_GETPARAM, unix.SYS_SCHED_SETSCHEDULER, unix.SYS_SCHED_GETSCHEDULER,
		unix.SYS_SCHED_GET_PRIORITY_MAX, unix.SYS_SCHED_GET_PRIORITY_MIN, unix.SYS_SCHED_RR_GET_INTERVAL,
		unix.SYS_MLOCK, unix.SYS_MUNLOCK, unix.SYS_MLOCKALL, unix.SYS_MUNLOCKALL, unix.SYS_MODIFY_LDT,
		unix.SYS_ARCH_PRCTL, unix.SYS_ADJTIMEX, unix.SYS_SETRLIMIT, unix.SYS_CHROOT, unix.SYS_SYNC,
		unix.SYS_GETTID, unix.SYS_READAHEAD, unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_FSETXATTR,
		unix.SYS_GETXATTR, unix.SYS_LGETXATTR, unix.SYS_FGETXATTR, unix.SYS_LISTXATTR, unix.SYS_LLISTXATTR,
		unix.SYS_FLISTXATTR, unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR, unix.SYS_FREMOVEXATTR, unix.SYS_TKILL,
		unix.SYS_TIME, unix.SYS_FUTEX, unix.SYS_SCHED_SETAFFINITY, unix.SYS_SCHED_GETAFFINITY,
		unix.SYS_SET_THREAD_AREA, unix.SYS_IO_SETUP, unix.SYS_IO_DESTROY, unix.SYS_IO_GETEVENTS,
		unix.SYS_IO_SUBMIT, unix.SYS_IO_CANCEL, unix.SYS_GET_THREAD_AREA, unix.SYS_EPOLL_CREATE,
		unix.SYS_EPOLL_CTL_OLD, unix.SYS_EPOLL_WAIT_OLD, unix.SYS_REMAP_FILE_PAGES, unix.SYS_GETDENTS64,
		unix.SYS_SET_TID_ADDRESS, unix.SYS_RESTART_SYSCALL, unix.SYS_SEMTIMEDOP, unix.SYS_FADVISE64,
		unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_GETTIME, unix.SYS_TIMER_GETOVERRUN,
		unix.SYS_TIMER_DELETE, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_GETRES, unix.SYS_CLOCK_NANOSLEEP,
		unix.SYS_EXIT_GROUP, unix.SYS_EPOLL_WAIT, unix.SYS_EPOLL_CTL, unix.SYS_TGKILL, unix.SYS_UTIMES,
		unix.SYS_MQ_OPEN, unix.SYS_MQ_UNLINK, unix.SYS_MQ_TIMEDSEND, unix.SYS_MQ_TIMEDRECEIVE,
		unix.SYS_MQ_NOTIFY, unix.SYS_MQ_GETSETATTR, unix.SYS_WAITID, unix.SYS_IOPRIO_SET, unix.SYS_IOPRIO_GET,
		unix.SYS_INOTIFY_INIT, unix.SYS_INOTIFY_ADD_WATCH, unix.SYS_INOTIFY_RM_WATCH, unix.SYS_OPENAT,
		unix.SYS_MKDIRAT, unix.SYS_MKNODAT, unix.SYS_FCHOWNAT, unix.SYS_FUTIMESAT, unix.SYS_NEWFSTATAT,
		unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_LINKAT, unix.SYS_SYMLINKAT, unix.SYS_READLINKAT,
		unix.SYS_FCHMODAT, unix.SYS_FACCESSAT, unix.SYS_PSELECT6, unix.SYS_PPOLL, unix.SYS_SET_ROBUST_LIST,
		unix.SYS_GET_ROBUST_LIST, unix.SYS_SPLICE, unix.SYS_TEE, unix.SYS_SYNC_FILE_RANGE, unix.SYS_VMSPLICE,
		unix.SYS_UTIMENSAT, unix.SYS_EPOLL_PWAIT, unix.SYS_SIGNALFD, unix.SYS_TIMERFD_CREATE, unix.SYS_EVENTFD,
		unix.SYS_FALLOCATE, unix.SYS_TIMERFD_SETTIME, unix.SYS_TIMERFD_GETTIME, unix.SYS_ACCEPT4,
		unix.SYS_SIGNALFD4, unix.SYS_EVENTFD2, unix.SYS_EPOLL_CREATE1, unix.SYS_DUP3, unix.SYS_PIPE2,
		unix.SYS_INOTIFY_INIT1, unix.SYS_PREADV, unix.SYS_PWRITEV, unix.SYS_RT_TGSIGQUEUEINFO,
		unix.SYS_RECVMMSG, unix.SYS_FANOTIFY_MARK, unix.SYS_PRLIMIT64, unix.SYS_NAME_TO_HANDLE_AT,
		unix.SYS_CLOCK_ADJTIME, unix.SYS_SYNCFS, unix.SYS_SENDMMSG, unix.SYS_GETCPU, unix.SYS_PROCESS_VM_READV,
		unix.SYS_PROCESS_VM_WRITEV, unix.SYS_SCHED_SETATTR, unix.SYS_SCHED_GETATTR, unix.SYS_RENAMEAT2,
		unix.SYS_SECCOMP, unix.SYS_GETRANDOM, unix.SYS_EXECVEAT, unix.SYS_MEMBARRIER,
		unix.SYS_MLOCK2, unix.SYS_COPY_FILE_RANGE, unix.SYS_PREADV2, unix.SYS_PWRITEV2, unix.SYS_PKEY_MPROTECT,
		unix.SYS_PKEY_ALLOC, unix.SYS_PKEY_FREE, unix.SYS_STATX, unix.SYS_IO_PGETEVENTS, unix.SYS_RSEQ,
		unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_PIDFD_OPEN, unix.SYS_CLOSE_RANGE, unix.SYS_OPENAT2,
		unix.SYS_FACCESSAT2, unix.SYS_EPOLL_PWAIT2, unix.SYS_LANDLOCK_CREATE_RULESET,
		unix.SYS_LANDLOCK_ADD_RULE, unix.SYS_LANDLOCK_RESTRICT_SELF, unix.SYS_PROCESS_MRELEASE,
		unix.SYS_FUTEX_WAITV, unix.SYS_CACHESTAT, unix.SYS_FCHMODAT2, unix.SYS_MAP_SHADOW_STACK,
		unix.SYS_FUTEX_WAKE, unix.SYS_FUTEX_WAIT, unix.SYS_FUTEX_REQUEUE, unix.SYS_MSEAL,
		unix.SYS_SETXATTRAT, unix.SYS_GETXATTRAT, unix.SYS_LISTXATTRAT, unix.SYS_REMOVEXATTRAT,
		unix.SYS_URETPROBE,
	},
	missing: {
		// Its flags are behind a pointer, where a filter cannot see them; libc falls back to clone.
		unix.SYS_CLONE3,
		unix.SYS_STATMOUNT, unix.SYS_LISTMOUNT, unix.SYS_MEMFD_SECRET,
		unix.SYS_LSM_GET_SELF_ATTR, unix.SYS_LSM_SET_SELF_ATTR, unix.SYS_LSM_LIST_MODULES,
		unix.SYS_FILE_GETATTR, unix.SYS_FILE_SETATTR,
	},
	argClone:       {unix.SYS_CLONE},
	argPersonality: {unix.SYS_PERSONALITY},
	argSocket:      {unix.SYS_SOCKET},
	argIoctl:       {unix.SYS_IOCTL},
	argMmap:        {unix.SYS_MMAP},
	argMemfd:       {unix.SYS_MEMFD_CREATE},
	argPrctl:       {unix.SYS_PRCTL},
}

// personalities that may be set: Docker's. 0xffffffff asks for the present one.
var personalities = []uint32{0, 0x0008, 0x20000, 0x20008, 0xffffffff}

// namespaceFlags make clone need CAP_SYS_ADMIN, CLONE_NEWUSER too in Docker's profile. CLONE_NEWTIME shares its bit with
// the exit signal here and means nothing to clone(2).
const namespaceFlags = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// inetProtocols exist of AF_INET and AF_INET6.
var inetProtocols = []uint32{0, unix.IPPROTO_ICMP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6, unix.IPPROTO_UDPLITE, unix.IPPROTO_MPTCP}

// netlinkProtocols that exist: what getifaddrs, ss and libudev use.
var netlinkProtocols = []uint32{unix.NETLINK_ROUTE, unix.NETLINK_SOCK_DIAG, unix.NETLINK_KOBJECT_UEVENT}

// deniedIoctls fail with EPERM for every process. They are compared in their low 32 bits, which is what
// the kernel looks at: a filter on all 64 would be passed by 1<<32|TIOCSTI (CVE-2019-10063).
var deniedIoctls = []uint32{
	unix.TIOCSTI,  // types into the terminal of whoever reads it
	0x541c,        // TIOCLINUX: pastes into a console
	unix.TIOCSETD, // loads line disciplines, a rich source of kernel faults
	unix.TIOCCONS, // takes the console's output
}

// deniedFileIoctls are type<<8|number of calls on files, whose size and
// direction bits differ between structures' versions: those that change other files'
// extents under a writer, or the whole file system.
var deniedFileIoctls = []uint32{
	'f'<<8 | 15,  // EXT4_IOC_MOVE_EXT
	'f'<<8 | 17,  // EXT4_IOC_SWAP_BOOT
	'X'<<8 | 109, // XFS_IOC_SWAPEXT
	'X'<<8 | 119, // FIFREEZE
	'X'<<8 | 120, // FITHAW
	'X'<<8 | 121, // FITRIM
	'X'<<8 | 129, // XFS_IOC_EXCHANGE_RANGE
}

// btrfsType is the type of btrfs's calls. Of them only those exist that all file systems have by now.
const btrfsType = 0x94

var allowedBtrfs = []uint32{
	btrfsType<<8 | 9,  // FICLONE
	btrfsType<<8 | 13, // FICLONERANGE
	btrfsType<<8 | 54, // FIDEDUPERANGE
}
