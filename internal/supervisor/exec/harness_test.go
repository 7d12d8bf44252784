package exec

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
	"github.com/harena-dev/harena/internal/supervisor/users"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// hostSpawner starts real processes on the host, in their cgroup, as the
// contract of zygote.Spawner says. Orphans come to this process, as they come
// to a sandbox's PID 1.
type hostSpawner struct {
	done chan struct{}
	// before is called before every fork.
	before func(ctx context.Context) error
}

type hostProcess struct {
	pid  int
	done chan struct{}
	exit zygote.Exit
	mu   sync.Mutex // against a signal to a reaped process
	gone bool
}

func (h *hostSpawner) Done() <-chan struct{} { return h.done }

func (h *hostSpawner) Spawn(ctx context.Context, s zygote.Spec) (zygote.Process, error) {
	if h.before != nil {
		if err := h.before(ctx); err != nil {
			return nil, err
		}
	}
	p := &hostProcess{done: make(chan struct{})}
	dir := s.Cwd
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		if !s.CwdOrRoot {
			p.exit = zygote.Exit{Code: 126, ExecErrno: int(unix.ENOENT), Stage: "chdir"}
			close(p.done)
			return p, nil
		}
		dir = "/"
	}
	if s.Stdin == nil {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		defer null.Close()
		s.Stdin = null
	}
	attr := &syscall.ProcAttr{
		Dir: dir, Env: s.Env, Files: []uintptr{s.Stdin.Fd(), s.Stdout.Fd(), s.Stderr.Fd()},
		Sys: &syscall.SysProcAttr{
			Setsid: true, Setctty: s.Terminal, Ctty: 0, UseCgroupFD: true, CgroupFD: int(s.Cgroup.Fd()),
			Credential: &syscall.Credential{Uid: s.UID, Gid: s.GID, Groups: s.Groups},
		},
	}
	if s.Extra != nil {
		attr.Files = append(attr.Files, s.Extra.Fd())
	}
	var first error
	for _, path := range s.Paths {
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		started.Lock()
		pid, err := syscall.ForkExec(path, s.Argv, attr)
		if err == nil {
			started.pids[pid] = true
		}
		started.Unlock()
		if err == nil {
			p.pid = pid
			go p.wait()
			return p, nil
		}
		if first == nil || errors.Is(err, unix.EACCES) {
			first = err
		}
	}
	var errno syscall.Errno
	if !errors.As(first, &errno) {
		return nil, first
	}
	p.exit = zygote.Exit{Code: 126, ExecErrno: int(errno), Stage: "exec"}
	if errno == unix.ENOENT {
		p.exit.Code = 127
	}
	close(p.done)
	return p, nil
}

func (p *hostProcess) wait() {
	var ws syscall.WaitStatus
	var ru syscall.Rusage
	// Wait without reaping first, so that the number stays ours while a signal may be sent.
	for unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := syscall.Wait4(p.pid, &ws, 0, &ru); err != nil {
		panic(err)
	}
	started.Lock()
	delete(started.pids, p.pid)
	started.Unlock()
	p.gone = true
	p.exit.CPU = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	if ws.Signaled() {
		p.exit.Code, p.exit.Signal = -1, int(ws.Signal())
	} else {
		p.exit.Code = ws.ExitStatus()
	}
	close(p.done)
}

func (p *hostProcess) Pid() int { return p.pid }

func (p *hostProcess) Wait(ctx context.Context) (zygote.Exit, error) {
	select {
	case <-p.done:
		return p.exit, nil
	case <-ctx.Done():
		return zygote.Exit{}, ctx.Err()
	}
}

func (p *hostProcess) Signal(sig int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone || p.pid == 0 {
		return nil
	}
	return syscall.Kill(-p.pid, syscall.Signal(sig))
}

// hostUsers knows root, a user by number, and one whose home does not exist.
type hostUsers struct{}

func (hostUsers) Resolve(_ context.Context, name string) (users.User, error) {
	switch name {
	case "", "root":
		return users.User{Name: "root", Home: "/root", Shell: "/bin/sh"}, nil
	case "homeless":
		return users.User{Name: name, UID: 4242, GID: 4243, Home: "/nonexistent"}, nil
	case "4242":
		return users.User{UID: 4242, GID: 4243, Home: "/"}, nil
	}
	return users.User{}, errs.E(errs.Invalid, "there is no user %q", name)
}

// rig is a service behind a real HTTP/2 connection over a UNIX socket.
type rig struct {
	t       testing.TB
	s       *Service
	cfg     Config
	spawner *hostSpawner
	client  harenav1connect.ExecServiceClient
	server  *http.Server
	trans   *http.Transport
	groups  cgroup.Dir
}

const sandboxID = "testedaaaaaaaaaaaaaa"

// testGroup makes a cgroup2 directory for one test.
func testGroup(t testing.TB) cgroup.Dir {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(mount + "/cgroup.procs"); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(mount, "harena-test-exec-")
		if err != nil {
			t.Skipf("cannot make a cgroup: %v", err)
		}
		d := cgroup.Dir(dir)
		t.Cleanup(func() {
			_ = d.Kill()
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := d.Remove(ctx); err != nil {
				t.Errorf("remove the test's cgroup: %v", err)
			}
		})
		return d
	}
	t.Skip("this machine has no cgroup2 mount")
	return ""
}

func newRig(t testing.TB, change func(*Config)) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: processes get other users and cgroups")
	}
	r := &rig{t: t, spawner: &hostSpawner{done: make(chan struct{})}, groups: testGroup(t)}
	r.cfg = Config{
		SandboxID: sandboxID, Spawner: r.spawner, Users: hostUsers{}, Groups: r.groups,
		RecordDir: filepath.Join(t.TempDir(), "commands"),
		Log:       slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	if change != nil {
		change(&r.cfg)
	}
	r.start()
	t.Cleanup(r.stop)
	return r
}

type testLog struct{ t testing.TB }

func (l testLog) Write(p []byte) (int, error) {
	l.t.Helper()
	l.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// start makes the service and serves it.
func (r *rig) start() {
	r.t.Helper()
	var err error
	r.cfg.Journal = nil // of its own, as each supervisor has
	if r.cfg.OpLog, err = oplog.Open(oplog.Config{Dir: filepath.Join(filepath.Dir(r.cfg.RecordDir), "log"), Header: &harenav1.LogHeader{SandboxId: sandboxID}}); err != nil {
		r.t.Fatal(err)
	}
	s, err := New(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "harena-exec-")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "guest.sock"))
	if err != nil {
		r.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(s.Handler())
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	r.s = s
	r.server = &http.Server{Handler: mux, Protocols: &protocols}
	go func() { _ = r.server.Serve(l) }()
	r.trans = &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", l.Addr().String())
	}}
	r.client = harenav1connect.NewExecServiceClient(&http.Client{Transport: r.trans}, "http://sandbox")
}

// stop closes the service, and checks that nothing of it is left.
func (r *rig) stop() {
	r.t.Helper()
	if err := r.s.Close(); err != nil {
		r.t.Errorf("close: %v", err)
	}
	reapOrphans()
	r.server.Close()
	r.trans.CloseIdleConnections()
	if children, _ := r.groups.Children(); len(children) > 0 {
		r.t.Errorf("cgroups are left: %v", children)
	}
}

// outcome is what a client saw of a command.
type outcome struct {
	id             string
	pid            int64
	attached       bool
	stdout, stderr []byte
	gaps           map[string]int64
	result         *harenav1.Result
}

type outputStream interface {
	Receive() bool
	Err() error
	Close() error
}

// collect reads a stream of output to its end.
func collect(in outputStream, msg func() *harenav1.Output) (*outcome, error) {
	o := &outcome{gaps: map[string]int64{}}
	defer in.Close()
	for in.Receive() {
		o.take(msg())
	}
	if err := in.Err(); err != nil && !errors.Is(err, io.EOF) {
		return o, errs.FromConnect(err)
	}
	return o, nil
}

func (o *outcome) take(ev *harenav1.Output) {
	switch {
	case ev.GetStarted() != nil:
		o.id, o.pid, o.attached = ev.GetStarted().GetCommandId(), ev.GetStarted().GetPid(), ev.GetStarted().GetAttached()
	case ev.GetResult() != nil:
		o.result = ev.GetResult()
	case ev.GetGap() != nil:
		o.gaps[ev.GetGap().GetStream()] += ev.GetGap().GetBytes()
	default:
		o.stdout = append(o.stdout, ev.GetStdout()...)
		o.stderr = append(o.stderr, ev.GetStderr()...)
	}
}

func (r *rig) tryRun(ctx context.Context, cmd *harenav1.Command) (*outcome, error) {
	st, err := r.client.Run(ctx, connect.NewRequest(&harenav1.RunRequest{SandboxId: sandboxID, Command: cmd}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return collect(st, func() *harenav1.Output { return st.Msg().GetOutput() })
}

// run runs a command to its end.
func (r *rig) run(cmd *harenav1.Command) *outcome {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o, err := r.tryRun(ctx, cmd)
	if err != nil {
		r.t.Fatalf("run %q: %v", commandLine(cmd), err)
	}
	if o.result == nil {
		r.t.Fatalf("run %q: no result", commandLine(cmd))
	}
	return o
}

func (r *rig) shell(format string, args ...any) *outcome {
	r.t.Helper()
	return r.run(shell(format, args...))
}

func shell(format string, args ...any) *harenav1.Command {
	return &harenav1.Command{Shell: fmt.Sprintf(format, args...)}
}

// begin starts a command without following it.
func (r *rig) begin(cmd *harenav1.Command) string {
	r.t.Helper()
	res, err := r.client.Start(context.Background(), connect.NewRequest(&harenav1.StartRequest{Command: cmd}))
	if err != nil {
		r.t.Fatalf("start %q: %v", commandLine(cmd), err)
	}
	return res.Msg.GetStarted().GetCommandId()
}

func (r *rig) tryConnect(ctx context.Context, req *harenav1.ConnectRequest) (*outcome, error) {
	st, err := r.client.Connect(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return collect(st, func() *harenav1.Output { return st.Msg().GetOutput() })
}

// connect follows a command to its end.
func (r *rig) connect(id string) *outcome {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o, err := r.tryConnect(ctx, &harenav1.ConnectRequest{CommandId: id})
	if err != nil {
		r.t.Fatalf("connect %s: %v", id, err)
	}
	return o
}

func (r *rig) signal(id, sig string, tree bool) error {
	_, err := r.client.Signal(context.Background(), connect.NewRequest(&harenav1.SignalRequest{CommandId: id, Signal: sig, Tree: tree}))
	return errs.FromConnect(err)
}

func (r *rig) info(id string) *harenav1.CommandInfo {
	r.t.Helper()
	res, err := r.client.ListCommands(context.Background(), connect.NewRequest(&harenav1.ListCommandsRequest{}))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, c := range res.Msg.GetCommands() {
		if c.GetCommandId() == id {
			return c
		}
	}
	return nil
}

// eventually waits for a condition that must come true.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func openFiles() int {
	names, _ := os.ReadDir("/proc/self/fd")
	return len(names)
}

// leaks compares goroutines and descriptors with what they were.
func leaks(t testing.TB, what string, f func()) {
	t.Helper()
	settle := func() { runtime.GC() }
	settle()
	files, routines := openFiles(), runtime.NumGoroutine()
	f()
	eventually(t, what+" leaves no goroutine and no descriptor", func() bool {
		settle()
		if openFiles() <= files && runtime.NumGoroutine() <= routines {
			return true
		}
		return false
	})
}

func wantKind(t testing.TB, err error, kind errs.Kind, text string) {
	t.Helper()
	if !errs.Is(err, kind) || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("got error %v (%s), want %s with %q", err, errs.KindOf(err), kind, text)
	}
}

func TestMain(m *testing.M) {
	// Orphans come here, so that a process that is left over is seen by the test that left it.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	os.Exit(m.Run())
}

// reapOrphans reaps what commands left behind, and no command: hostProcess.wait does that.
func reapOrphans() {
	started.Lock()
	defer started.Unlock()
	lists, _ := filepath.Glob("/proc/self/task/[0-9]*/children")
	for _, l := range lists {
		b, _ := os.ReadFile(l)
		for _, field := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				continue
			}
			if !started.pids[pid] {
				_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
			}
		}
	}
}

// started has the commands that were started and not waited for.
var started = struct {
	sync.Mutex
	pids map[int]bool
}{pids: map[int]bool{}}
