package exec

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

func TestSignals(t *testing.T) {
	r := newRig(t, nil)
	ready := func(id, text string) {
		t.Helper()
		eventually(t, "the command is ready", func() bool {
			o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
			return err == nil && strings.Contains(string(o.stdout), text)
		})
	}
	for _, name := range []string{"SIGUSR1", "usr1", "10"} {
		id := r.begin(shell(`trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.02; done`))
		ready(id, "ready")
		if err := r.signal(id, name, false); err != nil {
			t.Fatal(err)
		}
		if o := r.connect(id); o.result.GetExitCode() != 7 || string(o.stdout) != "ready\ncaught\n" {
			t.Errorf("%s: got %v, %q", name, o.result, o.stdout)
		}
	}
	id := r.begin(shell("setsid sh -c 'echo child; exec sleep 100' & echo parent; wait"))
	ready(id, "child")
	wantKind(t, r.signal(id, "SIGNONE", false), errs.Invalid, "SIGNONE")
	wantKind(t, r.signal(id, "99", false), errs.Invalid, "99")
	wantKind(t, r.signal("c999999", "", false), errs.NotFound, "c999999")
	// The group does not have the child that left it, the tree does.
	if err := r.signal(id, "", false); err != nil {
		t.Fatal(err)
	}
	if o := r.connect(id); o.result.GetSignal() != "SIGTERM" || !o.result.GetDetached() {
		t.Errorf("got %v", o.result)
	}
	if err := r.signal(id, "TERM", true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the child ends", func() bool { return r.info(id).GetState() == "ended" })
	wantKind(t, r.signal(id, "", false), errs.Precondition, "has ended")
}

func TestListing(t *testing.T) {
	r := newRig(t, nil)
	id := r.begin(&harenav1.Command{Argv: []string{"sh", "-c", "exec sleep 100", "it's"}, Tag: "a tag", OpId: "an op", User: "4242"})
	_ = r.run(&harenav1.Command{Argv: []string{"true"}})
	info := r.info(id)
	if info.GetState() != "running" || info.GetCommandLine() != `sh -c 'exec sleep 100' 'it'\''s'` || info.GetTag() != "a tag" ||
		info.GetOpId() != "an op" || info.GetUser() != "4242" || info.GetPid() == 0 || info.GetStarted() == nil {
		t.Errorf("got %v", info)
	}
	if got := commandLine(&harenav1.Command{Shell: strings.Repeat("é", 4000)}); len(got) != maxLine {
		t.Errorf("a long line is %d bytes", len(got))
	}
}

func TestRunningCommandsAreLimited(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Running = 2 })
	a := r.begin(shell("sleep 100"))
	r.begin(shell("sleep 100"))
	_, err := r.tryRun(context.Background(), shell("true"))
	wantKind(t, err, errs.Capacity, " is 2, asked 3")
	if err := r.signal(a, "KILL", true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "there is room again", func() bool {
		_, err := r.tryRun(context.Background(), shell("true"))
		return err == nil
	})
}

func TestRequestID(t *testing.T) {
	r := newRig(t, nil)
	start := func(id, text string) (*harenav1.Started, error) {
		res, err := r.client.Start(context.Background(), connect.NewRequest(&harenav1.StartRequest{Command: shell("%s", text), RequestId: id}))
		if err != nil {
			return nil, errs.FromConnect(err)
		}
		return res.Msg.GetStarted(), nil
	}
	file := filepath.Join(t.TempDir(), "count")
	text := "echo x >> " + file + "; sleep 0.05; echo done"
	first, err := start("req", text)
	if err != nil {
		t.Fatal(err)
	}
	again, err := start("req", text)
	if err != nil || again.GetCommandId() != first.GetCommandId() || !again.GetAttached() || first.GetAttached() {
		t.Errorf("got %v and %v, %v", first, again, err)
	}
	_, err = start("req", "other")
	wantKind(t, err, errs.Exists, `request_id "req"`)
	if o := r.connect(first.GetCommandId()); string(o.stdout) != "done\n" {
		t.Errorf("got %q", o.stdout)
	}
	if b, _ := os.ReadFile(file); string(b) != "x\n" {
		t.Errorf("it ran %d times", len(b)/2)
	}
	// Input with a request_id is accepted once.
	id := r.begin(&harenav1.Command{Argv: []string{"cat"}, StdinOpen: true})
	for range 3 {
		if n, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte("once\n"), RequestId: "in"}); n != 5 || err != nil {
			t.Errorf("got %d, %v", n, err)
		}
	}
	if _, err := r.send(&harenav1.SendInputRequest{CommandId: id, Eof: true}); err != nil {
		t.Error(err)
	}
	if o := r.connect(id); string(o.stdout) != "once\n" {
		t.Errorf("cat got %q", o.stdout)
	}
}

func TestCallsAreBoundedAndForgetFailures(t *testing.T) {
	var k calls
	ran := 0
	do := func(id string, err error) error {
		_, got := k.do(context.Background(), id, digest{}, func() (any, error) { ran++; return ran, err })
		return got
	}
	failed := errors.New("failed")
	if !errors.Is(do("a", failed), failed) || do("a", nil) != nil || do("a", failed) != nil || ran != 2 {
		t.Errorf("ran %d times", ran)
	}
	for i := range 3 * recentCalls {
		_ = do(fmt.Sprint(i), nil)
	}
	if len(k.known) > recentCalls || len(k.order) > recentCalls {
		t.Errorf("%d calls, %d names", len(k.known), len(k.order))
	}
}

// A signal, a time-out, a disconnect or the end of the service may come while
// a command is being started.
func TestKillWhileStarting(t *testing.T) {
	r := newRig(t, nil)
	forking, proceed := make(chan struct{}), make(chan struct{})
	var slow atomic.Bool
	r.spawner.before = func(context.Context) error {
		if slow.Load() {
			forking <- struct{}{}
			<-proceed
		}
		return nil
	}
	slow.Store(true)
	got := make(chan *outcome, 1)
	go func() { got <- r.run(shell("sleep 100")) }()
	<-forking
	killed := make(chan error, 1)
	go func() { killed <- r.signal("c1", "KILL", true) }()
	eventually(t, "it is listed while it starts", func() bool { return r.info("c1").GetState() == "running" })
	proceed <- struct{}{}
	if err := <-killed; err != nil {
		t.Error(err)
	}
	if o := <-got; o.result.GetSignal() != "SIGKILL" || o.result.GetExitCode() != 137 {
		t.Errorf("got %v", o.result)
	}

	// A client that leaves while the process is being forked: it runs, and can be found.
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() {
		_, err := r.tryRun(ctx, shell("echo ran"))
		gone <- err
	}()
	<-forking
	cancel()
	wantKind(t, <-gone, errs.Cancelled, "")
	proceed <- struct{}{}
	if o := r.connect("c2"); string(o.stdout) != "ran\n" {
		t.Errorf("got %q", o.stdout)
	}

	// The service closes while a process is being forked.
	go func() {
		_, err := r.tryRun(context.Background(), shell("sleep 100"))
		gone <- err
	}()
	<-forking
	closed := make(chan error, 1)
	go func() { closed <- r.s.Close() }()
	eventually(t, "it is closing", func() bool {
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		return r.s.closing
	})
	proceed <- struct{}{}
	if err := <-closed; err != nil {
		t.Error(err)
	}
	<-gone
	_, err := r.tryRun(context.Background(), shell("true"))
	wantKind(t, err, errs.Precondition, "stopping")
}

// The caller went away before the process was forked: nothing runs.
func TestCancelBeforeStart(t *testing.T) {
	r := newRig(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, _, _, err := r.s.begin(ctx, &harenav1.Command{Shell: "sleep 100", OpId: "op"}, "", true)
	wantKind(t, err, errs.Cancelled, "")
	if procs, _ := r.groups.Tree(); len(procs) > 0 || len(r.s.list()) > 0 {
		t.Errorf("processes %v", procs)
	}
	// The operation did not happen, so it may.
	if o := r.run(&harenav1.Command{Shell: "echo ran", OpId: "op"}); string(o.stdout) != "ran\n" {
		t.Errorf("got %q", o.stdout)
	}
}

func TestSpawnerErrorsLeaveNothing(t *testing.T) {
	r := newRig(t, nil)
	r.shell("true")
	r.spawner.before = func(context.Context) error {
		return errs.E(errs.Capacity, "the sandbox's pids limit is reached")
	}
	leaks(t, "a start that failed", func() {
		_, err := r.tryRun(context.Background(), &harenav1.Command{Shell: "true", Stdin: make([]byte, 1<<20)})
		wantKind(t, err, errs.Capacity, "pids limit")
	})
	if children, _ := r.groups.Children(); len(children) > 0 {
		t.Errorf("cgroups %v", children)
	}
	r.spawner.before = nil
	r.shell("true")
}

// endingSpawner loses the processes, as when the sandbox ends under them.
type endingSpawner struct {
	*hostSpawner
	lost chan struct{}
}

type lostProcess struct {
	zygote.Process
	lost chan struct{}
}

func (s endingSpawner) Spawn(ctx context.Context, spec zygote.Spec) (zygote.Process, error) {
	p, err := s.hostSpawner.Spawn(ctx, spec)
	return lostProcess{p, s.lost}, err
}

func (p lostProcess) Wait(ctx context.Context) (zygote.Exit, error) {
	select {
	case <-p.lost:
		return zygote.Exit{}, errs.E(errs.Precondition, "the sandbox has ended")
	case <-ctx.Done():
		return zygote.Exit{}, ctx.Err()
	}
}

func TestSandboxEndsUnderACommand(t *testing.T) {
	lost := make(chan struct{})
	r := newRig(t, func(c *Config) { c.Spawner = endingSpawner{c.Spawner.(*hostSpawner), lost} })
	id := r.begin(shell("echo before; sleep 100"))
	eventually(t, "it printed", func() bool {
		o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
		return err == nil && string(o.stdout) == "before\n"
	})
	close(lost)
	o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id})
	wantKind(t, err, errs.Precondition, "sandbox has ended")
	if string(o.stdout) != "before\n" {
		t.Errorf("got %q", o.stdout)
	}
	eventually(t, "nothing is left", func() bool { c, _ := r.groups.Children(); return len(c) == 0 })
}

// A killed process that hangs in the kernel does not hold the result for ever.
func TestTimeoutOfAProcessThatDoesNotDie(t *testing.T) {
	r := newRig(t, func(c *Config) {
		c.Spawner = endingSpawner{c.Spawner.(*hostSpawner), make(chan struct{})}
		c.Limits.KillGrace = 100 * time.Millisecond
	})
	o := r.run(&harenav1.Command{Shell: "echo partial; sleep 100", Timeout: durationpb.New(200 * time.Millisecond)})
	if !o.result.GetTimedOut() || o.result.GetExitCode() != 124 || !o.result.GetDetached() || o.result.GetMessage() == "" {
		t.Errorf("got %v", o.result)
	}
}

func TestOOMIsReported(t *testing.T) {
	var kills atomic.Int64
	r := newRig(t, func(c *Config) { c.OOMKills = kills.Load })
	kill := filepath.Join(t.TempDir(), "kill")
	id := r.begin(shell("while [ ! -e %s ]; do sleep 0.02; done; kill -KILL $$", kill))
	kills.Add(1)
	if err := os.WriteFile(kill, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if o := r.connect(id); !o.result.GetOomKilled() {
		t.Errorf("got %v", o.result)
	}
	if o := r.shell("kill -KILL $$"); o.result.GetOomKilled() {
		t.Error("an earlier kill is blamed on a later command")
	}
	// With others running, a command that ended well was not the one.
	other := r.begin(shell("sleep 100"))
	if err := os.Remove(kill); err != nil {
		t.Fatal(err)
	}
	id = r.begin(shell("while [ ! -e %s ]; do sleep 0.02; done", kill))
	kills.Add(1)
	if err := os.WriteFile(kill, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if o := r.connect(id); o.result.GetOomKilled() {
		t.Errorf("got %v", o.result)
	}
	_ = r.signal(other, "KILL", true)
}

func TestIdleServiceHoldsNothing(t *testing.T) {
	r := newRig(t, nil)
	r.shell("true")
	leaks(t, "a service", func() {
		id := r.begin(&harenav1.Command{Shell: "cat; sleep 0.1 &", StdinOpen: true, Timeout: durationpb.New(time.Minute)})
		if _, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte("x"), Eof: true}); err != nil {
			t.Fatal(err)
		}
		r.connect(id)
		r.run(&harenav1.Command{Shell: "sleep 100", Timeout: durationpb.New(10 * time.Millisecond)})
		eventually(t, "it ends", func() bool { return r.info(id).GetState() == "ended" })
	})
	if n, streams := r.s.Running(); n != 0 || streams != 0 {
		t.Errorf("%d commands, %d streams", n, streams)
	}
}

func TestActivityAndWrongSandbox(t *testing.T) {
	var n atomic.Int64
	r := newRig(t, func(c *Config) { c.Activity = func() { n.Add(1) } })
	r.shell("true")
	if n.Load() < 2 { // the call and the end
		t.Errorf("%d activities", n.Load())
	}
	_, err := r.client.ListCommands(context.Background(), connect.NewRequest(&harenav1.ListCommandsRequest{SandboxId: "another"}))
	wantKind(t, errs.FromConnect(err), errs.NotFound, "another")
	_, err = r.client.CreateSession(context.Background(), connect.NewRequest(&harenav1.CreateSessionRequest{}))
	wantKind(t, errs.FromConnect(err), errs.Invalid, "a session needs a name")
}
