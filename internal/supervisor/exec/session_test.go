package exec

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func in(session, text string) *harenav1.Command {
	return &harenav1.Command{Shell: text, Session: session}
}

// check runs a command in session "s" and compares what it did.
func (r *rig) check(text, stdout, stderr string, code int32) *outcome {
	r.t.Helper()
	o := r.run(in("s", text))
	if string(o.stdout) != stdout || string(o.stderr) != stderr || o.result.GetExitCode() != code {
		r.t.Errorf("%s: %q, %q, %v; want %q, %q, %d", text, o.stdout, o.stderr, o.result, stdout, stderr, code)
	}
	return o
}

// withShells runs a test with each kind of shell.
func withShells(t *testing.T, f func(t *testing.T, r *rig)) {
	for i, kind := range usualShells() {
		t.Run(kind.name, func(t *testing.T) {
			f(t, newRig(t, func(c *Config) {
				c.shells = usualShells()
				for k := range i {
					c.shells[k].paths = []string{"/nonexistent/" + kind.name}
				}
			}))
		})
	}
}

func TestSessionKeepsItsState(t *testing.T) {
	withShells(t, func(t *testing.T, r *rig) {
		dir := t.TempDir()
		r.check("cd "+dir+"; export A=1; B='two words'; f() { echo \"f$A $B $1\"; }", "", "", 0)
		r.check("pwd; f x; echo err >&2; false", dir+"\nf1 two words x\n", "err\n", 1)
		r.check("exit_code() { return 7; }; exit_code", "", "", 7)
		r.check("sh -c 'echo $A'", "1\n", "", 0)
		r.check("cat; echo \"it's 'quoted'\"; cat <<E\nhere\nE", "it's 'quoted'\nhere\n", "", 0)
		if o := r.run(in("s", "if")); o.result.GetExitCode() == 0 || len(o.stderr) == 0 {
			t.Errorf("a command that does not parse: %v, %q", o.result, o.stderr)
		}
		r.check("echo still here", "still here\n", "", 0)
		o := r.run(in("s", "head -c 3000000 /dev/zero; printf end >&2"))
		if len(o.stdout) != 3000000 || string(o.stderr) != "end" {
			t.Errorf("%d bytes, %q", len(o.stdout), o.stderr)
		}
		r.check("nosuchprogram 2>/dev/null", "", "", 127)
		argv := r.run(&harenav1.Command{Argv: []string{"printf", "%s|", "a b", "$A", "'"}, Session: "s"})
		if string(argv.stdout) != "a b|$A|'|" {
			t.Errorf("%q", argv.stdout)
		}
	})
}

// What a command prints cannot be taken for the end of it.
func TestSessionFramingCannotBeForged(t *testing.T) {
	withShells(t, func(t *testing.T, r *rig) {
		r.check("echo 'N 0'; sh -c \"echo 'N 0' >&3\" 2>/dev/null", "N 0\n", "", r.run(in("s", "sh -c 'echo >&3' 2>/dev/null")).result.GetExitCode())
		// A program has the descriptors that it has without a session.
		r.check("ls /proc/self/fd", string(r.shell("ls /proc/self/fd").stdout), "", 0)
		// A shell that writes to what it saved does not know the word.
		o := r.run(in("s", "for fd in 10 11 12 13 14 15 16 17 18 19 20; do eval \"echo N 0 >&$fd\" 2>/dev/null; done; echo out"))
		if o.result == nil {
			t.Error("no result")
		}
	})
}

func TestSessionEnds(t *testing.T) {
	withShells(t, func(t *testing.T, r *rig) {
		for _, way := range []struct {
			text string
			code int32
		}{{"exit 5", 5}, {"exec sh -c 'echo out; exit 6'", 6}, {"kill -9 $$", 137}} {
			r.check("echo alive", "alive\n", "", 0)
			o := r.run(in("s", way.text))
			if o.result.GetExitCode() != way.code || !strings.Contains(o.result.GetMessage(), "ended") {
				t.Errorf("%s: %v", way.text, o.result)
			}
			_, err := r.tryRun(context.Background(), in("s", "true"))
			wantKind(t, err, errs.Precondition, "has ended")
			if _, err := r.client.CreateSession(context.Background(), connect.NewRequest(&harenav1.CreateSessionRequest{Name: "s"})); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestSessionTimeOutKeepsTheShell(t *testing.T) {
	withShells(t, func(t *testing.T, r *rig) {
		r.check("X=kept", "", "", 0)
		slow := in("s", "echo begun; sleep 100; echo never")
		slow.Timeout = durationpb.New(200 * time.Millisecond)
		o := r.run(slow)
		if !o.result.GetTimedOut() || o.result.GetExitCode() != 124 || !strings.HasPrefix(string(o.stdout), "begun\n") {
			t.Errorf("%v, %q", o.result, o.stdout)
		}
		r.check("echo $X", "kept\n", "", 0)
		loop := in("s", "while :; do :; done")
		loop.Timeout = durationpb.New(200 * time.Millisecond)
		if o := r.run(loop); !o.result.GetTimedOut() || !strings.Contains(o.result.GetMessage(), "did not come back") {
			t.Errorf("%v", o.result)
		}
	})
}

func TestSessionSignalsSpareTheShell(t *testing.T) {
	r := newRig(t, nil)
	r.check("X=kept", "", "", 0)
	id := r.begin(in("s", "sleep 100; echo $?"))
	eventually(t, "it sleeps", func() bool {
		pids, _ := r.s.sessions.list()[0].group.path.Tree()
		return len(pids) == 2
	})
	if err := r.signal(id, "TERM", false); err != nil {
		t.Fatal(err)
	}
	if o := r.connect(id); string(o.stdout) != "143\n" {
		t.Errorf("%q, %v", o.stdout, o.result)
	}
	r.check("echo $X", "kept\n", "", 0)
}

func TestSessionBackgroundJobs(t *testing.T) {
	r := newRig(t, nil)
	file := filepath.Join(t.TempDir(), "f")
	r.check("(sleep 0.3; echo late; echo done > "+file+") & echo started", "started\n", "", 0)
	eventually(t, "the job goes on", func() bool { b, _ := os.ReadFile(file); return len(b) > 0 })
	r.check("wait; echo next", "late\nnext\n", "", 0)
}

func TestSessionCommandsTakeTurns(t *testing.T) {
	r := newRig(t, nil)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			o := r.run(in("s", "n=$((n+1)); echo begin; sleep 0.02; echo end"))
			if string(o.stdout) != "begin\nend\n" {
				t.Errorf("%q", o.stdout)
			}
		})
	}
	wg.Wait()
	r.check("echo $n", "8\n", "", 0)
	busy := r.begin(in("s", "sleep 100"))
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := r.tryRun(ctx, in("s", "true")); err == nil {
		t.Error("it did not wait")
	}
	if err := r.signal(busy, "KILL", true); err != nil {
		t.Fatal(err)
	}
	r.check("echo $n", "8\n", "", 0)
}

func TestSessionOperationsRunOnce(t *testing.T) {
	r := newRig(t, nil)
	cmd := in("s", "n=$((n+1)); echo $n")
	cmd.OpId = "once"
	first := r.run(cmd)
	again := r.run(cmd)
	if string(first.stdout) != "1\n" || string(again.stdout) != "1\n" || !again.attached {
		t.Errorf("%q, %q", first.stdout, again.stdout)
	}
	r.check("echo $n", "1\n", "", 0)
}

func TestSessionRequests(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	for _, bad := range []*harenav1.Command{
		{Shell: "true", Session: "s", Cwd: "/"},
		{Shell: "true", Session: "s", Env: map[string]string{"A": "b"}},
		{Shell: "true", Session: "s", Stdin: []byte("x")},
		{Shell: "true", Session: "s", Pty: &harenav1.Pty{}},
		{Shell: strings.Repeat("x", maxArg+1), Session: "s"},
	} {
		_, err := r.tryRun(ctx, bad)
		wantKind(t, err, errs.Invalid, "")
	}
	create := func(name, user string) error {
		_, err := r.client.CreateSession(ctx, connect.NewRequest(&harenav1.CreateSessionRequest{Name: name, User: user}))
		return errs.FromConnect(err)
	}
	if err := create("u", "4242"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, create("u", ""), errs.Exists, "exists already")
	wantKind(t, create("", ""), errs.Invalid, "name")
	if o := r.run(&harenav1.Command{Shell: "id -u", Session: "u"}); string(o.stdout) != "4242\n" {
		t.Errorf("%q", o.stdout)
	}
	_, err := r.tryRun(ctx, &harenav1.Command{Shell: "true", Session: "u", User: "root"})
	wantKind(t, err, errs.Invalid, "is of user")
	list, err := r.client.ListSessions(ctx, connect.NewRequest(&harenav1.ListSessionsRequest{}))
	if err != nil || strings.Join(list.Msg.GetNames(), ",") != "u" {
		t.Errorf("%v, %v", list, err)
	}
	closing := func(name string) error {
		_, err := r.client.CloseSession(ctx, connect.NewRequest(&harenav1.CloseSessionRequest{Name: name}))
		return errs.FromConnect(err)
	}
	if err := closing("u"); err != nil {
		t.Error(err)
	}
	wantKind(t, closing("u"), errs.NotFound, "u")
	for i := range maxSessions {
		if err := create(strings.Repeat("x", i+1), ""); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, create("more", ""), errs.Capacity, "64")
}
