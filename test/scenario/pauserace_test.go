package scenario

import (
	"context"
	"fmt"
	"math/rand"
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

// stubborn makes processes that are not simply running or asleep when they are to stop. Each writes a line to /tmp/done when it went on
// as it should; /tmp/ready is there when all are in their states.
const stubborn = `
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def done(what):
    fd = os.open("/tmp/done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, what.encode() + b"\n")
    os._exit(0)
def wait(path):
    while not os.path.exists(path): time.sleep(0.02)
for f in "/tmp/fifo", "/tmp/spawn": os.mkfifo(f)
started = []
def child(f):
    pid = os.fork()
    if pid == 0:
        f()
        os._exit(1)
    started.append(pid)
    return pid
def state(pid):
    with open("/proc/%d/stat" % pid) as f: return f.read().rsplit(") ", 1)[1][0]

def fifo():
    with open("/tmp/fifo") as f: f.read() == "more" and done("fifo")
def vfork(): # the child shares the memory of its parent, which waits, and opens a pipe that nobody writes to
    pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "/tmp/spawn", os.O_RDONLY, 0)])
    os.waitpid(pid, 0)[1] == 0 and done("vfork")
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
    done("stopped")
def tracer():
    pid = os.fork()
    if pid == 0:
        if libc.ptrace(0, 0, 0, 0) != 0: os._exit(3)
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(7)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSTOPPED(status): os._exit(1)
    open("/tmp/traced", "w").close()
    wait("/tmp/go")
    if state(pid) != "t": os._exit(1)
    libc.ptrace(7, pid, 0, 0)
    os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 and done("traced")
def zombie():
    pid = os.fork()
    if pid == 0: os._exit(9)
    while state(pid) != "Z": time.sleep(0.02)
    open("/tmp/zombie", "w").close()
    wait("/tmp/go")
    state(pid) == "Z" and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9 and done("zombie")
def locked():
    import fcntl
    mine = open("/tmp/lock", "w")
    fcntl.flock(mine, fcntl.LOCK_EX)
    done("locked")

import fcntl
lock = open("/tmp/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
child(fifo); child(vfork); child(tracer); child(zombie); child(locked)
sleeper = child(stopped)
while state(sleeper) != "T": time.sleep(0.02)
for f in "/tmp/traced", "/tmp/zombie": wait(f)
open("/tmp/ready", "w").close()
wait("/tmp/go")
state(sleeper) == "T" or done("the stopped one went on by itself")
os.kill(sleeper, signal.SIGCONT)
fcntl.flock(lock, fcntl.LOCK_UN) # children have it open too
for f, text in ("/tmp/fifo", "more"), ("/tmp/spawn", ""):
    with open(f, "w") as p: p.write(text)
bad = [pid for pid in started if os.waitpid(pid, 0)[1] != 0]
print("failed", len(bad))
`

// TestPauseOfProcessesThatWait: traced, stopped, in vfork, in a read of a pipe, waiting for a lock, dead and not waited for; a pause does not
// wait for any of them, and each is afterwards where it was.
func TestPauseOfProcessesThatWait(t *testing.T) {
	b := create(t)
	b.write("/tmp/stubborn.py", []byte(stubborn))
	id := b.start(&harenav1.Command{Shell: "python3 /tmp/stubborn.py", Timeout: durationpb.New(slowly(time.Minute))})
	eventually(t, "all wait", time.Minute, func() bool { return b.sh("test -e /tmp/ready").GetExitCode() == 0 })
	for range 3 {
		b.pause()
		b.is("paused")
		if out := b.sh("cat /tmp/done"); out.GetExitCode() == 0 { // resumes it
			t.Fatalf("went on by themselves: %s", out.stdout)
		}
	}
	b.must(": > /tmp/go")
	out := b.follow(&harenav1.ConnectRequest{CommandId: id})
	if out.GetExitCode() != 0 || string(out.stdout) != "failed 0\n" {
		t.Errorf("%v, stdout %q, stderr %q", out.Result, out.stdout, out.stderr)
	}
	if got := strings.Join(strings.Fields(b.must("sort /tmp/done")), " "); got != "fifo locked stopped traced vfork zombie" {
		t.Errorf("what went on as it should: %q", got)
	}
}

// frozen is what the kernel says of a sandbox's processes; it fails when there is no group of that name.
func frozen(t *testing.T, id string) bool {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/run/harena/cgroup2"} {
		found, _ := filepath.Glob(filepath.Join(root, "harena-*", id, "work", "cgroup.events"))
		for _, f := range found {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			return strings.Contains(string(text), "frozen 1")
		}
	}
	t.Fatalf("sandbox %s has no cgroup", id)
	return false
}

// TestPauseMeetsEverything: pauses, resumes, commands, snapshots, forks and stops of the same sandboxes at once, and the server is killed on the
// way. Whatever it was, afterwards every sandbox is what its record says, nothing stands still that is not paused, and all of it can be used.
func TestPauseMeetsEverything(t *testing.T) {
	own := needOwn(t)
	labels := map[string]string{"race": "pause"}
	all := &harenav1.Selector{Labels: labels}
	keeper := create(t, func(s *harenav1.SandboxSpec) { s.Labels = labels })
	keeper.write("/tmp/state", []byte("kept"))
	const name = "race:1"
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), slowly(2*time.Minute))
		defer cancel()
		if _, err := the.sandboxes.Stop(ctx, connect.NewRequest(&harenav1.StopRequest{Selector: all})); err != nil && kind(err) != "not-found" {
			t.Error(explain(err))
		}
		removeName(name)
	})
	did := map[string]int{}
	var mu sync.Mutex
	for round := range count(4, 100) {
		for range 2 {
			if _, err := the.sandboxes.Create(within(t, time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: the.image, Backend: the.backend, Labels: labels}})); err != nil {
				t.Fatal(explain(err))
			}
		}
		targets := alive(t, labels)
		ctx, cancel := context.WithTimeout(t.Context(), slowly(time.Minute))
		n := *the // the server's next life has connections of its own
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				for ctx.Err() == nil {
					what, err := meet(ctx, &n, targets[rand.Intn(len(targets))].GetId(), keeper.id, name, labels)
					if err == nil {
						mu.Lock()
						did[what]++
						mu.Unlock()
					} else if k := kind(err); k == "internal" || k == "invalid" || k == "unsupported" {
						t.Errorf("round %d, %s: %v", round, what, explain(err))
					}
				}
			})
		}
		time.Sleep(time.Duration(200+rand.Intn(900)) * time.Millisecond)
		own.kill()
		cancel()
		wg.Wait()
		if err := own.start(); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		left := alive(t, labels)
		for i, s := range left {
			b := &box{t, s.GetId()}
			switch state := s.GetState(); state {
			case "running", "paused":
				if is := frozen(t, b.id); is != (state == "paused") {
					t.Errorf("round %d: %s is %s, frozen %v", round, b.id, state, is)
				}
			default:
				t.Errorf("round %d: %s is %s (%s)", round, b.id, state, s.GetReason())
				continue
			}
			if got := b.must("echo usable"); got != "usable" || frozen(t, b.id) {
				t.Errorf("round %d: %s says %q, frozen %v", round, b.id, got, frozen(t, b.id))
			}
			if b.id != keeper.id && i > 6 { // enough is left for the next round
				if err := stop(within(t, time.Minute), b.id); err != nil {
					t.Error(explain(err))
				}
			}
		}
		same(t, "state of the keeper", keeper.read("/tmp/state"), []byte("kept"))
		doctor(t)
	}
	t.Logf("what succeeded: %v", did)
}

// meet does one thing, of those that get in each other's way, to a sandbox. The keeper is not stopped.
func meet(ctx context.Context, n *node, id, keeper, name string, labels map[string]string) (what string, err error) {
	sel := &harenav1.Selector{Ids: []string{id}}
	var outcomes []*harenav1.Outcome
	switch dice := rand.Intn(20); {
	case dice < 7:
		what = "pause"
		var res *connect.Response[harenav1.PauseResponse]
		if res, err = n.sandboxes.Pause(ctx, connect.NewRequest(&harenav1.PauseRequest{Selector: sel})); err == nil {
			outcomes = res.Msg.GetOutcomes()
		}
	case dice < 10:
		what = "resume"
		var res *connect.Response[harenav1.ResumeResponse]
		if res, err = n.sandboxes.Resume(ctx, connect.NewRequest(&harenav1.ResumeRequest{Selector: sel})); err == nil {
			outcomes = res.Msg.GetOutcomes()
		}
	case dice < 15:
		what = "exec"
		_, err = n.try(ctx, id, &harenav1.Command{Shell: "echo $$ >> /tmp/log"})
	case dice < 17:
		what = "snapshot"
		var stream *connect.ServerStreamForClient[harenav1.SnapshotResponse]
		if stream, err = n.sandboxes.Snapshot(ctx, connect.NewRequest(&harenav1.SnapshotRequest{Selector: sel, Name: name})); err == nil {
			for stream.Receive() {
				if d := stream.Msg().GetError(); d != nil {
					what = "snapshot: " + d.GetKind()
				}
			}
			err = stream.Err()
			_ = stream.Close()
		}
	case dice < 19 || id == keeper:
		what = "fork"
		_, err = n.sandboxes.Fork(ctx, connect.NewRequest(&harenav1.ForkRequest{Id: id, Count: 1, Labels: labels}))
	default:
		what = "stop"
		var res *connect.Response[harenav1.StopResponse]
		if res, err = n.sandboxes.Stop(ctx, connect.NewRequest(&harenav1.StopRequest{Selector: sel})); err == nil {
			outcomes = res.Msg.GetOutcomes()
		}
	}
	for _, o := range outcomes {
		if d := o.GetError(); d != nil {
			what += ": " + d.GetKind()
			if d.GetKind() == "internal" {
				err = fmt.Errorf("%s of %s: %s", what, id, o.GetErrorMessage())
			}
		}
	}
	return what, err
}

// alive are the sandboxes with labels that have not ended.
func alive(t *testing.T, labels map[string]string) []*harenav1.Sandbox {
	t.Helper()
	res, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{Labels: labels}))
	if err != nil {
		t.Fatal(explain(err))
	}
	return res.Msg.GetSandboxes()
}
