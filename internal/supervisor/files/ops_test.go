package files

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func asReader(body any) io.Reader {
	switch b := body.(type) {
	case string:
		return strings.NewReader(b)
	case []byte:
		return bytes.NewReader(b)
	case io.Reader:
		return b
	}
	return nil
}

func TestWriteAndRead(t *testing.T) {
	b := newBox(t)
	info, err := b.write("user", "a/b/c.txt", "hello", 0)
	must(t, err)
	if info.Path != "/home/user/a/b/c.txt" || info.Name != "c.txt" || info.Size != 5 || info.Mode != 0o644 || info.Uid != userUID || info.Type != "file" || info.Modified == nil {
		t.Errorf("info is %v", info)
	}
	got, err := b.read("user", "/home/user/a/b/c.txt")
	must(t, err)
	if got != "hello" {
		t.Errorf("read %q", got)
	}
	st, err := b.stat("user", "a", false)
	must(t, err)
	if st.Type != "directory" || st.Mode != 0o755 || st.Uid != userUID {
		t.Errorf("parent is %v", st)
	}
	b.noTemps()
	if b.starter.starts != 1 {
		t.Errorf("%d workers were started for one user", b.starter.starts)
	}
}

func TestReadRanges(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "0123456789")
	for _, c := range []struct {
		offset, length int64
		want           string
	}{{0, 0, "0123456789"}, {3, 0, "3456789"}, {3, 4, "3456"}, {8, 100, "89"}, {10, 0, ""}, {50, 5, ""}} {
		resp, err := b.svc.Read(b.ctx(), connect.NewRequest(&harenav1.ReadRequest{SandboxId: boxID, Path: "/f", Offset: c.offset, Length: c.length}))
		must(t, err)
		if string(resp.Msg.Content) != c.want || resp.Msg.Info.Size != 10 {
			t.Errorf("offset %d length %d: got %q, want %q", c.offset, c.length, resp.Msg.Content, c.want)
		}
	}
	for _, c := range [][2]int64{{-1, 0}, {0, -1}, {0, MaxContent + 1}} {
		_, err := b.svc.Read(b.ctx(), connect.NewRequest(&harenav1.ReadRequest{SandboxId: boxID, Path: "/f", Offset: c[0], Length: c[1]}))
		wantKind(t, errs.FromConnect(err), errs.Invalid, "")
	}
}

func TestReadLimitNamesTheWayOut(t *testing.T) {
	b := newBox(t)
	b.file("big", 0, 0o644, "")
	must(t, os.Truncate(b.host("big"), MaxContent+1))
	_, err := b.read("", "/big")
	wantKind(t, err, errs.Invalid, "16777216")
	if e := new(errs.Error); !asErr(err, &e) || !strings.Contains(e.Hint, "/files?path=") || e.Limit == nil {
		t.Errorf("error is %#v", err)
	}
	must(t, os.Truncate(b.host("big"), MaxContent))
	got, err := b.read("", "/big")
	must(t, err)
	if len(got) != MaxContent {
		t.Errorf("read %d bytes", len(got))
	}
	// The worker was given back in both cases.
	if b.starter.starts != 1 {
		t.Errorf("%d workers were started", b.starter.starts)
	}
}

func asErr(err error, e **errs.Error) bool {
	got, ok := err.(*errs.Error)
	*e = got
	return ok
}

func TestWriteKeepsModeAndOwner(t *testing.T) {
	b := newBox(t)
	b.file("etc/tool", 7, 0o4751, "old")
	_, err := b.write("root", "/etc/tool", "new", 0)
	must(t, err)
	st, err := b.stat("", "/etc/tool", false)
	must(t, err)
	if st.Mode != 0o4751 || st.Uid != 7 || st.Gid != 7 || b.content("etc/tool") != "new" {
		t.Errorf("root's write made %v", st)
	}
	// Another user may replace the file, since the directory is its own, but gets no set-ID bit of the old owner.
	b.file("home/user/tool", 0, 0o4755, "old")
	_, err = b.write("user", "tool", "new", 0)
	must(t, err)
	st, err = b.stat("", "/home/user/tool", false)
	must(t, err)
	if st.Mode != 0o755 || st.Uid != userUID {
		t.Errorf("user's write made %v", st)
	}
	if _, err = b.write("user", "tool", "newer", 0o600); err != nil {
		t.Fatal(err)
	}
	if st, _ = b.stat("", "/home/user/tool", false); st.GetMode() != 0o600 {
		t.Errorf("mode is %o", st.GetMode())
	}
}

func TestWriteThroughSymlinks(t *testing.T) {
	b := newBox(t)
	b.mkdir("etc/real", 0, 0o755)
	b.file("etc/real/conf", 0, 0o640, "old")
	b.symlink("real/conf", "etc/rel")
	b.symlink("/etc/rel", "etc/abs")
	b.symlink("../../../../../../etc/real/new", "etc/clamped")
	b.symlink("loop", "etc/loop")
	for path, target := range map[string]string{"/etc/rel": "etc/real/conf", "/etc/abs": "etc/real/conf", "/etc/clamped": "etc/real/new"} {
		_, err := b.write("", path, "via "+path, 0)
		must(t, err)
		if got := b.content(target); got != "via "+path {
			t.Errorf("%s has %q", target, got)
		}
		if st, err := os.Lstat(b.host(path)); err != nil || st.Mode()&os.ModeSymlink == 0 {
			t.Errorf("%s is no link any more", path)
		}
	}
	_, err := b.write("", "/etc/loop", "x", 0)
	wantKind(t, err, errs.Precondition, "symbolic links")
	// A link that somebody else put into /tmp is not followed.
	b.symlink("/etc/real/conf", "tmp/trap")
	must(t, os.Lchown(b.host("tmp/trap"), idBase+userUID, idBase+userUID))
	_, err = b.write("root", "/tmp/trap", "x", 0)
	wantKind(t, err, errs.Denied, "/tmp/trap")
	b.noTemps()
}

func TestStat(t *testing.T) {
	b := newBox(t)
	b.file("f", 3, 0o640, "abc")
	b.symlink("f", "l")
	b.symlink("nowhere", "dangling")
	must(t, unix.Mkfifo(b.host("p"), 0o600))
	for _, c := range []struct {
		path   string
		follow bool
		kind   string
		target string
	}{
		{"/f", false, "file", ""}, {"/l", false, "symlink", "f"}, {"/l", true, "file", ""},
		{"/dangling", false, "symlink", "nowhere"}, {"/p", true, "fifo", ""}, {"/", true, "directory", ""},
		{"/etc/../../..//etc/", false, "directory", ""},
	} {
		st, err := b.stat("", c.path, c.follow)
		must(t, err)
		if st.Type != c.kind || st.LinkTarget != c.target {
			t.Errorf("%s: %v", c.path, st)
		}
	}
	_, err := b.stat("", "/dangling", true)
	wantKind(t, err, errs.NotFound, "/dangling does not exist")
	_, err = b.stat("", "/f/x", true)
	wantKind(t, err, errs.Precondition, "not a directory")
	if st, _ := b.stat("", "/", true); st.GetName() != "/" || st.GetPath() != "/" {
		t.Errorf("root is %v", st)
	}
}

func TestList(t *testing.T) {
	b := newBox(t)
	for _, d := range []string{"d", "d/b", "d/b/x", "d/B"} {
		b.mkdir(d, 0, 0o755)
	}
	for _, f := range []string{"d/a", "d/c", "d/b/1", "d/b/x/2", "d/é"} {
		b.file(f, 0, 0o644, f)
	}
	names := func(r *harenav1.ListFilesResponse) (out []string) {
		for _, e := range r.GetEntries() {
			out = append(out, strings.TrimPrefix(e.Path, "/d/"))
		}
		return out
	}
	all := []string{"B", "a", "b", "b/1", "b/x", "b/x/2", "c", "é"}
	for _, c := range []struct {
		depth, limit int32
		want         []string
		truncated    bool
	}{
		{0, 0, []string{"B", "a", "b", "c", "é"}, false},
		{1, 5, []string{"B", "a", "b", "c", "é"}, false},
		{1, 2, []string{"B", "a"}, true},
		{2, 0, []string{"B", "a", "b", "b/1", "b/x", "c", "é"}, false},
		{32, 0, all, false}, {32, 8, all, false}, {32, 7, all[:7], true}, {32, 4, all[:4], true}, {32, 3, all[:3], true},
	} {
		r, err := b.list("", "/d", c.depth, c.limit)
		must(t, err)
		if !slices.Equal(names(r), c.want) || r.Truncated != c.truncated {
			t.Errorf("depth %d limit %d: %q, truncated %v", c.depth, c.limit, names(r), r.Truncated)
		}
	}
	for _, c := range [][2]int32{{33, 0}, {-1, 0}, {0, -1}, {0, 100_001}} {
		_, err := b.list("", "/d", c[0], c[1])
		wantKind(t, err, errs.Invalid, "")
	}
	_, err := b.list("", "/d/a", 1, 0)
	wantKind(t, err, errs.Precondition, "not a directory")
}

func TestListHugeDirectory(t *testing.T) {
	b := newBox(t, mountTmpfs(t, "mode=755"))
	b.mkdir("huge", 0, 0o755)
	const n = 50_000
	for i := range n {
		must(t, os.WriteFile(b.host(fmt.Sprintf("huge/%06d-%s", (i*7919)%n, strings.Repeat("x", 100))), nil, 0o644))
	}
	r, err := b.list("", "/huge", 1, maxLimit)
	must(t, err)
	if len(r.Entries) != n || r.Truncated {
		t.Fatalf("%d entries, truncated %v", len(r.Entries), r.Truncated)
	}
	for i, e := range r.Entries {
		if !strings.HasPrefix(e.Name, fmt.Sprintf("%06d-", i)) {
			t.Fatalf("entry %d is %s", i, e.Name)
		}
	}
	r, err = b.list("", "/huge", 1, 10)
	must(t, err)
	if len(r.Entries) != 10 || !r.Truncated || !strings.HasPrefix(r.Entries[9].Name, "000009-") {
		t.Errorf("limited listing: %v", r.Entries)
	}
	must(t, b.remove("", "/huge", true, false))
}

func TestMove(t *testing.T) {
	b := newBox(t)
	b.file("a", 0, 0o644, "a")
	b.file("b", 0, 0o644, "b")
	b.mkdir("full", 0, 0o755)
	b.file("full/x", 0, 0o644, "")
	b.mkdir("d", 0, 0o755)
	_, err := b.move("", "/a", "/b", true)
	wantKind(t, err, errs.Exists, "/b")
	info, err := b.move("", "/a", "/b", false)
	must(t, err)
	if info.Path != "/b" || b.content("b") != "a" {
		t.Errorf("moved to %v", info)
	}
	_, err = b.move("", "/a", "/c", false)
	wantKind(t, err, errs.NotFound, "/a")
	_, err = b.move("", "/b", "/no/where", false)
	wantKind(t, err, errs.NotFound, "/no/where")
	_, err = b.move("", "/d", "/full", false)
	wantKind(t, err, errs.Precondition, "not empty")
	_, err = b.move("", "/d", "/d/e", false)
	wantKind(t, err, errs.Invalid, "")
	_, err = b.move("", "/d/..", "/x", false)
	wantKind(t, err, errs.Precondition, "")
	_, err = b.move("user", "/b", "/home/user/b", false)
	wantKind(t, err, errs.Denied, "permission denied")
}

func TestMoveToAnotherFileSystem(t *testing.T) {
	b := newBox(t)
	mountTmpfs(t, "mode=1777,size=8m")(b.host("tmp"))
	b.mkdir("tree", 0, 0o750)
	b.mkdir("tree/sub", userUID, 0o555)
	b.file("tree/sub/f", userUID, 0o4711, "content")
	b.symlink("sub/f", "tree/l")
	must(t, os.Link(b.host("tree/sub/f"), b.host("tree/hard")))
	must(t, unix.Setxattr(b.host("tree/sub/f"), "user.note", []byte("n\x00te"), 0))
	_, err := b.move("", "/tree", "/tmp/moved", false)
	must(t, err)
	var f, hard syscall.Stat_t
	must(t, syscall.Stat(b.host("tmp/moved/sub/f"), &f))
	must(t, syscall.Stat(b.host("tmp/moved/hard"), &hard))
	if f.Mode&0o7777 != 0o4711 || f.Uid != idBase+userUID || f.Ino != hard.Ino || b.content("tmp/moved/l") != "content" {
		t.Errorf("copy is %o %d", f.Mode, f.Uid)
	}
	value := make([]byte, 8)
	if n, err := unix.Getxattr(b.host("tmp/moved/sub/f"), "user.note", value); err != nil || string(value[:n]) != "n\x00te" {
		t.Errorf("xattr: %q %v", value, err)
	}
	if st, _ := b.stat("", "/tmp/moved/sub", false); st.GetMode() != 0o555 {
		t.Errorf("directory is %v", st)
	}
	if _, err := b.stat("", "/tree", false); !errs.Is(err, errs.NotFound) {
		t.Errorf("the original: %v", err)
	}
	// Not enough space: the original stays, and nothing else.
	b.file("big", 0, 0o644, strings.Repeat("x", 9<<20))
	_, err = b.move("", "/big", "/tmp/big", false)
	wantKind(t, err, errs.Capacity, "no space")
	if b.content("big") != strings.Repeat("x", 9<<20) {
		t.Error("the original was damaged")
	}
	// The destination is taken.
	b.file("one", 0, 0o644, "1")
	b.file("tmp/one", 0, 0o644, "2")
	_, err = b.move("", "/one", "/tmp/one", true)
	wantKind(t, err, errs.Exists, "/tmp/one")
	b.noTemps()
}

func TestRemove(t *testing.T) {
	b := newBox(t)
	b.mkdir("d", 0, 0o755)
	b.file("d/f", 0, 0o644, "")
	b.file("keep", 0, 0o644, "kept")
	b.symlink("/keep", "d/l")
	b.symlink("/", "d/up")
	wantKind(t, b.remove("", "/d", false, false), errs.Precondition, "not empty")
	must(t, b.remove("", "/d", true, false))
	wantKind(t, b.remove("", "/d", true, false), errs.NotFound, "/d")
	must(t, b.remove("", "/d", true, true))
	must(t, b.remove("", "/no/such/dir", false, true))
	if b.content("keep") != "kept" {
		t.Error("a link was followed")
	}
	b.mkdir("empty", 0, 0o755)
	must(t, b.remove("", "/empty/", false, false))
	must(t, b.remove("", "/keep", false, false))
	for _, p := range []string{"/", "/etc/.", "/etc/.."} {
		wantKind(t, b.remove("", p, true, false), errs.Precondition, "")
	}
	wantKind(t, b.remove("user", "/etc", true, false), errs.Denied, "permission")
}

func TestRemoveDeepTree(t *testing.T) {
	b := newBox(t, mountTmpfs(t, "mode=755"))
	// Deeper than a path can say and than descriptors would reach.
	const depth = 6000
	dir, err := unix.Open(b.root, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	name := "deep"
	for range depth {
		must(t, unix.Mkdirat(dir, name, 0o755))
		must(t, unix.Fchownat(dir, name, idBase, idBase, 0))
		next, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		unix.Close(dir)
		dir, name = next, "d"
	}
	unix.Close(dir)
	must(t, b.remove("", "/deep", true, false))
}

func TestRemoveStopsAtMounts(t *testing.T) {
	b := newBox(t)
	b.mkdir("d", 0, 0o755)
	b.mkdir("d/m", 0, 0o755)
	mountTmpfs(t, "mode=755")(b.host("d/m"))
	b.file("d/m/f", 0, 0o644, "kept")
	if err := b.remove("", "/d", true, false); !errs.Is(err, errs.Precondition) {
		t.Errorf("got %v", err)
	}
	if b.content("d/m/f") != "kept" {
		t.Error("the mount was emptied")
	}
}

func TestMakeDir(t *testing.T) {
	b := newBox(t)
	info, err := b.makeDir("user", "a/b", 0, true)
	must(t, err)
	if info.Path != "/home/user/a/b" || info.Mode != 0o755 || info.Uid != userUID {
		t.Errorf("made %v", info)
	}
	_, err = b.makeDir("user", "a/b", 0, true)
	must(t, err)
	_, err = b.makeDir("user", "a/b", 0, false)
	wantKind(t, err, errs.Exists, "a/b")
	_, err = b.makeDir("user", "x/y", 0, false)
	wantKind(t, err, errs.NotFound, "x/y")
	info, err = b.makeDir("", "/team/", 0o2770, false)
	must(t, err)
	if info.Mode != 0o2770 {
		t.Errorf("mode is %o", info.Mode)
	}
	b.file("f", 0, 0o644, "")
	_, err = b.makeDir("", "/f", 0, true)
	wantKind(t, err, errs.Exists, "/f")
	_, err = b.makeDir("", "/", 0, false)
	wantKind(t, err, errs.Exists, "/")
	_, err = b.makeDir("", "/", 0, true)
	must(t, err)
	b.symlink("/nowhere/at/all", "dangling")
	_, err = b.makeDir("", "/dangling/x", 0, true)
	wantKind(t, err, errs.NotFound, "/dangling/x")
}

func TestNames(t *testing.T) {
	b := newBox(t)
	long := strings.Repeat("n", 255)
	for _, name := range []string{
		" lead and trail ", "new\nline", `quo"te'`, "-rf", "*?[a]", "\\", "ünïcödé", "\xff\xfe\x80", "a\xffb", "\x01\x7f", long, "…", "~", "a%2fb", "..x", "\u202e",
	} {
		path := "/tmp/" + name
		info, err := b.write("", path, name, 0)
		must(t, err)
		gotPath, gotName := bytesOf(info)
		if gotPath != path || gotName != name {
			t.Errorf("%q: info says %q %q", name, gotPath, gotName)
		}
		if got, err := b.read("", path); err != nil || got != name {
			t.Errorf("%q: read %q %v", name, got, err)
		}
		b.symlink(name, "tmp/link")
		st, err := b.stat("", "/tmp/link", false)
		must(t, err)
		target := st.LinkTarget
		if len(st.LinkTargetBytes) > 0 {
			target = string(st.LinkTargetBytes)
		}
		if target != name {
			t.Errorf("%q: link says %q", name, target)
		}
		must(t, b.remove("", "/tmp/link", false, false))
		list, err := b.list("", "/tmp", 1, 0)
		must(t, err)
		if len(list.Entries) != 1 {
			t.Fatalf("%q: listing %v", name, list)
		}
		if p, n := bytesOf(list.Entries[0]); p != path || n != name {
			t.Errorf("%q: listed as %q %q", name, p, n)
		}
		_, err = b.move("", path, path[:5]+"x", false)
		must(t, err)
		must(t, b.remove("", "/tmp/x", false, false))
	}
	_, err := b.write("", "/tmp/"+long+"n", "", 0)
	wantKind(t, err, errs.Invalid, "too long")
	_, err = b.write("", "/tmp/a\x00b", "", 0)
	wantKind(t, err, errs.Invalid, "NUL")
	_, err = b.write("", "", "", 0)
	wantKind(t, err, errs.Invalid, "no path")
	_, err = b.stat("", "/"+strings.Repeat("a/", 2048), false)
	wantKind(t, err, errs.Invalid, "4095")
}

func bytesOf(info *harenav1.FileInfo) (path, name string) {
	path, name = info.Path, info.Name
	if len(info.PathBytes) > 0 {
		path = string(info.PathBytes)
	}
	if len(info.NameBytes) > 0 {
		name = string(info.NameBytes)
	}
	return path, name
}

func TestRightsAreTheUsers(t *testing.T) {
	b := newBox(t)
	b.file("root/secret", 0, 0o600, "s")
	b.file("etc/shadow", 0, 0o640, "s")
	b.file("etc/group-only", 0, 0o640, "g")
	must(t, os.Chown(b.host("etc/group-only"), idBase, idBase+44))
	for _, op := range []func() error{
		func() error { _, err := b.read("user", "/root/secret"); return err },
		func() error { _, err := b.read("user", "/etc/shadow"); return err },
		func() error { _, err := b.write("user", "/etc/new", "", 0); return err },
		func() error { _, err := b.write("user", "/etc/shadow", "", 0); return err },
		func() error { _, err := b.list("user", "/root", 1, 0); return err },
		func() error { _, err := b.makeDir("user", "/etc/d/e", 0, true); return err },
		func() error { return b.remove("user", "/etc/shadow", false, false) },
	} {
		wantKind(t, op(), errs.Denied, "permission denied")
	}
	if got, err := b.read("user", "/etc/group-only"); err != nil || got != "g" {
		t.Errorf("supplementary groups are not used: %v", err)
	}
	// A directory that may not be entered is listed without its contents.
	r, err := b.list("user", "/", 2, 0)
	must(t, err)
	if len(r.Entries) < 5 {
		t.Errorf("listing: %v", r)
	}
}

func TestRequests(t *testing.T) {
	b := newBox(t)
	_, err := b.svc.Stat(b.ctx(), connect.NewRequest(&harenav1.StatRequest{SandboxId: "other", Path: "/"}))
	wantKind(t, errs.FromConnect(err), errs.NotFound, "other")
	_, err = b.stat("nobody-here", "/", false)
	wantKind(t, err, errs.Invalid, "")
	_, err = b.svc.Write(b.ctx(), connect.NewRequest(&harenav1.WriteRequest{SandboxId: boxID, Path: "/x", OpId: "1"}))
	wantKind(t, errs.FromConnect(err), errs.Unsupported, "op_id")
	_, err = b.svc.Write(b.ctx(), connect.NewRequest(&harenav1.WriteRequest{SandboxId: boxID, Path: "/x", Content: make([]byte, MaxContent+1)}))
	wantKind(t, errs.FromConnect(err), errs.Invalid, "16777216")
}

func TestRequestID(t *testing.T) {
	b := newBox(t)
	b.file("a", 0, 0o644, "a")
	move := func(from, to, id string) error {
		_, err := b.svc.Move(b.ctx(), connect.NewRequest(&harenav1.MoveRequest{SandboxId: boxID, From: from, To: to, RequestId: id}))
		return errs.FromConnect(err)
	}
	wantKind(t, move("/missing", "/b", "1"), errs.NotFound, "")
	must(t, move("/a", "/b", "1")) // what failed may be tried again
	must(t, move("/a", "/b", "1"))
	wantKind(t, move("/a", "/c", "1"), errs.Exists, "request_id")
	wantKind(t, move("/a", "/b", "2"), errs.NotFound, "")
	wantKind(t, move("/a", "/b", strings.Repeat("x", 129)), errs.Invalid, "request_id")
	for i := range 2 * maxRepeats {
		_, err := b.svc.MakeDir(b.ctx(), connect.NewRequest(&harenav1.MakeDirRequest{SandboxId: boxID, Path: "/", Parents: true, RequestId: fmt.Sprint("r", i)}))
		must(t, err)
	}
	if n := len(b.svc.repeats.byID); n != maxRepeats || len(b.svc.repeats.order) != maxRepeats {
		t.Errorf("%d results are remembered", n)
	}
}
