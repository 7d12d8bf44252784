package launch_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

func TestExitStatus(t *testing.T) {
	b := start(t, options{})
	b.sh(t, `echo 'no header' > /tmp/noexec; echo data > /tmp/text; echo '#!/nowhere' > /tmp/orphan; chmod 755 /tmp/noexec /tmp/orphan; mkdir /tmp/private; chmod 700 /tmp/private; mkdir /tmp/gone`)
	user := func(s *zygote.Spec) { s.UID, s.GID = 1000, 1000 }
	for _, c := range []struct {
		name  string
		argv  []string
		edit  func(*zygote.Spec)
		code  int
		errno unix.Errno
		stage string
	}{
		{name: "true", argv: []string{"/bin/true"}},
		{name: "status", argv: []string{"/bin/sh", "-c", "exit 3"}, code: 3},
		{name: "missing", argv: []string{"/bin/nothing"}, code: 127, errno: unix.ENOENT, stage: "exec"},
		{name: "below a file", argv: []string{"/etc/passwd/x"}, code: 126, errno: unix.ENOTDIR, stage: "exec"},
		{name: "not executable", argv: []string{"/tmp/text"}, code: 126, errno: unix.EACCES, stage: "exec"},
		{name: "a directory", argv: []string{"/tmp"}, code: 126, errno: unix.EACCES, stage: "exec"},
		{name: "no format", argv: []string{"/tmp/noexec"}, code: 126, errno: unix.ENOEXEC, stage: "exec"},
		{name: "no interpreter", argv: []string{"/tmp/orphan"}, code: 127, errno: unix.ENOENT, stage: "exec"},
		{name: "its own program", argv: []string{"/proc/self/exe"}, code: 126, errno: unix.EACCES, stage: "exec"},
		{name: "PID 1's program", argv: []string{"/proc/1/exe"}, code: 126, errno: unix.EACCES, stage: "exec"},
		{name: "second path", argv: []string{"true"}, edit: func(s *zygote.Spec) { s.Paths = []string{"/tmp/text", "/x/true", "/bin/true"} }},
		{name: "denied, then missing", argv: []string{"true"}, edit: func(s *zygote.Spec) { s.Paths = []string{"/tmp/text", "/x/true"} }, code: 126, errno: unix.EACCES, stage: "exec"},
		{name: "cwd missing", argv: []string{"/bin/true"}, edit: func(s *zygote.Spec) { s.Cwd = "/nowhere" }, code: 126, errno: unix.ENOENT, stage: "chdir"},
		{name: "cwd missing, or root", argv: []string{"/bin/true"}, edit: func(s *zygote.Spec) { s.Cwd, s.CwdOrRoot = "/nowhere", true }},
		{name: "cwd as the user", argv: []string{"/bin/true"}, edit: func(s *zygote.Spec) { user(s); s.Cwd = "/tmp/private" }, code: 126, errno: unix.EACCES, stage: "chdir"},
	} {
		s := b.spec(t, c.argv...)
		if c.edit != nil {
			c.edit(&s)
		}
		got := b.run(t, s)
		if got.Code != c.code || got.ExecErrno != int(c.errno) || got.Stage != c.stage || got.Signal != 0 {
			t.Errorf("%s: %+v, want %d, %v in %q", c.name, got, c.code, c.errno, c.stage)
		}
	}
	if got := b.run(t, b.spec(t, "/bin/sh", "-c", "kill -9 $$")); got.Code != -1 || got.Signal != 9 {
		t.Errorf("killed: %+v", got)
	}
}

func TestIdentity(t *testing.T) {
	lower := withAttack(t)
	suid := filepath.Join(lower, "bin/suid")
	copyFile(t, filepath.Join(lower, "bin/attack"), suid, 0o755)
	mustDo(t, os.Chmod(suid, 0o755|os.ModeSetuid))
	capped := filepath.Join(lower, "bin/capped")
	copyFile(t, filepath.Join(lower, "bin/busybox"), capped, 0o755)
	// A v2 file capability: cap_chown, effective (linux/capability.h, struct vfs_cap_data).
	mustDo(t, unix.Setxattr(capped, "security.capability", []byte{1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0))
	b := start(t, options{lowers: []string{lower}})

	user := func(argv ...string) zygote.Spec {
		s := b.spec(t, argv...)
		s.UID, s.GID, s.Groups = 1000, 1000, []uint32{20, 30}
		return s
	}
	const status = "cat /proc/self/status"
	fields := func(out string, names ...string) string {
		var got []string
		for line := range strings.Lines(out) {
			for _, n := range names {
				if v, ok := strings.CutPrefix(line, n+":"); ok {
					got = append(got, strings.Join(strings.Fields(v), " "))
				}
			}
		}
		return strings.Join(got, "|")
	}
	all := []string{"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"}
	const none, full = "0000000000000000", "00000000a80405fb"
	if got, want := fields(b.sh(t, status), all...), "0 0 0 0|0 0 0 0||"+strings.Join([]string{none, full, full, full, none}, "|")+"|0|2"; got != want {
		t.Errorf("root: %s, want %s", got, want)
	}
	out := b.run(t, user("/bin/sh", "-c", status)).out
	if got, want := fields(out, all...), "1000 1000 1000 1000|1000 1000 1000 1000|20 30|"+strings.Join([]string{none, none, none, full, none}, "|")+"|0|2"; got != want {
		t.Errorf("user: %s, want %s", got, want)
	}
	if got := b.run(t, user("/bin/suid", "ids", "x")).out; got != "1000 0\n" {
		t.Errorf("setuid program runs as %q", got)
	}
	c := user("busybox", "cat", "/proc/self/status")
	c.Paths = []string{"/bin/capped"}
	if got := b.run(t, c).out; fields(got, "CapEff") != "0000000000000001" {
		t.Errorf("file capability gives %q", fields(got, "CapEff"))
	}
	s := user("/bin/suid", "ids", "x")
	s.NoNewPrivs = true
	if got := b.run(t, s).out; got != "1000 1000\n" {
		t.Errorf("setuid program with no_new_privs runs as %q", got)
	}
	if got := b.sh(t, "umask; ulimit -n; ulimit -c; pwd"); got != "0022\n1024\n0\n/\n" {
		t.Errorf("defaults are %q", got)
	}
}

// TestWritableLayer: canonical IDs on disk, dead device nodes, whiteouts and opaque directories of a stack of layers.
func TestWritableLayer(t *testing.T) {
	base := busyboxLayer(t)
	top := filepath.Join(scratch(t), "top")
	for _, d := range []string{"a", "b"} {
		mustDo(t, os.MkdirAll(filepath.Join(base, "data", d), 0o755), os.WriteFile(filepath.Join(base, "data", d, "old"), nil, 0o644))
	}
	mustDo(t, os.WriteFile(filepath.Join(base, "data/gone"), nil, 0o644), os.MkdirAll(filepath.Join(top, "data/a"), 0o755))
	mustDo(t, unix.Mknod(filepath.Join(top, "data/gone"), unix.S_IFCHR, 0))
	mustDo(t, unix.Setxattr(filepath.Join(top, "data/a"), "trusted.overlay.opaque", []byte("y"), 0))
	mustDo(t, os.WriteFile(filepath.Join(top, "data/a/new"), nil, 0o600), os.Chown(filepath.Join(top, "data/a/new"), 1000, 1000))
	mustDo(t, unix.Mknod(filepath.Join(top, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	b := start(t, options{lowers: []string{top, base}})

	if got, want := b.sh(t, "cd /data; echo * a/* b/*; stat -c %u:%g a/new"), "a b a/new b/old\n1000:1000\n"; got != want {
		t.Errorf("layers look like %q, want %q", got, want)
	}
	if got := b.sh(t, "echo x 2>/dev/null > /null && echo device lives; cat /null 2>&1"); strings.Contains(got, "lives") || !strings.Contains(got, "denied") {
		t.Errorf("a layer's device node: %q", got)
	}
	b.sh(t, "touch /made; chown 1000:1001 /made; chmod 4755 /made; touch /data/a/new; rm /data/b/old; mv /etc/hosts /etc/hosts2")
	for name, want := range map[string][2]uint32{"made": {1000, 1001}, "data/a/new": {1000, 1000}} {
		var st unix.Stat_t
		mustDo(t, unix.Lstat(filepath.Join(b.launch.GetUpper(), name), &st))
		if st.Uid != want[0] || st.Gid != want[1] {
			t.Errorf("%s is %d:%d on disk, want %v", name, st.Uid, st.Gid, want)
		}
	}
	var st unix.Stat_t
	mustDo(t, unix.Lstat(filepath.Join(b.launch.GetUpper(), "data/b/old"), &st))
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Errorf("no whiteout on disk: mode %o", st.Mode)
	}
}

func TestManyLayers(t *testing.T) {
	lowers := make([]string, 0, 64)
	dir := scratch(t)
	for i := range 63 {
		l := filepath.Join(dir, fmt.Sprint(i))
		mustDo(t, os.MkdirAll(filepath.Join(l, "layers"), 0o755), os.WriteFile(filepath.Join(l, "layers", fmt.Sprint(i)), nil, 0o644))
		lowers = append(lowers, l)
	}
	b := start(t, options{lowers: append(lowers, busyboxLayer(t))})
	if got := b.sh(t, "ls /layers | grep -c ."); got != "63\n" {
		t.Errorf("%s of 63 layers are seen", got)
	}
}

func TestSpawnRefuses(t *testing.T) {
	b := start(t, options{})
	for _, c := range []struct {
		name, limit string
		edit        func(*zygote.Spec)
	}{
		{"NUL in an argument", "", func(s *zygote.Spec) { s.Argv = append(s.Argv, "a\x00b") }},
		{"NUL in the environment", "", func(s *zygote.Spec) { s.Env = append(s.Env, "A=a\x00b") }},
		{"NUL in cwd", "", func(s *zygote.Spec) { s.Cwd = "/\x00" }},
		{"long argument", "bytes of one argument", func(s *zygote.Spec) { s.Argv = append(s.Argv, strings.Repeat("x", 131072)) }},
		{"many arguments", "bytes of arguments and environment", func(s *zygote.Spec) {
			for range 30 {
				s.Argv = append(s.Argv, strings.Repeat("x", 100_000))
			}
		}},
		{"groups", "supplementary groups of a command", func(s *zygote.Spec) { s.Groups = make([]uint32, 65) }},
		{"no path", "", func(s *zygote.Spec) { s.Paths = nil }},
	} {
		s := b.spec(t, "/bin/true")
		c.edit(&s)
		_, err := b.Spawner().Spawn(context.Background(), s)
		limit := ""
		if e, ok := err.(*errs.Error); ok && e.Limit != nil {
			limit = e.Limit.Name
		}
		if !errs.Is(err, errs.Invalid) || limit != c.limit {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// As much as is allowed works.
	s := b.spec(t, "/bin/sh", "-c", "echo $#", "sh")
	for range 20 {
		s.Argv = append(s.Argv, strings.Repeat("x", 100_000))
	}
	s.Argv = append(s.Argv, strings.Repeat("y", 70_000))
	if got := b.run(t, s); got.out != "21\n" {
		t.Errorf("2 MB of arguments: %+v", got)
	}
	for _, raw := range []string{"", "\xff\xfe", "a b\nc"} {
		s := b.spec(t, "/bin/sh", "-c", `printf %s "$1$A"`, "sh", raw)
		s.Env = append(s.Env, "A="+raw)
		if got := b.run(t, s).out; got != raw+raw {
			t.Errorf("argument and variable %q arrive as %q", raw, got)
		}
	}
}

func TestPidsLimit(t *testing.T) {
	b := start(t, options{limits: cgroup.Limits{Pids: 8}})
	var err error
	for range 20 {
		if _, err = b.Spawner().Spawn(context.Background(), b.spec(t, "/bin/sleep", "100")); err != nil {
			break
		}
	}
	if !errs.Is(err, errs.Capacity) || !strings.Contains(err.Error()+fmt.Sprint(err.(*errs.Error).Hint), "pids limit") {
		t.Errorf("at the pids limit: %v", err)
	}
	if err.(*errs.Error).Limit == nil { //nolint:errorlint // see above
		t.Errorf("%v names no limit, so clients repeat it", err)
	}
}

func TestSignalAndKill(t *testing.T) {
	b := start(t, options{})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	// The whole group gets it; the shell ignores it.
	r, w, err := os.Pipe()
	mustDo(t, err)
	s := b.spec(t, "/bin/sh", "-c", "trap 'echo got' TERM; (echo ready; exec sleep 100) & wait; wait; echo done")
	s.Stdout = w
	p, err := b.Spawner().Spawn(ctx, s)
	mustDo(t, err, w.Close())
	lines := bufio.NewScanner(r)
	lines.Scan()
	mustDo(t, p.Signal(int(unix.SIGTERM)))
	var got []string
	for lines.Scan() {
		got = append(got, lines.Text())
	}
	mustDo(t, r.Close())
	if strings.Join(got, " ") != "got done" {
		t.Errorf("printed %q", got)
	}
	if e, err := p.Wait(ctx); err != nil || e.Code != 0 {
		t.Errorf("%+v, %v", e, err)
	}
	if err := p.Signal(int(unix.SIGTERM)); err != nil {
		t.Errorf("signal after the end: %v", err)
	}

	// A tree that left its session dies with its cgroup.
	s = b.spec(t, "/bin/sh", "-c", "setsid sleep 100 & sleep 100")
	p, err = b.Spawner().Spawn(ctx, s)
	mustDo(t, err)
	if err := p.Signal(999); !errs.Is(err, errs.Invalid) {
		t.Errorf("signal 999: %v", err)
	}
	mustDo(t, cgroup.Dir(s.Cgroup.Name()).Kill())
	if e, err := p.Wait(ctx); err != nil || e.Signal != 9 {
		t.Errorf("%+v, %v", e, err)
	}
	if err := cgroup.Dir(s.Cgroup.Name()).WaitEmpty(ctx); err != nil {
		t.Error(err)
	}
}

func TestManyCommandsLeaveNothing(t *testing.T) {
	each := 125
	if testing.Short() {
		each = 25
	}
	b := start(t, options{})
	s := b.spec(t, "/bin/sh", "-c", "true & exit 0")
	count := func() (fds int) {
		for _, pid := range []int{os.Getpid(), b.ZygotePid()} {
			e, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
			mustDo(t, err)
			fds += len(e)
		}
		return fds
	}
	b.run(t, b.spec(t, "/bin/true"))
	before := count()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range each {
				p, err := b.Spawner().Spawn(ctx, s)
				if err != nil {
					t.Error(err)
					return
				}
				if e, err := p.Wait(ctx); err != nil || e.Code != 0 {
					t.Errorf("%+v, %v", e, err)
					return
				}
			}
		})
	}
	wg.Wait()
	mustDo(t, cgroup.Dir(s.Cgroup.Name()).WaitEmpty(ctx))
	// PID 1 reaps what was left to it in its own time. Two stay: itself and the shell that expands the pattern.
	for {
		got := b.sh(t, "echo /proc/[0-9]*")
		if len(strings.Fields(got)) == 2 {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("processes are left: %s", got)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if after := count(); after > before+2 {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestAbandonedSpawn(t *testing.T) {
	b := start(t, options{})
	s := b.spec(t, "/bin/sleep", "100")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if p, err := b.Spawner().Spawn(ctx, s); err == nil {
		// The reply was there first.
		mustDo(t, p.Signal(int(unix.SIGKILL)))
	}
	wait, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	b.sh(t, "true") // a later command: the abandoned one was forked before
	if err := cgroup.Dir(s.Cgroup.Name()).WaitEmpty(wait); err != nil {
		t.Error(err)
	}
}
