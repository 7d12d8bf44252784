// The process from which everything in a sandbox is forked: PID 1 and every command.
//
// It decides nothing. Its supervisor sends it programs, lists of system calls
// that are composed and reviewed in Go (program.go, confine), and it runs them,
// in itself or in a new child. What is here is what cannot be in Go: a tiny
// process that may join a user namespace, that forks for almost nothing, and whose
// memory, never exec'd inside, cannot be read or traced from inside.
//
// Freestanding C without allocation; all memory is the stack and mapped programs.
#include "sys.h"

enum {
	CONTROL = 4,  // SOCK_SEQPACKET to the supervisor
	SIGNALS = 39, // signalfd of SIGCHLD
	PIDNS = 40,   // the sandbox's pid namespace, put there by joinProgram
	MAX_FDS = 16,
	SLOTS = 64,
	NO_SLOT = 0xff,
	ANY = 0xffff,
};

// Programs are mapped here, and hold absolute addresses.
#define BASE 0x100000000000ul

// Operations that are not system calls.
enum {
	OP_RECEIVE = 0xf000, // continue with the program that arrives on socket args[0]
	OP_EXEC = 0xf001,    // execve each of paths args[0] with argv args[1] and envp args[2]
	OP_REAP = 0xf002,    // be PID 1 for ever
	OP_SERVE = 0xf003,   // be the zygote in place of the parent, which ends
};

struct step {
	uint16_t nr;      // system call or operation
	uint16_t ignore;  // an errno that is no failure, or ANY …
	uint8_t skip;     // … and then so many more steps are left out
	uint8_t store;    // slot for the result, or NO_SLOT
	uint8_t slotargs; // bit i: args[i] is the number of a slot, whose value is meant
	uint8_t pad;
	uint64_t args[6];
};

struct program {
	uint64_t clone;  // flags of clone3; 0: run in place
	int64_t cgroup;  // slot of the cgroup directory, or -1
	uint64_t nsteps;
	struct step *steps;
};

// A message from the supervisor: this, and descriptors. Descriptor 0 is the
// program's sealed memfd; each is in the slot of its index.
struct request {
	uint64_t cookie;
	uint64_t size;
};

enum { REPLY = 1, FAILED = 2, EXITED = 3 };

// A message to the supervisor.
struct answer {
	uint32_t kind;
	uint32_t step;   // that failed; nsteps: clone3 did
	uint64_t cookie; // of the request; 0 for EXITED
	int32_t error;   // errno, or wait status for EXITED
	int32_t pid;     // in the supervisor's pid namespace
	int64_t value;   // REPLY: pid inside; EXITED: CPU time in µs
};

struct state {
	struct request req;
	struct program *prog;
	int nfds;
	long slot[SLOTS];
};

static void answer(uint32_t kind, uint64_t cookie, uint32_t step, int error, int pid, int64_t value)
{
	struct answer a = { kind, step, cookie, error, pid, value };
	struct iovec iov = { &a, sizeof a };
	struct msghdr m = { .iov = &iov, .iovlen = 1 };
	while (SYS3(__NR_sendmsg, CONTROL, &m, MSG_NOSIGNAL_) == -EINTR)
		;
}

static void forget(struct state *s)
{
	if (s->prog)
		SYS2(__NR_munmap, s->prog, s->req.size);
	s->prog = 0;
	for (int i = 0; i < s->nfds; i++)
		SYS1(__NR_close, s->slot[i]);
	s->nfds = 0;
}

// receive waits for a program on a socket and maps it. 0: end of file.
static long receive(int fd, struct state *s)
{
	struct {
		struct cmsghdr h;
		int fd[MAX_FDS];
	} c;
	struct iovec iov = { &s->req, sizeof s->req };
	struct msghdr m = { .iov = &iov, .iovlen = 1, .control = &c, .controllen = sizeof c };
	long n = SYS3(__NR_recvmsg, fd, &m, MSG_CMSG_CLOEXEC_);
	if (n <= 0)
		return n;
	s->prog = 0;
	s->nfds = 0;
	if (m.controllen >= sizeof c.h && c.h.level == SOL_SOCKET_ && c.h.type == SCM_RIGHTS_) {
		s->nfds = (int)((c.h.len - sizeof c.h) / sizeof c.fd[0]);
		for (int i = 0; i < s->nfds; i++)
			s->slot[i] = c.fd[i];
	}
	if (n != sizeof s->req || s->nfds == 0 || m.flags & (MSG_TRUNC_ | MSG_CTRUNC_))
		return -EBADMSG;
	long p = sys6(__NR_mmap, BASE, (long)s->req.size, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, s->slot[0], 0);
	if (p < 0)
		return p;
	s->prog = (struct program *)p;
	return n;
}

// exec tries each path as execvp(3) does, but runs no shell for a file
// without a header: an argv command must not depend on the sandbox's /bin/sh.
static long exec(char **paths, char **argv, char **envp)
{
	long err = -ENOENT, denied = 0;
	for (; *paths; paths++) {
		err = SYS3(__NR_execve, *paths, argv, envp);
		if (err == -EACCES)
			denied = err;
		else if (err != -ENOENT && err != -ENOTDIR)
			return err;
	}
	return denied ? denied : err;
}

// reap is PID 1's life. All signals are blocked; from inside none but those
// with a handler would reach it anyway (pid_namespaces(7)).
static __attribute__((noreturn)) void reap(void)
{
	uint64_t chld = 1ul << (SIGCHLD_ - 1);
	for (;;)
		if (SYS4(__NR_wait4, -1, 0, __WALL, 0) == -ECHILD)
			SYS4(__NR_rt_sigtimedwait, &chld, 0, 0, sizeof chld);
}

static __attribute__((noreturn)) void serve(void);

// run returns 0, or a negative errno and the step that failed.
static long run(struct state *s, uint32_t *failed)
{
	for (uint64_t i = 0; i < s->prog->nsteps; i++) {
		struct step *t = &s->prog->steps[i];
		long a[6], r;
		for (int k = 0; k < 6; k++)
			a[k] = t->slotargs & 1 << k ? s->slot[t->args[k] % SLOTS] : (long)t->args[k];
		switch (t->nr) {
		case OP_RECEIVE: {
			uint64_t cookie = s->req.cookie;
			SYS2(__NR_munmap, s->prog, s->req.size);
			r = receive((int)a[0], s);
			if (r <= 0)
				quit(1);
			s->req.cookie = cookie;
			i = (uint64_t)-1;
			continue;
		}
		case OP_EXEC:
			r = exec((char **)a[0], (char **)a[1], (char **)a[2]);
			break;
		case OP_REAP:
			reap();
		case OP_SERVE:
			forget(s);
			serve();
		default:
			r = sys6(t->nr, a[0], a[1], a[2], a[3], a[4], a[5]);
		}
		if (r < 0 && r >= -4095 && (r == -(long)t->ignore || t->ignore == ANY)) {
			i += t->skip;
		} else if (r < 0 && r >= -4095) {
			*failed = (uint32_t)i;
			return r;
		}
		if (t->store != NO_SLOT)
			s->slot[t->store % SLOTS] = r;
	}
	return 0;
}

// child runs the program in a new process. Nothing waits for it: inside may
// stop it before it execs, and it alone is held up then.
static __attribute__((noreturn)) void child(struct state *s)
{
	uint32_t step = 0;
	long r = run(s, &step);
	if (r == 0)
		quit(0);
	answer(FAILED, s->req.cookie, step, (int)-r, 0, 0);
	// As shells do.
	quit(r == -ENOENT && s->prog->steps[step].nr == OP_EXEC ? 127 : 126);
}

// handle runs one program. It returns the new PID 1, or 0.
static int handle(struct state *s)
{
	struct program *p = s->prog;
	if (p->clone == 0) {
		uint32_t step = 0;
		long r = run(s, &step);
		answer(REPLY, s->req.cookie, step, (int)-r, 0, 0);
		return 0;
	}
	struct clone_args c = { .flags = p->clone };
	if (!(p->clone & CLONE_PARENT)) // which shares the parent's signal
		c.exit_signal = SIGCHLD_;
	if (p->cgroup >= 0) {
		c.flags |= CLONE_INTO_CGROUP;
		c.cgroup = (uint64_t)s->slot[p->cgroup % SLOTS];
	}
	long pid = SYS2(__NR_clone3, &c, sizeof c);
	if (pid == 0)
		child(s);
	if (pid < 0) {
		answer(REPLY, s->req.cookie, (uint32_t)p->nsteps, (int)-pid, 0, 0);
		return 0;
	}
	// The child is not reaped before this returns, so its ID is its own.
	answer(REPLY, s->req.cookie, 0, 0, (int)pid, SYS3(__NR_ioctl, PIDNS, NS_GET_TGID_IN_PIDNS, pid));
	if (p->clone & CLONE_PARENT)
		quit(0);
	return p->clone & CLONE_NEWPID ? (int)pid : 0;
}

// collect reports children that ended. It returns whether any are left.
static int collect(int options)
{
	for (;;) {
		int status = 0;
		struct rusage u;
		long pid = SYS4(__NR_wait4, -1, &status, options | __WALL, &u);
		if (pid == -EINTR)
			continue;
		if (pid <= 0)
			return pid == 0;
		int64_t us = (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000 + u.ru_utime.tv_usec + u.ru_stime.tv_usec;
		answer(EXITED, 0, 0, status, (int)pid, us);
	}
}

// serve handles programs until the supervisor is gone.
static __attribute__((noreturn)) void serve(void)
{
	int init = 0;
	struct pollfd fds[2] = { { CONTROL, POLLIN, 0 }, { SIGNALS, POLLIN, 0 } };
	for (;;) {
		SYS3(__NR_poll, fds, 2, -1);
		if (fds[1].revents) {
			struct signalfd_siginfo info;
			while (SYS3(__NR_read, SIGNALS, &info, sizeof info) > 0)
				;
			// PID 1 ends last: the kernel makes it wait for the whole namespace.
			if (!collect(WNOHANG) && init)
				quit(0);
		}
		if (fds[0].revents) {
			struct state s;
			s.req.cookie = 0;
			s.prog = 0;
			s.nfds = 0;
			long r = receive(CONTROL, &s);
			if (r == 0)
				break;
			if (r > 0) {
				int pid = handle(&s);
				if (pid)
					init = pid;
			} else if (r != -EINTR) {
				answer(REPLY, s.req.cookie, 0, (int)-r, 0, 0);
			}
			forget(&s);
		}
	}
	// With PID 1 goes everything in its namespace.
	if (init)
		SYS2(__NR_kill, init, SIGKILL_);
	collect(0);
	quit(0);
}

static __attribute__((noreturn, used)) void zygote(void)
{
	// First of all: nothing in a sandbox may ever look into this process or a child of it.
	if (SYS2(__NR_prctl, PR_SET_DUMPABLE, 0) < 0)
		quit(1);
	SYS2(__NR_prctl, PR_SET_NAME, "init");
	struct ksigaction dfl = { 0 };
	for (int sig = 1; sig <= 64; sig++)
		SYS4(__NR_rt_sigaction, sig, &dfl, 0, sizeof dfl.mask);
	uint64_t all = ~0ul, chld = 1ul << (SIGCHLD_ - 1);
	SYS4(__NR_rt_sigprocmask, SIG_SETMASK_, &all, 0, sizeof all);
	long fd = SYS4(__NR_signalfd4, -1, &chld, sizeof chld, SFD_CLOEXEC | SFD_NONBLOCK);
	if (fd < 0 || SYS3(__NR_dup3, fd, SIGNALS, O_CLOEXEC) < 0)
		quit(1);
	SYS1(__NR_close, fd);
	serve();
}

__asm__(".globl _start\n"
	"_start:\n"
	"	xor %ebp, %ebp\n"
	"	and $-16, %rsp\n"
	"	call zygote\n");
