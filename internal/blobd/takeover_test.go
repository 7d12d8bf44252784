package blobd

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func (n *node) needResend() {
	n.t.Helper()
	if v := n.status(); v.HolderPid == 0 {
		n.t.Fatal("nobody holds the connection")
	}
}

func kill(t testing.TB, pid int) {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("pid %d", pid)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
}

// Readers under a daemon that is killed at random moments finish with the right content.
func TestKilledInMidRead(t *testing.T) {
	r := newRemote(t, 2*time.Millisecond, 0)
	n := startNode(t, r, func(c *Config) { c.CacheBytes, c.Patience = 24<<20, time.Minute }) // evicts as well: there is always something to fetch
	n.needResend()
	img := newImage(t, r, 12, 4<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path, "directio")
	kills := 40
	if testing.Short() {
		kills = 10
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	rounds := make([]int, 4)
	for i := range rounds {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if err := img.readAll(dir); err != nil {
					t.Error(err)
					return
				}
				rounds[i]++
				_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0)
			}
		})
	}
	for range kills {
		time.Sleep(time.Duration(rand.IntN(80)) * time.Millisecond)
		kill(t, n.status().Pid)
	}
	close(done)
	wg.Wait()
	n.event(EventTakeover)
	s := n.status()
	if !s.Takeover || s.Cache.FailedRead > 0 {
		t.Errorf("%+v", s)
	}
	t.Logf("rounds of readers: %v", rounds)
}

// Requests of one reader go to daemons that die while the store is slow, each with the read under way.
func TestKilledWhileStoreIsSlow(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	raw := content(1<<20, 3)
	o := r.put(t, raw)
	p := n.attach("layer", o)
	r.broken.Store(true)
	got := make(chan []byte, 1)
	go func() {
		b, err := os.ReadFile(p[0].Path)
		if err != nil {
			t.Error(err)
		}
		got <- b
	}()
	n.event(EventOutage)
	for range 5 {
		eventually(t, "a read waits", func() bool { return n.status().Waiting > 0 })
		kill(t, n.status().Pid)
	}
	eventually(t, "the last one has noticed", func() bool { return n.status().Store.Out })
	r.broken.Store(false)
	if b := <-got; !bytes.Equal(b, raw) {
		t.Error("wrong content")
	}
	n.event(EventRecovered)
}

func TestHolderKilled(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.Patience = 5 * time.Second })
	img := newImage(t, r, 4, 1<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	first := n.status().HolderPid
	kill(t, first)
	eventually(t, "another holder", func() bool { p := n.status().HolderPid; return p != 0 && p != first })
	kill(t, n.status().Pid)
	if err := img.readAll(dir); err != nil {
		t.Fatal(err)
	}
	if s := n.status(); !s.Takeover {
		t.Error("the new holder did not hand the connection over")
	}
}

// Without a daemon for longer than patience, readers get EIO; the next daemon reports the layer, and a new attach works.
func TestPatienceEnds(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.Patience = 500 * time.Millisecond })
	img := newImage(t, r, 4, 1<<20)
	local := r.put(t, content(1<<20, 9))
	if _, err := os.ReadFile(n.attach("local", local)[0].Path); err != nil {
		t.Fatal(err)
	}
	n.event(EventComplete)
	n.client.Detach(t.Context(), "local")
	n.attach("local", local)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	holder := n.status().HolderPid
	pid := n.status().Pid
	n.client.Close() // only the holder starts another
	n.mark(refuse)
	kill(t, pid)
	err := img.readAll(dir)
	if !errors.Is(err, unix.EIO) {
		t.Fatalf("read without a daemon: %v", err)
	}
	eventually(t, "the holder ends", func() bool { return syscall.Kill(holder, 0) != nil })
	n.unmark(refuse)
	n.start()
	if e := n.event(EventDegraded); len(e.Layers) != 1 || e.Layers[0] != "layer" {
		t.Errorf("degraded: %+v", e)
	}
	if s := n.status(); len(s.Layers) != 2 || !s.Layers[0].Degraded || s.Layers[1].Degraded || s.Takeover {
		t.Errorf("%+v", s)
	}
	if err := img.readAll(dir); !errors.Is(err, unix.EIO) {
		t.Errorf("read over a connection that was ended: %v", err)
	}
	dir = img.mount(t, n.attach("layer", img.blob)[0].Path)
	if err := img.readAll(dir); err != nil {
		t.Error(err)
	}
	if s := n.status(); s.Layers[0].Degraded {
		t.Errorf("%+v", s)
	}
}

// A daemon that hangs is as good as a dead one: its holder kills it.
func TestHungDaemon(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, func(c *Config) { c.Patience = time.Second })
	img := newImage(t, r, 4, 1<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	pid := n.status().Pid
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := img.readAll(dir); !errors.Is(err, unix.EIO) {
		t.Fatalf("read under a daemon that hangs: %v", err)
	}
	eventually(t, "another daemon", func() bool { s, err := n.client.Status(t.Context()); return err == nil && s.Pid != pid })
	n.event(EventDegraded)
	if err := img.readAll(img.mount(t, n.attach("layer", img.blob)[0].Path)); err != nil {
		t.Error(err)
	}
}

// Somebody ends the connection under a daemon that lives.
func TestConnectionAborted(t *testing.T) {
	r := newRemote(t, 0, 0)
	n := startNode(t, r, nil)
	img := newImage(t, r, 2, 1<<20)
	n.attach("layer", img.blob)
	if err := unix.Unmount(n.launch.mountPoint(), unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	n.event(EventDegraded)
	eventually(t, "it can be read again", func() bool {
		p, err := n.client.Attach(t.Context(), "layer", []Object{img.blob})
		if err != nil {
			return false
		}
		_, err = os.Stat(p[0].Path)
		return err == nil
	})
	if err := img.readAll(img.mount(t, n.attach("layer", img.blob)[0].Path)); err != nil {
		t.Error(err)
	}
}

func TestUpgrade(t *testing.T) {
	r := newRemote(t, 5*time.Millisecond, 0)
	n := startNode(t, r, nil)
	img := newImage(t, r, 8, 2<<20)
	dir := img.mount(t, n.attach("layer", img.blob)[0].Path)
	old := n.status()
	failed := make(chan error, 1)
	go func() { failed <- img.readAll(dir) }()
	n.client.Close()
	n.launch = n.launchOf(n.launch.Config, "2")
	n.start()
	if err := <-failed; err != nil {
		t.Error(err)
	}
	if s := n.status(); s.Version != "2" || s.Pid == old.Pid || !s.Takeover || s.HolderPid != old.HolderPid {
		t.Errorf("before %+v, after %+v", old, s)
	}
	// The same again finds the daemon.
	pid := n.status().Pid
	n.client.Close()
	n.start()
	if p := n.status().Pid; p != pid {
		t.Errorf("daemon %d was replaced by %d for nothing", pid, p)
	}
}

// What is attached survives the daemon, and a state that cannot be read is no obstacle.
func TestState(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	digest := "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	s := readState(path, "boot")
	s.Connection = 3
	s.Layers["a"] = &attachedLayer{Blobs: []Object{{Digest: digest, Size: 5}}, Lazy: []bool{true}, Connection: 2}
	if err := s.write(path); err != nil {
		t.Fatal(err)
	}
	if got := readState(path, "boot"); got.Connection != 3 || len(got.Layers) != 1 || !got.Layers["a"].degraded(3) || got.Layers["a"].degraded(2) {
		t.Errorf("%+v", got)
	}
	if got := readState(path, "next"); len(got.Layers) != 0 {
		t.Error("what was attached before a reboot is still")
	}
	for _, bad := range []string{"", "{", `{"boot":"boot","layers":{"a":null}}`, `{"boot":"boot","layers":{"a":{"blobs":[{"digest":"../x"}],"lazy":[true]}}}`,
		`{"boot":"boot","layers":{"a":{"blobs":[],"lazy":[true]}}}`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := readState(path, "boot"); len(got.Layers) != 0 {
			t.Errorf("%s: %+v", bad, got.Layers)
		}
	}
	if toSum(digest).String() != digest {
		t.Error(toSum(digest))
	}
	if err := checkAttach("l", []Object{{Digest: "x"}}); err == nil {
		t.Error("a digest of one character is accepted")
	}
}
