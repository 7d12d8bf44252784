package scenario

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func pauseAll(t *testing.T, sel *harenav1.Selector) []*harenav1.Outcome {
	t.Helper()
	res, err := the.sandboxes.Pause(within(t, 2*time.Minute), connect.NewRequest(&harenav1.PauseRequest{Selector: sel}))
	if err != nil {
		t.Fatal(explain(err))
	}
	return res.Msg.GetOutcomes()
}

func resumeAll(t *testing.T, sel *harenav1.Selector) []*harenav1.Outcome {
	t.Helper()
	res, err := the.sandboxes.Resume(within(t, 2*time.Minute), connect.NewRequest(&harenav1.ResumeRequest{Selector: sel}))
	if err != nil {
		t.Fatal(explain(err))
	}
	return res.Msg.GetOutcomes()
}

func (b *box) selector() *harenav1.Selector { return &harenav1.Selector{Ids: []string{b.id}} }

func (b *box) pause() *harenav1.PauseReport {
	b.t.Helper()
	out := pauseAll(b.t, b.selector())
	if len(out) != 1 || out[0].GetError() != nil || out[0].GetState() != "paused" {
		b.t.Fatalf("pause: %v", out)
	}
	return out[0].GetPause()
}

func (b *box) is(state string) {
	b.t.Helper()
	if s := b.get(); s.GetState() != state || (s.GetPaused() != nil) != (state == "paused") {
		b.t.Errorf("it is %s, paused %v; want %s", s.GetState(), s.GetPaused(), state)
	}
}

// TestEverythingContinuesAfterAPause: an attached command, a pipe between processes and a timer stand still, and go on.
func TestEverythingContinuesAfterAPause(t *testing.T) {
	b := create(t)
	id := b.start(&harenav1.Command{Shell: `mkfifo /tmp/p; (while read line; do echo "got $line"; done </tmp/p) &
exec 9>/tmp/p; i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i >&9; echo $i >/tmp/i; sleep 0.05; done; exec 9>&-; wait; echo end`})
	count := func() string { return strings.TrimSpace(string(b.read("/tmp/i"))) }
	eventually(t, "it counts", time.Minute, func() bool { return b.sh("cat /tmp/i").GetExitCode() == 0 })
	stream, err := the.exec.Connect(within(t, 3*time.Minute), connect.NewRequest(&harenav1.ConnectRequest{SandboxId: b.id, CommandId: id}))
	if err != nil || !stream.Receive() { // attached before the first pause: a call that comes later would resume
		t.Fatalf("connect: %v, %v", err, stream.Err())
	}
	defer stream.Close()
	done := make(chan output, 1)
	go func() {
		var out output
		for ok := true; ok; ok = stream.Receive() {
			out.take(stream.Msg().GetOutput())
		}
		done <- out
	}()
	for range 3 {
		b.pause()
		b.is("paused")
		if again := b.pause(); again == nil {
			t.Error("a second pause has no report")
		}
		b.is("paused") // looking does not resume
		before := count()
		b.is("running") // a file call does
		eventually(t, "it counts on", time.Minute, func() bool { return count() != before })
	}
	b.must(": > /tmp/end")
	out := <-done
	if out.GetExitCode() != 0 || !strings.HasSuffix(string(out.stdout), "end\n") {
		t.Errorf("%v, output ends with %.80q", out.Result, tail(out.stdout, 80))
	}
	// Nothing was lost or repeated on the way.
	for i, line := range strings.Split(strings.TrimSuffix(string(out.stdout), "\nend\n"), "\n") {
		if line != fmt.Sprintf("got %d", i+1) {
			t.Fatalf("line %d is %q", i+1, line)
		}
	}
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

// TestPauseGivesMemoryBack, as far as the node has swap; without, it says so.
func TestPauseGivesMemoryBack(t *testing.T) {
	b := create(t)
	id := b.start(&harenav1.Command{Shell: `{ head -c 67108864 /dev/urandom; : > /tmp/full; while [ ! -e /tmp/go ]; do sleep 0.1; done; } | tail -c 67108864 | wc -c`})
	eventually(t, "it holds memory", 2*time.Minute, func() bool { return b.sh("test -e /tmp/full").GetExitCode() == 0 })
	p := b.pause()
	if p.GetMemoryBefore() < 64<<20 || p.GetFreezeTook() == nil || p.GetNodeAvailableAfter() == 0 {
		t.Errorf("report %v", p)
	}
	if gone := p.GetMemoryBefore() - p.GetMemoryAfter(); gone < p.GetMemoryBefore()*9/10 && p.GetNote() == "" {
		t.Errorf("%d bytes came back, and why not more is not said: %v", gone, p)
	}
	t.Logf("of %d KiB %d came back; %d swapped, %d of cache; zram grew by %d; frozen in %v, reclaimed in %v; %s", p.GetMemoryBefore()>>10, (p.GetMemoryBefore()-p.GetMemoryAfter())>>10,
		p.GetSwapped()>>10, p.GetCacheDropped()>>10, p.GetZramGrew()>>10, p.GetFreezeTook().AsDuration(), p.GetReclaimTook().AsDuration(), p.GetNote())
	if shown := b.get().GetPause(); shown.GetMemoryBefore() != p.GetMemoryBefore() {
		t.Errorf("shown %v, was %v", shown, p)
	}
	b.must(": > /tmp/go")
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); out.GetExitCode() != 0 || strings.TrimSpace(string(out.stdout)) != "67108864" {
		t.Errorf("%v %q", out.Result, out.stdout)
	}
}

func TestTimeoutsRestWhilePaused(t *testing.T) {
	b := create(t)
	id := b.start(&harenav1.Command{Shell: "sleep 2; echo done", Timeout: durationpb.New(6 * time.Second)})
	b.pause()
	time.Sleep(7 * time.Second)
	b.is("paused")
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); out.GetTimedOut() || string(out.stdout) != "done\n" {
		t.Errorf("%v %q", out.Result, out.stdout)
	}
}

func TestPauseWhenIdle(t *testing.T) {
	b := create(t, func(s *harenav1.SandboxSpec) {
		s.Lifetime = &harenav1.Lifetime{Idle: durationpb.New(2 * time.Second), OnIdle: "pause"}
	})
	id := b.start(&harenav1.Command{Shell: "sleep 5; echo done"})
	time.Sleep(4 * time.Second)
	b.is("running") // a command runs
	eventually(t, "paused", time.Minute, func() bool { return b.get().GetState() == "paused" })
	if r := b.get().GetReason(); r != "idle" {
		t.Errorf("reason %q", r)
	}
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); string(out.stdout) != "done\n" {
		t.Errorf("%q", out.stdout)
	}
	b.is("running")
}

// TestPausedOutlivesKilledServer: also when the server is killed on the way there.
func TestPausedOutlivesKilledServer(t *testing.T) {
	own := needOwn(t)
	b, other := create(t), create(t)
	b.pause()
	wait := make(chan struct{})
	go func() {
		defer close(wait)
		_, _ = the.sandboxes.Pause(within(t, time.Minute), connect.NewRequest(&harenav1.PauseRequest{Selector: other.selector()}))
	}()
	own.kill()
	if err := own.start(); err != nil {
		t.Fatal(err)
	}
	<-wait
	b.is("paused")
	if s := other.get().GetState(); s != "paused" && s != "running" {
		t.Errorf("the other is %s", s)
	}
	b.must("true")
	other.must("true")
	doctor(t)
}

// TestPauseCycles pauses and resumes under load of calls, and leaves nothing.
func TestPauseCycles(t *testing.T) {
	boxes := []*box{create(t), create(t), create(t)}
	var wg sync.WaitGroup
	for _, b := range boxes {
		wg.Go(func() {
			for i := range count(10, 1000) / 3 {
				wg.Go(func() {
					out, err := b.try(within(t, 2*time.Minute), &harenav1.Command{Shell: fmt.Sprintf("echo %d", i)})
					if err != nil || string(out.stdout) != fmt.Sprintf("%d\n", i) {
						t.Errorf("exec %d: %q, %v", i, out.stdout, err)
					}
				})
				for _, o := range append(pauseAll(t, b.selector()), resumeAll(t, b.selector())...) {
					if o.GetError() != nil {
						t.Errorf("cycle %d: %v", i, o)
					}
				}
			}
		})
	}
	wg.Wait()
	for _, b := range boxes {
		b.must("true")
		b.pause()
		if err := stop(within(t, time.Minute), b.id); err != nil {
			t.Error(explain(err))
		}
	}
	doctor(t)
}

// tcpPair sends a stream over TCP from one process to another, which reads it slowly until /tmp/go is there, and compares each byte
// with what it should be. At the end each tells the other what it counted.
const tcpPair = `
import hashlib, os, socket, sys, time
total = 24 << 20
def block(i): return hashlib.shake_128(b"%d" % i).digest(65536)
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    out = socket.create_connection(listener.getsockname())
    h = hashlib.sha256()
    for i in range(total >> 16):
        h.update(block(i))
        out.sendall(block(i))
    out.shutdown(socket.SHUT_WR)
    answer = out.makefile("rb").read()
    print("sender", answer == h.digest(), flush=True)
    os._exit(0)
peer, _ = listener.accept()
h, got, want, at = hashlib.sha256(), 0, b"", 0
while True:
    data = peer.recv(4096)
    if not data: break
    while len(want) < len(data):
        want += block(at); at += 1
    if want[:len(data)] != data: sys.exit("the stream is wrong within 4096 bytes from %d" % got)
    want = want[len(data):]
    h.update(data)
    got += len(data)
    with open("/tmp/got.new", "w") as f: f.write(str(got))
    os.rename("/tmp/got.new", "/tmp/got")
    if not os.path.exists("/tmp/go"): time.sleep(0.01)
peer.sendall(h.digest())
peer.close()
os.wait()
print("receiver", got == total)
`

// TestConnectionInsideContinuesAfterAPause: data are under way between two processes when they stop, and arrive once and in order.
func TestConnectionInsideContinuesAfterAPause(t *testing.T) {
	b := create(t)
	b.write("/tmp/pair.py", []byte(tcpPair))
	id := b.start(&harenav1.Command{Shell: "python3 /tmp/pair.py"})
	eventually(t, "it flows", time.Minute, func() bool { return b.sh("test -s /tmp/got").GetExitCode() == 0 })
	for range 3 {
		b.pause()
		before := string(b.read("/tmp/got")) // resumes it
		eventually(t, "it flows on", time.Minute, func() bool { return string(b.read("/tmp/got")) != before })
	}
	b.pause()
	b.must(": > /tmp/go")
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); out.GetExitCode() != 0 || string(out.stdout) != "sender True\nreceiver True\n" {
		t.Errorf("%v, stdout %q, stderr %q", out.Result, out.stdout, out.stderr)
	}
}

// smallBuild is a build of so many steps by two workers, as make -j2 would run it: each step needs the one before, which the other
// worker makes, and consists of several processes. The last waits for /tmp/go. At the end all is made again, by one, and compared.
const smallBuild = `set -e
mkdir /tmp/b && cd /tmp/b && echo start > o0
step() { { cat o$(($1 - 1)); seq $1 $(($1 + 200)); } | sort | sha256sum > $2; }
worker() {
	i=$1
	while [ $i -le $steps ]; do
		while [ ! -e o$((i - 1)) ]; do sleep 0.01; done
		while [ $i = $steps ] && [ ! -e /tmp/go ]; do sleep 0.05; done
		step $i new$1
		mv new$1 o$i
		i=$((i + 2))
	done
}
worker 1 & first=$!
worker 2 & second=$!
wait $first
wait $second
i=1
while [ $i -le $steps ]; do
	step $i again
	cmp again o$i
	i=$((i + 1))
done
ls o* | wc -l
`

// TestBuildContinuesAfterPauses: it is stopped again and again in the middle, and is right in the end.
func TestBuildContinuesAfterPauses(t *testing.T) {
	b := create(t)
	id := b.start(&harenav1.Command{Shell: "steps=200\n" + smallBuild})
	made := func() int {
		var n int
		if _, err := fmt.Sscan(b.must("ls /tmp/b | grep -c ^o || true"), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "it builds", time.Minute, func() bool { return made() > 1 })
	var at []int
	for range 6 {
		b.pause()
		n := made()
		at = append(at, n)
		eventually(t, "it builds on", time.Minute, func() bool { return made() > n+5 })
	}
	if at[len(at)-1] > 200 {
		t.Errorf("it ended before it was let: %v", at)
	}
	b.must(": > /tmp/go")
	if out := b.follow(&harenav1.ConnectRequest{CommandId: id}); out.GetExitCode() != 0 || string(out.stdout) != "201\n" {
		t.Errorf("%v, stdout %q, stderr %q", out.Result, out.stdout, out.stderr)
	}
	t.Logf("outputs that were there at the pauses: %v", at)
}

// TestSwapFileOnAVolume: the swap file of a node with a volume takes the memory of paused sandboxes. It is found again after the server was
// killed, and after the node was down.
func TestSwapFileOnAVolume(t *testing.T) {
	o := secondNode(t, "--data-size", "1g", "--swap", "128m")
	o.must(t, "layer", "import", "--name", "bb:1", "dir:"+busyboxTree(t))
	file := filepath.Join(o.dir, "swapfile")
	active := func(when string) {
		t.Helper()
		swaps, err := os.ReadFile("/proc/swaps")
		if err != nil || strings.Count(string(swaps), file+" ") != 1 {
			t.Fatalf("%s: %s is not swap, once: %v, %s", when, file, err, swaps)
		}
	}
	active("at first")
	id := o.must(t, "create", "--image", "bb:1")
	// busybox tail keeps in memory what it is to print.
	o.must(t, "exec", "-d", id, "--", "sh", "-c", `dd if=/dev/urandom bs=1M count=24 of=/tmp/data && sha256sum </tmp/data >/tmp/sum
{ cat /tmp/data; : >/tmp/full; while [ ! -e /tmp/go ]; do sleep 0.1; done; } | busybox tail -c 25165824 | sha256sum >/tmp/again`)
	eventually(t, "it holds memory", 20*time.Second, func() bool { return o.cli(t, "exec", id, "--", "ls", "/tmp/full").code == 0 })
	var out []struct {
		Pause struct {
			Swapped int64  `json:"swapped,string"`
			Note    string `json:"note"`
		} `json:"pause"`
	}
	said := o.must(t, "pause", id, "--json")
	if err := json.Unmarshal([]byte(said), &out); err != nil || len(out) != 1 || out[0].Pause.Swapped < 24<<20 && out[0].Pause.Note == "" {
		t.Errorf("24 MiB of memory are not in swap, and why is not said: %v, %s", err, said)
	}
	o.kill()
	if err := o.start(); err != nil {
		t.Fatal(err)
	}
	active("after a kill")
	if state := o.must(t, "ps"); !strings.Contains(state, "paused") {
		t.Errorf("after a kill: %s", state)
	}
	o.must(t, "exec", id, "--", "touch", "/tmp/go")
	eventually(t, "it came back as it was", time.Minute, func() bool { return o.cli(t, "exec", id, "--", "busybox", "cmp", "/tmp/sum", "/tmp/again").code == 0 })
	o.must(t, "snapshot", id, "--name", "swapped:1") // the volume's copies do not mind that a file beside them is swap
	o.must(t, "stop", id)
	o.must(t, "down", "--data", o.dir)
	<-o.exited
	_ = o.log.Close()
	if swaps, err := os.ReadFile("/proc/swaps"); err != nil || strings.Contains(string(swaps), file) {
		t.Fatalf("after down: %v, %s", err, swaps)
	}
	o.flags = nil // they are remembered
	if err := o.start(); err != nil {
		t.Fatal(err)
	}
	active("after down")
}
