package users

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const passwd = `root:x:0:0:root:/root:/bin/bash
# comment
daemon:x:1:1::/usr/sbin:/usr/sbin/nologin

app:x:1000:1001:App,,,:/srv/app:/bin/sh
nohome:x:1002:1002::relative:
short:x:1003:1003
broken:x:abc:1
:x:5:5::/:/bin/sh
toobig:x:70000:70000::/:/bin/sh
nul` + "\x00" + `:x:6:6::/:/bin/sh
app:x:2000:2000::/second:/bin/sh
1005:x:1006:1006::/digits:/bin/sh
`

const groups = `root:x:0:
wheel:x:10:root,app
app:x:1001:app
docker:x:999:app
dup:x:999:app
other:x:50:someone
bad:x:-1:app
huge:x:99999:app
`

func TestFind(t *testing.T) {
	db := parse([]byte(passwd), []byte(groups))
	for spec, want := range map[string]User{
		"root":       {"root", 0, 0, []uint32{10}, "/root", "/bin/bash"},
		"0":          {"root", 0, 0, []uint32{10}, "/root", "/bin/bash"},
		"app":        {"app", 1000, 1001, []uint32{10, 999}, "/srv/app", "/bin/sh"},
		"1000":       {"app", 1000, 1001, []uint32{10, 999}, "/srv/app", "/bin/sh"},
		"app:docker": {"app", 1000, 999, nil, "/srv/app", "/bin/sh"},
		"app:50":     {"app", 1000, 50, nil, "/srv/app", "/bin/sh"},
		"app:60":     {"app", 1000, 60, nil, "/srv/app", "/bin/sh"},
		"4242":       {"", 4242, 0, nil, "/", "/bin/sh"},
		"4242:17":    {"", 4242, 17, nil, "/", "/bin/sh"},
		"1005":       {"", 1005, 0, nil, "/", "/bin/sh"},
		"65535":      {"", 65535, 0, nil, "/", "/bin/sh"},
		"nohome":     {"nohome", 1002, 1002, nil, "/", "/bin/sh"},
		"short":      {"short", 1003, 1003, nil, "/", "/bin/sh"},
	} {
		got, err := db.find(spec)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", spec, got, err, want)
		}
	}
	for _, spec := range []string{"nobody", "app:", ":app", "", ":", "app:none", "65536", "app:65536", "99999999999999999999", "-1", "broken", "toobig", "a:b:c"} {
		if u, err := db.find(spec); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %+v, %v", spec, u, err)
		}
	}
	empty := parse(nil, nil)
	if u, err := empty.find("root"); err != nil || u.UID != 0 || u.Home != "/" {
		t.Errorf("root of nothing: %+v %v", u, err)
	}
}

func TestGroupsAreBounded(t *testing.T) {
	var text strings.Builder
	for i := range 200 {
		fmt.Fprintf(&text, "g%d:x:%d:root\n", i, i+1)
	}
	u, err := parse([]byte(passwd), []byte(text.String())).find("root")
	if err != nil || len(u.Groups) != maxGroups {
		t.Errorf("%d groups, %v", len(u.Groups), err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(passwd), []byte(groups), "app:docker")
	f.Fuzz(func(t *testing.T, p, g []byte, spec string) {
		u, err := parse(p, g).find(spec)
		if err != nil {
			if !errs.Is(err, errs.Invalid) {
				t.Fatal(err)
			}
			return
		}
		if u.UID > maxID || u.GID > maxID || len(u.Groups) > maxGroups || !strings.HasPrefix(u.Home, "/") || !strings.HasPrefix(u.Shell, "/") ||
			strings.ContainsAny(u.Name+u.Home+u.Shell, "\x00\n") {
			t.Fatalf("%+v", u)
		}
	})
}

// tree is a sandbox's root with a Lookup that counts what goes to the worker.
type tree struct {
	t     *testing.T
	dir   string
	slow  int
	users *Lookup
}

func newTree(t *testing.T) *tree {
	x := &tree{t: t, dir: t.TempDir()}
	x.check(os.Mkdir(x.path("etc"), 0o755))
	x.put("etc/passwd", passwd)
	x.put("etc/group", groups)
	root, err := os.OpenFile(x.dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	x.check(err)
	t.Cleanup(func() { root.Close() })
	x.users = New(Config{Root: root, Read: func(_ context.Context, path string, most int64) ([]byte, error) {
		x.slow++
		b, err := os.ReadFile(x.path(path))
		switch {
		case os.IsNotExist(err):
			return nil, errs.E(errs.NotFound, "%w", err)
		case err == nil && int64(len(b)) > most:
			return nil, errs.OverLimit(errs.Invalid, "bytes", most, len(b))
		}
		return b, err
	}})
	return x
}

func (x *tree) path(p string) string { return filepath.Join(x.dir, p) }
func (x *tree) put(p, content string) {
	x.t.Helper()
	x.check(os.WriteFile(x.path(p), []byte(content), 0o644))
}
func (x *tree) check(err error) {
	x.t.Helper()
	if err != nil {
		x.t.Fatal(err)
	}
}

func (x *tree) home(user string) string {
	x.t.Helper()
	u, err := x.users.Resolve(context.Background(), user)
	x.check(err)
	return u.Home
}

func TestFastPathIsNeverStale(t *testing.T) {
	x := newTree(t)
	line := func(home string) string { return "root:x:0:0::" + home + ":/bin/sh\n" }
	if got := x.home(""); got != "/root" {
		t.Errorf("home is %s", got)
	}
	// Written in place, at once, with the same size: again and again.
	for i := range 300 {
		home := fmt.Sprintf("/h%03d", i)
		x.put("etc/passwd", line(home))
		if got := x.home(""); got != home {
			t.Fatalf("change %d: home is %s", i, got)
		}
	}
	// From the cache, and changed after that.
	old := time.Now().Add(-time.Hour)
	x.settle()
	x.home("")
	if x.users.fast.kept == nil {
		t.Fatal("nothing is kept")
	}
	x.put("etc/passwd", line("/h298"))
	x.check(os.Chtimes(x.path("etc/passwd"), old, old))
	if got := x.home(""); got != "/h298" {
		t.Errorf("written: %s", got)
	}
	for name, change := range map[string]func(){
		"renamed over": func() { x.put("etc/new", line("/h2")); x.check(os.Rename(x.path("etc/new"), x.path("etc/passwd"))) },
		"another etc": func() {
			x.check(os.Rename(x.path("etc"), x.path("etc.old")))
			x.check(os.Mkdir(x.path("etc"), 0o755))
			x.put("etc/passwd", line("/h2"))
		},
	} {
		x.settle()
		x.home("")
		change()
		if got := x.home(""); got != "/h2" {
			t.Errorf("%s: %s", name, got)
		}
		x.put("etc/passwd", line("/h1"))
	}
	x.check(os.Remove(x.path("etc/passwd")))
	if got := x.home(""); got != "/" {
		t.Errorf("removed: %s", got)
	}
	if x.slow != 0 {
		t.Errorf("the worker was asked %d times", x.slow)
	}
}

// settle makes the present stamps old enough to be kept: time passes.
func (x *tree) settle() {
	time.Sleep(settled + 50*time.Millisecond)
}

func TestFastPathLeavesTheRestToTheWorker(t *testing.T) {
	for name, change := range map[string]func(x *tree){
		"link": func(x *tree) {
			x.check(os.Rename(x.path("etc/passwd"), x.path("real")))
			x.check(os.Symlink("../real", x.path("etc/passwd")))
		},
		"linked etc": func(x *tree) {
			x.check(os.Rename(x.path("etc"), x.path("real")))
			x.check(os.Symlink("real", x.path("etc")))
		},
		"mount": func(x *tree) {
			x.put("other", passwd)
			x.check(unix.Mount(x.path("other"), x.path("etc/passwd"), "", unix.MS_BIND, ""))
			x.t.Cleanup(func() { unix.Unmount(x.path("etc/passwd"), unix.MNT_DETACH) })
		},
		"leased": func(x *tree) {
			f, err := os.OpenFile(x.path("etc/passwd"), os.O_RDWR, 0)
			x.check(err)
			x.t.Cleanup(func() { f.Close() })
			_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
			x.check(err)
			time.AfterFunc(50*time.Millisecond, func() { f.Close() })
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := newTree(t)
			change(x)
			if got := x.home("app"); got != "/srv/app" || x.slow == 0 {
				t.Errorf("home %s, worker asked %d times", got, x.slow)
			}
		})
	}
}

func TestFilesThatAreOfNoUse(t *testing.T) {
	x := newTree(t)
	x.check(os.Truncate(x.path("etc/group"), maxFile+1))
	_, err := x.users.Resolve(context.Background(), "app")
	if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "/etc/group") {
		t.Errorf("got %v", err)
	}
	// Root by numbers needs no file.
	if u, err := x.users.Resolve(context.Background(), "0:0"); err != nil || u.UID != 0 {
		t.Errorf("0:0: %+v %v", u, err)
	}
	x.check(os.Remove(x.path("etc/group")))
	x.check(unix.Mkfifo(x.path("etc/group"), 0o600))
	done := make(chan bool)
	go func() {
		_, file, err := x.users.fast.examine("etc/group")
		done <- err != nil && file == (stamp{})
	}()
	if !<-done {
		t.Error("a pipe passed for a file")
	}
}

func TestDefaultUser(t *testing.T) {
	x := newTree(t)
	x.users.cfg.DefaultUser = "app"
	if got := x.home(""); got != "/srv/app" {
		t.Errorf("home is %s", got)
	}
}

func TestGivesUpWhatHangs(t *testing.T) {
	x := newTree(t)
	x.users.fast.mu.Lock() // as a lookup that the kernel does not let finish
	x.home("app")
	x.users.fast.mu.Unlock()
	if x.slow == 0 || !x.users.fast.gaveUp.Load() {
		t.Errorf("worker asked %d times", x.slow)
	}
	n := x.slow
	x.home("app")
	if x.slow == n {
		t.Error("the fast path was taken again")
	}
}

func BenchmarkResolve(b *testing.B) {
	dir := b.TempDir()
	os.Mkdir(filepath.Join(dir, "etc"), 0o755)
	os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte(passwd), 0o644)
	os.WriteFile(filepath.Join(dir, "etc/group"), []byte(groups), 0o644)
	root, _ := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	defer root.Close()
	l := New(Config{Root: root})
	b.Run("fresh", func(b *testing.B) {
		for b.Loop() {
			l.fast.kept = nil
			if _, err := l.Resolve(context.Background(), ""); err != nil {
				b.Fatal(err)
			}
		}
	})
	time.Sleep(settled + 50*time.Millisecond)
	b.Run("kept", func(b *testing.B) {
		for b.Loop() {
			if _, err := l.Resolve(context.Background(), ""); err != nil {
				b.Fatal(err)
			}
		}
	})
}
