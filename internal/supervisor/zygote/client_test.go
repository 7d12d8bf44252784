package zygote

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// startZygote starts one that is in no sandbox.
func startZygote(t *testing.T) (*Zygote, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	image, err := NewImage()
	if err != nil {
		t.Fatal(err)
	}
	z, err := image.Start()
	if err := errors.Join(err, image.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := z.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		select {
		case <-z.Exited():
		default:
			t.Error("the zygote lives on after Close")
		}
	})
	return z, ctx
}

// What a child gets as files 0 to 4 would take the image's place before it is executed.
func TestImageIsAboveTheChildsFiles(t *testing.T) {
	image, err := NewImage()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if fd := image.f.Fd(); fd <= 4 {
		t.Errorf("the image is descriptor %d", fd)
	}
}

func TestRun(t *testing.T) {
	z, ctx := startZygote(t)
	dir := t.TempDir()
	p := NewProgram()
	fd := p.NewSlot()
	missing := func(then string) {
		p.Call("missing", unix.SYS_OPEN, filepath.Join(dir, "nothing"), unix.O_RDONLY, 0).Into(fd).Unless(unix.ENOENT, func() {
			p.Call(then, unix.SYS_MKDIR, filepath.Join(dir, then), 0o755)
		})
	}
	missing("skipped")
	p.Call("open", unix.SYS_OPEN, filepath.Join(dir, "file"), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600).Into(fd)
	p.Call("write", unix.SYS_WRITE, fd, "text", 4)
	p.Call("close", unix.SYS_CLOSE, fd)
	p.Call("any", unix.SYS_RMDIR, filepath.Join(dir, "nothing")).Unless(Any, nil)
	if err := z.Run(ctx, p); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(b) != "text" {
		t.Errorf("file has %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "skipped")); !os.IsNotExist(err) {
		t.Errorf("a step that is left out was done: %v", err)
	}

	p = NewProgram()
	p.Call("fine", unix.SYS_GETPID)
	p.Call("bad", unix.SYS_CHDIR, "/nowhere")
	p.Call("after", unix.SYS_MKDIR, filepath.Join(dir, "after"), 0o755)
	err := z.Run(ctx, p)
	var s *StepError
	if !errors.As(err, &s) || s.Step != "bad" || s.Errno != unix.ENOENT {
		t.Errorf("failing program: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "after")); !os.IsNotExist(err) {
		t.Errorf("a step after a failure was done: %v", err)
	}
}

func TestFork(t *testing.T) {
	z, ctx := startZygote(t)
	p := NewProgram()
	p.Clone = cloneFork
	p.Exec([]string{"/nowhere", "/bin/sh"}, []string{"sh", "-c", "exit $A"}, []string{"A=7"})
	c, err := z.fork(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := c.Wait(ctx); err != nil || e.Code != 7 || e.ExecErrno != 0 || e.CPU < 0 {
		t.Errorf("%+v, %v", e, err)
	}
	p = NewProgram()
	p.Clone = cloneFork
	p.Call("chdir", unix.SYS_CHDIR, "/nowhere")
	if c, err = z.fork(ctx, p); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Wait(ctx); err != nil || e.Code != 126 || e.Stage != "chdir" || e.ExecErrno != int(unix.ENOENT) {
		t.Errorf("%+v, %v", e, err)
	}
	if len(z.byPid) != 0 || len(z.byCookie) != 0 {
		t.Errorf("%d, %d entries are kept", len(z.byPid), len(z.byCookie))
	}
}

// TestHidden: from its first instruction on the process is undumpable, and says nothing of itself.
func TestHidden(t *testing.T) {
	z, ctx := startZygote(t)
	if err := z.Run(ctx, NewProgram()); err != nil { // until it serves
		t.Fatal(err)
	}
	p := NewProgram()
	p.Clone = cloneFork
	value := p.NewSlot()
	p.Call("dumpable", unix.SYS_PRCTL, unix.PR_GET_DUMPABLE).Into(value)
	p.Call("tell", unix.SYS_EXIT_GROUP, value)
	c, err := z.fork(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := c.Wait(ctx); err != nil || e.Code != 0 || e.ExecErrno != 0 {
		t.Errorf("a child is dumpable: %+v, %v", e, err)
	}
	read := func(name string) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", z.Pid(), name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := read("cmdline") + read("environ") + read("comm"); got != "init\x00init\n" {
		t.Errorf("it shows %q", got)
	}
	st, err := os.Stat(fmt.Sprintf("/proc/%d/exe", z.Pid()))
	if err != nil || st.Mode().Perm() != 0o500 {
		t.Errorf("its program has mode %v, %v", st.Mode(), err)
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/exe", z.Pid()), os.O_WRONLY, 0)
	if err == nil {
		_ = f.Close()
		t.Error("its program can be written to")
	}
}

func TestEnd(t *testing.T) {
	z, ctx := startZygote(t)
	p := NewProgram()
	p.Clone = cloneFork
	p.Exec([]string{"/bin/sleep"}, []string{"sleep", "1"}, nil)
	c, err := z.fork(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if err := z.proc.Kill(); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Wait(ctx); !errs.Is(err, errs.Precondition) || e.Signal != 9 {
		t.Errorf("%+v, %v", e, err)
	}
	<-z.Done()
	if !strings.Contains(z.Reason(), "killed") {
		t.Errorf("reason: %s", z.Reason())
	}
	if err := z.Run(ctx, NewProgram()); !errs.Is(err, errs.Precondition) {
		t.Errorf("run after the end: %v", err)
	}
	if err := c.Signal(int(unix.SIGTERM)); err != nil {
		t.Errorf("signal after the end: %v", err)
	}
}

func TestSpawnNeedsSandbox(t *testing.T) {
	z, ctx := startZygote(t)
	_, err := z.Spawn(ctx, Spec{Paths: []string{"/x"}, Argv: []string{"x"}, Stdin: os.Stdin, Stdout: os.Stdin, Stderr: os.Stdin, Cgroup: os.Stdin})
	if !errs.Is(err, errs.Precondition) {
		t.Errorf("%v", err)
	}
}
