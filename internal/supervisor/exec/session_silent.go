package exec

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// silence is how long a command of a session runs before its shell is watched; most have ended by then.
	silence = time.Second
	// scriptPipe is the size of the pipe of a shell's script: one page, so that every byte in it makes it full, and its end that
	// writes becomes ready exactly when the shell has taken all of it.
	scriptPipe = 4096
	whySilent  = "its shell went on without telling how a command ended: what it tells that with was changed (builtin or command, descriptors, traps, set -n)"
)

// watch ends the session when its shell has come to the end of its script without having reported. That is possible because
// nothing a shell could report with is safe from being redefined or closed. What cannot be is reading the script: a shell takes
// an empty line, which is sent when all before it was taken, no sooner than it has run the line that reports.
func (ses *session) watch(ctx context.Context) {
	patience := time.NewTimer(silence)
	defer patience.Stop()
	select {
	case <-ctx.Done():
		return
	case <-patience.C:
	}
	if !ses.taken(ctx) || ses.send("\n") != nil || !ses.taken(ctx) {
		return
	}
	// What was reported is in the pipe already.
	patience.Reset(silence)
	select {
	case <-ctx.Done():
		return
	case <-patience.C:
	}
	if err := ses.kill(whySilent); err != nil {
		ses.s.cfg.Log.Error("kill a session", "session", ses.name, "error", err)
	}
}

// taken waits until the shell has read all of its script that was sent; false: it never will, or ctx ended.
func (ses *session) taken(ctx context.Context) bool {
	raw, err := ses.control.SyscallConn()
	if err != nil || ses.control.SetWriteDeadline(time.Time{}) != nil {
		return false
	}
	given := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(given)
		_ = ses.control.SetWriteDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() {
			<-given // else it would hit who writes next
		}
	}()
	left := 0
	err = raw.Write(func(fd uintptr) bool {
		var ierr error
		left, ierr = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		return ierr != nil || left == 0
	})
	return err == nil && left == 0 && ctx.Err() == nil
}

// shrink gives a pipe the size of a script's.
func shrink(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Control(func(fd uintptr) { _, serr = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, scriptPipe) })
	return errors.Join(err, serr)
}
