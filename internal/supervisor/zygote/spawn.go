// Package zygote starts processes inside a sandbox from outside it.
package zygote

import (
	"context"
	"os"
	"time"
)

// Spec is one command to start. Everything in it is decided; nothing is looked up inside.
type Spec struct {
	// Paths are candidates for the program, tried in order (a PATH search done by the caller).
	Paths []string
	Argv  []string // any bytes but NUL
	Env   []string
	Cwd   string
	// CwdOrRoot starts the command in "/" when Cwd cannot be entered: nobody asked for this directory by name, it is a home
	// that may not exist.
	CwdOrRoot bool
	UID       uint32 // inside
	GID       uint32
	// Groups are supplementary groups, inside; at most 64.
	Groups []uint32
	// Stdin, Stdout, Stderr are given to the command as 0, 1, 2. The caller still owns and closes its copies. Without Stdin
	// the command gets the sandbox's /dev/null.
	Stdin, Stdout, Stderr *os.File
	// Extra, if any, is given to the command as 3.
	Extra *os.File
	// Terminal makes Stdin the controlling terminal.
	Terminal bool
	// NoNewPrivs keeps the command from gaining privileges by setuid or file capabilities (prctl(2)).
	NoNewPrivs bool
	// Cgroup is an open cgroup2 directory in which the command starts.
	Cgroup *os.File
}

// Exit is how a command ended.
type Exit struct {
	// Code is the exit status, or -1 when Signal ended it.
	Code   int
	Signal int
	// ExecErrno is why no candidate could be executed, 0 when one was; then Stage says which call failed
	// (exec, chdir, ids, seccomp …) and Code is 126 or 127.
	ExecErrno int
	Stage     string
	CPU       time.Duration
}

// Process is a command that was started.
type Process interface {
	// Pid is the process ID as seen inside.
	Pid() int
	// Wait returns when the command itself has ended; its children may live on. It may be called many times.
	Wait(ctx context.Context) (Exit, error)
	// Signal signals the command's process group. No error when it has ended.
	Signal(sig int) error
}

// Spawner starts commands. It is safe for concurrent use.
type Spawner interface {
	// Spawn starts a command and returns when it was forked; whether its program could be executed is told by
	// Wait. Errors: capacity (pids or memory limit of the sandbox), precondition (the sandbox has ended).
	Spawn(ctx context.Context, s Spec) (Process, error)
	// Done is closed when the sandbox has ended: PID 1 or the zygote died.
	Done() <-chan struct{}
}
