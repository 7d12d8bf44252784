package blobd

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	watchRole = "watch"
	runRole   = "run" // of tests, see TestKilledRun
)

// watch makes a directory the place for all that the tests leave anywhere, and starts a process that removes it, what is mounted
// below it and what runs from it when this one ends, also by a signal that nobody can catch. done ends it.
func watch(root string) (done func()) {
	if err := os.Setenv("TMPDIR", root); err != nil {
		panic(err)
	}
	cmd := exec.Command("/proc/self/exe", root)
	cmd.Env = append(os.Environ(), roleVar+"="+watchRole)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a signal to the tests' group is not for it
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		panic(err)
	}
	return func() {
		_ = in.Close()
		_ = cmd.Wait()
	}
}

// sweep ends processes that were told of a directory, unmounts what lies below it, and removes it.
func sweep(root string) {
	// The holder may start another daemon until it has ended itself.
	for range 100 {
		if running := runningIn(root); len(running) > 0 {
			for _, pid := range running {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			time.Sleep(20 * time.Millisecond)
			continue
		}
		break
	}
	for _, dir := range slices.Backward(mountedIn(root)) {
		_ = unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	_ = os.RemoveAll(root)
}

func runningIn(root string) (pids []int) {
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
		if b, _ := os.ReadFile(p); err == nil && pid != os.Getpid() && bytes.Contains(b, []byte(root+"/")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func mountedIn(root string) (dirs []string) {
	b, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], root+"/") {
			dirs = append(dirs, f[4])
		}
	}
	return dirs
}

// runToBeKilled is a run of tests that has a daemon.
func runToBeKilled(root, store string) {
	watch(root)
	if _, err := Start(context.Background(), (&node{}).launchOf(Config{Dir: root + "/data", Store: store}, "1")); err != nil {
		panic(err)
	}
	fmt.Println("started")
	select {}
}

// A run of tests that is killed leaves nothing behind.
func TestKilledRun(t *testing.T) {
	r := newRemote(t, 0, 0)
	root := t.TempDir()
	cmd := exec.Command(os.Args[0], root, r.URL)
	cmd.Env = append(os.Environ(), roleVar+"="+runRole)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if len(mountedIn(root)) == 0 || len(runningIn(root)) < 2 { // daemon and holder
		t.Error("nothing to sweep:", mountedIn(root), runningIn(root))
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	eventually(t, "all is gone", func() bool {
		_, err := os.Stat(root)
		return len(mountedIn(root)) == 0 && len(runningIn(root)) == 0 && os.IsNotExist(err)
	})
}
