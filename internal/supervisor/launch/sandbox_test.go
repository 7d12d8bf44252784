package launch_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/supervisor/launch"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// idBases gives every sandbox of a test run its own range, far above what nodes claim.
var idBases atomic.Uint32

// bed is one sandbox under test and what is around it.
type bed struct {
	*launch.Sandbox
	dir    string
	groups cgroup.Paths
	base   uint32
	launch *guestv1.Launch
}

type options struct {
	lowers []string // uppermost first; default: busybox
	limits cgroup.Limits
	edit   func(*guestv1.Launch)
	worker *os.File
}

// requireRoot skips where the tests cannot run at all.
func requireRoot(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("needs a static busybox (Debian: busybox-static)")
	}
	return busybox
}

// scratch is a directory that others may pass through, as layers' mounts are.
func scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "harena-launch-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove scratch directory: %v", err)
		}
	})
	return dir
}

// busyboxLayer is a minimal root file system.
func busyboxLayer(t testing.TB) string {
	t.Helper()
	busybox := requireRoot(t)
	dir := filepath.Join(scratch(t), "lower")
	for _, d := range []string{"bin", "etc", "proc", "sys", "dev", "tmp", "root", "home"} {
		mustDo(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	mustDo(t, os.Chmod(dir, 0o755), os.Chmod(filepath.Join(dir, "tmp"), 0o1777))
	copyFile(t, busybox, filepath.Join(dir, "bin/busybox"), 0o755)
	for _, n := range []string{"sh", "cat", "echo", "id", "ls", "sleep", "true", "ps", "grep", "mount", "umount", "mknod", "touch", "ip", "hostname", "kill", "stat", "rm", "mkdir", "setsid", "dd", "tty", "chmod", "chown", "cp", "mv", "head", "readlink", "find", "env", "pwd"} {
		mustDo(t, os.Symlink("busybox", filepath.Join(dir, "bin", n)))
	}
	mustDo(t, os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home:/bin/sh\n"), 0o644))
	return dir
}

func copyFile(t testing.TB, from, to string, mode os.FileMode) {
	t.Helper()
	b, err := os.ReadFile(from)
	mustDo(t, err)
	mustDo(t, os.WriteFile(to, b, mode), os.Chmod(to, mode))
}

func mustDo(t testing.TB, errors ...error) {
	t.Helper()
	for _, err := range errors {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func randomName() string {
	b := make([]byte, 6)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

var openCgroups = sync.OnceValues(func() (*cgroup.Root, error) { return cgroup.Open("harena-launchtest-" + randomName()) })

// newLaunch makes all that an edge makes before it launches.
func newLaunch(t testing.TB, o options) (*guestv1.Launch, cgroup.Paths) {
	t.Helper()
	if o.lowers == nil {
		o.lowers = []string{busyboxLayer(t)}
	}
	requireRoot(t)
	root, err := openCgroups()
	mustDo(t, err)
	g := root.Group(randomName())
	paths, err := g.Create(o.limits)
	mustDo(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := g.Kill(); err != nil {
			t.Errorf("kill what is left: %v", err)
		}
		if err := g.Remove(ctx); err != nil {
			t.Errorf("remove cgroups: %v", err)
		}
	})
	dir := scratch(t)
	for _, d := range []string{"upper/data", "upper/work"} {
		mustDo(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	l := &guestv1.Launch{
		SandboxId: "testing" + randomName(), Dir: dir, Lowers: o.lowers,
		Upper: filepath.Join(dir, "upper/data"), Work: filepath.Join(dir, "upper/work"),
		IdBase:   3_900_000_000 + 65536*idBases.Add(1),
		Hostname: "arena",
		Cgroups: &guestv1.Cgroups{
			Tracking: string(paths.Work), V1: paths.V1, FilesTracking: string(paths.Files), FilesV1: paths.FilesV1,
		},
	}
	if o.edit != nil {
		o.edit(l)
	}
	return l, paths
}

func start(t testing.TB, o options) *bed {
	t.Helper()
	l, paths := newLaunch(t, o)
	p, err := launch.Prepare(o.worker)
	mustDo(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	s, err := p.Launch(ctx, l)
	if err != nil {
		mustDo(t, p.Close())
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return &bed{Sandbox: s, dir: l.GetDir(), groups: paths, base: l.GetIdBase(), launch: l}
}

// result is a finished command.
type result struct {
	zygote.Exit
	out string // stdout and stderr
}

// spec is a command with its own cgroup and /dev/null everywhere.
func (b *bed) spec(t testing.TB, argv ...string) zygote.Spec {
	t.Helper()
	dir := b.groups.Work + cgroup.Dir("/c"+randomName())
	mustDo(t, dir.Make())
	g, err := os.Open(string(dir))
	mustDo(t, err)
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	mustDo(t, err)
	t.Cleanup(func() { mustDo(t, g.Close(), null.Close()) })
	return zygote.Spec{
		Paths: []string{argv[0]}, Argv: argv, Env: []string{"PATH=/bin"}, Cwd: "/",
		Stdin: null, Stdout: null, Stderr: null, Cgroup: g,
	}
}

// run runs a command to its end.
func (b *bed) run(t testing.TB, s zygote.Spec) result {
	t.Helper()
	r, w, err := os.Pipe()
	mustDo(t, err)
	defer func() { mustDo(t, r.Close()) }()
	mustDo(t, w.Chown(int(b.base+s.UID), int(b.base+s.GID)))
	s.Stdout, s.Stderr = w, w
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	p, err := b.Spawner().Spawn(ctx, s)
	mustDo(t, w.Close())
	if err != nil {
		t.Fatalf("spawn %q: %v", s.Argv, err)
	}
	var buf bytes.Buffer
	read := make(chan error, 1)
	go func() { _, err := io.Copy(&buf, r); read <- err }()
	e, err := p.Wait(ctx)
	if err != nil {
		t.Fatalf("wait for %q: %v", s.Argv, err)
	}
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	return result{e, buf.String()}
}

// sh runs shell text as root and returns what it printed.
func (b *bed) sh(t testing.TB, text string) string {
	t.Helper()
	return b.run(t, b.spec(t, "/bin/sh", "-c", text)).out
}

func TestMain(m *testing.M) {
	code := m.Run()
	if root, err := openCgroups(); os.Geteuid() == 0 && err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := root.Remove(ctx); err != nil && code == 0 {
			_, _ = os.Stderr.WriteString("cgroups are left: " + err.Error() + "\n")
			code = 1
		}
		cancel()
	}
	os.Exit(code)
}
