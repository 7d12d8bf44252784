package packdiff

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

var (
	then = time.Unix(1_700_000_000, 123)
	now  = time.Unix(1_800_000_000, 0)
)

// stack is a writable layer over two others, as directories.
type stack struct {
	t                  *testing.T
	bottom, top, upper string
}

func newStack(t *testing.T) *stack {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making whiteouts needs root")
	}
	return &stack{t, t.TempDir(), t.TempDir(), t.TempDir()}
}

// put makes a file: content, or "DIR", "OPAQUE", "WHITEOUT", "FIFO", "SOCKET", "LINK target", "HARD path".
func (s *stack) put(dir, path, what string) string {
	s.t.Helper()
	at := filepath.Join(dir, path)
	s.check(os.MkdirAll(filepath.Dir(at), 0o755))
	kind, rest, _ := strings.Cut(what, " ")
	switch kind {
	case "DIR", "OPAQUE":
		s.check(os.MkdirAll(at, 0o755))
		if kind == "OPAQUE" {
			s.check(unix.Lsetxattr(at, "trusted.overlay.opaque", []byte("y"), 0))
		}
	case "WHITEOUT":
		s.check(unix.Mknod(at, unix.S_IFCHR, 0))
	case "FIFO":
		s.check(unix.Mkfifo(at, 0o600))
	case "SOCKET":
		s.check(unix.Mknod(at, unix.S_IFSOCK|0o600, 0))
	case "LINK":
		s.check(os.Symlink(rest, at))
	case "HARD":
		s.check(os.Link(filepath.Join(dir, rest), at))
	default:
		s.check(os.WriteFile(at, []byte(what), 0o644))
		s.check(os.Chtimes(at, then, then))
	}
	return at
}

func (s *stack) check(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// pack makes an image of the writable layer and compares it with the others.
func (s *stack) pack(rules *Rules) (*Difference, *Cleaner) {
	s.t.Helper()
	var files [2]*os.File
	for i := range files {
		f, err := os.CreateTemp(s.t.TempDir(), "image")
		s.check(err)
		s.t.Cleanup(func() { _ = f.Close() })
		files[i] = f
	}
	c := NewCleaner(rules)
	_, err := erofs.FromDir(context.Background(), s.upper, files[0], files[1], erofs.Options{KeepTrusted: true, Choose: c.Choose})
	s.check(err)
	img, err := erofs.Open(files[0], files[1])
	s.check(err)
	before := descriptors(s.t)
	d, err := Examine(context.Background(), img, []string{s.bottom, s.top}, Options{Now: now, Quality: true, Cleaner: c})
	s.check(err)
	if after := descriptors(s.t); after != before {
		s.t.Errorf("%d descriptors are left open", after-before)
	}
	return d, c
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func wantPaths(t *testing.T, what string, l List, want ...string) {
	t.Helper()
	got := slices.Sorted(slices.Values(l.Paths))
	slices.Sort(want)
	if !slices.Equal(got, want) || l.Count != int64(len(want)) {
		t.Errorf("%s: %q (%d), want %q", what, got, l.Count, want)
	}
}

func TestExamine(t *testing.T) {
	s := newStack(t)
	for path, what := range map[string]string{
		"same": "x", "size": "x", "time": "x", "mode": "x", "owner": "x", "forged": "before", "capable": "x", "link": "LINK a", "gone": "x",
		"d/in": "x", "d/sub/deep": "x", "dirgone/a/b": "x", "opaque/old": "x", "opaque/both": "x", "opaque/sub/x": "x", "file2dir": "x",
		"dir2file/a": "x", "dir2file/b/c": "x", "dir2link/a": "x", "hidden/bottom": "x", "twice": "x", "fifo": "FIFO", "evil": "LINK /etc",
	} {
		s.put(s.bottom, path, what)
	}
	for path, what := range map[string]string{
		"twice": "WHITEOUT", "hidden": "OPAQUE", "hidden/top": "x", "d/top": "x", "shade": "LINK ../../../../etc",
	} {
		s.put(s.top, path, what)
	}
	for path, what := range map[string]string{
		"same": "x", "size": "xx", "time": "x", "mode": "x", "owner": "x", "forged": "after!", "capable": "x", "link": "LINK b", "gone": "WHITEOUT",
		"d/new": "x", "d/sub/deep": "x", "dirgone": "WHITEOUT", "opaque": "OPAQUE", "opaque/both": "x", "opaque/sub": "DIR",
		"file2dir": "DIR", "file2dir/n": "x", "dir2file": "x", "dir2link": "LINK opaque", "hidden": "WHITEOUT", "twice": "x", "fifo": "SOCKET",
		"never": "WHITEOUT", "added/a": "x", "evil/passwd": "x", "shade/passwd": "WHITEOUT", "proc": "DIR", "sys/new": "DIR",
		"etc/hostname": "mine", "etc/hosts": "LINK x", "\x1b\xff": "x",
	} {
		_ = s.put(s.upper, path, what)
	}
	s.put(s.upper, "hard", "HARD added/a")
	s.check(os.Chtimes(filepath.Join(s.upper, "time"), now, now))
	s.check(os.Chmod(filepath.Join(s.upper, "mode"), 0o600))
	s.check(os.Chown(filepath.Join(s.upper, "owner"), 1, 1))
	s.check(os.Chmod(filepath.Join(s.upper, "d"), 0o700))
	s.check(unix.Setxattr(filepath.Join(s.upper, "capable"), capability, capNetRaw(), 0))
	d, _ := s.pack(nil)
	wantPaths(t, "added", d.Added, "added", "added/a", "d/new", "file2dir/n", "hard", "twice", "evil/passwd", "\x1b\xff", "sys/new", "etc")
	wantPaths(t, "changed", d.Changed, "size", "time", "mode", "owner", "forged", "capable", "link", "d", "file2dir", "dir2file", "dir2link", "fifo",
		"evil", "shade")
	wantPaths(t, "deleted", d.Deleted, "gone", "dirgone", "dirgone/a", "dirgone/a/b", "opaque/old", "opaque/sub/x", "dir2file/a", "dir2file/b",
		"dir2file/b/c", "dir2link/a", "hidden", "hidden/top")
}

// capNetRaw is cap_net_raw=ep in the kernel's form (struct vfs_cap_data).
func capNetRaw() []byte {
	b := make([]byte, 20)
	b[0], b[3], b[5] = 1, 2, 0x20
	return b
}

// TestExamineCleaned: what is left out is told once, wherever it is; what a lower layer has stays there.
func TestExamineCleaned(t *testing.T) {
	s := newStack(t)
	s.put(s.bottom, "tmp", "DIR")
	s.put(s.bottom, "var/cache/below/x", "x")
	for path, what := range map[string]string{
		"tmp/a": "x", "tmp/d/e/f": "x", "tmp/empty": "DIR", "tmp/kept/k": "x", "var/cache/below/x": "changed", "var/cache/below/y": "new", "root/.ssh/id": "x",
		"tmp/s": "SOCKET", "tmp/f": "FIFO", "tmp/l": "LINK /etc", "tmp/w": "WHITEOUT",
		"tmp/od": "OPAQUE", "tmp/od/x": "x",
	} {
		s.put(s.upper, path, what)
	}
	s.put(s.upper, "root/.netrc", "HARD root/.ssh/id")
	s.put(s.upper, "srv/copy", "HARD root/.ssh/id")
	rules, err := Parse(true, "", []string{"/tmp/kept/k"})
	s.check(err)
	d, c := s.pack(rules)
	wantPaths(t, "cleaned", c.Cleaned, "tmp/a", "tmp/d", "tmp/d/e", "tmp/d/e/f", "tmp/empty", "tmp/s", "tmp/f", "tmp/l", "tmp/od/x", "var/cache/below/x",
		"var/cache/below/y", "root/.ssh/id", "root/.netrc")
	wantPaths(t, "added", d.Added, "root", "root/.ssh", "srv", "srv/copy", "tmp/kept", "tmp/kept/k", "tmp/od")
	wantPaths(t, "changed", d.Changed)
	wantPaths(t, "deleted", d.Deleted)
}

func TestFindings(t *testing.T) {
	s := newStack(t)
	id, other := strings.Repeat("a", 40), strings.Repeat("b", 40)
	s.put(s.bottom, "etc/passwd", "root:x:0:0::/:\nu:x:1000:1000::/:\n")
	s.put(s.bottom, "bin/su", "x")
	s.check(unix.Chmod(filepath.Join(s.bottom, "bin/su"), 0o4755))
	s.put(s.bottom, "bin/ping", "x")
	s.put(s.bottom, "bin/pong", "x")
	s.check(unix.Setxattr(filepath.Join(s.bottom, "bin/pong"), capability, capNetRaw(), 0))
	s.put(s.bottom, "bin/forged", "nothing here, and of the same length...")
	set := func(path, what string, change func(at string) error) {
		at := s.put(s.upper, path, what)
		if change != nil {
			s.check(change(at))
		}
	}
	mode := func(m uint32) func(string) error { return func(at string) error { return unix.Chmod(at, m) } }
	owner := func(id int) func(string) error { return func(at string) error { return os.Chown(at, id, 0) } }
	attr := func(at string) error { return unix.Setxattr(at, capability, capNetRaw(), 0) }
	set("srv/key", "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC", nil)
	set("bin/forged", "key AKIAABCDEFGHIJKLMNOP of another day", nil)
	set("bin/su", "changed", mode(0o4755)) // it was so before
	set("bin/ping", "x", attr)             // nothing but the capability
	set("bin/pong", "yy", attr)
	set("srv/suid", "x", mode(0o4755))
	set("srv/sgid", "x", mode(0o2755))
	set("srv/locks", "x", mode(0o2644)) // mandatory locking, no privilege
	set("srv/open", "x", mode(0o666))
	set("srv/opendir", "DIR", mode(0o777))
	set("srv/sticky", "DIR", mode(0o1777))
	set("srv/nobody", "x", owner(65534))
	set("srv/stranger", "x", owner(4242))
	set("srv/user", "x", owner(1000))
	set("srv/later", "x", func(at string) error { return os.Chtimes(at, now, now.Add(6*time.Minute)) })
	set("srv/soon", "x", func(at string) error { return os.Chtimes(at, now, now.Add(4*time.Minute)) })
	set("srv/huge", "", mode(0o644))
	s.check(os.Truncate(filepath.Join(s.upper, "srv/huge"), hugeFile+1))
	set("srv/r/.git/HEAD", "ref: refs/heads/main\n", nil)
	set("srv/r/.git/refs/heads/main", id+"\n", nil)
	set("srv/r/.git/refs/heads/side", other+"\n", nil)
	set("srv/r/.git/objects/ab/cd", "x", nil)
	d, _ := s.pack(nil)
	want := []string{
		"secret /srv/key", "secret /bin/forged", "setuid /bin/ping", "setuid /srv/suid", "setuid /srv/sgid", "world-writable /srv/open",
		"world-writable /srv/opendir", "owner /srv/nobody", "owner /srv/stranger", "future /srv/later", "huge /srv/huge", "unscanned /srv/huge",
		"git /srv/r/.git/refs/heads/side",
	}
	var got []string
	for _, f := range d.Findings.All() {
		got = append(got, f.Kind+" "+Quote(f.Path))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("findings %q, want %q", got, want)
	}
}

// TestFindingsAreBounded: however many there are, a hundred of a kind are told, and how many more there are.
func TestFindingsAreBounded(t *testing.T) {
	s := newStack(t)
	for i := range maxFindings + 20 {
		s.check(unix.Chmod(s.put(s.upper, fmt.Sprintf("d/f%d", i), "x"), 0o666))
	}
	d, _ := s.pack(nil)
	all := d.Findings.All()
	if len(all) != maxFindings+1 || all[maxFindings].Message != "20 more paths" {
		t.Errorf("%d findings, the last %v", len(all), all[len(all)-1])
	}
}

// TestExamineEnds: with its context, and whatever the image is without the layers.
func TestExamineEnds(t *testing.T) {
	s := newStack(t)
	s.put(s.upper, "a", "x")
	meta, err := os.CreateTemp(t.TempDir(), "")
	s.check(err)
	blob, err := os.CreateTemp(t.TempDir(), "")
	s.check(err)
	defer meta.Close()
	defer blob.Close()
	_, err = erofs.FromDir(context.Background(), s.upper, meta, blob, erofs.Options{KeepTrusted: true})
	s.check(err)
	img, err := erofs.Open(meta, blob)
	s.check(err)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Examine(ctx, img, []string{s.bottom}, Options{Now: now}); err == nil {
		t.Error("it does not end with its context")
	}
	if _, err := Examine(context.Background(), img, []string{filepath.Join(s.bottom, "none")}, Options{Now: now}); err == nil {
		t.Error("a layer that is not there is none")
	}
	d, err := Examine(context.Background(), img, nil, Options{Now: now})
	if err != nil || d.Added.Count != 1 {
		t.Errorf("without layers: %v, %v", d, err)
	}
}

// TestListIsBounded: what is not kept is counted.
func TestListIsBounded(t *testing.T) {
	var l List
	long := strings.Repeat("x", 4000)
	for range MaxListed/4000 + 100 {
		l.Add(long)
	}
	if l.Count != MaxListed/4000+100 || len(l.Paths)*(4000+32) > MaxListed {
		t.Errorf("%d paths of %d", len(l.Paths), l.Count)
	}
}
