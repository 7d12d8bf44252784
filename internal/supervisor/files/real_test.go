package files

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/launch"
	"github.com/harena-dev/harena/internal/supervisor/users"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// realBox is a container with the service beside it, as the supervisor composes them.
type realBox struct {
	box
	sandbox *launch.Sandbox
	base    uint32
	groups  cgroup.Paths
	users   *users.Lookup
}

func newRealBox(t testing.TB) *realBox {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("needs a static busybox (Debian: busybox-static)")
	}
	random := make([]byte, 6)
	_, err = rand.Read(random)
	must(t, err)
	name := hex.EncodeToString(random)
	dir, err := os.MkdirTemp("/var/tmp", "harena-files-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	lower := filepath.Join(dir, "lower")
	for _, d := range []string{"bin", "etc", "proc", "sys", "dev", "root", "home/user", "tmp", "opt/tree/sub"} {
		must(t, os.MkdirAll(filepath.Join(lower, d), 0o755))
	}
	must(t, os.Chmod(filepath.Join(lower, "tmp"), 0o1777))
	must(t, os.Chown(filepath.Join(lower, "home/user"), userUID, userUID))
	program, err := os.ReadFile(busybox)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(lower, "bin/busybox"), program, 0o755))
	for file, content := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", "etc/group": "user:x:1000:\n",
		"opt/tree/sub/f": "from the layer", "opt/g": "g",
	} {
		must(t, os.WriteFile(filepath.Join(lower, file), []byte(content), 0o644))
	}
	upper := filepath.Join(dir, "upper")
	must(t, os.MkdirAll(filepath.Join(upper, "data"), 0o755))
	must(t, os.MkdirAll(filepath.Join(upper, "work"), 0o755))

	root, err := cgroup.Open("harena-filestest-" + name)
	must(t, err)
	group := root.Group(name)
	paths, err := group.Create(cgroup.Limits{})
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		for _, err := range []error{group.Kill(), group.Remove(ctx), root.Remove(ctx)} {
			if err != nil {
				t.Errorf("remove cgroups: %v", err)
			}
		}
	})
	r := &realBox{base: 3_800_000_000, groups: paths}
	p, err := launch.Prepare(guest(t))
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r.sandbox, err = p.Launch(ctx, &guestv1.Launch{
		SandboxId: boxID, Dir: dir, Lowers: []string{lower}, IdBase: r.base, Hostname: "arena",
		Upper: filepath.Join(upper, "data"), Work: filepath.Join(upper, "work"),
		Cgroups: &guestv1.Cgroups{Tracking: string(paths.Work), V1: paths.V1, FilesTracking: string(paths.Files), FilesV1: paths.FilesV1},
	})
	if err != nil {
		p.Close()
		t.Fatal(err)
	}
	r.users = users.New(users.Config{Root: r.sandbox.Root, Read: func(ctx context.Context, path string, most int64) ([]byte, error) {
		return r.svc.ReadSmall(ctx, path, most)
	}})
	r.box = box{t: t, svc: New(Config{SandboxID: boxID, Starter: r.sandbox, Users: r.users, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})}
	t.Cleanup(func() {
		r.svc.Close()
		r.waitGone()
		if err := r.sandbox.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

// guestDir is where guestProgram has built, for TestMain to remove.
var guestDir string

// guestProgram builds the program whose workers are to be tested, once; it is
// static, as everything that runs in a sandbox's mount namespace has to be.
var guestProgram = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("/var/tmp", "harena-files-guest-")
	if err != nil {
		return "", err
	}
	guestDir = dir
	path := filepath.Join(dir, "harena-guest")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "github.com/harena-dev/harena/cmd/harena-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return path, fmt.Errorf("build: %w\n%s", err, out)
	}
	// As installed: nobody inside may read it.
	return path, os.Chmod(path, 0o111)
})

func guest(t testing.TB) *os.File {
	t.Helper()
	path, err := guestProgram()
	must(t, err)
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	must(t, err)
	return os.NewFile(uintptr(fd), path)
}

// sh runs shell text inside as root; end waits for it.
func (r *realBox) sh(text string) (out func() string) {
	t := r.t
	t.Helper()
	random := make([]byte, 6)
	_, err := rand.Read(random)
	must(t, err)
	dir := r.groups.Work + cgroup.Dir("/c"+hex.EncodeToString(random))
	must(t, dir.Make())
	g, err := os.Open(string(dir))
	must(t, err)
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	must(t, err)
	pr, pw, err := os.Pipe()
	must(t, err)
	must(t, pw.Chown(int(r.base), int(r.base)))
	p, err := r.sandbox.Spawner().Spawn(r.ctx(), zygote.Spec{
		Paths: []string{"/bin/busybox"}, Argv: []string{"sh", "-c", text}, Env: []string{"PATH=/bin"}, Cwd: "/",
		Stdin: null, Stdout: pw, Stderr: pw, Cgroup: g,
	})
	must(t, err)
	for _, f := range []*os.File{g, null, pw} {
		f.Close()
	}
	return func() string {
		t.Helper()
		var buf bytes.Buffer
		io.Copy(&buf, pr)
		pr.Close()
		_, err := p.Wait(r.ctx())
		must(t, err)
		return buf.String()
	}
}

func TestRealSandbox(t *testing.T) {
	r := newRealBox(t)
	info, err := r.write("user", "a/b", "hello", 0)
	must(t, err)
	if info.Uid != userUID || info.Path != "/home/user/a/b" {
		t.Errorf("info %v", info)
	}
	if got := r.sh("busybox cat /home/user/a/b; busybox stat -c ' %u %g %a' /home/user/a/b")(); got != "hello 1000 1000 644\n" {
		t.Errorf("inside: %q", got)
	}
	r.sh("echo -n inside >/tmp/x; busybox chmod 640 /tmp/x; busybox mkfifo /tmp/fifo; busybox ln -s /proc/1/root/etc /tmp/magic; busybox ln -s /proc/sys/kernel /tmp/sysctl")()
	if got, err := r.read("", "/tmp/x"); err != nil || got != "inside" {
		t.Errorf("read %q %v", got, err)
	}
	_, err = r.read("user", "/tmp/x")
	wantKind(t, err, errs.Denied, "permission")
	for _, p := range []string{"/proc", "/proc/1/environ", "/proc/self/environ", "/proc/sys/kernel/hostname", "/sys", "/dev/pts", "/tmp/sysctl/hostname", "/tmp/magic/passwd"} {
		if _, err := r.stat("", p, true); err == nil {
			t.Errorf("%s was described", p)
		}
		if _, err := r.read("", p); err == nil {
			t.Errorf("%s was read", p)
		}
		if _, err := r.write("", p, "x", 0); err == nil {
			t.Errorf("%s was written", p)
		}
	}
	for _, p := range []string{"/dev/null", "/dev/zero", "/dev/tty", "/tmp/fifo"} {
		_, err := r.read("", p)
		wantKind(t, err, errs.Precondition, "not a regular file")
	}
	// Files and directories of the layer below.
	_, err = r.write("", "/opt/g", "changed", 0)
	must(t, err)
	_, err = r.move("", "/opt/tree", "/opt/moved", false)
	must(t, err)
	if got, err := r.read("", "/opt/moved/sub/f"); err != nil || got != "from the layer" {
		t.Errorf("moved: %q %v", got, err)
	}
	_, err = r.move("", "/opt/moved", "/dev/shm/m", false)
	must(t, err)
	must(t, r.remove("", "/opt", true, false))
	if got := r.sh("busybox ls /opt /dev/shm 2>&1")(); !strings.Contains(got, "No such file") || !strings.Contains(got, "m") {
		t.Errorf("inside: %q", got)
	}
	if got := r.sh("busybox find / -xdev -name '.harena*'")(); got != "" {
		t.Errorf("left behind: %s", got)
	}
	if got := r.sh("busybox ps -o args | busybox grep [f]iles")(); got != "" {
		t.Errorf("workers are seen inside: %q", got)
	}
}

func TestRealUsersAreFresh(t *testing.T) {
	r := newRealBox(t)
	for i := range 30 {
		r.sh(fmt.Sprintf("echo 'u%d:x:%d:100::/h%d:/bin/sh' >>/etc/passwd; echo 'g%d:x:%d:u%d' >>/etc/group", i, 2000+i, i, i, 3000+i, i))()
		u, err := r.users.Resolve(r.ctx(), fmt.Sprint("u", i))
		must(t, err)
		if u.UID != uint32(2000+i) || u.Home != fmt.Sprint("/h", i) || len(u.Groups) != 1 || u.Groups[0] != uint32(3000+i) {
			t.Errorf("user %+v", u)
		}
	}
	if n := len(r.svc.pool.idle); n != 0 {
		t.Errorf("%d workers were needed", n)
	}
	// By the worker, when the file is somewhere else.
	r.sh("busybox mv /etc/passwd /dev/shm/passwd; busybox ln -s /dev/shm/passwd /etc/passwd; echo 'm:x:77:77::/m:/bin/sh' >>/etc/passwd")()
	if u, err := r.users.Resolve(r.ctx(), "m"); err != nil || u.UID != 77 {
		t.Errorf("by the worker: %+v %v", u, err)
	}
}

func TestRealTreeGoesAround(t *testing.T) {
	r := newRealBox(t)
	srv := r.http().URL
	r.sh("busybox mkdir -p /tmp/w/a; cd /tmp/w; echo x >a/x; busybox ln a/x y; busybox ln -s a l; busybox mkfifo p; busybox chown 5:6 a/x; busybox chmod 4755 a/x; busybox chown -h 7:8 l; busybox touch -d @1000 a")()
	resp, body := r.do(r.request("GET", r.tarURL(srv, "path=/tmp/w"), nil, nil))
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s", resp.Status, body)
	}
	if resp, text := r.do(r.request("PUT", r.tarURL(srv, "path=/root/w"), nil, body)); resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s", resp.Status, text)
	}
	const list = "busybox find . | busybox sort | busybox xargs busybox stat -c '%n %F %u:%g %a %h %Y'"
	want, got := r.sh("cd /tmp/w; "+list)(), r.sh("cd /root/w; "+list)()
	if want != got || !strings.Contains(want, "./a/x regular file 5:6 4755 2") {
		t.Errorf("\n%s became\n%s", want, got)
	}
	resp, err := http.DefaultClient.Do(r.request("GET", r.tarURL(srv, "path=/"), nil, nil))
	must(t, err)
	n, err := io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	if err != nil || n < 1<<20 {
		t.Errorf("the whole sandbox: %d bytes, %v", n, err)
	}
}

func TestRealRacesFromInside(t *testing.T) {
	r := newRealBox(t)
	hostname, err := os.ReadFile("/proc/sys/kernel/hostname")
	must(t, err)
	// The file is swapped for a link, and its directory for one. Writes make what is
	// missing, so the attacker starts from nothing each time.
	end := r.sh(`busybox mkdir /tmp/w; cd /tmp/w
		while [ ! -e /tmp/stop ]; do
			busybox rm -rf d; busybox mkdir -p d
			for i in 1 2 3 4; do
				echo inside >x; busybox mv -f x d/hostname
				busybox ln -s /proc/sys/kernel/hostname y; busybox mv -f y d/hostname
			done
			busybox rm -rf d; busybox ln -s /proc/sys/kernel d
			busybox rm -rf d; busybox ln -s /proc/1/root/proc/sys/kernel d
		done`)
	denied, read, wrote := 0, 0, 0
	for until := time.Now().Add(4 * time.Second); time.Now().Before(until); {
		got, err := r.read("", "/tmp/w/d/hostname")
		switch {
		case err == nil && got != "inside\n" && got != "written\n":
			t.Fatalf("read %q", got)
		case err == nil:
			read++
		case errs.Is(err, errs.Denied):
			denied++
		}
		if _, err := r.write("", "/tmp/w/d/hostname", "written\n", 0); err == nil {
			wrote++
		}
	}
	_, err = r.write("", "/tmp/stop", "", 0)
	must(t, err)
	end()
	t.Logf("%d reads, %d writes, %d refused", read, wrote, denied)
	if now, err := os.ReadFile("/proc/sys/kernel/hostname"); err != nil || !bytes.Equal(now, hostname) {
		t.Errorf("the host's name is %q", now)
	}
	if read == 0 || wrote == 0 || denied == 0 {
		t.Error("nothing was tried")
	}
}

func TestRealKilledUploadLeavesNothing(t *testing.T) {
	r := newRealBox(t)
	_, err := r.write("", "/tmp/f", "old", 0)
	must(t, err)
	pr, pw := io.Pipe()
	go func() {
		pw.Write(make([]byte, 4<<20))
		r.svc.pool.mu.Lock()
		for busy := range r.svc.pool.busy {
			busy.os.Kill()
		}
		r.svc.pool.mu.Unlock()
		for {
			if _, err := pw.Write(make([]byte, 1<<20)); err != nil {
				return
			}
		}
	}()
	_, err = r.svc.put(r.ctx(), r.svc.upload(), subject{path: "/tmp/f"}, 0, pr)
	pr.Close()
	wantKind(t, err, errs.Capacity, "ended in the middle")
	if got := r.sh("busybox cat /tmp/f; busybox find / -xdev -name '.harena*'")(); got != "old" {
		t.Errorf("inside: %q", got)
	}
}

func TestRealWorkerStaysUnderTheMemoryLimit(t *testing.T) {
	r := newRealBox(t)
	_, err := r.write("", "/tmp/f", "x", 0)
	must(t, err)
	r.svc.pool.mu.Lock()
	pid := r.svc.pool.idle[0].os.Pid
	r.svc.pool.mu.Unlock()
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	must(t, err)
	if !strings.Contains(string(groups), filepath.Base(string(r.groups.Files))) {
		t.Errorf("cgroups of the worker:\n%s", groups)
	}
	if peak := peakRSS(t, pid); peak > 40<<20 {
		t.Errorf("a worker needs %d MiB", peak>>20)
	} else {
		t.Logf("worker: %d KiB at most", peak>>10)
	}
	if _, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil {
		t.Errorf("worker: %v", err)
	}
	var st unix.Stat_t
	must(t, unix.Stat(fmt.Sprintf("/proc/%d/environ", pid), &st))
	if st.Uid != 0 { // files of a process that is not dumpable belong to the node's root
		t.Errorf("the worker is dumpable: its files belong to %d", st.Uid)
	}
}

func BenchmarkReal(b *testing.B) {
	r := newRealBox(b)
	_, err := r.write("", "/tmp/f", "hello", 0)
	must(b, err)
	b.Run("read warm", func(b *testing.B) {
		for b.Loop() {
			_, err := r.svc.ReadSmall(context.Background(), "/tmp/f", 100)
			must(b, err)
		}
	})
	b.Run("write warm", func(b *testing.B) {
		for b.Loop() {
			_, err := r.write("", "/tmp/f", "hello", 0)
			must(b, err)
		}
	})
	b.Run("read cold", func(b *testing.B) {
		for b.Loop() {
			_, err := r.svc.ReadSmall(context.Background(), "/tmp/f", 100)
			must(b, err)
			pr := r.svc.pool.idle[0]
			pr.expire.Stop()
			r.svc.pool.forget(pr)
			r.svc.pool.end(pr)
		}
	})
	b.Run("resolve root", func(b *testing.B) {
		for b.Loop() {
			_, err := r.users.Resolve(context.Background(), "")
			must(b, err)
		}
	})
}
