package scenario

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func TestFileNames(t *testing.T) {
	b := create(t)
	for _, name := range []string{"plain", "two words", `quo"te'\`, "new\nline", "日本語 é", "\xff\xfe\x01", strings.Repeat("n", 255), "-rf", "$HOME`id`", " "} {
		path := "/tmp/names/" + name
		b.write(path, []byte(name))
		same(t, fmt.Sprintf("%q", name), b.read(path), []byte(name))
	}
	list, err := the.files.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListFilesRequest{SandboxId: b.id, Path: "/tmp/names"}))
	if err != nil {
		t.Fatal(explain(err))
	}
	if n := len(list.Msg.GetEntries()); n != 10 {
		t.Errorf("%d entries", n)
	}
	for _, e := range list.Msg.GetEntries() {
		name := e.GetNameBytes()
		if name == nil {
			name = []byte(e.GetName())
		}
		same(t, "listed name", b.read("/tmp/names/"+string(name)), name)
	}
	_, err = the.files.Write(within(t, time.Minute), connect.NewRequest(&harenav1.WriteRequest{SandboxId: b.id, Path: "/tmp/" + strings.Repeat("n", 256)}))
	if kind(err) != "invalid" {
		t.Errorf("a name of 256 bytes: %v", err)
	}
}

func TestFileOperations(t *testing.T) {
	b := create(t)
	ctx := within(t, time.Minute)
	b.must("mkdir -p /w/sub && echo content > /w/f && chmod 640 /w/f && chown 5:6 /w/f && ln -s f /w/link && mkfifo /w/fifo")
	st, err := the.files.Stat(ctx, connect.NewRequest(&harenav1.StatRequest{SandboxId: b.id, Path: "/w/f"}))
	if err != nil {
		t.Fatal(explain(err))
	}
	if i := st.Msg.GetInfo(); i.GetType() != "file" || i.GetSize() != 8 || i.GetMode() != 0o640 || i.GetUid() != 5 || i.GetGid() != 6 || i.GetModified() == nil {
		t.Errorf("stat %v", i)
	}
	st, err = the.files.Stat(ctx, connect.NewRequest(&harenav1.StatRequest{SandboxId: b.id, Path: "/w/link"}))
	if err != nil || st.Msg.GetInfo().GetType() != "symlink" || st.Msg.GetInfo().GetLinkTarget() != "f" {
		t.Errorf("stat of a symlink: %v %v", st, err)
	}
	// Replacing keeps what the file had; it is atomic: a reader inside never sees a part.
	b.write("/w/f", []byte("new"))
	if got := b.must("stat -c '%a %u %g' /w/f; cat /w/f"); got != "640 5 6\nnew" {
		t.Errorf("after replacement: %q", got)
	}
	if _, err := the.files.Move(ctx, connect.NewRequest(&harenav1.MoveRequest{SandboxId: b.id, From: "/w/f", To: "/w/sub/g", NoReplace: true})); err != nil {
		t.Error(explain(err))
	}
	if _, err := the.files.MakeDir(ctx, connect.NewRequest(&harenav1.MakeDirRequest{SandboxId: b.id, Path: "/w/a/b/c", Parents: true})); err != nil {
		t.Error(explain(err))
	}
	if _, err := the.files.MakeDir(ctx, connect.NewRequest(&harenav1.MakeDirRequest{SandboxId: b.id, Path: "/w/a"})); kind(err) != "exists" {
		t.Errorf("mkdir of an existing directory: %v", err)
	}
	if _, err := the.files.Remove(ctx, connect.NewRequest(&harenav1.RemoveRequest{SandboxId: b.id, Path: "/w/a"})); kind(err) != "precondition" {
		t.Errorf("remove of a full directory: %v", err)
	}
	if _, err := the.files.Remove(ctx, connect.NewRequest(&harenav1.RemoveRequest{SandboxId: b.id, Path: "/w/a", Recursive: true})); err != nil {
		t.Error(explain(err))
	}
	if got := b.must("find /w | sort | tr '\\n' ' '"); got != "/w /w/fifo /w/link /w/sub /w/sub/g " {
		t.Errorf("tree is %q", got)
	}
	for path, want := range map[string]string{"/w/none": "not-found", "/w/sub": "precondition", "/w/fifo": "precondition", "/dev/zero": "precondition", "/proc/1/environ": "denied", "/sys/kernel/notes": "denied"} {
		if _, err := the.files.Read(ctx, connect.NewRequest(&harenav1.ReadRequest{SandboxId: b.id, Path: path})); kind(err) != want {
			t.Errorf("read %s: %v, want kind %s", path, err, want)
		}
	}
	b.must("useradd -m ann; mkdir -m 700 /root/private; echo s > /root/private/s")
	if _, err := the.files.Read(ctx, connect.NewRequest(&harenav1.ReadRequest{SandboxId: b.id, Path: "/root/private/s", User: "ann"})); kind(err) != "denied" {
		t.Errorf("another user's secret: %v", err)
	}
	if _, err := the.files.Write(ctx, connect.NewRequest(&harenav1.WriteRequest{SandboxId: b.id, Path: "note", User: "ann", Content: []byte("x")})); err != nil {
		t.Error(explain(err))
	}
	if got := b.must("stat -c '%U %n' /home/ann/note"); got != "ann /home/ann/note" {
		t.Errorf("relative path of a user: %q", got)
	}
}

func TestLargeFilesStream(t *testing.T) {
	b := create(t)
	const size = 1 << 30
	up := sha256.New()
	body := io.TeeReader(io.LimitReader(&pattern{}, size), up)
	if res := b.plain(http.MethodPut, "files", "/var/tmp/large", body); res.StatusCode/100 != 2 {
		msg, _ := io.ReadAll(res.Body)
		t.Fatalf("upload: %s %s", res.Status, msg)
	}
	if got := b.must("sha256sum < /var/tmp/large"); !strings.HasPrefix(got, fmt.Sprintf("%x", up.Sum(nil))) {
		t.Errorf("inside it is %s", got)
	}
	down := sha256.New()
	res := b.plain(http.MethodGet, "files", "/var/tmp/large", nil)
	if n, err := io.Copy(down, res.Body); err != nil || n != size || !bytes.Equal(down.Sum(nil), up.Sum(nil)) {
		t.Errorf("download: %d bytes, %v", n, err)
	}
	part := b.plain(http.MethodGet, "files", "/var/tmp/large", nil, "Range", "bytes=1000000-1000099")
	want := make([]byte, size/512)[:1000100]
	_, _ = io.ReadFull(&pattern{}, want)
	got, _ := io.ReadAll(part.Body)
	if part.StatusCode != http.StatusPartialContent {
		t.Errorf("range: %s", part.Status)
	}
	same(t, "range", got, want[1000000:])
	if res := b.plain(http.MethodGet, "files", "/var/tmp/large", nil, "Range", "bytes=99999999999-"); res.StatusCode != http.StatusRequestedRangeNotSatisfiable {
		t.Errorf("a range past the end: %s", res.Status)
	}
	_, err := the.files.Read(within(t, time.Minute), connect.NewRequest(&harenav1.ReadRequest{SandboxId: b.id, Path: "/var/tmp/large"}))
	if d := detail(err); d.GetLimitValue() == "" {
		t.Errorf("an unary read of 1 GiB: %v", err)
	}
}

// pattern is an endless stream that differs in every word.
type pattern struct {
	n    uint64
	word [8]byte
	left int
}

func (p *pattern) Read(b []byte) (int, error) {
	n := 0
	for ; p.left > 0 && n < len(b); n++ {
		b[n] = p.word[8-p.left]
		p.left--
	}
	for ; len(b)-n >= 8; n += 8 {
		p.n++
		binary.LittleEndian.PutUint64(b[n:], p.n*0x9e3779b97f4a7c15)
	}
	if n < len(b) {
		p.n++
		binary.LittleEndian.PutUint64(p.word[:], p.n*0x9e3779b97f4a7c15)
		p.left = 8
		m, _ := p.Read(b[n:])
		n += m
	}
	return n, nil
}

func TestInterruptedUploadLeavesTheOldFile(t *testing.T) {
	b := create(t)
	b.write("/w/f", []byte("old"))
	broken := io.MultiReader(io.LimitReader(&pattern{}, 8<<20), brokenReader{})
	req, err := http.NewRequestWithContext(within(t, time.Minute), http.MethodPut, the.url+"/v1/sandboxes/"+b.id+"/files?path=/w/f", broken)
	if err != nil {
		t.Fatal(err)
	}
	if res, err := the.http.Do(req); err == nil {
		res.Body.Close()
		if res.StatusCode/100 == 2 {
			t.Error("a broken upload succeeded")
		}
	}
	same(t, "the file", b.read("/w/f"), []byte("old"))
	eventually(t, "no temporary file is left", 10*time.Second, func() bool { return b.must("ls -A /w") == "f" })
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("the client broke off") }

func TestTreesAsTar(t *testing.T) {
	b := create(t)
	b.must("mkdir -p /w/src/d && cd /w/src && echo a > a && ln a d/hard && ln -s a link && chmod 4755 a && chown 7:8 d && touch -d '2001-02-03 04:05:06.789' a && printf x > \"$(printf 'n\\nl')\"")
	res := b.plain(http.MethodGet, "tar", "/w/src", nil)
	archive, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("download: %s, %v", res.Status, err)
	}
	if res := b.plain(http.MethodPut, "tar", "/w/dst", bytes.NewReader(archive)); res.StatusCode/100 != 2 {
		msg, _ := io.ReadAll(res.Body)
		t.Fatalf("upload: %s %s", res.Status, msg)
	}
	listing := `cd %s && find . -printf '%%p %%m %%U %%G %%n %%l %%T@\n' | sort && cat a`
	src, dst := b.must(fmt.Sprintf(listing, "/w/src")), b.must(fmt.Sprintf(listing, "$(test -d /w/dst/src && echo /w/dst/src || echo /w/dst)"))
	if src != dst {
		t.Errorf("the copy differs:\n%s\n--\n%s", src, dst)
	}
}

func TestHostileTarStaysInside(t *testing.T) {
	b := create(t)
	b.must("mkdir -p /w/in /w/out && ln -s /w/out /w/in/door")
	for name, entries := range map[string][]tar.Header{
		"parent":       {{Name: "../out/x", Typeflag: tar.TypeReg, Size: 1, Mode: 0o644}},
		"absolute":     {{Name: "/w/out/x", Typeflag: tar.TypeReg, Size: 1, Mode: 0o644}},
		"through link": {{Name: "door/x", Typeflag: tar.TypeReg, Size: 1, Mode: 0o644}},
		"own link":     {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/w/out"}, {Name: "l/x", Typeflag: tar.TypeReg, Size: 1, Mode: 0o644}},
		"hard link":    {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../../etc/shadow"}},
	} {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, e := range entries {
			if err := w.WriteHeader(&e); err != nil {
				t.Fatal(err)
			}
			if e.Size > 0 {
				_, _ = w.Write([]byte("x"))
			}
		}
		w.Close()
		res := b.plain(http.MethodPut, "tar", "/w/in", &buf)
		if got := b.must("ls -A /w/out"); got != "" {
			t.Errorf("%s wrote outside: %q (%s)", name, got, res.Status)
			b.must("rm -rf /w/out/*")
		}
	}
}

// A loop inside swaps a file with a symlink out of the directory, and with
// special files, while the file API works on it.
func TestRacesFromInsideNeverReachTheHost(t *testing.T) {
	b := create(t)
	b.must("mkdir -p /r/dir && echo inside > /r/dir/f")
	loop := b.start(&harenav1.Command{Argv: []string{"/usr/bin/python3", "-c", `
import os
os.chdir("/r")
targets = ["/etc/hostname", "../../../../../../etc/hostname", "/proc/1/root/etc/hostname", "/proc/self/root", "/proc/sys/kernel/core_pattern", "/dev/zero"]
i = 0
def attempt(f, *args):
    try: f(*args)
    except OSError: pass
while True:
    i += 1
    attempt(os.symlink, targets[i % len(targets)], "x"); attempt(os.rename, "x", "dir/f")
    open("y", "w").write("inside\n"); attempt(os.rename, "y", "dir/f")
    attempt(os.mkfifo, "z"); attempt(os.rename, "z", "dir/f")
    attempt(os.rename, "dir", "gone"); attempt(os.symlink, "/etc", "dir"); attempt(os.unlink, "dir"); attempt(os.rename, "gone", "dir")
`}})
	inside := b.must("cat /etc/hostname")
	deadline := time.Now().Add(5 * time.Second)
	calls := 0
	for time.Now().Before(deadline) {
		calls++
		res, err := the.files.Read(within(t, 20*time.Second), connect.NewRequest(&harenav1.ReadRequest{SandboxId: b.id, Path: "/r/dir/f"}))
		if err == nil {
			if got := strings.TrimSpace(string(res.Msg.GetContent())); got != "inside" && got != "" && got != inside {
				t.Fatalf("read %q", got)
			}
		} else if k := kind(err); k == "internal" || k == "timeout" || k == "" {
			t.Fatalf("read: %v", explain(err))
		}
		_, err = the.files.Write(within(t, 20*time.Second), connect.NewRequest(&harenav1.WriteRequest{SandboxId: b.id, Path: "/r/dir/f", Content: []byte("inside\n")}))
		if k := kind(err); err != nil && (k == "internal" || k == "timeout" || k == "") {
			t.Fatalf("write: %v", explain(err))
		}
	}
	t.Logf("%d rounds", calls)
	if _, err := the.exec.Signal(within(t, time.Minute), connect.NewRequest(&harenav1.SignalRequest{SandboxId: b.id, CommandId: loop, Signal: "KILL", Tree: true})); err != nil {
		t.Error(explain(err))
	}
}

func TestReplacedToolsChangeNothing(t *testing.T) {
	b := create(t)
	b.must("mkdir -p /w && echo truth > /w/f")
	b.must("cp /bin/true /tmp/t; for p in /bin/sh /bin/cat /bin/ls /usr/bin/tar /bin/bash; do rm -f $p; printf '#!/tmp/t\\n' > $p; chmod 755 $p; done; rm -f /lib/x86_64-linux-gnu/libnss_files*; echo 'evil' > /etc/ld.so.preload")
	same(t, "read", b.read("/w/f"), []byte("truth\n"))
	b.write("/w/g", []byte("still works"))
	same(t, "read back", b.read("/w/g"), []byte("still works"))
	list, err := the.files.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListFilesRequest{SandboxId: b.id, Path: "/w"}))
	if err != nil || len(list.Msg.GetEntries()) != 2 {
		t.Errorf("list: %v, %v", list, err)
	}
}
