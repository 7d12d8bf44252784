package datadir

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

func TestMain(m *testing.M) {
	// A node that is killed while it holds its directory and slot.
	if path := os.Getenv("DATADIR_HOLD"); path != "" {
		d, err := Open(path, Options{Rand: rand.Reader, Slots: os.Getenv("DATADIR_SLOTS"), NoMount: true})
		fmt.Println(err)
		if err == nil {
			fmt.Println(d.Slot())
			time.Sleep(time.Minute)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type place struct{ root, slots string }

func newPlace(t *testing.T) place {
	t.Helper()
	root, err := os.MkdirTemp("", "datadir")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	return place{root, filepath.Join(root, "slots")}
}

func (p place) dir(name string) string { return filepath.Join(p.root, name) }

func (p place) open(name string) (*Dir, error) {
	return Open(p.dir(name), Options{Rand: rand.Reader, Slots: p.slots, NoMount: true})
}

func (p place) must(t *testing.T, name string) *Dir {
	t.Helper()
	d, err := p.open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestIdentityIsKept(t *testing.T) {
	p := newPlace(t)
	d := p.must(t, "a")
	edge, slot := d.Edge(), d.Slot()
	if slot < 1 || slot > 7 || len(edge) != 6 {
		t.Fatalf("edge %q, slot %d", edge, slot)
	}
	if err := d.SetDraining(true); err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
	d = p.must(t, "a")
	if d.Edge() != edge || d.Slot() != slot || !d.Draining() {
		t.Errorf("edge %q, slot %d, draining %v after a restart", d.Edge(), d.Slot(), d.Draining())
	}
	st, err := os.Stat(p.dir("a"))
	if err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func TestOneServerOnly(t *testing.T) {
	p := newPlace(t)
	p.must(t, "a")
	_, err := p.open("a")
	if !errs.Is(err, errs.Precondition) || !strings.Contains(err.Error(), "pid "+strconv.Itoa(os.Getpid())) {
		t.Errorf("second server: %v", err)
	}
	info, err := Inspect(p.dir("a"))
	if err != nil || info.ServerPid != strconv.Itoa(os.Getpid()) || info.Format != Format {
		t.Errorf("inspect: %+v, %v", info, err)
	}
}

func TestFormats(t *testing.T) {
	for content, kind := range map[string]errs.Kind{
		`{"format":1}`: "", `{"format":2}`: errs.Precondition, `{"format":0}`: errs.Precondition, `junk`: errs.Precondition,
	} {
		p := newPlace(t)
		_ = os.MkdirAll(p.dir("a"), 0o755)
		if err := os.WriteFile(filepath.Join(p.dir("a"), "version.json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		d, err := p.open("a")
		if errs.KindOf(err) != kind {
			t.Errorf("%s: %v", content, err)
		}
		if err == nil {
			_ = d.Close()
		}
	}
	p := newPlace(t)
	if _, err := Inspect(p.dir("nothing")); !errs.Is(err, errs.NotFound) {
		t.Errorf("inspect of nothing: %v", err)
	}
	if _, err := p.open("a b"); !errs.Is(err, errs.Invalid) {
		t.Errorf("a path with a blank: %v", err)
	}
}

func TestDamagedIdentity(t *testing.T) {
	p := newPlace(t)
	_ = p.must(t, "a").Close()
	if err := os.WriteFile(filepath.Join(p.dir("a"), "node.json"), []byte(`{"edge":""}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := p.open("a"); !errs.Is(err, errs.Precondition) {
		t.Errorf("a node without identity: %v", err)
	}
}

func TestSlots(t *testing.T) {
	p := newPlace(t)
	taken := map[int]bool{}
	var last *Dir
	for i := range 7 {
		last = p.must(t, fmt.Sprint(i))
		if taken[last.Slot()] {
			t.Fatalf("slot %d twice", last.Slot())
		}
		taken[last.Slot()] = true
	}
	if _, err := p.open("one"); !errs.Is(err, errs.Capacity) {
		t.Errorf("eighth node: %v", err)
	}
	// A node that is closed keeps its slot: its sandboxes live on.
	slot := last.Slot()
	_ = last.Close()
	if _, err := p.open("one"); !errs.Is(err, errs.Capacity) {
		t.Errorf("eighth node while the seventh is closed: %v", err)
	}
	// One that goes down gives it back.
	last = p.must(t, "6")
	if err := last.Down(); err != nil {
		t.Fatal(err)
	}
	if d := p.must(t, "one"); d.Slot() != slot {
		t.Errorf("slot %d, want %d", d.Slot(), slot)
	}
}

func TestStaleClaims(t *testing.T) {
	p := newPlace(t)
	first := p.must(t, "a")
	slot := first.Slot()
	_ = first.Close()
	claim := filepath.Join(p.slots, strconv.Itoa(slot))
	content, err := os.ReadFile(claim)
	if err != nil {
		t.Fatal(err)
	}
	// Its directory is gone.
	if err := os.RemoveAll(p.dir("a")); err != nil {
		t.Fatal(err)
	}
	second := p.must(t, "b")
	if second.Slot() != slot {
		t.Errorf("slot %d, want the stale %d", second.Slot(), slot)
	}
	_ = second.Close()
	// It is of another boot.
	content = []byte(strings.Replace(string(content), first.Boot(), "another-boot", 1))
	_ = p.must(t, "a").Close()
	if err := os.WriteFile(claim, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if d := p.must(t, "c"); d.Slot() != slot {
		t.Errorf("slot %d, want %d of another boot", d.Slot(), slot)
	}
	// b comes back and finds its slot taken.
	if d := p.must(t, "b"); d.Slot() == slot {
		t.Error("two nodes have one slot")
	}
}

func TestCopyIsRefused(t *testing.T) {
	p := newPlace(t)
	d := p.must(t, "a")
	_ = d.Close()
	if err := os.CopyFS(p.dir("copy"), os.DirFS(p.dir("a"))); err != nil {
		t.Fatal(err)
	}
	if _, err := p.open("copy"); !errs.Is(err, errs.Precondition) || !strings.Contains(err.Error(), "copy") {
		t.Errorf("a copy: %v", err)
	}
	// But it may be moved.
	if err := os.RemoveAll(p.dir("a")); err != nil {
		t.Fatal(err)
	}
	if got := p.must(t, "copy"); got.Edge() != d.Edge() || got.Slot() != d.Slot() {
		t.Errorf("moved: edge %q, slot %d", got.Edge(), got.Slot())
	}
}

// TestKilledServer: the lock and the slot of a killed server are free for the next on its directory, and only there.
func TestKilledServer(t *testing.T) {
	p := newPlace(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "DATADIR_HOLD="+p.dir("a"), "DATADIR_SLOTS="+p.slots)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "<nil>" || !lines.Scan() {
		t.Fatalf("child: %s", lines.Text())
	}
	slot := lines.Text()
	if _, err := p.open("a"); !errs.Is(err, errs.Precondition) || !strings.Contains(err.Error(), strconv.Itoa(cmd.Process.Pid)) {
		t.Errorf("while it lives: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if other := p.must(t, "b"); strconv.Itoa(other.Slot()) == slot {
		t.Error("another node took the slot of a killed server, whose sandboxes live on")
	}
	if d := p.must(t, "a"); strconv.Itoa(d.Slot()) != slot {
		t.Errorf("slot %d after a kill, %s before", d.Slot(), slot)
	}
}

func TestMount(t *testing.T) {
	p := newPlace(t)
	o := Options{Rand: rand.Reader, Slots: p.slots}
	d, err := Open(p.dir("a"), o)
	if errs.Is(err, errs.Precondition) && strings.Contains(err.Error(), "no permission") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for unix.Unmount(p.dir("a"), unix.MNT_DETACH) == nil {
		}
	})
	points := func() int {
		mounts, err := Mounts()
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, m := range mounts {
			if m.Point == p.dir("a") {
				n++
				if !m.has("nosuid") || !m.has("nodev") || m.Shared {
					t.Errorf("mount %+v", m)
				}
			}
		}
		return n
	}
	if n := points(); n != 1 {
		t.Fatalf("%d mounts, want 1", n)
	}
	_ = d.Close()
	// Found again.
	if d, err = Open(p.dir("a"), o); err != nil {
		t.Fatal(err)
	}
	if n := points(); n != 1 {
		t.Errorf("%d mounts after a restart, want 1", n)
	}
	if info, err := Inspect(p.dir("a")); err != nil || !info.Bound {
		t.Errorf("inspect: %+v, %v", info, err)
	}
	if err := d.Down(); err != nil {
		t.Fatal(err)
	}
	if n := points(); n != 0 {
		t.Errorf("%d mounts after down", n)
	}
	if info, err := Inspect(p.dir("a")); err != nil || info.Bound || info.ServerPid != "" {
		t.Errorf("inspect after down: %+v, %v", info, err)
	}
	if d, err = Open(p.dir("a"), o); err != nil {
		t.Fatal(err)
	}
	if err := d.Down(); err != nil {
		t.Error(err)
	}
}

// TestMountIsNotStacked: a mount left half made is made whole, and one of somebody else stays below.
func TestMountIsNotStacked(t *testing.T) {
	p := newPlace(t)
	o := Options{Rand: rand.Reader, Slots: p.slots}
	path := p.dir("a")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		for unix.Unmount(path, unix.MNT_DETACH) == nil {
		}
	})
	if err := unix.Mount("", path, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	count := func() (n int) {
		mounts, err := Mounts()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range mounts {
			if m.Point == path {
				n++
			}
		}
		return n
	}
	var d *Dir
	for i, prepare := range []func(){
		func() {},
		func() {},
		// A server was killed between the steps.
		func() { _ = unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT, "") },
		func() { _ = unix.Mount("", path, "", unix.MS_SHARED, "") },
		// A server was killed after it had written that it would mount.
		func() { _ = unix.Unmount(path, unix.MNT_DETACH) },
	} {
		prepare()
		var err error
		if d, err = Open(path, o); err != nil {
			t.Fatal(err)
		}
		if n := count(); n != 2 {
			t.Errorf("%d: %d mounts, want the one that was there and ours", i, n)
		}
		if top, err := topMount(path); err != nil || !top.has("nosuid") || !top.has("nodev") || top.Shared {
			t.Errorf("%d: %+v, %v", i, top, err)
		}
		if i < 4 {
			_ = d.Close()
		}
	}
	if err := d.Down(); err != nil {
		t.Fatal(err)
	}
	if n := count(); n != 1 {
		t.Errorf("%d mounts after down, want the one that was there", n)
	}
}

// TestForeignDirectory: what holds files of others is left as it is.
func TestForeignDirectory(t *testing.T) {
	p := newPlace(t)
	o := Options{Rand: rand.Reader, Slots: p.slots, NoMount: true}
	for _, entry := range []string{"file", "lost+found"} {
		path := p.dir("with-" + entry)
		if err := os.MkdirAll(filepath.Join(path, entry), 0o755); err != nil { //nolint:gosec // the mode is what is tested
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o755); err != nil { //nolint:gosec // the mode is what is tested
			t.Fatal(err)
		}
		d, err := Open(path, o)
		if entry == "lost+found" {
			if err != nil {
				t.Errorf("a file system of its own: %v", err)
			} else {
				_ = d.Close()
			}
			continue
		}
		st, serr := os.Stat(path)
		left, rerr := os.ReadDir(path)
		if !errs.Is(err, errs.Precondition) || serr != nil || st.Mode().Perm() != 0o755 || rerr != nil || len(left) != 1 {
			t.Errorf("%v; it now has mode %v and %v", err, st.Mode(), left)
		}
	}
	if _, err := Open("", o); !errs.Is(err, errs.Invalid) {
		t.Errorf("no directory: %v", err)
	}
	if _, err := Open("/dev/null/x", o); !errs.Is(err, errs.Precondition) {
		t.Errorf("below a file: %v", err)
	}
}

// TestPathThroughLink: the path is that of the real directory from the first start on.
func TestPathThroughLink(t *testing.T) {
	p := newPlace(t)
	if err := os.Mkdir(p.dir("real"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", p.dir("link")); err != nil {
		t.Fatal(err)
	}
	d, err := Open(filepath.Join(p.dir("link"), "new"), Options{Rand: rand.Reader, Slots: p.slots, NoMount: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	if want := filepath.Join(p.dir("real"), "new"); d.Path() != want {
		t.Errorf("path %s, want %s", d.Path(), want)
	}
}

func TestFault(t *testing.T) {
	for err, kind := range map[error]errs.Kind{
		unix.ENOSPC: errs.Capacity, unix.EDQUOT: errs.Capacity, unix.EMFILE: errs.Capacity,
		unix.EROFS: errs.Precondition, unix.EPERM: errs.Precondition, unix.EIO: errs.Internal,
		errs.E(errs.Exists, "known"): errs.Exists,
	} {
		wrapped := Fault("do it", "/data", &os.PathError{Op: "open", Path: "/data/x", Err: err})
		if errs.KindOf(wrapped) != kind {
			t.Errorf("%v became %v", err, wrapped)
		}
	}
	if Fault("do it", "/data", nil) != nil {
		t.Error("nil became an error")
	}
	if !errors.Is(Fault("do it", "/data", unix.EIO), unix.EIO) {
		t.Error("the cause is lost")
	}
}

func TestParseMounts(t *testing.T) {
	got := parseMounts([]byte(`36 35 98:0 /mnt1 /mnt\0402 rw,noatime,nosuid shared:1 master:2 - ext3 /dev/root rw
bad line
x 35 98:0 / / rw - ext3 a rw
40 36 0:30 / /sys/fs/cgroup rw,nodev - cgroup2 cgroup rw
`))
	if len(got) != 2 || got[0].Point != "/mnt 2" || !got[0].Shared || !got[0].has("nosuid") || got[0].has("nodev") || got[1].Type != "cgroup2" || got[1].Shared {
		t.Errorf("parsed %+v", got)
	}
}
