// What an attacker who is root inside a sandbox tries. Exit status 0: nothing worked.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Where zygote.bin is linked.
#define ZYGOTE_TEXT 0x400000

static int bad;
static int quiet;

// worked records an attempt: a result of 0 or more means that it got through.
static void worked(const char *what, long r)
{
	if (r >= 0) {
		printf("%s: worked\n", what);
		bad++;
	} else if (!quiet) {
		printf("%s: %s\n", what, strerror(errno));
	}
}

static int open_of(int pid, const char *file, int flags)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
	return open(path, flags | O_NONBLOCK);
}

// contents of a /proc file that open() alone does not protect
static long read_of(int pid, const char *file)
{
	char b[64];
	int f = open_of(pid, file, O_RDONLY);
	if (f < 0)
		return -1;
	long n = read(f, b, sizeof b);
	close(f);
	if (n == 0)
		errno = ENODATA;
	return n > 0 ? n : -1;
}

static void process(int pid)
{
	char path[64], b[256];
	worked("mem", open_of(pid, "mem", O_RDWR));
	worked("environ", read_of(pid, "environ"));
	worked("maps", read_of(pid, "maps"));
	worked("auxv", read_of(pid, "auxv"));
	worked("exe", open_of(pid, "exe", O_RDONLY));
	snprintf(path, sizeof path, "/proc/%d/exe", pid);
	worked("readlink exe", readlink(path, b, sizeof b));
	worked("root", open_of(pid, "root/etc", O_RDONLY));
	worked("cwd", open_of(pid, "cwd/etc", O_RDONLY));
	for (int i = 0; i < 16; i++) {
		snprintf(b, sizeof b, "fd/%d", i);
		worked(b, open_of(pid, b, O_RDONLY));
	}
	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	worked("list fd", opendir(path) ? 0 : -1);
	worked("stack", read_of(pid, "stack"));
	worked("syscall", read_of(pid, "syscall"));
	worked("ns/user", open_of(pid, "ns/user", O_RDONLY));
	worked("ns/mnt", open_of(pid, "ns/mnt", O_RDONLY));
	int pidfd = syscall(SYS_pidfd_open, pid, 0);
	for (int i = 0; i < 16; i++)
		worked("pidfd_getfd", syscall(SYS_pidfd_getfd, pidfd, i, 0));
	struct iovec local = {b, 8}, remote = {(void *)0x400000, 8};
	worked("process_vm_readv", process_vm_readv(pid, &local, 1, &remote, 1, 0));
	worked("process_vm_writev", process_vm_writev(pid, &local, 1, &remote, 1, 0));
	worked("ptrace", ptrace(PTRACE_SEIZE, pid, 0, 0));
	worked("ptrace attach", ptrace(PTRACE_ATTACH, pid, 0, 0));
}

// each calls f for every process but init and ourselves.
static void each(void (*f)(int))
{
	DIR *d = opendir("/proc");
	struct dirent *e;
	while (d && (e = readdir(d))) {
		int pid = atoi(e->d_name);
		if (pid > 1 && pid != getpid())
			f(pid);
	}
	closedir(d);
}

// took counts what got through on a process that was ours a moment ago. If it
// has executed its program meanwhile it belongs to the sandbox: then only the
// zygote's memory, at its link address, would be a hole.
static void took(int pid, const char *what, int fd)
{
	char path[64], exe[256], b[8];
	if (fd < 0)
		return;
	long ours = pread(fd, b, sizeof b, ZYGOTE_TEXT);
	close(fd);
	snprintf(path, sizeof path, "/proc/%d/exe", pid);
	long n = readlink(path, exe, sizeof exe - 1);
	if (ours > 0 || (n < 0 && errno != ENOENT && errno != ESRCH)) {
		printf("hunt: %s worked\n", what);
		bad++;
	}
}

static void take(int pid)
{
	took(pid, "mem", open_of(pid, "mem", O_RDWR));
	took(pid, "root", open_of(pid, "root", O_PATH | O_DIRECTORY));
	took(pid, "ns/user", open_of(pid, "ns/user", O_RDONLY));
	int pidfd = syscall(SYS_pidfd_open, pid, 0);
	for (int i = 0; i < 8; i++)
		took(pid, "pidfd_getfd", syscall(SYS_pidfd_getfd, pidfd, i, 0));
	if (pidfd >= 0)
		close(pidfd);
}

// A process of ours before its exec: its executable cannot be read as a file of the sandbox.
static void catch_it(int pid)
{
	char path[64], exe[256];
	snprintf(path, sizeof path, "/proc/%d/exe", pid);
	long n = readlink(path, exe, sizeof exe - 1);
	if (n < 0) {
		if (errno == EACCES || errno == EPERM)
			take(pid); // this is the moment
		return;
	}
	exe[n] = 0;
	if (strstr(exe, "memfd") || strstr(exe, "harena") || strstr(exe, "zygote")) {
		printf("hunt: exe is %s\n", exe);
		bad++;
	}
}

static void stop_it(int pid)
{
	kill(pid, SIGSTOP);
}

static void for_seconds(int s, void (*f)(int))
{
	time_t end = time(0) + s;
	while (time(0) < end)
		each(f);
}

static void kernel(void)
{
	worked("unshare user", unshare(CLONE_NEWUSER));
	worked("unshare mount", unshare(CLONE_NEWNS));
	worked("unshare net", unshare(CLONE_NEWNET));
	long r = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
	if (r == 0)
		_exit(0);
	worked("clone user", r);
	char args[88] = {0};
	worked("clone3", syscall(SYS_clone3, args, sizeof args) == 0 ? (_exit(0), 0) : -1);
	worked("mount", mount("none", "/mnt", "tmpfs", 0, ""));
	worked("umount", umount2("/proc/kcore", MNT_DETACH));
	worked("pivot_root", syscall(SYS_pivot_root, ".", "."));
	worked("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
	worked("open_tree", syscall(SYS_open_tree, AT_FDCWD, "/", 1));
	worked("bpf", syscall(SYS_bpf, BPF_PROG_LOAD, args, sizeof args) < 0 && errno == EINVAL ? 0 : syscall(SYS_bpf, BPF_MAP_CREATE, args, sizeof args));
	worked("perf_event_open", syscall(SYS_perf_event_open, args, 0, -1, -1, 0));
	worked("add_key", syscall(SYS_add_key, "user", "x", "y", 1, -3));
	worked("keyctl", syscall(SYS_keyctl, 0, -3, 1));
	worked("userfaultfd", syscall(SYS_userfaultfd, 0));
	worked("io_uring", syscall(SYS_io_uring_setup, 8, args));
	worked("init_module", syscall(SYS_init_module, args, 8, ""));
	worked("open_by_handle_at", syscall(SYS_open_by_handle_at, AT_FDCWD, args, O_RDONLY));
	worked("swapon", syscall(SYS_swapon, "/tmp/x", 0));
	worked("reboot", syscall(SYS_reboot, 0xfee1dead, 672274793, 0, 0));
	worked("settimeofday", syscall(SYS_settimeofday, args, 0));
	worked("sethostname", sethostname("x", 1));
	worked("quotactl", syscall(SYS_quotactl, 0x80000800, 0, 0, 0));
	worked("AF_PACKET", socket(AF_PACKET, SOCK_RAW, 0));
	worked("AF_VSOCK", socket(AF_VSOCK, SOCK_STREAM, 0));
	worked("AF_ALG", socket(AF_ALG, SOCK_SEQPACKET, 0));
	worked("raw ip", socket(AF_INET, SOCK_RAW, 1));
	worked("seccomp off", prctl(PR_SET_SECCOMP, 0));
	worked("kmsg", open("/dev/kmsg", O_RDONLY));
	worked("mem", open("/dev/mem", O_RDONLY));
	worked("fuse", open("/dev/fuse", O_RDWR));
	int tty = open("/dev/ptmx", O_RDWR | O_NOCTTY);
	worked("TIOCSTI", ioctl(tty, 0x5412, "x"));
	worked("TIOCSTI with high bits", syscall(SYS_ioctl, tty, 0xffffffff00005412UL, "x"));
	// EXT4_IOC_MOVE_EXT, XFS_IOC_SWAPEXT, XFS_IOC_EXCHANGE_RANGE: blocks of one file swapped with another's
	int f = open("/tmp/attack-file", O_CREAT | O_RDWR, 0600);
	char arg[256] = {0};
	worked("EXT4_IOC_MOVE_EXT", ioctl(f, 0xc028660f, arg));
	worked("XFS_IOC_SWAPEXT", ioctl(f, 0xc0c0586d, arg));
	worked("XFS_IOC_EXCHANGE_RANGE", ioctl(f, 0x40285881, arg));
	worked("FITRIM", ioctl(f, 0xc0185879, arg));
	worked("FIFREEZE", ioctl(f, 0xc0045877, arg));
	// 32-bit system calls would bypass a filter of 64-bit numbers.
	long r32 = -1;
	pid_t c = fork();
	if (c == 0) {
		long v;
		__asm__ volatile("int $0x80" : "=a"(v) : "a"(20 /* getpid */) : "memory");
		_exit(v > 0 ? 0 : 1);
	}
	int st;
	waitpid(c, &st, 0);
	if (WIFEXITED(st) && WEXITSTATUS(st) == 0)
		r32 = 0;
	errno = EPERM;
	worked("32-bit system calls", r32);
	worked("x32 system calls", syscall(0x40000000 + SYS_getpid));
	if (prctl(PR_CAPBSET_READ, 21 /* SYS_ADMIN */) == 1 || prctl(PR_CAPBSET_READ, 12 /* NET_ADMIN */) == 1 || prctl(PR_CAPBSET_READ, 13 /* NET_RAW */) == 1)
		worked("capability bounding set", 0);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, 0, _IOLBF, 0);
	if (argc > 2 && !strcmp(argv[1], "process"))
		process(atoi(argv[2]));
	else if (argc > 2 && !strcmp(argv[1], "hunt"))
		quiet = 1, for_seconds(atoi(argv[2]), catch_it);
	else if (argc > 2 && !strcmp(argv[1], "stop"))
		for_seconds(atoi(argv[2]), stop_it);
	else if (argc > 1 && !strcmp(argv[1], "kernel"))
		kernel();
	else
		return 2;
	return bad ? 1 : 0;
}
