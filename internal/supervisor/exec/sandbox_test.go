package exec

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/launch"
)

// sandboxRig is a rig whose commands run in a real sandbox of busybox.
func sandboxRig(t testing.TB) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("needs a static busybox (Debian: busybox-static)")
	}
	must := func(errors ...error) {
		t.Helper()
		for _, err := range errors {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-exec-")
	must(err, os.Chmod(dir, 0o755))
	t.Cleanup(func() { must(os.RemoveAll(dir)) })
	lower := filepath.Join(dir, "lower")
	for _, d := range []string{"bin", "etc", "proc", "sys", "dev", "tmp", "root"} {
		must(os.MkdirAll(filepath.Join(lower, d), 0o755))
	}
	b, err := os.ReadFile(busybox)
	must(err, os.WriteFile(lower+"/bin/busybox", b, 0o755), os.Chmod(lower+"/tmp", 0o1777))
	for _, n := range strings.Fields("sh cat echo id sleep true setsid head yes stty test stat pwd kill touch wc seq sort") {
		must(os.Symlink("busybox", lower+"/bin/"+n))
	}
	must(os.WriteFile(lower+"/etc/plain", []byte("x"), 0o644))

	name := fmt.Sprintf("harena-exectest-%d-%d", os.Getpid(), rand.Uint32())
	root, err := cgroup.Open(name)
	must(err)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	group := root.Group("sandbox")
	paths, err := group.Create(cgroup.Limits{Memory: 256 << 20, Pids: 100})
	must(err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		must(group.Kill(), group.Remove(ctx), root.Remove(ctx))
	})
	must(os.MkdirAll(dir+"/upper/data", 0o755), os.MkdirAll(dir+"/upper/work", 0o755))
	l := &guestv1.Launch{
		SandboxId: sandboxID, Dir: dir, Lowers: []string{lower}, Upper: dir + "/upper/data", Work: dir + "/upper/work",
		IdBase: 3_700_000_000 + 65536*rand.Uint32N(1000), Hostname: "arena",
		Cgroups: &guestv1.Cgroups{Tracking: string(paths.Work), V1: paths.V1, FilesTracking: string(paths.Files), FilesV1: paths.FilesV1},
	}
	p, err := launch.Prepare(nil)
	must(err)
	s, err := p.Launch(ctx, l)
	if err != nil {
		must(p.Close())
		t.Fatal(err)
	}
	t.Cleanup(func() { must(s.Close()) })
	r := newRig(t, func(c *Config) {
		c.Spawner, c.Devpts, c.IDBase, c.Groups, c.Hostname = s.Spawner(), s.Devpts, l.GetIdBase(), paths.Work, "arena"
		c.OOMKills = func() int64 {
			n, err := cgroup.OOMKills(paths.Work, paths.V1)
			if err != nil {
				t.Error(err)
			}
			return n
		}
	})
	r.groups = paths.Work
	return r
}

func TestCommandsInASandbox(t *testing.T) {
	r := sandboxRig(t)
	tests := []struct {
		name    string
		cmd     *harenav1.Command
		code    int32
		stdout  string
		stderr  string
		message string
	}{
		{"streams", shell("id -u; echo out; echo err >&2; exit 3"), 3, "0\nout\n", "err\n", ""},
		{"user", &harenav1.Command{Shell: "id -u; id -g; echo a >/dev/stdout; echo b >/dev/stderr; pwd; echo $HOSTNAME", User: "homeless"}, 0, "4242\n4243\na\n/\narena\n", "b\n", ""},
		{"not found", &harenav1.Command{Argv: []string{"nope"}}, 127, "", "", "not found in PATH"},
		{"not executable", &harenav1.Command{Argv: []string{"/etc/plain"}}, 126, "", "", "permission denied"},
		{"PATH", &harenav1.Command{Argv: []string{"plain"}, Env: map[string]string{"PATH": "/nope:/etc"}}, 126, "", "", "permission denied"},
		{"relative", &harenav1.Command{Argv: []string{"./echo", "x"}, Cwd: "/bin"}, 0, "x\n", "", ""},
		{"cwd", &harenav1.Command{Shell: "true", Cwd: "/no/dir"}, 126, "", "", `"/no/dir"`},
		{"stdin", &harenav1.Command{Argv: []string{"cat"}, Stdin: []byte("a\x00\xff\n\n")}, 0, "a\x00\xff\n\n", "", ""},
		{"no stdin", &harenav1.Command{Argv: []string{"cat"}}, 0, "", "", ""},
		{"a stdin that is opened", &harenav1.Command{Shell: "cat /dev/stdin", Stdin: []byte("x"), User: "4242"}, 0, "x", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := r.run(tt.cmd)
			if o.result.GetExitCode() != tt.code || string(o.stdout) != tt.stdout || string(o.stderr) != tt.stderr ||
				!strings.Contains(o.result.GetMessage(), tt.message) {
				t.Errorf("got %q, %q, %v", o.stdout, o.stderr, o.result)
			}
		})
	}
	o := r.run(&harenav1.Command{Shell: "stty size; test -t 1 && stat -L -c %u:%g:%a /dev/stdin", User: "4242", Pty: &harenav1.Pty{Cols: 90, Rows: 20}})
	if string(o.stdout) != "20 90\r\n4242:5:620\r\n" {
		t.Errorf("terminal: %q, %v", o.stdout, o.result)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	if o := r.run(&harenav1.Command{Argv: []string{"cat"}, Stdin: data}); !bytes.Equal(o.stdout, data) {
		t.Errorf("%d bytes came back", len(o.stdout))
	}
}

func TestEndsInASandbox(t *testing.T) {
	r := sandboxRig(t)
	empty := func(id string) {
		t.Helper()
		eventually(t, "nothing of it is left", func() bool {
			_, err := os.Stat(string(r.groups) + "/" + id)
			return os.IsNotExist(err) && r.info(id).GetState() == "ended"
		})
	}
	o := r.run(&harenav1.Command{Shell: "echo partial; sleep 100 & setsid sleep 100; true", Timeout: durationpb.New(time.Second)})
	if !o.result.GetTimedOut() || o.result.GetExitCode() != 124 || string(o.stdout) != "partial\n" {
		t.Errorf("time-out: got %v, %q", o.result, o.stdout)
	}
	empty(o.id)

	o = r.shell("echo main; (setsid sleep 100 &)")
	if !o.result.GetDetached() || string(o.stdout) != "main\n" {
		t.Errorf("daemon: got %v, %q", o.result, o.stdout)
	}
	if err := r.signal(o.id, "TERM", true); err != nil {
		t.Error(err)
	}
	empty(o.id)

	id := r.begin(shell("sleep 100"))
	if err := r.signal(id, "INT", false); err != nil {
		t.Error(err)
	}
	if o := r.connect(id); o.result.GetSignal() != "SIGINT" || o.result.GetExitCode() != 130 {
		t.Errorf("signal: got %v", o.result)
	}
	empty(id)

	// More than the sandbox may have, by one command of several.
	other := r.begin(shell("sleep 100"))
	o = r.shell("head -c 400000000 /dev/zero | sort >/dev/null")
	if !o.result.GetOomKilled() || o.result.GetExitCode() != 137 {
		t.Errorf("memory hog: %v", o.result)
	}
	if err := r.signal(other, "KILL", true); err != nil {
		t.Error(err)
	}
	empty(other)

	// The sandbox ends under a command.
	id = r.begin(shell("echo before; exec sleep 100"))
	eventually(t, "it runs", func() bool {
		o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
		return err == nil && string(o.stdout) == "before\n"
	})
	init, err := r.groups.Procs() // commands are below, in groups of their own
	if err != nil || len(init) != 1 {
		t.Fatalf("PID 1: %v, %v", init, err)
	}
	if err := unix.Kill(init[0], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	o, err = r.tryConnect(ctx, &harenav1.ConnectRequest{CommandId: id})
	if err == nil && o.result.GetSignal() != "SIGKILL" {
		t.Errorf("got %v", o.result)
	}
	if err != nil {
		wantKind(t, err, errs.Precondition, "ended")
	}
	_, err = r.client.Start(context.Background(), connect.NewRequest(&harenav1.StartRequest{Command: shell("true")}))
	wantKind(t, errs.FromConnect(err), errs.Precondition, "")
}

func TestQuickCommandsInASandbox(t *testing.T) {
	r := sandboxRig(t)
	n := 1000
	if testing.Short() {
		n = 100
	}
	r.shell("true")
	leaks(t, "commands in a sandbox", func() {
		for i := range n {
			if o := r.run(&harenav1.Command{Argv: []string{"echo", fmt.Sprint(i)}}); string(o.stdout) != fmt.Sprintln(i) {
				t.Fatalf("%d: got %q, %v", i, o.stdout, o.result)
			}
		}
	})
	o := r.shell("set -- /proc/[0-9]*; echo $#")
	if string(o.stdout) != "2\n" { // PID 1 and the shell itself
		t.Errorf("%s processes inside", strings.TrimSpace(string(o.stdout)))
	}
}

// BenchmarkRoundTripInASandbox is what `harena exec` waits for, without the relays.
func BenchmarkRoundTripInASandbox(b *testing.B) {
	r := sandboxRig(b)
	cmd := &harenav1.Command{Argv: []string{"/bin/true"}}
	r.run(cmd)
	b.ResetTimer()
	for b.Loop() {
		r.run(cmd)
	}
}
