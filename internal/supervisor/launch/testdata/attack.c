// What a hostile process tries inside a sandbox. One line for each attempt: its name, and OK or the errno's name.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static void say(const char *name, long r)
{
	printf("%s %s\n", name, r >= 0 ? "OK" : strerrorname_np(errno));
	fflush(stdout);
}

static void process(int pid)
{
	static const char *files[] = { "mem", "environ", "maps", "smaps", "auxv", "exe", "root/bin", "cwd/.", "fd/0", "fd/4",
				       "fdinfo/4", "syscall", "stack", "io", "ns/mnt", "ns/user", "map_files", "pagemap", "clear_refs" };
	char path[128], b[4096];
	for (unsigned i = 0; i < sizeof files / sizeof *files; i++) {
		snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
		int fd = open(path, (strcmp(files[i], "clear_refs") ? O_RDONLY : O_WRONLY) | O_NONBLOCK);
		long r = fd;
		// Some check when they are read.
		if (fd >= 0 && strcmp(files[i], "clear_refs") && strcmp(files[i], "root/bin") && strcmp(files[i], "cwd/.") && strcmp(files[i], "map_files")) {
			r = pread(fd, b, 64, strcmp(files[i], "mem") ? 0 : 0x400000);
			if (r == 0) {
				errno = ENODATA;
				r = -1;
			}
		}
		say(files[i], r);
		if (fd >= 0)
			close(fd);
	}
	snprintf(path, sizeof path, "/proc/%d/exe", pid);
	say("readlink", readlink(path, b, sizeof b));
	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	DIR *d = opendir(path);
	say("list-fds", d ? 0 : -1);
	// A script whose interpreter is the process's program.
	int s = open("/tmp/steal", O_WRONLY | O_CREAT | O_TRUNC, 0755);
	dprintf(s, "#!/proc/%d/exe\n", pid);
	close(s);
	pid_t c = fork();
	if (c == 0) {
		execl("/tmp/steal", "steal", (char *)0);
		_exit(errno == EACCES ? 13 : errno == ENOENT ? 2 : 1);
	}
	int st;
	waitpid(c, &st, 0);
	errno = WIFEXITED(st) ? WEXITSTATUS(st) : 0;
	say("run-exe", errno ? -1 : 0);
	int pf = syscall(SYS_pidfd_open, pid, 0);
	say("pidfd_getfd", syscall(SYS_pidfd_getfd, pf, 0, 0));
	struct iovec mine = { b, 8 }, theirs = { (void *)0x400000, 8 };
	say("process_vm_readv", process_vm_readv(pid, &mine, 1, &theirs, 1, 0));
	say("process_vm_writev", process_vm_writev(pid, &mine, 1, &theirs, 1, 0));
	say("ptrace-seize", ptrace(PTRACE_SEIZE, pid, 0, 0));
	say("ptrace-attach", ptrace(PTRACE_ATTACH, pid, 0, 0));
	say("setns", setns(pf, CLONE_NEWNS));
}

static long int80(long nr)
{
	long r;
	__asm__ volatile("int $0x80" : "=a"(r) : "a"(nr) : "memory", "r8", "r9", "r10", "r11");
	if (r < 0 && r > -4096) {
		errno = (int)-r;
		return -1;
	}
	return r;
}

static void calls(void)
{
	say("unshare-user", unshare(CLONE_NEWUSER));
	say("unshare-mount", unshare(CLONE_NEWNS));
	say("clone-user", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
	say("clone-pid", syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0));
	say("clone3", syscall(SYS_clone3, 0, 0));
	say("mount", mount("none", "/tmp", "tmpfs", 0, 0));
	say("umount", umount2("/proc/sys", MNT_DETACH));
	say("remount", mount(0, "/proc/sys", 0, MS_REMOUNT | MS_BIND, 0));
	say("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
	say("open_tree", syscall(SYS_open_tree, AT_FDCWD, "/", 1));
	say("move_mount", syscall(SYS_move_mount, 0, "", 0, "", 0));
	say("mount_setattr", syscall(SYS_mount_setattr, AT_FDCWD, "/", 0, 0, 0));
	say("pivot_root", syscall(SYS_pivot_root, "/", "/"));
	say("setns", syscall(SYS_setns, 0, 0));
	say("sethostname", sethostname("x", 1));
	say("bpf", syscall(SYS_bpf, 0, 0, 0));
	say("perf_event_open", syscall(SYS_perf_event_open, 0, 0, 0, 0, 0));
	say("keyctl", syscall(SYS_keyctl, 0, -3, 0));
	say("add_key", syscall(SYS_add_key, 0, 0, 0, 0, 0));
	say("io_uring_setup", syscall(SYS_io_uring_setup, 1, 0));
	say("userfaultfd", syscall(SYS_userfaultfd, 0));
	say("open_by_handle_at", syscall(SYS_open_by_handle_at, 0, 0, 0));
	say("kexec_load", syscall(SYS_kexec_load, 0, 0, 0, 0));
	say("init_module", syscall(SYS_init_module, 0, 0, 0));
	say("finit_module", syscall(SYS_finit_module, 0, 0, 0));
	say("syslog", syscall(SYS_syslog, 3, 0, 0));
	say("swapon", syscall(SYS_swapon, 0, 0));
	say("reboot", syscall(SYS_reboot, 0, 0, 0, 0));
	say("quotactl", syscall(SYS_quotactl, 0, 0, 0, 0));
	say("kcmp", syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0));
	say("iopl", syscall(SYS_iopl, 3));
	say("personality-addr", personality(ADDR_NO_RANDOMIZE));
	say("personality-read", personality(0xffffffff));
	say("af-vsock", socket(40, SOCK_STREAM, 0));
	say("af-packet", socket(AF_PACKET, SOCK_RAW, 0));
	say("af-alg", socket(38, SOCK_SEQPACKET, 0));
	say("af-inet-raw", socket(AF_INET, SOCK_RAW, 1));
	say("af-inet", socket(AF_INET, SOCK_STREAM, 0));
	say("af-unix", socket(AF_UNIX, SOCK_STREAM, 0));
	say("netlink-route", socket(AF_NETLINK, SOCK_RAW, 0));
	say("netlink-audit", socket(AF_NETLINK, SOCK_RAW, 9));
	say("netlink-netfilter", socket(AF_NETLINK, SOCK_RAW, 12));
	say("tiocsti", syscall(SYS_ioctl, 0, 0x5412ul, "x"));
	say("tiocsti-high", syscall(SYS_ioctl, 0, 1ul << 32 | 0x5412, "x"));
	say("tiocsetd", syscall(SYS_ioctl, 0, 0x5423ul, "x"));
	say("fitrim", syscall(SYS_ioctl, 0, 0xC0185879ul, 0));
	say("ext4-move-ext", syscall(SYS_ioctl, 0, 0xC028660Ful, 0));
	say("btrfs-snap-destroy", syscall(SYS_ioctl, 0, 0x5000940Ful, 0));
	say("i386", int80(20));
	say("x32", syscall(0x40000000 + SYS_getpid));
	say("unknown", syscall(600));
	say("sctp", socket(AF_INET, SOCK_STREAM, 132));
	say("mmap-huge", mmap(0, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0) == MAP_FAILED ? -1 : 0);
	say("memfd-huge", memfd_create("x", MFD_HUGETLB));
	say("shm-huge", shmget(IPC_PRIVATE, 2 << 20, IPC_CREAT | SHM_HUGETLB | 0600));
	say("sched-core", prctl(62, 1, 0, 0, 0));
	struct sched_param fifo = { 1 };
	say("sched-fifo", sched_setscheduler(0, SCHED_FIFO, &fifo));
	errno = 0;
	say("nice-negative", setpriority(PRIO_PROCESS, 0, -1));
	say("mknod-disk", mknod("/tmp/disk", S_IFBLK | 0600, 254 << 8));
	say("mknod-null", mknod("/tmp/null", S_IFCHR | 0666, 1 << 8 | 3));
	say("mknod-whiteout", mknod("/tmp/wh", S_IFCHR | 0666, 0));
}

// self prints what a command has been given.
static void self(void)
{
	for (int fd = 0; fd < 4096; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			printf("fd%d %#x\n", fd, fcntl(fd, F_GETFL));
	sigset_t blocked;
	sigprocmask(SIG_BLOCK, 0, &blocked);
	for (int sig = 1; sig < 65; sig++) {
		struct sigaction a = { 0 };
		if (sigismember(&blocked, sig) == 1 || (sigaction(sig, 0, &a) == 0 && a.sa_handler != SIG_DFL))
			printf("signal%d changed\n", sig);
	}
	int m = umask(0);
	printf("umask %03o\n", m);
	printf("session %s\n", getsid(0) == getpid() && getpgrp() == getpid() ? "own" : "shared");
	printf("tty %s\n", open("/dev/tty", O_RDWR) < 0 ? strerrorname_np(errno) : "OK");
	printf("parent %d\n", getppid());
	printf("nice %d\n", getpriority(PRIO_PROCESS, 0));
	printf("scheduler %d\n", sched_getscheduler(0));
	printf("io-priority %ld\n", syscall(SYS_ioprio_get, 1, 0));
	printf("personality %#x\n", personality(0xffffffff));
	printf("securebits %d\n", prctl(PR_GET_SECUREBITS));
	printf("no-new-privs %d\n", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
	int death = -1;
	prctl(PR_GET_PDEATHSIG, &death);
	printf("death-signal %d\n", death);
	extern char **environ;
	for (char **e = environ; *e; e++)
		printf("env:%s\n", *e);
	for (int r = 0; r < 16; r++) {
		struct rlimit l;
		getrlimit(r, &l);
		printf("rlimit%d %lld %lld\n", r, (long long)l.rlim_cur, (long long)l.rlim_max);
	}
}

// counters uses up what the kernel counts per user, or for the whole node.
static void counters(void)
{
	int n = 0;
	while (inotify_init1(0) >= 0)
		n++;
	printf("inotify %d\n", n);
	struct mq_attr a = { 0, 10, 8000 };
	char name[16];
	for (n = 0; n < 1000; n++) {
		snprintf(name, sizeof name, "/q%d", n);
		if (syscall(SYS_mq_open, name + 1, O_CREAT | O_RDWR, 0600, &a) < 0)
			break;
	}
	printf("mqueues %d\n", n);
	sigset_t all;
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, 0);
	union sigval v = { 0 };
	for (n = 0; sigqueue(getpid(), 40, v) == 0;)
		n++;
	printf("signals %d\n", n);
	struct rlimit files = { 4096, 4096 };
	setrlimit(RLIMIT_NOFILE, &files);
	for (n = 0; open("/dev/ptmx", O_RDWR | O_NOCTTY) >= 0;)
		n++;
	printf("terminals %d\n", n);
	printf("held\n");
	fflush(stdout);
}

// sockets queues as much as it can in connections to itself that nobody reads.
static void sockets(int n)
{
	static char b[1 << 20];
	struct sockaddr_in a = { AF_INET, htons(999), { htonl(INADDR_LOOPBACK) }, { 0 } };
	int l = socket(AF_INET, SOCK_STREAM, 0), size = 8 << 20;
	long long total = 0;
	if (bind(l, (void *)&a, sizeof a) < 0 || listen(l, 8) < 0)
		return;
	for (int i = 0; i < n; i++) {
		int s = socket(AF_INET, SOCK_STREAM, 0);
		setsockopt(s, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
		if (connect(s, (void *)&a, sizeof a) < 0 || accept(l, 0, 0) < 0)
			break;
		for (long k; (k = send(s, b, sizeof b, MSG_DONTWAIT)) > 0;)
			total += k;
	}
	printf("queued %lld\n", total);
}

// xattrs sets on a file what overlayfs or the node could believe.
static void xattrs(const char *path)
{
	static const char *names[] = { "user.overlay.opaque", "user.overlay.redirect", "user.overlay.metacopy", "trusted.overlay.opaque",
				       "trusted.overlay.redirect", "trusted.overlay.overlay.opaque", "trusted.other", "security.ima", "security.other" };
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
		say(names[i], setxattr(path, names[i], "y", 1, 0));
	// cap_chown and cap_sys_admin, permitted and effective (linux/capability.h, struct vfs_cap_data)
	static const unsigned char caps[20] = { 1, 0, 0, 2, 1, 0, 0x20 };
	say("security.capability", setxattr(path, "security.capability", caps, sizeof caps, 0));
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "process"))
		process(atoi(argv[2]));
	else if (argc == 2 && !strcmp(argv[1], "calls"))
		calls();
	else if (argc == 2 && !strcmp(argv[1], "self"))
		self();
	else if (argc == 2 && !strcmp(argv[1], "counters"))
		counters();
	else if (argc == 2 && !strcmp(argv[1], "hold")) {
		counters();
		for (;;)
			pause();
	} else if (argc == 3 && !strcmp(argv[1], "sockets"))
		sockets(atoi(argv[2]));
	else if (argc == 3 && !strcmp(argv[1], "xattrs"))
		xattrs(argv[2]);
	else if (argc == 3 && !strcmp(argv[1], "ids")) // a setuid program prints whom it runs as, then waits
		printf("%d %d\n", getuid(), geteuid());
	else
		for (;;) // as "files": a worker that never ends
			pause();
	return 0;
}
