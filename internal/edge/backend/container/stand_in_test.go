package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/supervisor"
)

// standIn is a guest whose sandbox is one process in the sandbox's cgroups: the edge's side is tested without a rootfs.
func standInMain() error {
	ch, err := supervisor.Channel()
	if err != nil {
		return err
	}
	return supervisor.Run(supervisor.Config{Channel: ch, Version: "test", Prepare: func() (supervisor.Prepared, error) { return standIn{}, nil }})
}

type standIn struct{}

func (standIn) Close() error { return nil }

func (standIn) Launch(ctx context.Context, l *guestv1.Launch) (supervisor.Sandbox, error) {
	init := cgroup.Dir(l.Cgroups.Tracking + "/init")
	if err := init.Make(); err != nil {
		return nil, err
	}
	d, err := os.Open(string(init))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(d.Fd()), Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &standInSandbox{cmd: cmd, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(s.done)
	}()
	for _, v1 := range l.Cgroups.V1 {
		if err := cgroup.Dir(v1).Attach(cmd.Process.Pid); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	if ctx.Err() != nil {
		return nil, errors.Join(ctx.Err(), s.Close())
	}
	return s, nil
}

type standInSandbox struct {
	cmd  *exec.Cmd
	done chan struct{}
}

func (s *standInSandbox) Services(supervisor.Env) (supervisor.Services, error) {
	return supervisor.Services{}, nil
}
func (s *standInSandbox) InitPid() int          { return s.cmd.Process.Pid }
func (s *standInSandbox) ZygotePid() int        { return s.cmd.Process.Pid }
func (s *standInSandbox) Done() <-chan struct{} { return s.done }
func (s *standInSandbox) Reason() string        { return fmt.Sprint(s.cmd.ProcessState) }
func (s *standInSandbox) Close() error {
	_ = s.cmd.Process.Kill()
	<-s.done
	return nil
}
