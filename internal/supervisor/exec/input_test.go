package exec

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func (r *rig) send(req *harenav1.SendInputRequest) (int64, error) {
	res, err := r.client.SendInput(context.Background(), connect.NewRequest(req))
	if err != nil {
		return 0, errs.FromConnect(err)
	}
	return res.Msg.GetOffset(), nil
}

// 100 MB through cat and back. Input and output are both longer than every
// buffer on the way, so neither may wait for the other to be complete.
func TestInputRoundTrip(t *testing.T) {
	r := newRig(t, nil)
	size := 100 << 20
	if testing.Short() {
		size = 20 << 20
	}
	st, err := r.client.Run(context.Background(), connect.NewRequest(&harenav1.RunRequest{
		Command: &harenav1.Command{Argv: []string{"cat"}, StdinOpen: true},
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if !st.Receive() {
		t.Fatal(st.Err())
	}
	id := st.Msg().GetOutput().GetStarted().GetCommandId()
	sent := sha256.New()
	fed := make(chan error, 1)
	go func() {
		rng := rand.NewChaCha8([32]byte{1})
		buf := make([]byte, 1<<20)
		for off := 0; off < size; off += len(buf) {
			_, _ = rng.Read(buf)
			sent.Write(buf)
			if n, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: buf}); err != nil || n != int64(off+len(buf)) {
				fed <- fmt.Errorf("at %d: %d, %w", off, n, err)
				return
			}
		}
		_, err := r.send(&harenav1.SendInputRequest{CommandId: id, Eof: true})
		fed <- err
	}()
	got := sha256.New()
	n := 0
	var res *harenav1.Result
	for st.Receive() {
		out := st.Msg().GetOutput()
		got.Write(out.GetStdout())
		n += len(out.GetStdout())
		res = out.GetResult()
	}
	if err := <-fed; err != nil {
		t.Fatal(err)
	}
	if n != size || !bytes.Equal(got.Sum(nil), sent.Sum(nil)) || res.GetExitCode() != 0 {
		t.Errorf("%d bytes, result %v", n, res)
	}
}

func TestInputWithTheCommand(t *testing.T) {
	r := newRig(t, nil)
	if o := r.run(&harenav1.Command{Shell: "cat; echo end"}); string(o.stdout) != "end\n" {
		t.Errorf("without input: %q", o.stdout)
	}
	for _, size := range []int{1, 64 << 10, 64<<10 + 1, 1 << 20} {
		data := bytes.Repeat([]byte{'x'}, size)
		if o := r.run(&harenav1.Command{Argv: []string{"cat"}, Stdin: data}); !bytes.Equal(o.stdout, data) {
			t.Errorf("%d of %d bytes", len(o.stdout), size)
		}
	}
	// A command that does not read what it got ends all the same.
	if o := r.run(&harenav1.Command{Argv: []string{"true"}, Stdin: make([]byte, 1<<20)}); o.result.GetExitCode() != 0 {
		t.Errorf("got %v", o.result)
	}
}

func TestInputOffsets(t *testing.T) {
	r := newRig(t, nil)
	id := r.begin(&harenav1.Command{Argv: []string{"cat"}, Stdin: []byte("0123"), StdinOpen: true})
	at := func(off int64, data string, eof bool) (int64, error) {
		return r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte(data), Offset: &off, Eof: eof})
	}
	steps := []struct {
		off  int64
		data string
		eof  bool
		want int64
		kind errs.Kind
	}{
		{4, "4567", false, 8, ""},
		{4, "4567", false, 8, ""},      // a retry
		{6, "6789", false, 10, ""},     // half of it is new
		{12, "x", false, 0, "invalid"}, // a gap
		{-1, "x", false, 0, "invalid"},
		{10, "a\n", true, 12, ""},
		{10, "a\n", true, 12, ""}, // a retry of the end
		{12, "more", false, 0, "precondition"},
	}
	for i, s := range steps {
		n, err := at(s.off, s.data, s.eof)
		if n != s.want || errs.KindOf(err) != s.kind {
			t.Errorf("step %d: got %d, %v", i, n, err)
		}
	}
	if o := r.connect(id); string(o.stdout) != "0123456789a\n" {
		t.Errorf("cat got %q", o.stdout)
	}
	// The answer to the end may have been lost, and the command has ended of it meanwhile.
	if n, err := at(10, "a\n", true); n != 12 || err != nil {
		t.Errorf("a retry of the end after the command's: %d, %v", n, err)
	}
	_, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte("x")})
	wantKind(t, err, errs.Precondition, "has ended")
}

func TestInputThatNobodyReads(t *testing.T) {
	r := newRig(t, nil)
	id := r.begin(&harenav1.Command{Shell: "exec <&-; echo closed; exec sleep 100", StdinOpen: true})
	eventually(t, "the command closed its input", func() bool {
		o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
		return err == nil && string(o.stdout) == "closed\n"
	})
	_, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte("x")})
	wantKind(t, err, errs.Precondition, "has closed its standard input")
	_, err = r.send(&harenav1.SendInputRequest{CommandId: r.begin(shell("sleep 100")), Data: []byte("x")})
	wantKind(t, err, errs.Precondition, "no open standard input")

	// A call that waits for a command that does not read ends with its caller, or with the command.
	id = r.begin(&harenav1.Command{Shell: "sleep 100", StdinOpen: true})
	big := make([]byte, 1<<20)
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan error, 2)
	send := func(ctx context.Context) {
		_, err := r.client.SendInput(ctx, connect.NewRequest(&harenav1.SendInputRequest{CommandId: id, Data: big}))
		got <- errs.FromConnect(err)
	}
	go send(ctx)
	c, err := r.s.find(id)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pipe is full", func() bool { return len(c.in.turn) == 1 })
	cancel()
	wantKind(t, <-got, errs.Cancelled, "")
	eventually(t, "the turn is given back", func() bool { return len(c.in.turn) == 0 })
	go send(context.Background())
	eventually(t, "the pipe is full again", func() bool { return len(c.in.turn) == 1 })
	if err := r.signal(id, "KILL", true); err != nil {
		t.Fatal(err)
	}
	wantKind(t, <-got, errs.Precondition, "the command has") // ended, or closed its input by dying
}

// devpts mounts a devpts of its own, as a sandbox has one.
func devpts(t *testing.T) *os.File {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("devpts", dir, "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")
	if errors.Is(err, unix.EPERM) {
		t.Skipf("mount devpts: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestTerminal(t *testing.T) {
	pts := devpts(t)
	r := newRig(t, func(c *Config) { c.Devpts = pts })
	o := r.run(&harenav1.Command{
		Shell: `test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM && stat -L -c '%u %a' /proc/self/fd/0 && echo err >&2`,
		User:  "4242", Pty: &harenav1.Pty{Cols: 100, Rows: 30},
	})
	if want := "30 100\r\nxterm-256color\r\n4242 620\r\nerr\r\n"; string(o.stdout) != want || len(o.stderr) > 0 {
		t.Errorf("got %q, %q, %v", o.stdout, o.stderr, o.result)
	}

	id := r.begin(&harenav1.Command{Shell: "stty -echo; echo ready; while read line; do stty size; echo got $line; done; echo end", Pty: &harenav1.Pty{}})
	seen := func(text string) {
		t.Helper()
		eventually(t, "it prints "+text, func() bool {
			o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
			return err == nil && strings.Contains(string(o.stdout), text)
		})
	}
	seen("ready")
	if _, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte("one\n")}); err != nil {
		t.Fatal(err)
	}
	seen("24 80\r\ngot one")
	_, err := r.client.Resize(context.Background(), connect.NewRequest(&harenav1.ResizeRequest{CommandId: id, Cols: 132, Rows: 50}))
	if err != nil {
		t.Fatal(err)
	}
	// A line without its end, and then the end of the input.
	if _, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte("two\nthree"), Eof: true}); err != nil {
		t.Fatal(err)
	}
	if o := r.connect(id); !strings.Contains(string(o.stdout), "50 132\r\ngot two\r\n") || !strings.HasSuffix(string(o.stdout), "end\r\n") {
		t.Errorf("got %q", o.stdout)
	}
	_, err = r.client.Resize(context.Background(), connect.NewRequest(&harenav1.ResizeRequest{CommandId: id}))
	wantKind(t, errs.FromConnect(err), errs.Precondition, "has ended")
	_, err = r.client.Resize(context.Background(), connect.NewRequest(&harenav1.ResizeRequest{CommandId: r.begin(shell("sleep 100"))}))
	wantKind(t, errs.FromConnect(err), errs.Precondition, "no terminal")

	// ^C reaches the foreground process; what was on the terminal is not lost.
	id = r.begin(&harenav1.Command{Shell: "seq 1 2000; echo waiting; sleep 100", Pty: &harenav1.Pty{}})
	seen("waiting")
	if _, err := r.send(&harenav1.SendInputRequest{CommandId: id, Data: []byte{3}}); err != nil {
		t.Fatal(err)
	}
	if o := r.connect(id); o.result.GetSignal() != "SIGINT" && o.result.GetExitCode() != 130 {
		t.Errorf("got %v", o.result)
	}
	if o := r.run(&harenav1.Command{Argv: []string{"seq", "1", "20000"}, Pty: &harenav1.Pty{}}); !strings.HasSuffix(string(o.stdout), "\r\n20000\r\n") {
		t.Errorf("the end is lost: %q", o.stdout[max(0, len(o.stdout)-20):])
	}
}

// Somebody inside mounted over ptmx: the service must not open what is there.
func TestTerminalIsTheDevptsOwn(t *testing.T) {
	pts := devpts(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(fifo, pts.Name()+"/ptmx", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *Config) { c.Devpts = pts })
	_, err := r.tryRun(context.Background(), &harenav1.Command{Shell: "true", Pty: &harenav1.Pty{}})
	wantKind(t, err, errs.Precondition, "terminal")
}
