package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

// A supervisor changes its process (working directory, output), so each of these tests runs one in a process of its own,
// with a sandbox that is a channel: what it does is named by the role.
func TestMain(m *testing.M) {
	role := os.Getenv("SUPERVISOR_TEST_ROLE")
	if role == "" {
		os.Exit(m.Run())
	}
	ch, err := Channel()
	if err == nil {
		err = Run(Config{Channel: ch, Version: "v-test", Prepare: func() (Prepared, error) {
			if role == "unprepared" {
				return nil, errs.E(errs.Unsupported, "no such kernel")
			}
			return fake{role}, nil
		}})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// mark leaves a sign in the working directory, which a launched supervisor has in the sandbox's.
func mark(name string) { _ = os.WriteFile(name, nil, 0o600) }

type fake struct{ role string }

func (f fake) Close() error { return nil }

func (f fake) Launch(ctx context.Context, _ *guestv1.Launch) (Sandbox, error) {
	switch f.role {
	case "refused":
		return nil, errs.E(errs.Capacity, "no more")
	case "slow":
		mark("launching")
		<-ctx.Done()
		mark("cancelled")
		return nil, ctx.Err()
	}
	s := &fakeSandbox{done: make(chan struct{})}
	if f.role == "ends" {
		time.AfterFunc(50*time.Millisecond, func() { close(s.done) })
	}
	return s, nil
}

type fakeSandbox struct{ done chan struct{} }

func (s *fakeSandbox) Services(e Env) (Services, error) {
	return Services{
		Handlers: map[string]func() http.Handler{"/echo": func() http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
		}},
		Running: func() (int, int) { return 3, 2 },
		Close:   func() error { mark("services-closed"); return nil },
	}, nil
}
func (s *fakeSandbox) InitPid() int   { return 11 }
func (s *fakeSandbox) ZygotePid() int { return 12 }
func (s *fakeSandbox) Timings() []*harenav1.Timing {
	return []*harenav1.Timing{{Step: "fake", Micros: 1}}
}
func (s *fakeSandbox) Done() <-chan struct{} { return s.done }
func (s *fakeSandbox) Reason() string        { return "PID 1 ended" }
func (s *fakeSandbox) Close() error          { mark("closed"); return nil }

// guest is a supervisor under test.
type guest struct {
	t    *testing.T
	cmd  *exec.Cmd
	ch   *os.File
	dir  string
	exit chan error
}

func spawn(t *testing.T, role string) *guest {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "theirs")
	defer theirs.Close()
	g := &guest{t: t, ch: os.NewFile(uintptr(pair[0]), "ours"), dir: t.TempDir(), exit: make(chan error, 1)}
	g.cmd = exec.Command(os.Args[0])
	g.cmd.Env = append(os.Environ(), "SUPERVISOR_TEST_ROLE="+role)
	g.cmd.ExtraFiles = []*os.File{theirs}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { g.exit <- g.cmd.Wait() }()
	t.Cleanup(func() { g.ch.Close(); _ = g.cmd.Process.Kill() })
	return g
}

func (g *guest) read() *guestv1.LaunchResult {
	g.t.Helper()
	_ = g.ch.SetReadDeadline(time.Now().Add(20 * time.Second))
	var r guestv1.LaunchResult
	if err := claim.Read(g.ch, &r); err != nil {
		g.t.Fatal(err)
	}
	return &r
}

func (g *guest) launch() {
	g.t.Helper()
	if r := g.read(); r.GetError() != "" {
		g.t.Fatal(r.GetError())
	}
	if err := claim.Write(g.ch, &guestv1.Launch{SandboxId: "sb", Dir: g.dir, Cgroups: &guestv1.Cgroups{Tracking: g.dir + "/no-cgroup"}}); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) wait() error {
	g.t.Helper()
	select {
	case err := <-g.exit:
		return err
	case <-time.After(20 * time.Second):
		g.t.Fatal("the supervisor does not exit")
		return nil
	}
}

func (g *guest) has(name string) bool {
	_, err := os.Stat(filepath.Join(g.dir, name))
	return err == nil
}

func (g *guest) exitFile() claim.Exit {
	g.t.Helper()
	b, err := os.ReadFile(filepath.Join(g.dir, claim.ExitFile))
	if err != nil {
		g.t.Fatal(err)
	}
	var e claim.Exit
	if err := json.Unmarshal(b, &e); err != nil {
		g.t.Fatal(err)
	}
	return e
}

// client speaks HTTP/2 or HTTP/1 to the socket.
func (g *guest) client(h2 bool) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(g.dir, claim.Socket))
	}}
	tr.Protocols.SetUnencryptedHTTP2(h2)
	tr.Protocols.SetHTTP1(!h2)
	g.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func TestUnclaimed(t *testing.T) {
	g := spawn(t, "runs")
	g.read()
	g.ch.Close()
	if err := g.wait(); err != nil {
		t.Errorf("a supervisor that nobody claimed: %v", err)
	}
}

func TestErrorsKeepTheirKind(t *testing.T) {
	g := spawn(t, "unprepared")
	if got := g.read().GetError(); got != "unsupported: no such kernel" {
		t.Errorf("unprepared: %q", got)
	}
	if err := g.wait(); err == nil {
		t.Error("an unprepared supervisor exits with success")
	}
	g = spawn(t, "refused")
	g.launch()
	if got := g.read().GetError(); got != "capacity: no more" {
		t.Errorf("refused: %q", got)
	}
	if err := g.wait(); err == nil {
		t.Error("a refused supervisor exits with success")
	}
}

func TestLaunchIsCancelledWithTheChannel(t *testing.T) {
	g := spawn(t, "slow")
	g.launch()
	for !g.has("launching") {
		time.Sleep(time.Millisecond)
	}
	g.ch.Close()
	if err := g.wait(); err == nil || !g.has("cancelled") {
		t.Errorf("exit %v, cancelled %t", err, g.has("cancelled"))
	}
}

func TestServeAndShutdown(t *testing.T) {
	for _, h2 := range []bool{true, false} {
		t.Run(fmt.Sprintf("h2=%t", h2), func(t *testing.T) {
			g := spawn(t, "runs")
			g.launch()
			if r := g.read(); r.GetInitPid() != 11 || r.GetZygotePid() != 12 || len(r.GetTimings()) == 0 {
				t.Errorf("result %v", r)
			}
			if err := claim.Read(g.ch, &guestv1.LaunchResult{}); !errors.Is(err, io.EOF) {
				t.Errorf("the channel after the answer: %v, want EOF", err)
			}
			c := g.client(h2)
			api := guestv1connect.NewGuestServiceClient(c, "http://guest")
			first, err := api.Status(t.Context(), connect.NewRequest(&guestv1.StatusRequest{}))
			if err != nil {
				t.Fatal(err)
			}
			s := first.Msg
			if !s.GetAlive() || s.GetSandboxId() != "sb" || s.GetVersion() != "v-test" || s.GetRunningCommands() != 3 || s.GetAttachedStreams() != 2 {
				t.Errorf("status %v", s)
			}
			again, err := api.Status(t.Context(), connect.NewRequest(&guestv1.StatusRequest{}))
			if err != nil || again.Msg.GetLastActivityNanos() != s.GetLastActivityNanos() {
				t.Errorf("status counts as activity (%v)", err)
			}
			resp, err := c.Post("http://guest/echo", "text/plain", strings.NewReader("hello"))
			if err != nil {
				t.Fatal(err)
			}
			if b, _ := io.ReadAll(resp.Body); string(b) != "hello" {
				t.Errorf("echo %q", b)
			}
			resp.Body.Close()
			if after, err := api.Status(t.Context(), connect.NewRequest(&guestv1.StatusRequest{})); err != nil || after.Msg.GetLastActivityNanos() <= s.GetLastActivityNanos() {
				t.Errorf("a call does not count as activity (%v)", err)
			}
			if _, err := api.Shutdown(t.Context(), connect.NewRequest(&guestv1.ShutdownRequest{GraceMillis: -1})); connect.CodeOf(err) != connect.CodeInvalidArgument {
				t.Errorf("shutdown with a negative grace: %v", err)
			}
			if _, err := api.Shutdown(t.Context(), connect.NewRequest(&guestv1.ShutdownRequest{GraceMillis: 100})); err != nil {
				t.Errorf("shutdown: %v", err)
			}
			if err := g.wait(); err != nil {
				t.Errorf("exit: %v", err)
			}
			if e := g.exitFile(); e.Reason != "shutdown" || e.Time == "" {
				t.Errorf("exit file %+v", e)
			}
			if !g.has("closed") || !g.has("services-closed") {
				t.Error("sandbox and services were not both closed")
			}
			if g.has(claim.Socket) {
				t.Error("the socket is left")
			}
		})
	}
}

func TestExitTellsThatTheSandboxEnded(t *testing.T) {
	g := spawn(t, "ends")
	g.launch()
	g.read()
	if err := g.wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	if e := g.exitFile(); e.Reason != "ended" || e.Detail != "PID 1 ended" {
		t.Errorf("exit file %+v", e)
	}
}

func TestChannelRefusesOtherDescriptors(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "SUPERVISOR_TEST_ROLE=runs")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "not a claim channel") {
		t.Errorf("started by hand: %v, %s", err, out)
	}
}

func TestBoundedLog(t *testing.T) {
	var b strings.Builder
	w := &bounded{w: &b, left: 10}
	for range 5 {
		if n, err := w.Write([]byte("1234\n")); n != 5 || err != nil {
			t.Fatal(n, err)
		}
	}
	if got := b.String(); got != "1234\n1234\n" {
		t.Errorf("log %q", got)
	}
	w = &bounded{w: &b, left: 2}
	b.Reset()
	_, _ = w.Write([]byte("1234\n"))
	_, _ = w.Write([]byte("1234\n"))
	if got := b.String(); strings.Count(got, "dropped") != 1 {
		t.Errorf("log %q does not say once that it is full", got)
	}
}
