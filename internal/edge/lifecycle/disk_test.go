package lifecycle

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// onTmpfs puts a world's data directory on a small file system of its own.
func onTmpfs(t *testing.T, w *world, options string) {
	t.Helper()
	if err := os.MkdirAll(w.path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("harena-test", w.path, "tmpfs", 0, options); err != nil {
		t.Skipf("cannot mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		w.down()
		_ = unix.Unmount(w.path, unix.MNT_DETACH)
	})
}

func fillDisk(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, size := range []int{64 << 10, 4096, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
}

func TestDiskFull(t *testing.T) {
	w := newWorld(t)
	onTmpfs(t, w, "size=1m")
	e := w.up()
	kept, stopped, resumed := w.create(), w.create(), w.create()
	w.good(w.pause(ids(resumed.GetId())), sandbox.Paused)
	ballast := filepath.Join(w.path, "ballast")
	fillDisk(t, ballast)
	_, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()})
	var known *errs.Error
	if !errors.As(err, &known) || known.Kind != errs.Capacity || !strings.Contains(err.Error(), "is full") || known.Hint == "" {
		t.Errorf("create on a full disk: %v", err)
	}
	resp, err := e.SetLifetime(t.Context(), &harenav1.SetLifetimeRequest{Selector: &harenav1.Selector{Ids: []string{kept.GetId()}}})
	if err != nil || resp.GetOutcomes()[0].GetError().GetKind() != "capacity" {
		t.Errorf("a change that cannot be recorded: %v, %v", resp, err)
	}
	// Stopping frees space, so it must work.
	if out := w.stop(stopped.GetId()); out[0].GetError() != nil || out[0].GetState() != "stopped" {
		t.Errorf("stop on a full disk: %v", out)
	}
	w.good(w.resume(ids(resumed.GetId())), sandbox.Running)
	// The server can be started again, and has lost nothing.
	w.down()
	err = w.try()
	if err != nil {
		if !errs.Is(err, errs.Capacity) {
			t.Fatalf("start on a full disk: %v", err)
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		w.up()
	}
	_ = os.Remove(ballast)
	e = w.edge
	if s, err := e.Get(kept.GetId()); err != nil || s.GetState() != "running" {
		t.Errorf("after a full disk: %v, %v", s, err)
	}
	w.holds(resumed.GetId(), sandbox.Running)
	if s, err := e.Get(stopped.GetId()); err != nil || s.GetState() != "stopped" {
		t.Errorf("stopped on a full disk: %v, %v", s, err)
	}
	w.good(w.stop(kept.GetId(), resumed.GetId()), sandbox.Stopped)
	w.good(w.stop(w.create().GetId()), sandbox.Stopped)
}

func TestNoInodes(t *testing.T) {
	w := newWorld(t)
	onTmpfs(t, w, "size=4m,nr_inodes=60")
	e := w.up()
	var last error
	for i := 0; last == nil && i < 60; i++ {
		_, last = e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec(func(s *harenav1.SandboxSpec) { s.Job = "j" })})
	}
	if !errs.Is(last, errs.Capacity) {
		t.Fatalf("without inodes: %v", last)
	}
	resp, err := e.Stop(t.Context(), &harenav1.StopRequest{Selector: &harenav1.Selector{Job: "j"}, Remove: true})
	if err != nil || len(resp.GetOutcomes()) == 0 {
		t.Fatalf("stop: %v", err)
	}
	for _, o := range resp.GetOutcomes() {
		if o.GetError() != nil {
			t.Errorf("stop: %v", o)
		}
	}
	w.empty()
	w.create()
}

func TestReadOnlyDirectory(t *testing.T) {
	w := newWorld(t)
	onTmpfs(t, w, "size=4m")
	e := w.up()
	s := w.create()
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", w.path, "", unix.MS_REMOUNT|flags, ""); err != nil {
			t.Skipf("cannot remount: %v", err)
		}
	}
	// The event log holds a file open for writing, which keeps the file system itself from going read-only.
	remount(unix.MS_BIND | unix.MS_RDONLY)
	_, err := e.Create(t.Context(), &edgev1.CreateRequest{Spec: spec()})
	if !errs.Is(err, errs.Precondition) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("create in a read-only directory: %v", err)
	}
	if got, err := e.Get(s.GetId()); err != nil || got.GetState() != "running" {
		t.Errorf("sandbox in a read-only directory: %v, %v", got, err)
	}
	w.down()
	if err := w.try(); !errs.Is(err, errs.Precondition) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("start in a read-only directory: %v", err)
	}
	remount(unix.MS_BIND)
	e = w.up()
	if got, err := e.Get(s.GetId()); err != nil || got.GetState() != "running" {
		t.Errorf("sandbox after a read-only directory: %v, %v", got, err)
	}
}

// TestTrash erases what a hostile sandbox can leave: deep, wide, odd names, no permissions.
func TestTrash(t *testing.T) {
	w := newWorld(t)
	w.up()
	s := w.create()
	upper := filepath.Join(w.path, "sandboxes", s.GetId(), "upper", "data")
	dir, err := unix.Open(upper, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	// Deeper than PATH_MAX and than any limit of open files.
	for range 3000 {
		for _, name := range []string{"deeper", "d"} {
			if err := unix.Mkdirat(dir, name, 0); err != nil {
				t.Fatal(err)
			}
		}
		next, err := unix.Openat(dir, "deeper", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(dir)
		dir = next
	}
	_ = unix.Close(dir)
	for i := range 2000 {
		if err := os.WriteFile(filepath.Join(upper, fmt.Sprintf("\n %d\xff", i)), nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc", filepath.Join(upper, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(filepath.Join(upper, "fifo"), unix.S_IFIFO, 0); err != nil {
		t.Fatal(err)
	}
	w.stop(s.GetId())
	w.empty()
	if _, err := os.Stat("/etc/passwd"); err != nil {
		t.Fatalf("a link was followed: %v", err)
	}
}

// TestTrashAfterCrash: what a server did not come to erase, the next one does.
func TestTrashAfterCrash(t *testing.T) {
	w := newWorld(t)
	w.up()
	w.down()
	if err := os.MkdirAll(filepath.Join(w.path, "trash", "left.1", "a", "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(w.path, "sandboxes", "no-record", "upper"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.up()
	w.empty()
	if len(w.dirs()) != 0 {
		t.Errorf("directories: %v", w.dirs())
	}
}

// TestUnreadableRecord: what a loss of power can do to a record must not cost the files, nor the other sandboxes.
func TestUnreadableRecord(t *testing.T) {
	w := newWorld(t)
	w.up()
	torn, fine := w.create(), w.create()
	w.down()
	if err := os.Truncate(filepath.Join(w.path, "sandboxes", torn.GetId(), recordName), 10); err != nil {
		t.Fatal(err)
	}
	e := w.up()
	if s, err := e.Get(fine.GetId()); err != nil || s.GetState() != "running" {
		t.Errorf("the other: %v, %v", s, err)
	}
	if w.node.Len() != 1 {
		t.Errorf("%d sandboxes run, want 1", w.node.Len())
	}
	lost, err := os.ReadDir(filepath.Join(w.path, "lost"))
	if err != nil || len(lost) != 1 {
		t.Fatalf("set aside: %v, %v", lost, err)
	}
	if _, err := os.Stat(filepath.Join(w.path, "lost", lost[0].Name(), "upper", "data")); err != nil {
		t.Error(err)
	}
	found := false
	for _, c := range e.Doctor(t.Context()).GetChecks() {
		found = found || c.GetName() == "data.records" && c.GetStatus() == statusDegraded
	}
	if !found {
		t.Error("doctor does not tell")
	}
}

func TestReboot(t *testing.T) {
	w := newWorld(t)
	e := w.up()
	s := w.create()
	b, err := e.find(sandbox.ID(s.GetId()))
	if err != nil {
		t.Fatal(err)
	}
	err = e.commit(b, false, func(r *Record) error {
		r.Boot = "another"
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	e = w.restart()
	got, err := e.Get(s.GetId())
	if err != nil || got.GetState() != "failed" || got.GetReason() != "node-rebooted" {
		t.Errorf("after a reboot: %v, %v", got, err)
	}
	if w.node.Len() != 0 {
		t.Error("something of it is left")
	}
	if _, err := e.Enter(t.Context(), sandbox.ID(s.GetId()), true); err != nil {
		t.Errorf("its files: %v", err)
	}
	w.stop(s.GetId())
	w.empty()
}
