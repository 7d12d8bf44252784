package files

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func TestOnlyRegularFilesHaveContent(t *testing.T) {
	b := newBox(t)
	must(t, unix.Mkfifo(b.host("fifo"), 0o666))
	must(t, unix.Mknod(b.host("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, unix.Mknod(b.host("disk"), unix.S_IFBLK|0o666, int(unix.Mkdev(250, 250))))
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(t, err)
	defer unix.Close(sock)
	must(t, unix.Bind(sock, &unix.SockaddrUnix{Name: b.host("sock")}))
	for _, p := range []string{"fifo", "null", "disk", "sock"} {
		must(t, os.Lchown(b.host(p), idBase, idBase))
		b.symlink("/"+p, "to-"+p)
		for _, path := range []string{"/" + p, "/to-" + p} {
			_, err := b.read("", path)
			wantKind(t, err, errs.Precondition, "not a regular file")
			_, err = b.write("", path, "x", 0)
			wantKind(t, err, errs.Precondition, "not a regular file")
		}
	}
	_, err = b.read("", "/etc")
	wantKind(t, err, errs.Precondition, "is a directory")
	_, err = b.write("", "/etc", "x", 0)
	wantKind(t, err, errs.Precondition, "is a directory")
	b.noTemps()
}

func TestKernelFileSystemsAreRefused(t *testing.T) {
	b := newBox(t)
	for _, m := range []struct{ dir, kind string }{{"proc", "proc"}, {"sys", "sysfs"}, {"pts", "devpts"}, {"cg", "cgroup2"}} {
		b.mkdir(m.dir, 0, 0o755)
		if err := unix.Mount(m.kind, b.host(m.dir), m.kind, 0, ""); err != nil {
			t.Logf("%s: %v", m.kind, err)
			continue
		}
		t.Cleanup(func() { unix.Unmount(b.host(m.dir), unix.MNT_DETACH) })
		for name, op := range map[string]func(string) error{
			"stat":    func(p string) error { _, err := b.stat("", p, true); return err },
			"list":    func(p string) error { _, err := b.list("", p, 1, 0); return err },
			"write":   func(p string) error { _, err := b.write("", p+"/x", "1", 0); return err },
			"mkdir":   func(p string) error { _, err := b.makeDir("", p+"/x", 0, false); return err },
			"remove":  func(p string) error { return b.remove("", p+"/x", false, false) },
			"move":    func(p string) error { _, err := b.move("", "/etc", p+"/x", false); return err },
			"replace": func(p string) error { _, err := b.write("", p+"/self/comm", "1", 0); return err },
		} {
			err := op("/" + m.dir)
			if m.kind != "proc" && name == "replace" {
				continue
			}
			if !errs.Is(err, errs.Denied) {
				t.Errorf("%s on %s: %v", name, m.kind, err)
			}
		}
		// Listing and archiving what is above shows the place, not what is there.
		r, err := b.list("", "/", 2, 0)
		must(t, err)
		for _, e := range r.Entries {
			if strings.HasPrefix(e.Path, "/"+m.dir+"/") {
				t.Errorf("listed %s", e.Path)
			}
		}
	}
	for _, p := range []string{"/proc/1/environ", "/proc/sys/kernel/hostname", "/sys/kernel/uevent_seqnum", "/proc/1/root/etc/passwd", "/proc/1/cwd"} {
		if _, err := b.read("", p); err == nil {
			t.Errorf("%s was read", p)
		}
		if _, err := b.write("", p, "x", 0); err == nil {
			t.Errorf("%s was written", p)
		}
	}
	b.symlink("/proc/1/root/etc", "magic")
	if _, err := b.list("", "/magic", 1, 0); err == nil {
		t.Error("a magic link was followed")
	}
}

// TestRacesNeverLeaveTheRoot swaps directories and links as fast as possible
// while the service works on paths through them.
func TestRacesNeverLeaveTheRoot(t *testing.T) {
	b := newBox(t)
	outside := filepath.Join(filepath.Dir(b.root), "outside")
	must(t, os.Mkdir(outside, 0o777))
	must(t, os.Chmod(outside, 0o777))
	canary := filepath.Join(outside, "f")
	must(t, os.WriteFile(canary, []byte("OUTSIDE"), 0o666))
	must(t, os.Chmod(canary, 0o666))
	before := snapshot(t, outside)

	b.mkdir("w", 0, 0o777)
	b.mkdir("w/real", 0, 0o777)
	b.file("w/real/f", 0, 0o666, "inside")
	// Links of every kind that could lead out, and pipes and directories in place of files.
	must(t, os.Symlink("../../../../outside", b.host("w/rel")))
	must(t, os.Symlink(outside, b.host("w/abs")))
	must(t, unix.Mkfifo(b.host("w/pipe"), 0o666))
	stop := make(chan struct{})
	var attackers, users sync.WaitGroup
	// By descriptors: the attacker is inside and cannot reach through the links either.
	dir := func(path string) int {
		fd, err := unix.Open(b.host(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	w, real := dir("w"), dir("w/real")
	swap := func(d1 int, x string, d2 int, y string) {
		attackers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				unix.Renameat2(d1, x, d2, y, unix.RENAME_EXCHANGE)
			}
		})
	}
	swap(w, "real", w, "rel")
	swap(w, "real", w, "abs")
	swap(real, "f", w, "pipe")
	srv := b.http()
	end := time.Now().Add(4 * time.Second)
	var ops, reads int
	work := func(count *int, f func(i int)) {
		users.Go(func() {
			for i := 0; time.Now().Before(end); i++ {
				f(i)
				*count++
			}
		})
	}
	work(&reads, func(int) {
		if got, err := b.read("", "/w/real/f"); err == nil && got != "inside" && got != "written" {
			t.Errorf("read %q", got)
		}
	})
	work(&ops, func(i int) {
		b.write("", "/w/real/f", "written", 0)
		b.write("", fmt.Sprintf("/w/real/n%d/x", i%4), "written", 0)
		b.move("", "/w/real/n1", "/w/real/n2", false)
		b.remove("", "/w/real/n2", true, true)
		b.makeDir("", "/w/real/../real/n3/deep", 0, true)
	})
	var tars int
	work(&tars, func(int) {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		for _, n := range []string{"real/t/a", "real/t/b"} {
			tw.WriteHeader(&tar.Header{Name: n, Mode: 0o666, Size: 7, Typeflag: tar.TypeReg})
			tw.Write([]byte("written"))
		}
		tw.Close()
		resp, err := http.DefaultClient.Do(b.request(http.MethodPut, srv.URL+"/v1/sandboxes/"+boxID+"/tar?path=/w", nil, buf.Bytes()))
		if err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		resp, err = http.DefaultClient.Do(b.request(http.MethodGet, srv.URL+"/v1/sandboxes/"+boxID+"/tar?path=/w", nil, nil))
		if err == nil {
			all, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if bytes.Contains(all, []byte("OUTSIDE")) {
				t.Error("the archive has what is outside")
			}
		}
	})
	users.Wait()
	close(stop)
	attackers.Wait()
	if after := snapshot(t, outside); after != before {
		t.Errorf("outside changed from\n%s to\n%s", before, after)
	}
	t.Logf("%d reads, %d rounds of changes, %d archives", reads, ops, tars)
	if reads == 0 || ops == 0 || tars == 0 {
		t.Error("nothing was tried")
	}
}

// snapshot describes a tree, with the times that no access may change.
func snapshot(t *testing.T, dir string) string {
	var out strings.Builder
	must(t, filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		must(t, err)
		st := info.Sys().(*syscall.Stat_t)
		fmt.Fprintln(&out, path, info.Mode(), info.Size(), st.Ino, st.Ctim, st.Uid)
		return nil
	}))
	return out.String()
}

func TestRemoveRaceStaysInTheTree(t *testing.T) {
	b := newBox(t)
	b.mkdir("keep", 0, 0o777)
	for i := range 50 {
		b.file(fmt.Sprintf("keep/%d", i), 0, 0o666, "")
	}
	for range 15 {
		b.mkdir("t", 0, 0o777)
		b.mkdir("t/a", 0, 0o777)
		b.mkdir("t/a/b", 0, 0o777)
		for i := range 200 {
			b.file(fmt.Sprintf("t/a/b/%d", i), 0, 0o666, "")
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			// While t/a/b is emptied, it moves to where "keep" is the neighbour.
			time.Sleep(time.Millisecond)
			os.Rename(b.host("t/a/b"), b.host("b"))
			os.Symlink("/keep", b.host("t/a/l"))
		}()
		b.remove("", "/t", true, true)
		<-done
		os.RemoveAll(b.host("t"))
		os.RemoveAll(b.host("b"))
		if entries, err := os.ReadDir(b.host("keep")); err != nil || len(entries) != 50 {
			t.Fatalf("%d entries are left: %v", len(entries), err)
		}
	}
}

func TestKilledWorkerCostsOneOperation(t *testing.T) {
	b := newBox(t)
	b.file("old", 0, 0o644, "old")
	_, err := b.read("", "/old")
	must(t, err)
	// While idle: nobody notices.
	victim := b.starter.last()
	must(t, victim.Kill())
	waitFor(t, func() bool { return len(b.svc.pool.idle) == 1 && !b.svc.pool.idle[0].quiet() })
	if got, err := b.read("", "/old"); err != nil || got != "old" {
		t.Errorf("after the death of an idle worker: %q %v", got, err)
	}
	// In the middle of an upload.
	r, w := io.Pipe()
	go func() {
		w.Write(make([]byte, 1<<20))
		b.starter.last().Kill()
		for {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				return
			}
		}
	}()
	_, err = b.svc.put(b.ctx(), b.svc.upload(), subject{path: "/old"}, 0, r)
	r.Close()
	wantKind(t, err, errs.Capacity, "ended in the middle")
	if b.content("old") != "old" {
		t.Error("the old file was touched")
	}
	b.noTemps()
	if got, err := b.read("", "/old"); err != nil || got != "old" {
		t.Errorf("afterwards: %q %v", got, err)
	}
}

func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("waited in vain")
		}
	}
}

func TestHungWorkerTimesOutAlone(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "f")
	b.svc.progress = 300 * time.Millisecond
	_, err := b.read("user", "/f") // a worker of another user
	must(t, err)
	_, err = b.read("", "/f")
	must(t, err)
	hung := b.starter.last()
	must(t, hung.Signal(syscall.SIGSTOP))
	_, err = b.read("", "/f")
	wantKind(t, err, errs.Timeout, "took too long")
	for _, user := range []string{"user", ""} {
		if got, err := b.read(user, "/f"); err != nil || got != "f" {
			t.Errorf("%q afterwards: %q %v", user, got, err)
		}
	}
	b.waitGoneExcept(2)
	if err := hung.Signal(syscall.Signal(0)); err == nil {
		t.Error("the hung worker lives")
	}
}

// waitGoneExcept waits until no killed worker is left and n are idle.
func (b *box) waitGoneExcept(n int) {
	b.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		b.svc.pool.mu.Lock()
		dying, idle := b.svc.pool.dying, len(b.svc.pool.idle)
		b.svc.pool.mu.Unlock()
		if dying == 0 && idle == n {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%d workers are dying, %d idle", dying, idle)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestCancelEndsAnOperation(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "f")
	_, err := b.read("", "/f")
	must(t, err)
	must(t, b.starter.last().Signal(syscall.SIGSTOP))
	ctx, cancel := context.WithCancel(b.ctx())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err = b.svc.Read(ctx, connect.NewRequest(&harenav1.ReadRequest{SandboxId: boxID, Path: "/f"}))
	wantKind(t, errs.FromConnect(err), errs.Cancelled, "")
	b.waitGoneExcept(0)
	ctx, cancel = context.WithTimeout(b.ctx(), 0)
	defer cancel()
	_, err = b.svc.Read(ctx, connect.NewRequest(&harenav1.ReadRequest{SandboxId: boxID, Path: "/f"}))
	wantKind(t, errs.FromConnect(err), errs.Timeout, "")
}

func TestSlotsAreBounded(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "f")
	b.svc.progress = 100 * time.Millisecond
	for range maxSmall {
		b.svc.small <- struct{}{}
	}
	_, err := b.read("", "/f")
	wantKind(t, err, errs.Capacity, "file operations at a time")
	b.svc.pool.dying = maxDying
	<-b.svc.small
	_, err = b.read("", "/f")
	wantKind(t, err, errs.Precondition, "hang")
	b.svc.pool.dying = 0
	for range maxSmall - 1 {
		<-b.svc.small
	}
}

func TestIdleWorkersAreFew(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "f")
	for uid := range uint32(maxIdle + 3) {
		_, err := b.svc.read(b.ctx(), subject{id: identity{uid: uid, gid: uid}, path: "/f"}, 0, 0, 10)
		must(t, err)
	}
	b.waitGoneExcept(maxIdle)
	b.svc.Close()
	b.waitGoneExcept(0)
	_, err := b.read("", "/f")
	wantKind(t, err, errs.Precondition, "stopped")
}

func TestIdleWorkersEnd(t *testing.T) {
	b := newBox(t)
	b.svc.pool.keep = time.Millisecond
	b.file("f", 0, 0o644, "f")
	for range 20 { // also while others are about to end
		if _, err := b.read("", "/f"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	b.waitGoneExcept(0)
}

func TestDiskFull(t *testing.T) {
	b := newBox(t, mountTmpfs(t, "mode=755,size=4m,nr_inodes=64"))
	b.file("f", 0, 0o644, "old")
	_, err := b.write("", "/f", strings.Repeat("x", 8<<20), 0)
	wantKind(t, err, errs.Capacity, "no space left in the sandbox")
	if e := new(errs.Error); !errors.As(err, &e) || e.Limit == nil {
		t.Errorf("%v names no limit, so clients repeat it", err)
	}
	if b.content("f") != "old" {
		t.Error("the old file was touched")
	}
	_, err = b.write("", "/f", "new", 0)
	must(t, err)
	// No inodes.
	for i := 0; err == nil && i < 100; i++ {
		_, err = b.write("", fmt.Sprintf("/i%d", i), "", 0)
	}
	wantKind(t, err, errs.Capacity, "no space left in the sandbox")
	_, err = b.makeDir("", "/d", 0, false)
	wantKind(t, err, errs.Capacity, "no space left in the sandbox")
	must(t, b.remove("", "/i1", false, false))
	b.noTemps()
}

func TestReadOnlyFileSystem(t *testing.T) {
	b := newBox(t, mountTmpfs(t, "mode=755"))
	b.file("f", 0, 0o644, "f")
	must(t, unix.Mount("", b.root, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	_, err := b.write("", "/f", "x", 0)
	wantKind(t, err, errs.Denied, "read-only")
	if got, err := b.read("", "/f"); err != nil || got != "f" {
		t.Errorf("read %q %v", got, err)
	}
}

func TestFileThatIsAMountIsNotReplaced(t *testing.T) {
	b := newBox(t)
	b.file("etc/hosts", 0, 0o644, "a")
	b.file("source", 0, 0o644, "mounted")
	must(t, unix.Mount(b.host("source"), b.host("etc/hosts"), "", unix.MS_BIND, ""))
	defer unix.Unmount(b.host("etc/hosts"), unix.MNT_DETACH)
	_, err := b.write("", "/etc/hosts", "x", 0)
	wantKind(t, err, errs.Precondition, "mount point")
	b.noTemps()
}
