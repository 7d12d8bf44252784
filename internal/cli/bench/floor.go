package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// namespaces are those of a Harena container.
const namespaces = syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET |
	syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWCGROUP

// staticTrue finds a small static program: the floor must not pay for a dynamic linker.
func staticTrue() ([]string, error) {
	for _, p := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		if _, err := os.Stat(p); err == nil {
			return []string{p, "true"}, nil
		}
	}
	return nil, fmt.Errorf("no busybox on this machine to measure the floor with: install busybox-static")
}

// floorCreate times clone with a container's namespaces and exec of a static
// program in them: what any container start costs at least.
func floorCreate(ctx context.Context, n int) ([]time.Duration, error) {
	return floor(ctx, n, &syscall.SysProcAttr{
		Cloneflags:  namespaces,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1 << 30, Size: 1 << 16}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1 << 30, Size: 1 << 16}},
		Credential:  &syscall.Credential{},
	})
}

// floorExec times fork and exec of a static program on the node.
func floorExec(ctx context.Context, n int) ([]time.Duration, error) {
	return floor(ctx, n, &syscall.SysProcAttr{})
}

func floor(ctx context.Context, n int, attr *syscall.SysProcAttr) ([]time.Duration, error) {
	argv, err := staticTrue()
	if err != nil {
		return nil, err
	}
	out := make([]time.Duration, 0, n)
	for range n {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.SysProcAttr = attr
		start := time.Now()
		if err := cmd.Run(); err != nil {
			return nil, fmt.Errorf("measure the floor: %w", err)
		}
		out = append(out, time.Since(start))
	}
	return out, nil
}
