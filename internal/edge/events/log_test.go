package events

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func openLog(t *testing.T, dir string, change func(*Options)) *Log {
	t.Helper()
	o := Options{Edge: "eeeeee", Now: func() time.Time { return time.Unix(1000, 0) }, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if change != nil {
		change(&o)
	}
	l, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func add(l *Log, from, to int) {
	for i := from; i <= to; i++ {
		l.Append(&harenav1.Event{Kind: fmt.Sprintf("sandbox.k%d", i%2), SandboxId: fmt.Sprint(i), Project: "lab/team"})
	}
}

func flush(t *testing.T, l *Log) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := l.Flush(ctx); err != nil {
		t.Fatalf("flush: %v", err)
	}
}

func list(t *testing.T, l *Log, f *harenav1.EventFilter) []*harenav1.Event {
	t.Helper()
	var all []*harenav1.Event
	after := int64(0)
	for {
		page, next, err := l.List(f, after, 7)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, page...)
		if next == 0 {
			return all
		}
		after = next
	}
}

func TestSurvivesRestart(t *testing.T) {
	dir := t.TempDir()
	l := openLog(t, dir, nil)
	add(l, 1, 100)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = openLog(t, dir, func(o *Options) { o.Memory = 10 })
	add(l, 101, 150)
	flush(t, l)
	all := list(t, l, nil)
	if len(all) != 150 {
		t.Fatalf("%d events, want 150", len(all))
	}
	for i, e := range all {
		if e.GetSeq() != int64(i+1) || e.GetSandboxId() != fmt.Sprint(i+1) || e.GetEdge() != "eeeeee" || e.GetTime() == nil {
			t.Fatalf("event %d is %v", i, e)
		}
	}
}

func TestFilters(t *testing.T) {
	l := openLog(t, t.TempDir(), nil)
	add(l, 1, 20)
	l.Append(&harenav1.Event{Kind: "edge.started"})
	flush(t, l)
	for _, test := range []struct {
		name   string
		filter *harenav1.EventFilter
		want   int
	}{
		{"none", nil, 21},
		{"kind prefix", &harenav1.EventFilter{Kind: "sandbox."}, 20},
		{"kind", &harenav1.EventFilter{Kind: "sandbox.k1"}, 10},
		{"sandbox", &harenav1.EventFilter{SandboxId: "7"}, 1},
		{"project", &harenav1.EventFilter{Project: "lab/team"}, 20},
		{"parent project", &harenav1.EventFilter{Project: "lab"}, 20},
		{"other project", &harenav1.EventFilter{Project: "la"}, 0},
		{"job", &harenav1.EventFilter{Job: "j"}, 0},
		{"after", &harenav1.EventFilter{AfterSeq: 18}, 3},
		{"past the end", &harenav1.EventFilter{AfterSeq: 99}, 0},
	} {
		if got := list(t, l, test.filter); len(got) != test.want {
			t.Errorf("%s: %d events, want %d", test.name, len(got), test.want)
		}
	}
}

func TestRotation(t *testing.T) {
	dir := t.TempDir()
	small := func(o *Options) { o.FileBytes, o.Files, o.Memory = 2000, 3, 5 }
	l := openLog(t, dir, small)
	for i := 1; i <= 200; i++ {
		add(l, i, i)
		flush(t, l)
	}
	names, err := os.ReadDir(dir)
	if err != nil || len(names) != 3 {
		t.Fatalf("%d files kept (%v), want 3", len(names), err)
	}
	all := list(t, l, nil)
	if len(all) == 0 || all[len(all)-1].GetSeq() != 200 || all[0].GetSeq() == 1 {
		t.Fatalf("%d events kept", len(all))
	}
	for i, e := range all {
		if e.GetSeq() != all[0].GetSeq()+int64(i) {
			t.Fatalf("gap before %d", e.GetSeq())
		}
	}
	_ = l.Close()
	l = openLog(t, dir, small)
	add(l, 201, 201)
	flush(t, l)
	if again := list(t, l, nil); again[len(again)-1].GetSeq() != 201 {
		t.Errorf("the last event is %v", again[len(again)-1])
	}
}

func TestTornLastLine(t *testing.T) {
	dir := t.TempDir()
	l := openLog(t, dir, nil)
	add(l, 1, 3)
	_ = l.Close()
	path := filepath.Join(dir, "1.jsonl")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b[:len(b)-9], 0o600); err != nil {
		t.Fatal(err)
	}
	l = openLog(t, dir, nil)
	if n := l.Last(); n != 2 {
		t.Fatalf("last is %d, want 2", n)
	}
	add(l, 30, 31)
	flush(t, l)
	all := list(t, l, nil)
	if len(all) != 4 || all[2].GetSandboxId() != "30" || all[3].GetSeq() != 4 {
		t.Errorf("events: %v", all)
	}
}

// TestFollow checks that nothing is lost or repeated between what is recorded and what happens, for readers of any speed.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	l := openLog(t, dir, func(o *Options) { o.Memory, o.FileBytes, o.Files = 16, 10_000, 1000 })
	add(l, 1, 500)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const total = 3000
	stop := errors.New("enough")
	var wg sync.WaitGroup
	for r := range 4 {
		wg.Go(func() {
			next := int64(1)
			err := l.Follow(ctx, nil, func(e *harenav1.Event) error {
				if e.GetSeq() != next {
					return fmt.Errorf("got %d, want %d", e.GetSeq(), next)
				}
				next++
				if r == 0 && next%100 == 0 {
					time.Sleep(time.Millisecond)
				}
				if next > total {
					return stop
				}
				return nil
			})
			if !errors.Is(err, stop) {
				t.Errorf("follower %d: %v", r, err)
			}
		})
	}
	for i := 501; i <= total; i += 50 {
		add(l, i, i+49)
	}
	wg.Wait()
}

func TestFollowEnds(t *testing.T) {
	l := openLog(t, t.TempDir(), nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Follow(ctx, nil, func(*harenav1.Event) error { return nil }) }()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled follower: %v", err)
	}
	go func() {
		ended <- l.Follow(t.Context(), nil, func(*harenav1.Event) error { return nil })
	}()
	_ = l.Close()
	if err := <-ended; err != nil {
		t.Errorf("follower of a closed log: %v", err)
	}
}

// TestDiskFull uses a real full disk. Followers go on; the log goes on when there is space again.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("harena-test", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("cannot mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	l := openLog(t, dir, nil)
	add(l, 1, 5)
	flush(t, l)
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	_ = f.Close()
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill: %v", err)
	}
	for i := 6; i <= 100; i++ {
		add(l, i, i)
		flush(t, l)
	}
	if got := list(t, l, nil); len(got) != 100 {
		t.Errorf("%d events readable with a full disk, want 100", len(got))
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	add(l, 101, 101)
	flush(t, l)
	_ = l.Close()
	l = openLog(t, dir, nil)
	all := list(t, l, nil)
	if last := all[len(all)-1]; last.GetSeq() != 101 || last.GetSandboxId() != "101" {
		t.Errorf("last event after the disk was full: %v", last)
	}
}
