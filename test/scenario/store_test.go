package scenario

import (
	"crypto/rand"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// storeNode is a node beside the suite's own, one of several that share a store.
type storeNode struct {
	t      *testing.T
	dir    string
	args   []string
	cmd    *exec.Cmd
	listen string
}

func startStoreNode(t *testing.T, dir, store string) *storeNode {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &storeNode{t: t, dir: dir, listen: l.Addr().String()}
	l.Close()
	n.args = []string{"up", "--data", dir, "--listen", n.listen, "--store", store}
	t.Cleanup(func() { // also of one that did not become ready
		if out, err := exec.Command(program("harena"), "down", "--data", dir).CombinedOutput(); err != nil {
			t.Errorf("harena down: %v: %s", err, out)
		}
		if n.cmd != nil {
			_ = n.cmd.Wait()
		}
		mounts, _ := os.ReadFile("/proc/self/mountinfo")
		if strings.Contains(string(mounts), dir) {
			t.Errorf("mounts of %s are left", dir)
		}
	})
	n.start()
	return n
}

func (n *storeNode) start() {
	n.t.Helper()
	n.cmd = exec.Command(program("harena"), n.args...)
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if out, err := n.try("fleet", "ls"); err == nil {
			return
		} else if time.Now().After(end) {
			n.t.Fatalf("the node is not ready: %s", out)
		}
	}
}

// try runs the CLI against the node.
func (n *storeNode) try(args ...string) (string, error) { return n.tryFor(2*time.Minute, args...) }

func (n *storeNode) tryFor(d time.Duration, args ...string) (string, error) {
	ctx := within(n.t, d)
	cmd := exec.CommandContext(ctx, program("harena"), append([]string{"--profile", filepath.Join(n.dir, "client.json")}, args...)...)
	// The server that the suite runs against, if that is named, is another one.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "HARENA_URL=") || strings.HasPrefix(v, "HARENA_TOKEN=")
	})
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (n *storeNode) run(args ...string) string {
	n.t.Helper()
	out, err := n.try(args...)
	if err != nil {
		n.t.Fatalf("harena %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return out
}

// takes is run of what may take so long.
func (n *storeNode) takes(d time.Duration, args ...string) string {
	n.t.Helper()
	out, err := n.tryFor(d, args...)
	if err != nil {
		n.t.Fatalf("harena %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return out
}

// smallTree makes a root file system of this machine's shell and a file of noise.
func smallTree(t *testing.T, noise int) string {
	t.Helper()
	dir := t.TempDir()
	script := `cd "$1"; mkdir -p proc dev sys tmp root etc usr/bin; ln -s usr/bin bin; echo root:x:0:0::/root:/bin/sh > etc/passwd
for p in sh sha256sum cat ls true sleep; do f=$(readlink -f "$(command -v /bin/$p || command -v /usr/bin/$p)"); cp "$f" usr/bin/$p
for l in $(ldd "$f" | grep -o '/lib[^ ]*'); do mkdir -p ".$(dirname "$l")"; cp -Ln "$l" ".$l"; done; done`
	if out, err := exec.Command("sh", "-ec", script, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := make([]byte, noise)
	_, _ = rand.Read(b)
	if err := os.WriteFile(filepath.Join(dir, "root", "noise"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func hashOf(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("sha256sum", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out[:64])
}

// TestTwoNodesShareAStore: what one node imports runs on another one, also through the death of its servers, and while the store is away
// what is there goes on.
func TestTwoNodesShareAStore(t *testing.T) {
	if _, err := os.Stat(program("harena")); err != nil || os.Geteuid() != 0 {
		t.Skip("it starts nodes of its own: root and bin/harena are needed")
	}
	for _, mode := range []string{"", "?direct=1"} {
		t.Run("mode"+mode, func(t *testing.T) {
			root, err := os.MkdirTemp("/var/tmp", "harena-store-")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(root) })
			store := filepath.Join(root, "store")
			if err := os.Mkdir(store, 0o700); err != nil {
				t.Fatal(err)
			}
			a := startStoreNode(t, filepath.Join(root, "a"), "file://"+store+mode)
			b := startStoreNode(t, filepath.Join(root, "b"), "file://"+store+mode)
			tree := smallTree(t, 24<<20)
			want := hashOf(t, filepath.Join(tree, "root", "noise"))
			a.run("layer", "import", "--name", "small:1", "dir:"+tree)

			id := strings.TrimSpace(b.run("create", "--image", "small:1"))
			_ = b.cmd.Process.Kill()
			_ = b.cmd.Wait()
			b.killBlobd(mode == "")
			b.start()
			if got := b.run("exec", id, "--", "sha256sum", "/root/noise"); !strings.HasPrefix(got, want) {
				t.Errorf("read %s, want %s", got, want)
			}
			if got := b.run("layer", "verify", "small:1"); !strings.Contains(got, "intact") {
				t.Errorf("verify: %s", got)
			}

			// An upgrade changes what new sandboxes get, and nothing else.
			if err := os.WriteFile(filepath.Join(tree, "root", "new"), []byte("new\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			a.run("layer", "import", "--name", "small:1", "dir:"+tree)
			time.Sleep(6 * time.Second) // how long the other node takes a name for good
			if got := b.run("run", "--image", "small:1", "--", "cat", "/root/new"); got != "new\n" {
				t.Errorf("a new sandbox has %q", got)
			}
			if out, err := b.try("exec", id, "--", "cat", "/root/new"); err == nil {
				t.Errorf("an old sandbox has %q", out)
			}
			var reach struct {
				Sandboxes []struct {
					ID      string
					Current bool
				}
			}
			if err := json.Unmarshal([]byte(b.run("layer", "reach", "small:1", "--json")), &reach); err != nil {
				t.Fatal(err)
			}
			for _, s := range reach.Sandboxes {
				if s.ID == id && s.Current {
					t.Errorf("%s is said to have the present layer", id)
				}
			}

			// Without the store: what is here goes on, what is not is an error, and nothing is forgotten.
			if mode == "" {
				if err := os.Rename(store, store+".away"); err != nil {
					t.Fatal(err)
				}
				if got := a.run("run", "--image", "small:1", "--", "cat", "/root/new"); got != "new\n" {
					t.Errorf("without the store: %q", got)
				}
				if out, err := b.try("run", "--image", "unknown:1", "--", "true"); err == nil || !strings.Contains(out, "store cannot be used") {
					t.Errorf("an unknown name without the store: %v, %s", err, out)
				}
				if err := os.Rename(store+".away", store); err != nil {
					t.Fatal(err)
				}
				if got := b.run("run", "--image", "small:1", "--", "cat", "/root/new"); got != "new\n" {
					t.Errorf("with the store again: %q", got)
				}
			}
		})
	}
}

// killBlobd kills the node's blobd, which must be there or must not.
func (n *storeNode) killBlobd(there bool) {
	n.t.Helper()
	found := false
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		b, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		args := strings.Split(string(b), "\x00")
		if len(args) > 3 && args[1] == "blobd" && args[2] == "--data" && args[3] == n.dir {
			found = true
			if pid, err := strconv.Atoi(filepath.Base(p)); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	if found != there {
		n.t.Errorf("blobd runs: %v, want %v", found, there)
	}
}
