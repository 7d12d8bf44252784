package exec

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// Exit codes of a shell, and of timeout(1), that Harena uses.
const (
	codeTimedOut      = 124
	codeNotExecutable = 126
	codeNotFound      = 127
	codeSignal        = 128
)

// firstRealtime is the kernel's SIGRTMIN; glibc hides the first two.
const (
	firstRealtime = 32
	lastSignal    = 64
)

// parseSignal reads "SIGTERM", "term", "15"; empty means SIGTERM.
func parseSignal(s string) (unix.Signal, error) {
	if s == "" {
		return unix.SIGTERM, nil
	}
	name := strings.ToUpper(s)
	if n, err := strconv.Atoi(name); err == nil {
		if n >= 1 && n <= lastSignal {
			return unix.Signal(n), nil
		}
	} else if sig := unix.SignalNum("SIG" + strings.TrimPrefix(name, "SIG")); sig != 0 {
		return sig, nil
	}
	return 0, errs.E(errs.Invalid, "signal %.40q is not known", s).WithHint("use a name such as SIGTERM or TERM, or a number from 1 to %d", lastSignal)
}

func signalName(n int) string {
	if name := unix.SignalName(syscall.Signal(n)); name != "" {
		return name
	}
	if n >= firstRealtime && n <= lastSignal {
		return fmt.Sprintf("SIGRTMIN+%d", n-firstRealtime)
	}
	return fmt.Sprintf("signal %d", n)
}

// setStatus fills in how the main process ended.
func setStatus(r *harenav1.Result, e zygote.Exit, s zygote.Spec) {
	switch {
	case e.ExecErrno != 0:
		r.ExitCode, r.Message = notStarted(e, s)
	case e.Signal != 0:
		r.ExitCode, r.Signal = int32(codeSignal+e.Signal), signalName(e.Signal)
	default:
		r.ExitCode = int32(e.Code & 0xff)
	}
}

// notStarted explains why a program was not executed.
func notStarted(e zygote.Exit, s zygote.Spec) (int32, string) {
	errno := unix.Errno(e.ExecErrno)
	name := s.Argv[0]
	code := int32(codeNotExecutable)
	if e.Code == codeNotFound {
		code = codeNotFound
	}
	switch {
	case e.Stage == "chdir":
		return codeNotExecutable, fmt.Sprintf("cannot enter working directory %q: %v", s.Cwd, errno)
	case e.Stage != "exec" && e.Stage != "":
		return code, fmt.Sprintf("cannot start %q: %s: %v", name, e.Stage, errno)
	case errno != unix.ENOENT && errno != unix.ENOTDIR:
		return code, fmt.Sprintf("cannot execute %q: %v", name, errno)
	case strings.Contains(name, "/"):
		return code, fmt.Sprintf("%q not found: there is no such file, or its interpreter is missing", name)
	}
	return code, fmt.Sprintf("%q not found in PATH", name)
}
