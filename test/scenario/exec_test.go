package scenario

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func TestStreamsAreKeptApart(t *testing.T) {
	out := create(t).sh("id -u; echo out; echo err >&2; exit 3")
	same(t, "stdout", out.stdout, []byte("0\nout\n"))
	same(t, "stderr", out.stderr, []byte("err\n"))
	if out.GetExitCode() != 3 || out.GetTimedOut() || out.GetSignal() != "" {
		t.Errorf("result %v", out.Result)
	}
}

func TestExitCodes(t *testing.T) {
	b := create(t)
	for _, c := range []struct {
		name   string
		cmd    *harenav1.Command
		code   int32
		signal string
	}{
		{"missing program", &harenav1.Command{Argv: []string{"no-such-program"}}, 127, ""},
		{"missing path", &harenav1.Command{Argv: []string{"/no/such/program"}}, 127, ""},
		{"not executable", &harenav1.Command{Argv: []string{"/etc/passwd"}}, 126, ""},
		{"a directory", &harenav1.Command{Argv: []string{"/etc"}}, 126, ""},
		{"shell: missing program", &harenav1.Command{Shell: "no-such-program"}, 127, ""},
		{"shell: not executable", &harenav1.Command{Shell: "/etc/passwd"}, 126, ""},
		{"true", &harenav1.Command{Argv: []string{"true"}}, 0, ""},
		{"false", &harenav1.Command{Argv: []string{"false"}}, 1, ""},
		{"255", &harenav1.Command{Shell: "exit 255"}, 255, ""},
		{"killed by itself", &harenav1.Command{Shell: "kill -KILL $$"}, 137, "SIGKILL"},
		{"terminated", &harenav1.Command{Shell: "kill -TERM $$"}, 143, "SIGTERM"},
		{"segmentation fault", &harenav1.Command{Shell: "kill -SEGV $$"}, 139, "SIGSEGV"},
	} {
		out := b.run(c.cmd)
		if out.GetExitCode() != c.code || out.GetSignal() != c.signal {
			t.Errorf("%s: exit %d signal %q (%s), want %d %q", c.name, out.GetExitCode(), out.GetSignal(), out.GetMessage(), c.code, c.signal)
		}
	}
}

func TestTimeoutKillsTheWholeTree(t *testing.T) {
	b := create(t)
	begin := time.Now()
	out := b.run(&harenav1.Command{Shell: "echo before; sleep 100 & setsid sleep 100", Timeout: seconds(2)})
	if !out.GetTimedOut() || out.GetExitCode() != 124 {
		t.Errorf("result %v", out.Result)
	}
	same(t, "partial output", out.stdout, []byte("before\n"))
	// The command sleeps for 100 s: anything near that means that nothing was killed.
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("took %v", took)
	}
	if left := b.must("cat /proc/[0-9]*/comm | grep -c '^sleep$' || true"); left != "0" {
		t.Errorf("%s sleeps are left", left)
	}
}

func TestEnvironmentUserAndDirectory(t *testing.T) {
	b := create(t, func(s *harenav1.SandboxSpec) {
		s.Process = &harenav1.ProcessDefaults{Env: map[string]string{"FROM": "sandbox", "BOTH": "sandbox"}}
	})
	out := b.run(&harenav1.Command{Shell: `echo "$FROM $BOTH $NEW [$EMPTY] $HOME"; pwd`, Cwd: "/tmp", Env: map[string]string{"BOTH": "command", "NEW": "a b\nc", "EMPTY": ""}})
	same(t, "environment", out.stdout, []byte("sandbox command a b\nc [] /root\n/tmp\n"))

	b.must("useradd -m -s /bin/bash -u 1234 ann && groupadd -g 4321 crew && usermod -aG crew ann")
	for user, want := range map[string]string{
		"ann":       "1234 1234 1234,4321 /home/ann\n",
		"1234":      "1234 1234 1234,4321 /home/ann\n",
		"ann:crew":  "1234 4321 4321 /home/ann\n",
		"5678":      "5678 0 0 /\n",
		"5678:8765": "5678 8765 8765 /\n",
	} {
		out := b.run(&harenav1.Command{Shell: `echo "$(id -u) $(id -g) $(id -G | tr ' ' ,) $HOME"`, User: user})
		if string(out.stdout) != want {
			t.Errorf("user %s: %q, want %q (%s)", user, out.stdout, want, out.stderr)
		}
	}
	for _, bad := range []*harenav1.Command{
		{Shell: "true", User: "nobody-of-this-name"},
		{Shell: "true", User: "ann:no-such-group"},
		{},
		{Shell: "true", Argv: []string{"true"}},
		{Shell: "true", Env: map[string]string{"A=B": ""}},
		{Argv: []string{"a\x00b"}},
	} {
		out, err := b.try(within(t, time.Minute), bad)
		if d := detail(err); d == nil || (d.GetKind() != "invalid" && d.GetKind() != "precondition") {
			t.Errorf("%v was accepted: %v, %v", bad, out.Result, err)
		}
	}
	if out := b.run(&harenav1.Command{Shell: "true", Cwd: "/no/such/dir"}); out.GetExitCode() != 126 || !strings.Contains(out.GetMessage(), "/no/such/dir") {
		t.Errorf("a directory that is missing: %v", out.Result)
	}
	// sudo, hence setuid, works by default.
	b.must("echo 'ann ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/ann")
	if out := b.run(&harenav1.Command{Argv: []string{"sudo", "-n", "id", "-u"}, User: "ann"}); string(out.stdout) != "0\n" {
		t.Errorf("sudo: %q %q", out.stdout, out.stderr)
	}
}

func TestOutputIsBytes(t *testing.T) {
	b := create(t)
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	weird := bytes.Join([][]byte{[]byte("\n\n  \n\t\n"), all, {0, 0, 0xff, 0xfe}, []byte("é日本語"), {0xe6, 0x97}, []byte("\r\n")}, nil)
	b.write("/tmp/weird", weird)
	same(t, "weird bytes", b.run(&harenav1.Command{Argv: []string{"cat", "/tmp/weird"}}).stdout, weird)
	// A multi-byte sequence in two writes arrives as it was written.
	split := b.sh(`printf '\346\227'; sleep 0.2; printf '\245'`)
	same(t, "split sequence", split.stdout, []byte("日"))
	heredoc := b.sh("cat <<'EOF'\n$HOME `x` \\n\n\n  end\nEOF\n")
	same(t, "heredoc", heredoc.stdout, []byte("$HOME `x` \\n\n\n  end\n"))
	args := b.run(&harenav1.Command{ArgvBytes: [][]byte{[]byte("printf"), []byte(`%s|`), []byte("a b"), []byte(`"'\`), {0xff, 0xfe}, {}}})
	same(t, "arguments", args.stdout, []byte("a b|\"'\\|\xff\xfe||"))
}

func TestOutputOfInstantExitIsNeverLost(t *testing.T) {
	b := create(t)
	for i := range count(100, 1000) {
		if out := b.run(&harenav1.Command{Argv: []string{"echo", strconv.Itoa(i)}}); string(out.stdout) != fmt.Sprintln(i) {
			t.Fatalf("run %d printed %q", i, out.stdout)
		}
	}
}

func TestQuickCommandsLeaveNoZombie(t *testing.T) {
	b := create(t)
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for range 8 {
		wg.Go(func() {
			for range count(125, 1250) {
				if out, err := b.try(t.Context(), &harenav1.Command{Argv: []string{"true"}}); err != nil || out.GetExitCode() != 0 {
					errs <- fmt.Errorf("%v: %w", out.Result, err)
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if z := b.must("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"); z != "0" {
		t.Errorf("%s zombies", z)
	}
	if n, _ := strconv.Atoi(b.must("ls -d /proc/[0-9]* | wc -l")); n > 10 {
		t.Errorf("%d processes are visible in an idle sandbox", n)
	}
}

func TestLargeInputComesBackIntact(t *testing.T) {
	b := create(t)
	const size = 100 << 20
	id := b.start(&harenav1.Command{Argv: []string{"cat"}, StdinOpen: true})
	data := make([]byte, 1<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	sent := sha256.New()
	fail := make(chan error, 1)
	ctx := within(t, 4*time.Minute)
	go func() {
		defer close(fail)
		for off := int64(0); off < size; off += int64(len(data)) {
			data[0] = byte(off >> 20)
			sent.Write(data)
			at := off
			if _, err := the.exec.SendInput(ctx, connect.NewRequest(&harenav1.SendInputRequest{SandboxId: b.id, CommandId: id, Data: data, Offset: &at, Eof: off+int64(len(data)) == size})); err != nil {
				fail <- err
				return
			}
		}
	}()
	stream, err := the.exec.Connect(ctx, connect.NewRequest(&harenav1.ConnectRequest{SandboxId: b.id, CommandId: id}))
	if err != nil {
		t.Fatal(explain(err))
	}
	defer stream.Close()
	got, n := sha256.New(), 0
	var result *harenav1.Result
	for stream.Receive() {
		o := stream.Msg().GetOutput()
		got.Write(o.GetStdout())
		n += len(o.GetStdout())
		if r := o.GetResult(); r != nil {
			result = r
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(explain(err))
	}
	if err := <-fail; err != nil {
		t.Fatalf("send: %v", explain(err))
	}
	if n != size || !bytes.Equal(got.Sum(nil), sent.Sum(nil)) || result.GetExitCode() != 0 {
		t.Errorf("%d of %d bytes came back, same %v, result %v", n, size, bytes.Equal(got.Sum(nil), sent.Sum(nil)), result)
	}
}

func TestUnreadOutputIsBounded(t *testing.T) {
	b := create(t)
	const keep = 1 << 20
	id := b.start(&harenav1.Command{Argv: []string{"yes"}, MaxOutput: keep, Timeout: seconds(5)})
	// Nobody reads. Afterwards the record holds what it may, and says what it dropped.
	out := b.follow(&harenav1.ConnectRequest{CommandId: id})
	rec := out.GetStdout()
	if !out.GetTimedOut() || rec.GetRecorded() > keep || rec.GetDropped() == 0 || rec.GetTotal() != rec.GetRecorded()+rec.GetDropped() {
		t.Errorf("record %v, timed out %v", rec, out.GetTimedOut())
	}
	// A reader that was live from the start would get it all; this one came in the middle or at the end.
	again := b.follow(&harenav1.ConnectRequest{CommandId: id})
	if int64(len(again.stdout)) != rec.GetRecorded() || !bytes.HasPrefix(again.stdout, []byte("y\ny\n")) {
		t.Errorf("replay has %d bytes, recorded %d", len(again.stdout), rec.GetRecorded())
	}
}

func TestDaemonDoesNotHoldTheCall(t *testing.T) {
	b := create(t)
	begin := time.Now()
	out := b.sh("(sleep 60; echo late) & echo now")
	if took := time.Since(begin); took > 30*time.Second || !out.GetDetached() || out.GetExitCode() != 0 {
		t.Errorf("took %v, result %v", took, out.Result)
	}
	same(t, "stdout", out.stdout, []byte("now\n"))
	if got := b.must("cat /proc/[0-9]*/comm | grep -c '^sleep$'"); got != "1" {
		t.Errorf("%s sleeps: the daemon did not live on", got)
	}
}

func TestReconnectListAndKill(t *testing.T) {
	b := create(t)
	id := b.start(&harenav1.Command{Shell: "echo one; echo two >&2; sleep 100", Tag: "mine"})
	eventually(t, "it has printed", 20*time.Second, func() bool {
		out := b.follow(&harenav1.ConnectRequest{CommandId: id, NoFollow: true})
		return len(out.stdout) == 4 && len(out.stderr) == 4
	})
	// A client that saw the first 2 bytes goes on where it was.
	ctx, cancel := context.WithCancel(within(t, time.Minute))
	stream, err := the.exec.Connect(ctx, connect.NewRequest(&harenav1.ConnectRequest{SandboxId: b.id, CommandId: id, StdoutOffset: 2}))
	if err != nil {
		t.Fatal(explain(err))
	}
	var got output
	for string(got.stdout) != "e\n" || string(got.stderr) != "two\n" {
		if !stream.Receive() {
			t.Fatalf("ended with %q %q: %v", got.stdout, got.stderr, stream.Err())
		}
		got.take(stream.Msg().GetOutput())
	}
	cancel()
	stream.Close()

	list, err := the.exec.ListCommands(within(t, time.Minute), connect.NewRequest(&harenav1.ListCommandsRequest{SandboxId: b.id}))
	if err != nil {
		t.Fatal(explain(err))
	}
	var info *harenav1.CommandInfo
	for _, c := range list.Msg.GetCommands() {
		if c.GetCommandId() == id {
			info = c
		}
	}
	if info.GetState() != "running" || info.GetTag() != "mine" || !strings.Contains(info.GetCommandLine(), "sleep 100") {
		t.Errorf("listed as %v", info)
	}
	if _, err := the.exec.Signal(within(t, time.Minute), connect.NewRequest(&harenav1.SignalRequest{SandboxId: b.id, CommandId: id, Signal: "TERM"})); err != nil {
		t.Fatal(explain(err))
	}
	out := b.follow(&harenav1.ConnectRequest{CommandId: id})
	if out.GetSignal() != "SIGTERM" || out.GetExitCode() != 143 || string(out.stdout) != "one\n" || string(out.stderr) != "two\n" {
		t.Errorf("after kill: %v %q %q", out.Result, out.stdout, out.stderr)
	}
	_, err = the.exec.Signal(within(t, time.Minute), connect.NewRequest(&harenav1.SignalRequest{SandboxId: b.id, CommandId: "c999999"}))
	if kind(err) != "not-found" {
		t.Errorf("signal to nobody: %v", err)
	}
}

func TestOpIDNeverRunsTwice(t *testing.T) {
	b := create(t)
	cmd := func() *harenav1.Command {
		return &harenav1.Command{Shell: "echo ran >> /tmp/count; sleep 1; echo done", OpId: "op-1"}
	}
	var wg sync.WaitGroup
	outs := make([]output, 4)
	for i := range outs {
		wg.Go(func() { outs[i], _ = b.try(t.Context(), cmd()) })
	}
	wg.Wait()
	outs = append(outs, b.run(cmd()))
	for i, o := range outs {
		if string(o.stdout) != "done\n" || o.Result.GetExitCode() != 0 {
			t.Errorf("call %d: %q %v", i, o.stdout, o.Result)
		}
	}
	if n := b.must("wc -l < /tmp/count"); n != "1" {
		t.Errorf("ran %s times", n)
	}
	other := cmd()
	other.Shell = "echo another"
	if _, err := b.try(t.Context(), other); kind(err) != "exists" {
		t.Errorf("another request under the same op_id: %v", err)
	}
}

func TestTerminal(t *testing.T) {
	b := create(t)
	id := b.start(&harenav1.Command{Argv: []string{"/bin/sh"}, Pty: &harenav1.Pty{Cols: 100, Rows: 30}, StdinOpen: true})
	ctx := within(t, time.Minute)
	stream, err := the.exec.Connect(ctx, connect.NewRequest(&harenav1.ConnectRequest{SandboxId: b.id, CommandId: id}))
	if err != nil {
		t.Fatal(explain(err))
	}
	defer stream.Close()
	var screen output
	expect := func(want string) {
		t.Helper()
		for !strings.Contains(string(screen.stdout), want) {
			if !stream.Receive() {
				t.Fatalf("the terminal ended before %q: %q, %v", want, screen.stdout, stream.Err())
			}
			screen.take(stream.Msg().GetOutput())
		}
	}
	send := func(s string) {
		t.Helper()
		if _, err := the.exec.SendInput(ctx, connect.NewRequest(&harenav1.SendInputRequest{SandboxId: b.id, CommandId: id, Data: []byte(s)})); err != nil {
			t.Fatal(explain(err))
		}
	}
	send("tty; stty size; echo $TERM\n")
	expect("/dev/pts/")
	expect("30 100")
	expect("xterm-256color")
	if _, err := the.exec.Resize(ctx, connect.NewRequest(&harenav1.ResizeRequest{SandboxId: b.id, CommandId: id, Cols: 120, Rows: 40})); err != nil {
		t.Fatal(explain(err))
	}
	send("stty size; echo $((6*7))\n")
	expect("40 120")
	expect("42")
	send("sleep 100\n")
	time.Sleep(300 * time.Millisecond) // the shell has to start it before the key arrives
	send("\x03")
	send("exit 7\n")
	for stream.Receive() {
		screen.take(stream.Msg().GetOutput())
	}
	if screen.Result.GetExitCode() != 7 {
		t.Errorf("the shell ended with %v: %q", screen.Result, screen.stdout)
	}
}

func TestKillWhileStarting(t *testing.T) {
	b := create(t)
	for range count(20, 200) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
		_, _ = b.try(ctx, &harenav1.Command{Argv: []string{"true"}})
		cancel()
	}
	id := b.start(&harenav1.Command{Argv: []string{"sleep", "100"}})
	if _, err := the.exec.Signal(within(t, time.Minute), connect.NewRequest(&harenav1.SignalRequest{SandboxId: b.id, CommandId: id, Signal: "KILL", Tree: true})); err != nil {
		t.Fatal(explain(err))
	}
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); out.GetExitCode() != 137 {
		t.Errorf("%v", out.Result)
	}
	b.must("true")
}
