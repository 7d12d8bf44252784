package vm

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// makeScratch makes the directory of one run, in place of that of a run whose guard was killed, too. The lock is held.
func makeScratch(cache string) (dir string, remove func(), err error) {
	dir = filepath.Join(cache, "scratch")
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
		return "", nil, err
	}
	// Compilers and mkfs may be at work there for a moment longer.
	release, err := guard(`for i in 1 2 3 4 5; do rm -rf -- "$0" && break; sleep 1; done`, dir)
	if err != nil {
		return "", nil, err
	}
	return dir, func() {
		_ = os.RemoveAll(dir)
		release()
	}, nil
}

// guard runs a shell script with args (from $0) when this process ends without having called release: interrupted, timed out, killed.
func guard(script string, args ...string) (release func(), err error) {
	cmd := exec.Command("sh", append([]string{"-c", "read -r _ || { " + script + "; }"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what ends a process group leaves it
	alive, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() {
		_, _ = io.WriteString(alive, "\n")
		_ = cmd.Wait()
	}, nil
}

// guardedDir tells this program to be the one that is killed.
const guardedDir = "HARENA_VM_TEST_GUARD"

func TestNothingIsLeftOfAKilledRun(t *testing.T) {
	if cache := os.Getenv(guardedDir); cache != "" {
		dir, _, err := makeScratch(cache)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "disk"), nil, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("made")
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	cache := t.TempDir()
	// What a run has left whose guard died with it.
	if err := os.MkdirAll(filepath.Join(cache, "scratch", "tree"), 0o755); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run=^TestNothingIsLeftOfAKilledRun$")
	child.Env = append(os.Environ(), guardedDir+"="+cache)
	out, err := child.Output()
	if string(out) != "made\n" {
		t.Fatalf("%q, %v", out, err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(cache, "scratch")); errors.Is(err, fs.ErrNotExist) {
			return
		}
		if time.Now().After(end) {
			t.Fatal("the directory of a run that was killed is still there")
		}
	}
}
