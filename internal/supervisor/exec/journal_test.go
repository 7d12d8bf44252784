package exec

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func op(id, text string) *harenav1.Command { return &harenav1.Command{Shell: text, OpId: id} }

func TestOperationRunsOnce(t *testing.T) {
	r := newRig(t, nil)
	file := filepath.Join(t.TempDir(), "count")
	cmd := op("op", "echo x >> "+file+"; sleep 0.1; echo out; echo err >&2; exit 3")
	var wg sync.WaitGroup
	all := make([]*outcome, 4)
	for i := range all {
		wg.Go(func() { all[i] = r.run(cmd) })
	}
	wg.Wait()
	all = append(all, r.run(cmd)) // when it has ended
	fresh := 0
	for _, o := range all {
		if string(o.stdout) != "out\n" || string(o.stderr) != "err\n" || o.result.GetExitCode() != 3 || o.id != all[0].id {
			t.Errorf("got %s: %q, %q, %v", o.id, o.stdout, o.stderr, o.result)
		}
		if !o.attached {
			fresh++
		}
	}
	if b, _ := os.ReadFile(file); string(b) != "x\n" || fresh != 1 {
		t.Errorf("it ran %d times, %d callers were first", len(b)/2, fresh)
	}
	_, err := r.tryRun(context.Background(), op("op", "echo other"))
	wantKind(t, err, errs.Exists, `op_id "op"`)
}

// restart replaces the service by a new one on the same records, as when the
// supervisor died: nothing of it is closed in order.
func (r *rig) restart() {
	r.t.Helper()
	old := r.s
	r.server.Close()
	r.trans.CloseIdleConnections()
	r.t.Cleanup(func() {
		if err := old.Close(); err != nil {
			r.t.Error(err)
		}
	})
	r.start()
}

func TestOperationAfterTheSupervisorDied(t *testing.T) {
	r := newRig(t, nil)
	done := op("done", "echo out; head -c 100000 /dev/zero >&2; exit 3")
	first := r.run(done)
	plain := r.shell("echo no operation")
	half := op("half", "echo started; sleep 100")
	id := r.begin(half)
	eventually(t, "it runs", func() bool { return r.info(id).GetPid() != 0 })

	r.restart()
	o := r.run(done)
	if !o.attached || o.id != first.id || string(o.stdout) != "out\n" || len(o.stderr) != 100000 || o.result.GetExitCode() != 3 {
		t.Errorf("got %v, %q, %d bytes", o.result, o.stdout, len(o.stderr))
	}
	if c := r.connect(first.id); string(c.stdout) != "out\n" {
		t.Errorf("got %q", c.stdout)
	}
	_, err := r.tryRun(context.Background(), half)
	wantKind(t, err, errs.Precondition, "indeterminate")
	_, err = r.tryRun(context.Background(), op("done", "echo other"))
	wantKind(t, err, errs.Exists, "done")
	// No ID is given twice.
	for _, o := range []*outcome{r.shell("true"), r.run(op("new", "echo again"))} {
		if o.id == first.id || o.id == plain.id || o.id == id {
			t.Errorf("%s was given twice", o.id)
		}
	}
	_, err = r.send(&harenav1.SendInputRequest{CommandId: first.id, Data: []byte("x")})
	wantKind(t, err, errs.Precondition, "ended")
	wantKind(t, r.signal(first.id, "", true), errs.Precondition, "ended")
}

func TestOperationBeyondTheHistory(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Ended = 3; c.Limits.Ops = 2 })
	cmd := op("old", "echo out; exit 3")
	first := r.run(cmd)
	for range 5 {
		r.shell("true")
	}
	eventually(t, "it is forgotten", func() bool { return r.info(first.id) == nil })
	o := r.run(cmd)
	if !o.attached || o.id != first.id || o.result.GetExitCode() != 3 || string(o.stdout) != "out\n" {
		t.Errorf("got %v, %q, gaps %v", o.result, o.stdout, o.gaps)
	}
	r.run(op("second", "true"))
	_, err := r.tryRun(context.Background(), op("third", "true"))
	wantKind(t, err, errs.Quota, " is 2, asked 3")
}

// What cannot be recorded is not started.
func TestOperationThatCannotBeRecorded(t *testing.T) {
	r := newRig(t, nil)
	if err := os.MkdirAll(r.cfg.RecordDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.cfg.RecordDir, "ops"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ran")
	if _, err := r.tryRun(context.Background(), op("op", "touch "+file)); err == nil {
		t.Error("it was started")
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("it ran")
	}
}

// The disk is full: an operation is refused, other commands run without a record.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("mount tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	r := newRig(t, func(c *Config) { c.RecordDir, c.Limits.Ops = dir+"/commands", 1 })
	if err := os.WriteFile(dir+"/fill", make([]byte, 1<<20), 0o600); err == nil {
		t.Fatal("the disk is not full")
	}
	for range 3 { // refused operations do not count against their limit
		_, err := r.tryRun(context.Background(), op("op", "true"))
		wantKind(t, err, errs.Capacity, "no space left")
		if e := new(errs.Error); !errors.As(errs.FromConnect(err), &e) || e.Limit == nil {
			t.Errorf("%v names no limit, so clients repeat it", err)
		}
	}
	o := r.shell("head -c 500000 /dev/zero; exit 3")
	if len(o.stdout) != 500000 || o.result.GetExitCode() != 3 || o.result.GetStdout().GetDropped() == 0 {
		t.Errorf("%d bytes, %v", len(o.stdout), o.result)
	}
	if err := os.Remove(dir + "/fill"); err != nil {
		t.Fatal(err)
	}
	if o := r.run(op("op", "echo ran")); string(o.stdout) != "ran\n" {
		t.Errorf("the operation that was refused did not run: %q", o.stdout)
	}
}
