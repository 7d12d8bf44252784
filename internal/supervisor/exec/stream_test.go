package exec

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// recordBytes is what a rig's records take on disk.
func (r *rig) recordBytes() int64 {
	var n int64
	_ = filepath.Walk(r.cfg.RecordDir, func(_ string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
		return nil
	})
	return n
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// numbered makes bytes of which every 8 tell their position.
func numbered(from, n int64) []byte {
	out := make([]byte, 0, n)
	for i := from / 8; int64(len(out)) < n; i++ {
		out = fmt.Appendf(out, "%07x\n", i)
	}
	return out[:n]
}

const numberedShell = `awk 'BEGIN { for (i = 0; i < %d; i++) printf "%%07x\n", i }'`

func TestRecordIsAPrefixAndReplays(t *testing.T) {
	r := newRig(t, nil)
	// Below and above what is kept in memory, and beyond the record.
	for _, size := range []int64{8, 64 << 10, 64<<10 + 8, 1 << 20, 1<<20 + 8, 3 << 20} {
		cmd := shell(numberedShell, size/8)
		cmd.MaxOutput = 1 << 20
		id := r.begin(cmd)
		live := r.connect(id)
		want := numbered(0, size)
		// Started without a reader, it may have been dropped, but then it is told.
		if int64(len(live.stdout))+live.gaps["stdout"] != size {
			t.Errorf("size %d: %d bytes and a gap of %d", size, len(live.stdout), live.gaps["stdout"])
		}
		kept := min(size, 1<<20)
		o := r.connect(id)
		if !bytes.Equal(o.stdout, want[:kept]) || o.gaps["stdout"] != size-kept {
			t.Errorf("size %d: replay of %d bytes, gap %v", size, len(o.stdout), o.gaps)
		}
		if rec := o.result.GetStdout(); rec.GetTotal() != size || rec.GetRecorded() != kept || rec.GetDropped() != size-kept {
			t.Errorf("size %d: record %v", size, rec)
		}
		from, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, StdoutOffset: kept / 2})
		if err != nil || !bytes.Equal(from.stdout, want[kept/2:kept]) {
			t.Errorf("size %d: from the middle: %d bytes, %v", size, len(from.stdout), err)
		}
		_, err = r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, StdoutOffset: size + 1})
		wantKind(t, err, errs.Invalid, "stdout_offset")
	}
}

// A client that reads gets everything, also far beyond the record, in constant memory.
func TestLiveReaderGetsEverything(t *testing.T) {
	r := newRig(t, nil)
	const size = 100 << 20
	before := heap()
	var most int64
	sum, n := uint64(0), int64(0)
	st, err := r.client.Run(context.Background(), connect.NewRequest(&harenav1.RunRequest{Command: &harenav1.Command{
		Shell: fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x", size), MaxOutput: 1 << 20,
	}}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var res *harenav1.Result
	for next := int64(0); st.Receive(); {
		out := st.Msg().GetOutput()
		for _, b := range out.GetStdout() {
			sum += uint64(b)
		}
		if n += int64(len(out.GetStdout())); n > next {
			most = max(most, heap()-before)
			next += size / 10
		}
		if out.GetGap() != nil {
			t.Fatalf("a gap of %v", out.GetGap())
		}
		if out.GetResult() != nil {
			res = out.GetResult()
		}
	}
	if n != size || sum != size*'x' {
		t.Errorf("%d bytes, sum %d", n, sum)
	}
	if rec := res.GetStdout(); rec.GetTotal() != size || rec.GetRecorded() != 1<<20 {
		t.Errorf("record %v", rec)
	}
	if most > 24<<20 {
		t.Errorf("the heap grew by %d MiB", most>>20)
	}
	if n := r.recordBytes(); n > 2<<20 {
		t.Errorf("%d bytes on disk", n)
	}
}

func TestEndlessOutputNeitherGrowsMemoryNorDisk(t *testing.T) {
	d := 5 * time.Second
	if testing.Short() {
		d = time.Second
	}
	r := newRig(t, nil)
	before := heap()
	// Nobody reads: what is beyond the record is dropped, and the command does not wait.
	id := r.begin(&harenav1.Command{Argv: []string{"yes"}, MaxOutput: 1 << 20, Timeout: durationpb.New(d)})
	time.Sleep(d / 2)
	if grown := heap() - before; grown > 8<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	o := r.connect(id)
	rec := o.result.GetStdout()
	if !o.result.GetTimedOut() || rec.GetRecorded() != 1<<20 || rec.GetDropped() < 10<<20 {
		t.Errorf("got %v", o.result)
	}
	if n := r.recordBytes(); n > 2<<20 {
		t.Errorf("%d bytes on disk", n)
	}
}

// A reader that is slow makes the command wait, and still gets everything.
func TestSlowReaderIsWaitedFor(t *testing.T) {
	r := newRig(t, nil)
	const size = 16 << 20
	cmd := shell(numberedShell, size/8)
	cmd.MaxOutput = 64 << 10
	st, err := r.client.Run(context.Background(), connect.NewRequest(&harenav1.RunRequest{Command: cmd}))
	if err != nil {
		t.Fatal(err)
	}
	o := &outcome{gaps: map[string]int64{}}
	for st.Receive() {
		if o.take(st.Msg().GetOutput()); len(o.stdout) < 1<<20 {
			time.Sleep(10 * time.Millisecond)
		}
	}
	st.Close()
	if !bytes.Equal(o.stdout, numbered(0, size)) || len(o.gaps) > 0 || o.result == nil {
		t.Errorf("%d bytes, gaps %v, result %v", len(o.stdout), o.gaps, o.result)
	}
}

// The reader that takes nothing is dropped; the other gets everything.
func TestStalledReaderIsDropped(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Stall = 3 * time.Second })
	const size = 32 << 20 // more than all buffers between the command and a client that does not read
	release := filepath.Join(t.TempDir(), "release")
	cmd := shell("while [ ! -e %s ]; do sleep 0.02; done; head -c %d /dev/zero", release, size)
	cmd.MaxOutput = 64 << 10
	stalled, err := r.client.Run(context.Background(), connect.NewRequest(&harenav1.RunRequest{Command: cmd}))
	if err != nil {
		t.Fatal(err)
	}
	defer stalled.Close()
	if !stalled.Receive() {
		t.Fatal(stalled.Err())
	}
	id := stalled.Msg().GetOutput().GetStarted().GetCommandId()
	good := make(chan *outcome, 1)
	go func() { good <- r.connect(id) }()
	eventually(t, "both are attached", func() bool { _, n := r.s.Running(); return n == 2 })
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if o := <-good; len(o.stdout) != size || len(o.gaps) > 0 || o.result.GetExitCode() != 0 {
		t.Errorf("%d bytes, gaps %v, %v", len(o.stdout), o.gaps, o.result)
	}
	for stalled.Receive() {
		if stalled.Msg().GetOutput().GetResult() != nil {
			t.Error("the stalled reader got a result as if it had everything")
		}
	}
	wantKind(t, errs.FromConnect(stalled.Err()), errs.Timeout, "took no output")
}

func TestDisconnectNeitherKillsNorLosesTheRecord(t *testing.T) {
	r := newRig(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	release := filepath.Join(t.TempDir(), "release")
	st, err := r.client.Run(ctx, connect.NewRequest(&harenav1.RunRequest{
		Command: shell("echo one; while [ ! -e %s ]; do sleep 0.02; done; echo two; yes | head -c 1000000 >&2", release),
	}))
	if err != nil {
		t.Fatal(err)
	}
	if !st.Receive() {
		t.Fatal(st.Err())
	}
	id := st.Msg().GetOutput().GetStarted().GetCommandId()
	cancel()
	st.Close()
	eventually(t, "the service notices", func() bool { _, n := r.s.Running(); return n == 0 })
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	o := r.connect(id)
	if string(o.stdout) != "one\ntwo\n" || len(o.stderr) != 1000000 || o.result.GetExitCode() != 0 {
		t.Errorf("got %q, %d bytes, %v", o.stdout, len(o.stderr), o.result)
	}
	now, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
	if err != nil || now.result == nil || len(now.stderr) != 1000000 {
		t.Errorf("no_follow after the end: %v, %v", now, err)
	}
}

func TestNoFollowAndKeepalive(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Keepalive = 20 * time.Millisecond })
	id := r.begin(shell("echo now; exec sleep 100"))
	eventually(t, "what is recorded now, without waiting", func() bool {
		o, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: id, NoFollow: true})
		return err == nil && o.result == nil && string(o.stdout) == "now\n"
	})
	st, err := r.client.Connect(context.Background(), connect.NewRequest(&harenav1.ConnectRequest{CommandId: id}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	for beats := 0; beats < 3; {
		if !st.Receive() {
			t.Fatal(st.Err())
		}
		if st.Msg().GetOutput().GetKeepalive() {
			beats++
		}
	}
	if err := r.signal(id, "TERM", false); err != nil {
		t.Error(err)
	}
}

func TestRecordsAreBounded(t *testing.T) {
	r := newRig(t, func(c *Config) {
		c.Limits.RecordBytes, c.Limits.EndedMemory, c.Limits.Ended = 1<<20, 32<<10, 20
	})
	var first string
	for range 30 {
		id := r.shell("head -c 20000 /dev/zero").id
		if first == "" {
			first = id
		}
	}
	var kept []*command
	eventually(t, "all are retired", func() bool {
		kept = r.s.list()
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		return len(r.s.alive) == 0 && len(kept) == 20
	})
	_, err := r.tryConnect(context.Background(), &harenav1.ConnectRequest{CommandId: first})
	wantKind(t, err, errs.NotFound, first)
	for _, c := range kept {
		if o := r.connect(c.id); len(o.stdout) != 20000 {
			t.Errorf("%s: %d bytes", c.id, len(o.stdout))
		}
	}
	if n := r.recordBytes(); n < 300_000 || n > 420_000 {
		t.Errorf("%d bytes on disk for 20 records of 20,000 bytes, of which 32 KiB are in memory", n)
	}

	// A big one pushes the oldest out; one that is too big is cut.
	o := r.shell("head -c 1000000 /dev/zero")
	if rec := o.result.GetStdout(); rec.GetDropped() != 0 {
		t.Errorf("record %v", rec)
	}
	// Until it is retired one more is listed than is kept.
	eventually(t, "it is retired", func() bool { kept = r.s.list(); return len(kept) == 20 })
	gaps := int64(0)
	for _, c := range kept {
		if c.id == o.id {
			continue
		}
		old := r.connect(c.id)
		if old.result == nil || int64(len(old.stdout))+old.gaps["stdout"] != 20000 {
			t.Errorf("%s: result %v, %d bytes, gap %v", c.id, old.result, len(old.stdout), old.gaps)
		}
		gaps += old.gaps["stdout"]
	}
	if gaps == 0 {
		t.Error("nothing was dropped to make room")
	}
	o = r.shell("head -c 3000000 /dev/zero")
	if rec := o.result.GetStdout(); rec.GetTotal() != 3000000 || rec.GetRecorded() > 1<<20 || len(o.stdout) != 3000000 {
		t.Errorf("record %v, %d bytes live", rec, len(o.stdout))
	}
	if n := r.recordBytes(); n > 1<<20+4096 {
		t.Errorf("%d bytes on disk", n)
	}
}

// A record that cannot be written costs the record, not the command.
func TestRecordThatCannotBeWritten(t *testing.T) {
	r := newRig(t, nil)
	id := r.shell("true").id
	// The next command's directory is a file already.
	var n int
	if _, err := fmt.Sscanf(id, "c%d", &n); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.cfg.RecordDir, fmt.Sprintf("c%d", n+1)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	o := r.shell("head -c 1000000 /dev/zero; echo end >&2; exit 5")
	if len(o.stdout) != 1000000 || string(o.stderr) != "end\n" || o.result.GetExitCode() != 5 {
		t.Errorf("%d bytes, %q, %v", len(o.stdout), o.stderr, o.result)
	}
	if rec := o.result.GetStdout(); rec.GetDropped() == 0 || rec.GetRecorded() > 64<<10 {
		t.Errorf("record %v", rec)
	}
}

func TestWindow(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	w := window{start: 12345}
	model := []byte{} // bytes [w.start, …)
	next := byte(0)
	for range 5000 {
		switch rng.IntN(3) {
		case 0:
			p := make([]byte, rng.IntN(100_000))
			for i := range p {
				next++
				p[i] = next
			}
			n := w.put(p)
			if want := min(len(p), windowSize-len(model)); n != want {
				t.Fatalf("put %d of %d, want %d", n, len(p), want)
			}
			next -= byte(len(p) - n)
			model = append(model, p[:n]...)
		case 1:
			off := rng.IntN(len(model) + 1)
			got := make([]byte, rng.IntN(100_000))
			if w.buf == nil {
				continue
			}
			n := w.get(got, w.start+int64(off))
			if !bytes.Equal(got[:n], model[off:off+n]) || n != min(len(got), len(model)-off) {
				t.Fatalf("get %d at %d", n, off)
			}
		case 2:
			n := rng.IntN(len(model) + 1)
			w.forget(w.start + int64(n))
			model = model[n:]
		}
		if w.n != len(model) {
			t.Fatalf("%d bytes, want %d", w.n, len(model))
		}
	}
}
