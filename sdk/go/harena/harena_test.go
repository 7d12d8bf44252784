package harena_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
	"github.com/harena-dev/harena/sdk/go/harenatest"
)

// start serves a fake server and returns it with a client for it.
func start(t *testing.T, opts ...harena.Option) (*harenatest.Server, *harena.Client, string) {
	t.Helper()
	s := harenatest.New()
	url, stop, err := s.Listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return s, client(t, url, opts...), url
}

func client(t *testing.T, url string, opts ...harena.Option) *harena.Client {
	t.Helper()
	c, err := harena.New(append([]harena.Option{harena.WithURL(url), harena.WithToken(harenatest.Token)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func sandbox(t *testing.T, c *harena.Client) *harena.Sandbox {
	t.Helper()
	sb, err := c.CreateSandbox(within(t), harena.Spec{Image: "debian:12"})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestRunTellsHowACommandEnded(t *testing.T) {
	_, c, _ := start(t)
	sb := sandbox(t, c)
	for name, test := range map[string]struct {
		argv           []string
		code           int
		signal         string
		stdout, stderr string
		timedOut       bool
	}{
		"output":   {argv: []string{"both"}, stdout: "out\n", stderr: "err\n"},
		"status":   {argv: []string{"exit", "7"}, code: 7},
		"signal":   {argv: []string{"kill", "9"}, code: 137, signal: "SIGKILL"},
		"time-out": {argv: []string{"timeout"}, code: 124, timedOut: true, stdout: "partial\n"},
		"missing":  {argv: []string{"no-such"}, code: 127},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := sb.Run(within(t), harena.Cmd{Argv: test.argv})
			if err != nil {
				t.Fatal(err)
			}
			if r.ExitCode != test.code || r.Signal != test.signal || string(r.Stdout) != test.stdout || string(r.Stderr) != test.stderr || r.TimedOut != test.timedOut {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestInputReachesTheCommand(t *testing.T) {
	_, c, _ := start(t)
	sb := sandbox(t, c)
	big := harenatest.Pattern(3 << 20)
	for name, in := range map[string]io.Reader{
		"none": nil, "along with the start": strings.NewReader("short"), "too long for that": bytes.NewReader(big), "of unknown length": io.LimitReader(bytes.NewReader(big), 700_000),
	} {
		t.Run(name, func(t *testing.T) {
			want := map[string][]byte{"none": {}, "along with the start": []byte("short"), "too long for that": big, "of unknown length": big[:700_000]}[name]
			r, err := sb.Run(within(t), harena.Cmd{Argv: []string{"cat"}, Stdin: in})
			if err != nil || !bytes.Equal(r.Stdout, want) {
				t.Errorf("%v, %d bytes of %d", err, len(r.Stdout), len(want))
			}
		})
	}
	cmd, err := sb.Start(within(t), harena.Cmd{Argv: []string{"cat"}, OpenStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	out := cmd.Stdout()
	for _, line := range []string{"one\n", "two\n"} {
		if _, err := io.WriteString(cmd.Stdin(), line); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(line))
		if _, err := io.ReadFull(out, got); err != nil || string(got) != line {
			t.Errorf("%q, %v", got, err)
		}
	}
	if err := cmd.Stdin().Close(); err != nil {
		t.Error(err)
	}
	if rest, err := io.ReadAll(out); err != nil || len(rest) != 0 {
		t.Errorf("%q, %v", rest, err)
	}
	if r, err := cmd.Wait(within(t)); err != nil || r.ExitCode != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := io.WriteString(cmd.Stdin(), "late"); err == nil {
		t.Error("a command that ended takes input")
	}
}

func TestCapturedOutputIsCapped(t *testing.T) {
	_, c, _ := start(t)
	r, err := sandbox(t, c).Run(within(t), harena.Cmd{Argv: []string{"spew", "100000"}, MaxOutput: 1000})
	if err != nil || len(r.Stdout) != 1000 || !r.Truncated {
		t.Errorf("%d bytes, truncated %v, %v", len(r.Stdout), r.Truncated, err)
	}
}

func TestEndOfContextKillsWhatRunStarted(t *testing.T) {
	_, c, _ := start(t)
	sb := sandbox(t, c)
	ctx, cancel := context.WithCancel(within(t))
	go func() {
		for {
			list, err := sb.Commands(t.Context())
			if err != nil || len(list) > 0 {
				cancel()
				return
			}
		}
	}()
	_, err := sb.Run(ctx, harena.Cmd{Argv: []string{"block"}})
	if !harena.IsKind(err, harena.KindCancelled) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	cmd, err := sb.Attach(within(t), "c1", nil, nil)
	if err != nil {
		// The context may have ended before the command began.
		if !harena.IsKind(err, harena.KindNotFound) {
			t.Error(err)
		}
		return
	}
	if r, err := cmd.Wait(within(t)); err != nil || r.Signal != "SIGKILL" {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestUnreadOutputHoldsNothingUpOnceWaitIsCalled(t *testing.T) {
	_, c, _ := start(t)
	sb := sandbox(t, c)
	cmd, err := sb.Start(within(t), harena.Cmd{Argv: []string{"spew", "4000000"}})
	if err != nil {
		t.Fatal(err)
	}
	// One stream is read, the other is nobody's.
	out := cmd.Stdout()
	read := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(out)
		read <- b
	}()
	if _, err := cmd.Wait(within(t)); err != nil {
		t.Fatal(err)
	}
	if b := <-read; !bytes.Equal(b, harenatest.Pattern(4000000)) {
		t.Errorf("%d bytes", len(b))
	}
}

// cutter is a proxy that cuts each connection after some bytes from the server.
type cutter struct {
	net.Listener
	server string
	mu     sync.Mutex
	random *rand.Rand
	cuts   int
	calm   bool
}

func newCutter(t *testing.T, server string) *cutter {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &cutter{Listener: l, server: strings.TrimPrefix(server, "http://"), random: rand.New(rand.NewPCG(1, 2))}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(conn)
		}
	}()
	return p
}

func (p *cutter) serve(conn net.Conn) {
	defer conn.Close()
	up, err := net.Dial("tcp", p.server)
	if err != nil {
		return
	}
	defer up.Close()
	p.mu.Lock()
	limit := int64(p.random.IntN(400_000))
	if p.calm {
		limit = 1 << 60
	}
	p.cuts++
	p.mu.Unlock()
	go func() {
		_, _ = io.Copy(up, conn)
		_ = up.Close()
	}()
	_, _ = io.CopyN(conn, up, limit)
}

func TestBrokenConnectionsLoseAndDoubleNothing(t *testing.T) {
	s, _, url := start(t)
	p := newCutter(t, url)
	c := client(t, "http://"+p.Addr().String())
	var sb *harena.Sandbox
	for sb == nil {
		sb, _ = c.CreateSandbox(within(t), harena.Spec{Image: "debian:12", RequestID: "one"})
	}
	if n := s.Live(); n != 1 {
		t.Errorf("%d sandboxes of one request", n)
	}
	const n = 4_000_000
	r, err := sb.Run(within(t), harena.Cmd{Argv: []string{"spew", "4000000"}, MaxOutput: 2 * n})
	if err != nil {
		t.Fatalf("%#v", err)
	}
	if want := harenatest.Pattern(n); !bytes.Equal(r.Stdout, want) || !bytes.Equal(r.Stderr, want) {
		t.Errorf("%d and %d bytes of %d, or others", len(r.Stdout), len(r.Stderr), n)
	}
	in := harenatest.Pattern(n)
	r, err = sb.Run(within(t), harena.Cmd{Argv: []string{"cat"}, Stdin: io.LimitReader(bytes.NewReader(in), n)})
	if err != nil || !bytes.Equal(r.Stdout, in) {
		t.Errorf("input came back as %d bytes of %d: %v", len(r.Stdout), n, err)
	}
	if s.Started() != 2 {
		t.Errorf("%d commands were started, want 2", s.Started())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cuts < 10 {
		t.Errorf("only %d connections: nothing was tested", p.cuts)
	}
}

func TestPatienceEnds(t *testing.T) {
	s := harenatest.New()
	url, stop, err := s.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	sb := sandbox(t, client(t, url, harena.WithPatience(50*time.Millisecond)))
	cmd, err := sb.Start(within(t), harena.Cmd{Argv: []string{"block"}})
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := cmd.Wait(within(t)); !errors.Is(err, harena.ErrUnreachable) || !strings.Contains(err.Error(), url) {
		t.Errorf("%v", err)
	}
}

func TestErrors(t *testing.T) {
	_, c, url := start(t)
	sb := sandbox(t, c)
	down := client(t, "http://127.0.0.1:1")
	wrong, err := harena.New(harena.WithURL(url), harena.WithToken("wrong"))
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		call func() error
		kind harena.Kind
		hint string
	}{
		"unary":       {func() error { _, err := c.GetSandbox(within(t), harenatest.Edge+"99999999999999"); return err }, harena.KindNotFound, "look it up"},
		"outcome":     {func() error { return c.Sandbox(harenatest.Edge + "99999999999999").Stop(within(t)) }, harena.KindNotFound, ""},
		"stream":      {func() error { _, err := c.Sandbox("x").RunShell(within(t), "true"); return err }, harena.KindNotFound, "look it up"},
		"plain read":  {func() error { _, err := sb.ReadFile(within(t), "/none"); return err }, harena.KindNotFound, "look it up"},
		"plain write": {func() error { return sb.WriteFile(within(t), "/readonly/x", nil) }, harena.KindDenied, "write elsewhere"},
		"image":       {func() error { _, err := c.CreateSandbox(within(t), harena.Spec{Image: "missing"}); return err }, harena.KindNotFound, "import"},
		"token":       {func() error { _, err := wrong.Edges(within(t)); return err }, harena.KindUnauthenticated, "right one"},
		"plain token": {func() error { _, err := wrong.Sandbox(sb.ID()).ReadFile(within(t), "/x"); return err }, harena.KindUnauthenticated, "right one"},
		"no server":   {func() error { _, err := down.Edges(within(t)); return err }, harena.KindPrecondition, "is `harena up` running?"},
		"plain down":  {func() error { return down.Sandbox(sb.ID()).WriteFile(within(t), "/x", nil) }, harena.KindPrecondition, "is `harena up` running?"},
		"not there": {func() error {
			_, err := c.Doctor(within(t), "")
			_, err2 := c.RemoveLayer(within(t), "x")
			return errors.Join(err, err2)
		}, harena.KindUnsupported, ""},
		"bad URL": {func() error { _, err := harena.New(harena.WithURL("127.0.0.1:7070")); return err }, harena.KindInvalid, "http://"},
		"no URL":  {func() error { _, err := harena.New(); return err }, harena.KindInvalid, "HARENA_URL"},
		"import": {func() error {
			_, _, err := c.ImportLayer(within(t), harena.ImportOptions{Name: "x", Source: "floppy:a"})
			return err
		}, harena.KindInvalid, "dir:PATH"},
		"no directory": {func() error {
			_, _, err := c.ImportLayer(within(t), harena.ImportOptions{Name: "x", Source: "dir:/none"})
			return err
		}, harena.KindInvalid, "directory"},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.call()
			var e *harena.Error
			if !errors.As(err, &e) || e.Kind != test.kind || !strings.Contains(e.Error(), test.hint) {
				t.Errorf("%#v", err)
			}
		})
	}
}

func TestProfileAndEnvironment(t *testing.T) {
	_, _, url := start(t)
	home := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", home)
	t.Setenv("HARENA_URL", "")
	t.Setenv("HARENA_TOKEN", "")
	if _, err := harena.FromEnv(); !harena.IsKind(err, harena.KindInvalid) {
		t.Errorf("without anything: %v", err)
	}
	write := func(path, content string) string {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := `{"url": "` + url + `", "token": "` + harenatest.Token + `"}`
	works := func(what string, opts ...harena.Option) {
		t.Helper()
		c, err := harena.FromEnv(opts...)
		if err == nil {
			_, err = c.Edges(within(t))
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	works("a named profile", harena.WithProfile(write(filepath.Join(home, "other.json"), good)))
	write(filepath.Join(home, "harena", "client.json"), good)
	works("the default profile")
	t.Setenv("HARENA_URL", "http://127.0.0.1:1")
	c, err := harena.FromEnv()
	if err != nil {
		t.Fatal(err)
	}
	if c.URL() != "http://127.0.0.1:1" {
		t.Errorf("the environment does not come first: %s", c.URL())
	}
	t.Setenv("HARENA_URL", url)
	t.Setenv("HARENA_TOKEN", "wrong")
	if c, err = harena.FromEnv(); err == nil {
		_, err = c.Edges(within(t))
	}
	if !harena.IsKind(err, harena.KindUnauthenticated) {
		t.Errorf("the environment's token does not come first: %v", err)
	}
	works("a named profile beside another environment", harena.WithProfile(filepath.Join(home, "other.json")))
	t.Setenv("HARENA_URL", "http://127.0.0.1:1")
	works("a named profile beside the environment of another server", harena.WithProfile(filepath.Join(home, "other.json")))
	if _, err := harena.FromEnv(harena.WithURL("http://x"), harena.WithToken("t"), harena.WithProfile(write(filepath.Join(home, "bad.json"), "{"))); err != nil {
		t.Errorf("a profile that is not needed was read: %v", err)
	}
	t.Setenv("HARENA_TOKEN", "")
	if _, err := harena.FromEnv(harena.WithProfile(filepath.Join(home, "bad.json"))); !harena.IsKind(err, harena.KindInvalid) {
		t.Errorf("a damaged profile: %v", err)
	}
}

func TestListsTurnPages(t *testing.T) {
	_, c, _ := start(t)
	made := map[int]bool{}
	if err := c.BatchCreate(within(t), harena.Spec{Image: "debian:12", Job: "j"}, 5, func(i int, sb *harena.Sandbox, err error) { made[i] = err == nil && sb.ID() != "" }); err != nil || len(made) != 5 {
		t.Fatalf("%v, %v", made, err)
	}
	list, err := c.Sandboxes(within(t), harena.Filter{Job: "j"})
	if err != nil || len(list) != 5 {
		t.Errorf("%d sandboxes, %v", len(list), err)
	}
}
