package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// blobdStatus is what a node's blobd says of itself; ok is false when it does not answer.
func (n *storeNode) blobdStatus() (s struct {
	Pid     int `json:"pid"`
	Holder  int `json:"holder_pid"`
	Waiting int `json:"waiting"`
}, ok bool) {
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(n.dir, "blobd.sock"))
	}}}
	res, err := client.Post("http://blobd/status", "application/json", nil)
	if err != nil {
		return s, false
	}
	defer res.Body.Close()
	return s, json.NewDecoder(res.Body).Decode(&s) == nil && s.Pid > 1
}

// readWaits returns when a read waits for the store in a blobd that is not one of those, and says which blobd and holder that are.
func (n *storeNode) readWaits(not ...int) (pid, holder int) {
	n.t.Helper()
	for end := time.Now().Add(slowly(30 * time.Second)); ; time.Sleep(20 * time.Millisecond) {
		if s, ok := n.blobdStatus(); ok && s.Waiting > 0 && !slices.Contains(not, s.Pid) {
			return s.Pid, s.Holder
		}
		if time.Now().After(end) {
			n.t.Fatal("no read waits for the store")
		}
	}
}

func (n *storeNode) create(image string) string {
	n.t.Helper()
	id := strings.TrimSpace(n.run("create", "--image", image))
	// From here on all of its programs is here, the file is not: a program whose own pages cannot be read gets SIGBUS before it tells of an error.
	n.run("exec", id, "--", "sh", "-c", "cat /usr/bin/* /lib*/*.* /lib*/*/* > /dev/null; sha256sum /usr/bin/true; ls /nowhere; true")
	return id
}

// hashing starts the hash of a file that is not here yet.
func (n *storeNode) hashing(id string) string {
	n.t.Helper()
	return strings.TrimSpace(n.run("exec", "--detach", id, "--", "sha256sum", "/root/noise"))
}

func (n *storeNode) noise(id, want string) {
	n.t.Helper()
	if got := n.run("exec", id, "--", "sha256sum", "/root/noise"); !strings.HasPrefix(got, want) {
		n.t.Errorf("read %s, want %s", got, want)
	}
}

// eventOf fails unless there was an event of a kind that names a layer.
func (n *storeNode) eventOf(kind, digest string) {
	n.t.Helper()
	var out string
	for end := time.Now().Add(slowly(10 * time.Second)); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if out = n.run("events", "--kind", kind, "--json"); strings.Contains(out, digest) {
			return
		}
	}
	n.t.Errorf("no event %s names %s: %s", kind, digest, out)
}

func (n *storeNode) digest(name string) string {
	n.t.Helper()
	var l struct{ Digest string }
	if err := json.Unmarshal([]byte(n.run("layer", "show", name, "--json")), &l); err != nil || l.Digest == "" {
		n.t.Fatalf("show %s: %+v, %v", name, l, err)
	}
	return l.Digest
}

// TestStoreFaults: what sandboxes on lazy layers notice of dying daemons, a store that is away, and damage in it.
func TestStoreFaults(t *testing.T) {
	if _, err := os.Stat(program("harena")); err != nil || os.Geteuid() != 0 {
		t.Skip("it starts nodes of its own: root and bin/harena are needed")
	}
	root, err := os.MkdirTemp("/var/tmp", "harena-store-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	store := filepath.Join(root, "store")
	if err := os.Mkdir(store, 0o700); err != nil {
		t.Fatal(err)
	}
	away := func(t *testing.T) (back func()) {
		if err := os.Rename(store, store+".away"); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Rename(store+".away", store); err != nil {
				t.Fatal(err)
			}
		}
	}
	a := startStoreNode(t, filepath.Join(root, "a"), "file://"+store)
	b := startStoreNode(t, filepath.Join(root, "b"), "file://"+store)
	imported := func(t *testing.T, name string) (tree, want string) {
		tree = smallTree(t, 6<<20)
		a.run("layer", "import", "--name", name, "dir:"+tree)
		return tree, hashOf(t, filepath.Join(tree, "root", "noise"))
	}

	t.Run("KilledInMidRead", func(t *testing.T) {
		_, want := imported(t, "killed:1")
		id := b.create("killed:1")
		back := away(t)
		command := b.hashing(id)
		first, _ := b.readWaits()
		if out, err := b.try("doctor"); err != nil || !strings.Contains(out, "has not answered since") || !strings.Contains(out, "MiB") {
			t.Errorf("doctor in an outage: %v, %s", err, out)
		}
		if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		second, holder := b.readWaits(first)
		for _, pid := range []int{second, holder} {
			if own, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup"); err != nil || pid > 0 && !strings.Contains(string(own)+"\n", "/blobd\n") {
				t.Errorf("process %d is in %s, %v", pid, own, err)
			}
		}
		_ = b.cmd.Process.Kill() // the server, with the read still waiting
		_ = b.cmd.Wait()
		b.start()
		if now, _ := b.readWaits(); now != second {
			t.Errorf("the next server started another blobd: %d, not %d", now, second)
		}
		back()
		if got := b.run("attach", id, command); !strings.HasPrefix(got, want) {
			t.Errorf("read %s, want %s", got, want)
		}
		if out := b.run("show", id); strings.Contains(out, "reads of layer") {
			t.Errorf("degraded after a takeover: %s", out)
		}
	})

	t.Run("LostForGood", func(t *testing.T) {
		_, want := imported(t, "lost:1")
		id := b.create("lost:1")
		digest := b.digest("lost:1")
		back := away(t)
		command := b.hashing(id)
		daemon, holder := b.readWaits()
		if holder <= 1 {
			t.Skip("nobody holds the connection: the kernel cannot resend")
		}
		// Stopped first, so that it does not start another holder in between.
		for _, kill := range []struct {
			pid int
			sig syscall.Signal
		}{{daemon, syscall.SIGSTOP}, {holder, syscall.SIGKILL}, {daemon, syscall.SIGKILL}} {
			if err := syscall.Kill(kill.pid, kill.sig); err != nil {
				t.Fatal(err)
			}
		}
		if out, err := b.try("attach", id, command); err == nil || !strings.Contains(out, "Input/output error") {
			t.Errorf("a read that nobody can answer any more: %v, %s", err, out)
		}
		b.eventOf("blobd.degraded", digest)
		if out := b.run("show", id); !strings.Contains(out, "reads of layer "+digest) {
			t.Errorf("the sandbox is not shown as degraded: %s", out)
		}
		back()
		b.noise(b.create("lost:1"), want)
		b.run("stop", id)
	})

	t.Run("Damaged", func(t *testing.T) {
		tree, want := imported(t, "damaged:1")
		noise, err := os.ReadFile(filepath.Join(tree, "root", "noise"))
		if err != nil {
			t.Fatal(err)
		}
		object, at := objectWith(t, store, noise[3<<20:3<<20+1024])
		overwrite(t, object, at, make([]byte, 1024))
		id := b.create("damaged:1")
		if out, err := b.try("exec", id, "--", "sha256sum", "/root/noise"); err == nil || !strings.Contains(out, "Input/output error") {
			t.Errorf("a damaged blob: %v, %s", err, out)
		}
		b.eventOf("store.corrupt", b.digest("damaged:1"))
		overwrite(t, object, at, noise[3<<20:3<<20+1024])
		b.noise(id, want)
	})

	t.Run("DamagedMetadata", func(t *testing.T) {
		_, want := imported(t, "meta:1")
		hex := strings.TrimPrefix(a.digest("meta:1"), "sha256:")
		text, err := os.ReadFile(filepath.Join(store, "manifests", hex[:2], hex+".json"))
		if err != nil {
			t.Fatal(err)
		}
		var m struct{ Meta struct{ Digest string } }
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		hex = strings.TrimPrefix(m.Meta.Digest, "sha256:")
		path := filepath.Join(store, "blobs", hex[:2], hex)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, int64(len(whole)/2)); err != nil {
			t.Fatal(err)
		}
		if out, err := b.try("create", "--image", "meta:1"); err == nil || !strings.Contains(out, "damaged in the shared store") {
			t.Errorf("damaged metadata: %v, %s", err, out)
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		b.noise(b.create("meta:1"), want)
	})

	t.Run("WarmEqualsLocal", func(t *testing.T) {
		imported(t, "same:1")
		const look = "ls -lARn --full-time /root /usr /etc/passwd /lib*; cd /; sha256sum root/* usr/bin/* etc/passwd lib*/*/* lib*/*.* 2>/dev/null; true"
		local := a.run("run", "--image", "same:1", "--", "sh", "-c", look)
		if strings.Count(local, "\n") < 20 || strings.Contains(local, "rror") {
			t.Fatalf("a strange tree: %s", local)
		}
		if cold := b.run("run", "--image", "same:1", "--", "sh", "-c", look); cold != local {
			t.Errorf("cold:\n%s\nlocal:\n%s", cold, local)
		}
		b.eventOf("blobd.complete", b.digest("same:1"))
		back := away(t)
		defer back()
		if warm := b.run("run", "--image", "same:1", "--", "sh", "-c", look); warm != local {
			t.Errorf("warm:\n%s\nlocal:\n%s", warm, local)
		}
	})
}

// objectWith finds the object of a store that has bytes in it as they are.
func objectWith(t *testing.T, store string, part []byte) (path string, at int64) {
	t.Helper()
	objects, _ := filepath.Glob(filepath.Join(store, "blobs", "*", "*"))
	for _, o := range objects {
		b, err := os.ReadFile(o)
		if err != nil {
			t.Fatal(err)
		}
		if i := bytes.Index(b, part); i >= 0 {
			return o, int64(i)
		}
	}
	t.Fatal("none of " + strconv.Itoa(len(objects)) + " objects has it")
	return "", 0
}

func overwrite(t *testing.T, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(b, at)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}
