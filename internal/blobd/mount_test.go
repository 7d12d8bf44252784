package blobd

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/fuseblob"
)

// Somebody unmounts the directory lazily: what is mounted over it goes on, and new mounts work, too, also under the next daemon.
func TestUnmountedLazily(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	img := newImage(t, r, 4, 1<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	for _, next := range []bool{false, true} {
		if err := unix.Unmount(n.launch.mountPoint(), unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		if next {
			kill(t, n.status().Pid)
			n.event(EventTakeover)
		}
		other := newImage(t, r, 2, 1<<20+4096)
		if err := other.readAll(other.mount(t, n.attach(other.blob.Digest, other.blob)[0].Path)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Unmount(n.launch.mountPoint(), unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is noticed without an attach", func() bool {
			b, _ := os.ReadFile("/proc/self/mountinfo")
			return strings.Contains(string(b), " "+n.launch.mountPoint()+" ")
		})
	}
	if err := img.readAll(dir); err != nil {
		t.Error(err)
	}
	if s := n.status(); s.Layers[0].Degraded {
		t.Errorf("%+v", s)
	}
}

// Nothing uses it: the connection ends with the mount, and there is another at once.
func TestUnmountedUnused(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	if err := unix.Unmount(n.launch.mountPoint(), unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	img := newImage(t, r, 2, 1<<20)
	eventually(t, "it can be read", func() bool {
		p, err := n.client.Attach(t.Context(), "layer", []Object{img.blob})
		if err != nil {
			return false
		}
		_, err = os.Stat(p[0].Path)
		return err == nil
	})
}

// A daemon that waits in the kernel for what it does not serve any more ends all the same.
func TestEndWhatCannotBeKilled(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts file systems")
	}
	c := Config{Dir: t.TempDir()}.WithDefaults()
	if err := os.Mkdir(c.mountPoint(), 0o700); err != nil {
		t.Fatal(err)
	}
	conn, err := fuseblob.Mount(c.mountPoint(), "test", readahead)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	defer func() { _ = unmountAll(c.mountPoint()) }()
	cmd := exec.Command("cat", c.mountPoint()+"/file")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	// Its request is taken, and never answered: the kernel waits for the answer whatever happens to the caller.
	if _, err := unix.Read(conn.FD(), make([]byte, 64<<10)); err != nil {
		t.Fatal(err)
	}
	if err := endDaemon(c, cmd.Process.Pid, 100*time.Millisecond); err != nil {
		t.Error(err)
		abort(c.mountPoint())
	}
	<-ended
}

// The kernel has learned from the holder that there is no FLUSH: a close waits for no daemon.
func TestCloseWithoutDaemon(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	o := r.put(t, content(1<<20, 1))
	eventually(t, "the holder has opened and closed a file", func() bool { return n.status().Requests >= 3 })
	f, err := os.Open(n.attach("layer", o)[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	pid := n.status().Pid
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("a close waits for the daemon")
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
}
