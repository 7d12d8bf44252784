package blobd

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func (n *node) mark(name string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.launch.Dir, name), nil, 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) unmark(name string) {
	n.t.Helper()
	if err := os.Remove(filepath.Join(n.launch.Dir, name)); err != nil {
		n.t.Fatal(err)
	}
}

// Daemon and node are killed together in the middle of a read: the holder starts a daemon, and the next node keeps that one.
func TestKilledWithItsNode(t *testing.T) {
	r := newRemote(t, 5*time.Millisecond, 8<<20)
	n := startNode(t, r, func(c *Config) { c.Patience = 10 * time.Second })
	n.client.Close()
	b, err := json.Marshal(n.launch.Config)
	if err != nil {
		t.Fatal(err)
	}
	other := exec.Command(os.Args[0], "node", string(b))
	other.Env = append(os.Environ(), roleVar+"=1")
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	// A daemon of that node's own.
	first := n.status()
	kill(t, first.Pid)
	eventually(t, "another daemon", func() bool { s, err := n.client.Status(t.Context()); return err == nil && s.Pid != first.Pid })
	first = n.status()

	img := newImage(t, r, 6, 4<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	got := make(chan error, 1)
	moved := r.moved.Load()
	go func() { got <- img.readAll(dir) }()
	eventually(t, "it reads", func() bool { return r.moved.Load() > moved+1<<20 })
	kill(t, other.Process.Pid)
	kill(t, first.Pid)
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	s := n.status()
	if !s.Takeover || s.Pid == first.Pid || s.HolderPid != first.HolderPid {
		t.Errorf("before %+v, after %+v", first, s)
	}
	n.start()
	if again := n.status().Pid; again != s.Pid {
		t.Errorf("the next node has replaced daemon %d by %d", s.Pid, again)
	}
}

// Daemons that end as soon as they have the connection do not make readers wait for ever, however often they are started.
func TestCrashLoop(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.Patience = maxBackoff + time.Second })
	img := newImage(t, r, 2, 1<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	s := n.status()
	n.mark(crash)
	kill(t, s.Pid)
	got := make(chan error, 1)
	go func() { got <- img.readAll(dir) }()
	select {
	case err := <-got:
		if !errors.Is(err, unix.EIO) {
			t.Errorf("read under daemons that crash: %v", err)
		}
	case <-time.After(30 * time.Second):
		n.unmark(crash)
		t.Fatal("a reader waits for daemons that crash:", <-got)
	}
	eventually(t, "the holder ends", func() bool { return syscall.Kill(s.HolderPid, 0) != nil })
	n.unmark(crash)
	n.event(EventDegraded)
}
