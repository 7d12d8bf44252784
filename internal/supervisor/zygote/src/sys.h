// System calls without a C library (x86-64; syscall(2), "Architecture calling conventions").
#ifndef HARENA_SYS_H
#define HARENA_SYS_H

#ifndef __x86_64__
#error "the zygote is written for x86-64; another architecture needs its system call and entry conventions here"
#endif

#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/nsfs.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/resource.h>
#include <linux/sched.h>
#include <linux/signalfd.h>
#include <linux/time.h>
#include <linux/wait.h>
#include <stddef.h>
#include <stdint.h>

#ifndef NS_GET_TGID_IN_PIDNS // since Linux 6.11 (include/uapi/linux/nsfs.h)
#define NS_GET_TGID_IN_PIDNS _IOR(NSIO, 0x9, int)
#endif

static inline long sys6(long nr, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;
	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
}

#define SYS0(nr) sys6(nr, 0, 0, 0, 0, 0, 0)
#define SYS1(nr, a) sys6(nr, (long)(a), 0, 0, 0, 0, 0)
#define SYS2(nr, a, b) sys6(nr, (long)(a), (long)(b), 0, 0, 0, 0)
#define SYS3(nr, a, b, c) sys6(nr, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define SYS4(nr, a, b, c, d) sys6(nr, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

static inline __attribute__((noreturn)) void quit(int code)
{
	for (;;)
		SYS1(__NR_exit_group, code);
}

// The kernel's structures of socket(7) and sigaction(2), which its exported headers leave to C libraries.
struct iovec {
	void *base;
	size_t len;
};

struct msghdr {
	void *name;
	int namelen;
	struct iovec *iov;
	size_t iovlen;
	void *control;
	size_t controllen;
	unsigned flags;
};

struct cmsghdr {
	size_t len;
	int level;
	int type;
};

struct ksigaction {
	void *handler;
	unsigned long flags;
	void *restorer;
	uint64_t mask;
};

enum {
	SOL_SOCKET_ = 1,
	SCM_RIGHTS_ = 1,
	MSG_TRUNC_ = 0x20,
	MSG_CTRUNC_ = 0x8,
	MSG_NOSIGNAL_ = 0x4000,
	MSG_CMSG_CLOEXEC_ = 0x40000000,
	SIG_SETMASK_ = 2,
	SIGKILL_ = 9,
	SIGCHLD_ = 17,
};

#endif
