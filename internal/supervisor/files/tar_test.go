package files

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// archive makes a tar of headers; those of regular files have their name as content.
func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = int64(len(h.Name))
		}
		must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := w.Write([]byte(h.Name))
			must(t, err)
		}
	}
	must(t, w.Close())
	return buf.Bytes()
}

func (b *box) tarURL(srv string, query string) string {
	return srv + "/v1/sandboxes/" + boxID + "/tar?" + query
}

func TestTarRoundTrip(t *testing.T) {
	b := newBox(t)
	srv := b.http().URL
	b.mkdir("src", 5, 0o2750)
	b.mkdir("src/ro", userUID, 0o555)
	b.file("src/ro/suid", 6, 0o4711, "suid")
	b.file("src/big", 0, 0o644, strings.Repeat("big", 300_000))
	b.file("src/empty", 0, 0o600, "")
	b.file("src/n\nl \xff\"", 0, 0o644, "odd")
	b.file("src/"+strings.Repeat("l", 255), 0, 0o644, "long")
	must(t, os.Link(b.host("src/ro/suid"), b.host("src/hard")))
	b.symlink("ro/suid", "src/link")
	b.symlink(strings.Repeat("t", 300)+"\xfe", "src/longlink")
	must(t, unix.Mkfifo(b.host("src/fifo"), 0o620))
	must(t, os.Chown(b.host("src/fifo"), idBase+8, idBase+9))
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(t, err)
	defer unix.Close(sock)
	must(t, unix.Bind(sock, &unix.SockaddrUnix{Name: b.host("src/sock")}))
	must(t, unix.Setxattr(b.host("src/big"), "user.k=v", []byte("x"), 0))
	must(t, unix.Setxattr(b.host("src/big"), "user.note", []byte("a\x00b"), 0))
	// cap_net_raw=ep as root of the sandbox would set it: version 3 with its root's ID.
	capability := []byte{1, 0, 0, 3, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0}
	must(t, unix.Setxattr(b.host("src/big"), "security.capability", capability, 0))
	old := time.Date(2001, 2, 3, 4, 5, 6, 700, time.UTC)
	for _, p := range []string{"src/empty", "src/ro", "src"} {
		must(t, os.Chtimes(b.host(p), old, old))
	}

	resp, body := b.do(b.request("GET", b.tarURL(srv, "path=/src"), nil, nil))
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "application/x-tar" {
		t.Fatalf("%s %v", resp.Status, resp.Header)
	}
	resp, text := b.do(b.request("PUT", b.tarURL(srv, "path=/new/dst"), nil, body))
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s", resp.Status, text)
	}
	for _, p := range []string{"", "/ro", "/ro/suid", "/big", "/empty", "/n\nl \xff\"", "/" + strings.Repeat("l", 255), "/hard", "/link", "/longlink", "/fifo"} {
		var x, y syscall.Stat_t
		must(t, syscall.Lstat(b.host("src"+p), &x))
		if err := syscall.Lstat(b.host("new/dst"+p), &y); err != nil {
			t.Error(err)
			continue
		}
		sizes := x.Mode&syscall.S_IFMT == syscall.S_IFDIR || x.Size == y.Size
		if x.Mode != y.Mode || x.Uid != y.Uid || x.Gid != y.Gid || !sizes || x.Mtim != y.Mtim || x.Mode&syscall.S_IFMT == syscall.S_IFREG && x.Nlink != y.Nlink {
			t.Errorf("%q: %+v became %+v", p, x, y)
		}
		if x.Mode&syscall.S_IFMT == syscall.S_IFREG && b.content("src"+p) != b.content("new/dst"+p) {
			t.Errorf("%q: another content", p)
		}
		l1, _ := os.Readlink(b.host("src" + p))
		l2, _ := os.Readlink(b.host("new/dst" + p))
		if l1 != l2 {
			t.Errorf("%q: link %q became %q", p, l1, l2)
		}
	}
	if _, err := os.Lstat(b.host("new/dst/sock")); !os.IsNotExist(err) {
		t.Errorf("the socket: %v", err)
	}
	value := make([]byte, 64)
	n, err := unix.Getxattr(b.host("new/dst/big"), "security.capability", value)
	if err != nil || !bytes.Equal(value[:n], capability) {
		t.Errorf("capability: %x %v", value[:max(n, 0)], err)
	}
	n, err = unix.Getxattr(b.host("new/dst/big"), "user.note", value)
	if err != nil || string(value[:n]) != "a\x00b" {
		t.Errorf("xattr: %q %v", value[:max(n, 0)], err)
	}
	// Again, over what is there; a file alone; and as somebody who owns nothing there.
	resp, text = b.do(b.request("PUT", b.tarURL(srv, "path=/new/dst"), nil, body))
	if resp.StatusCode != http.StatusOK {
		t.Errorf("again: %s %s", resp.Status, text)
	}
	_, one := b.do(b.request("GET", b.tarURL(srv, "path=/src/empty"), nil, nil))
	if h, err := tar.NewReader(strings.NewReader(one)).Next(); err != nil || h.Name != "empty" {
		t.Errorf("one file: %v %v", h, err)
	}
	resp, text = b.do(b.request("PUT", b.tarURL(srv, "path=mine&user=user"), nil, body))
	if resp.StatusCode != http.StatusOK {
		t.Errorf("as user: %s %s", resp.Status, text)
	}
	if st, err := b.stat("", "/home/user/mine/ro/suid", false); err != nil || st.Uid != userUID || st.Mode != 0o711 {
		t.Errorf("as user: %v %v", st, err)
	}
}

func TestTarOfTheRootLeavesTheKernelOut(t *testing.T) {
	b := newBox(t)
	b.mkdir("proc", 0, 0o555)
	must(t, unix.Mount("proc", b.host("proc"), "proc", 0, ""))
	defer unix.Unmount(b.host("proc"), unix.MNT_DETACH)
	must(t, unix.Mknod(b.host("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.Chown(b.host("null"), idBase, idBase))
	_, body := b.do(b.request("GET", b.tarURL(b.http().URL, "path=/"), nil, nil))
	r := tar.NewReader(strings.NewReader(body))
	seen := map[string]*tar.Header{}
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		seen[h.Name] = h
		if strings.HasPrefix(h.Name, "proc/") && h.Name != "proc/" {
			t.Fatalf("archived %s", h.Name)
		}
	}
	if seen["./"] == nil || seen["proc/"] == nil || seen["home/user/"] == nil {
		t.Errorf("missing entries in %v", seen)
	}
	if n := seen["null"]; n == nil || n.Typeflag != tar.TypeChar || n.Devmajor != 1 || n.Devminor != 3 {
		t.Errorf("device: %+v", n)
	}
}

func TestHostileArchives(t *testing.T) {
	b := newBox(t)
	srv := b.http().URL
	b.file("etc/passwd", 0, 0o644, "original")
	reg := func(name string) tar.Header { return tar.Header{Name: name} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	hard := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeLink}
	}
	dir := func(name string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}
	}
	for i, c := range []struct {
		name   string
		body   []byte
		status int
		text   string
	}{
		{"absolute", archive(t, reg("/etc/passwd")), 400, "leads outside"},
		{"up", archive(t, reg("../etc/passwd")), 400, "leads outside"},
		{"up inside", archive(t, reg("a/../../etc/passwd")), 400, "leads outside"},
		{"dotdot", archive(t, reg("..")), 400, "leads outside"},
		{"through an absolute link", archive(t, link("l", "/etc"), reg("l/passwd")), 400, "leads outside"},
		{"through a relative link", archive(t, link("l", "../../etc"), reg("l/passwd")), 400, "leads outside"},
		{"through two links", archive(t, dir("a"), link("a/l", ".."), link("m", "a/l/.."), reg("m/etc/passwd")), 400, "leads outside"},
		{"directory over a link", archive(t, link("l", "/etc"), dir("l/"), reg("l/passwd")), 200, ""},
		{"file over a link", archive(t, link("l", "/etc/passwd"), reg("l")), 200, ""},
		{"hard link up", archive(t, hard("l", "../../etc/passwd")), 400, "leads outside"},
		{"hard link absolute", archive(t, hard("l", "/etc/passwd")), 400, "leads outside"},
		{"hard link through a link", archive(t, link("l", "/etc"), hard("m", "l/passwd")), 400, "leads outside"},
		{"hard link to a link, then a file", archive(t, link("l", "/etc/passwd"), hard("m", "l"), reg("m")), 200, ""},
		{"hard link to nothing", archive(t, hard("l", "missing")), 404, "does not exist"},
		{"owner beyond", archive(t, tar.Header{Name: "f", Uid: 100_000}), 400, "range of IDs"},
		{"device", archive(t, tar.Header{Name: "d", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}), 403, "permission"},
		{"no name", []byte("x"), 400, "ends in the middle"},
		{"garbage", bytes.Repeat([]byte("garbage!"), 200), 400, "not one of a tar"},
		{"cut", archive(t, tar.Header{Name: strings.Repeat("x", 90)})[:540], 400, "ends in the middle"},
		{"directory by file", archive(t, dir("d"), reg("d")), 400, "directory"},
		{"name beyond", archive(t, reg(strings.Repeat("n", 256))), 400, "too long"},
		{"empty", nil, 200, ""},
		{"padding", append(archive(t, reg("ok")), make([]byte, 1<<20)...), 200, ""},
	} {
		resp, body := b.do(b.request("PUT", b.tarURL(srv, fmt.Sprintf("path=/t/%d", i)), nil, c.body))
		if resp.StatusCode != c.status || !strings.Contains(body, c.text) {
			t.Errorf("%s: %s %s", c.name, resp.Status, body)
		}
		if got := b.content("etc/passwd"); got != "original" {
			t.Fatalf("%s: /etc/passwd has %q", c.name, got)
		}
	}
	if entries, _ := os.ReadDir(b.host("etc")); len(entries) != 1 {
		t.Errorf("/etc has %v", entries)
	}
	if b.starter.starts != 1 {
		t.Errorf("%d workers were started", b.starter.starts)
	}
}

func TestTarIntoFullDisk(t *testing.T) {
	b := newBox(t, mountTmpfs(t, "mode=755,size=2m"))
	big := archive(t, tar.Header{Name: strings.Repeat("x", 100), Size: 100})
	var sparse bytes.Buffer
	w := tar.NewWriter(&sparse)
	must(t, w.WriteHeader(&tar.Header{Name: "f", Mode: 0o644, Size: 8 << 20}))
	_, err := w.Write(make([]byte, 8<<20))
	must(t, err)
	must(t, w.Close())
	srv := b.http().URL
	resp, body := b.do(b.request("PUT", b.tarURL(srv, "path=/t"), nil, sparse.Bytes()))
	if resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(body, "no space left") {
		t.Errorf("%s %s", resp.Status, body)
	}
	must(t, b.remove("", "/t", true, true))
	resp, body = b.do(b.request("PUT", b.tarURL(srv, "path=/t"), nil, big))
	if resp.StatusCode != http.StatusOK {
		t.Errorf("%s %s", resp.Status, body)
	}
}

func TestTarOfFilesThatChange(t *testing.T) {
	b := newBox(t)
	srv := b.http().URL
	b.mkdir("d", 0, 0o755)
	b.file("d/shrinks", 0, 0o644, "")
	must(t, os.Truncate(b.host("d/shrinks"), 256<<20))
	resp, err := http.DefaultClient.Do(b.request("GET", b.tarURL(srv, "path=/d"), nil, nil))
	must(t, err)
	defer resp.Body.Close()
	_, err = io.ReadFull(resp.Body, make([]byte, 1<<20))
	must(t, err)
	must(t, os.Truncate(b.host("d/shrinks"), 1<<20))
	if _, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Error("the client took half an archive for a whole one")
	}
	// One that may not be read ends the download too.
	b.file("home/user/mine", userUID, 0o600, "x")
	b.file("home/user/root's", 0, 0o600, "x")
	resp, err = http.DefaultClient.Do(b.request("GET", b.tarURL(srv, "path=&path=/home/user&user=user"), nil, nil))
	must(t, err)
	if _, err := io.Copy(io.Discard, resp.Body); err == nil && resp.StatusCode == http.StatusOK {
		t.Error("an archive lacks a file and nobody was told")
	}
	resp.Body.Close()
}

func FuzzTarIn(f *testing.F) {
	f.Add(archive(f, tar.Header{Name: "a/b"}, tar.Header{Name: "l", Linkname: "../x", Typeflag: tar.TypeSymlink}, tar.Header{Name: "l/x"}))
	f.Add(archive(f, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o700}, tar.Header{Name: "h", Linkname: "d/../../f", Typeflag: tar.TypeLink}))
	f.Add(archive(f, tar.Header{Name: "p", Typeflag: tar.TypeFifo, Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.xattr.user.x": "y"}}))
	// On tmpfs: an ext4 that discards makes each removal slow.
	top, err := os.MkdirTemp("/dev/shm", "harena-files-")
	must(f, err)
	f.Cleanup(func() { os.RemoveAll(top) })
	f.Fuzz(func(t *testing.T, data []byte) {
		dir, err := os.MkdirTemp(top, "")
		must(t, err)
		defer os.RemoveAll(dir)
		must(t, os.WriteFile(dir+"/f", []byte("canary"), 0o600))
		must(t, os.Mkdir(dir+"/root", 0o755))
		before, err := os.ReadDir(dir)
		must(t, err)
		root, err := unix.Open(dir+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(root)
		w := newWorker(bytes.NewReader(nil), io.Discard, root)
		// A sparse header may say any size; the test's disk is not for that.
		in := &tarIn{w: w, root: root}
		var limit syscall.Rlimit
		must(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit))
		must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 1 << 20, Max: limit.Max}))
		err = in.unpack(bytes.NewReader(data))
		must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit))
		var fl *failure
		if err != nil && !errors.As(err, &fl) {
			t.Fatalf("an error without a code: %v", err)
		}
		if fl != nil && decodeFailure(fl.encode()) == nil {
			t.Fatalf("a failure that cannot be sent: %#v", fl)
		}
		after, err := os.ReadDir(dir)
		must(t, err)
		if c, err := os.ReadFile(dir + "/f"); err != nil || string(c) != "canary" || len(after) != len(before) {
			t.Fatalf("outside changed: %v", after)
		}
	})
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte("D\x00\x00\x00\x01xE\x00\x00\x00\x00"))
	f.Add([]byte("F\x00\x00\x00\x06\x00\x00\x00\x00\x02x"))
	f.Fuzz(func(t *testing.T, data []byte) {
		fr := frames{r: bytes.NewReader(data), in: newBuffer()}
		left := len(data)
		for {
			ft, payload, err := fr.read()
			if err != nil {
				return
			}
			left -= headerSize + len(payload)
			if !ft.valid() || len(payload) > maxPayload || left < 0 {
				t.Fatalf("frame %v of %d bytes", ft, len(payload))
			}
			if ft == frameFail {
				if fl := decodeFailure(payload); fl != nil {
					if e := fl.toErr("/p"); e == nil || len(e.Error()) > 2000 {
						t.Fatalf("error %v", e)
					}
				}
			}
		}
	})
}

func FuzzPaths(f *testing.F) {
	f.Add("/home", "a/../b//")
	f.Add("", "\xff/")
	f.Fuzz(func(t *testing.T, home, p string) {
		abs, err := absolute(home, "", []byte(p))
		if err != nil {
			return
		}
		dir, base, _ := split(abs)
		if abs[0] != '/' || dir[0] != '/' || strings.Contains(base, "/") || len(abs) > maxPath {
			t.Fatalf("%q: %q %q", abs, dir, base)
		}
		if base != "" && strings.TrimRight(join(dir, base), "/") != strings.TrimRight(join(strings.TrimRight(abs[:len(dir)], "/"), base), "/") {
			t.Fatalf("%q: %q %q", abs, dir, base)
		}
		if name, bad := tarName(p); bad == nil && (name[0] == '/' || name == ".." || strings.HasPrefix(name, "../")) {
			t.Fatalf("entry %q", name)
		}
	})
}
