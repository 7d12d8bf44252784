package fuseblob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func message(op uint32, unique, node uint64, body []byte) []byte {
	b := order.AppendUint32(nil, uint32(inHeaderLen+len(body)))
	b = order.AppendUint32(b, op)
	b = order.AppendUint64(b, unique)
	b = order.AppendUint64(b, node)
	b = append(b, make([]byte, inHeaderLen-len(b))...)
	return append(b, body...)
}

func TestParse(t *testing.T) {
	read := append(order.AppendUint64(make([]byte, 8), 4096), order.AppendUint32(nil, 77)...)
	read = append(read, make([]byte, 40-len(read))...)
	if r, err := parse(message(opRead, 5, 9, read)); err != nil || r.offset != 4096 || r.size != 77 || r.unique != 5 || r.node != 9 {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := parse(message(opLookup, 5, 1, []byte("name\x00rest"))); err != nil || r.name != "name" {
		t.Errorf("%+v, %v", r, err)
	}
	wrongLength := message(opRead, 1, 2, read)
	order.PutUint32(wrongLength, 1<<31)
	for name, b := range map[string][]byte{
		"empty": nil, "short header": make([]byte, inHeaderLen-1), "wrong length": wrongLength,
		"short read": message(opRead, 1, 2, read[:39]), "no name": message(opLookup, 1, 1, []byte{0}),
		"endless name": message(opLookup, 1, 1, bytes.Repeat([]byte{'a'}, 5000)), "short interrupt": message(opInterrupt, 1, 1, nil),
		"short init": message(opInit, 1, 0, make([]byte, 15)),
	} {
		if _, err := parse(b); !errors.Is(err, errMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(message(opInit, 2, 0, make([]byte, 64)))
	f.Add(message(opRead, 2, 3, make([]byte, 40)))
	f.Add(message(opLookup, 2, 1, []byte("x\x00")))
	f.Add(message(opInterrupt, 2, 1, make([]byte, 8)))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parse(b); err == nil && len(r.name) > maxName {
			t.Errorf("a name of %d bytes", len(r.name))
		}
	})
}

func TestDirents(t *testing.T) {
	var files []File
	for i := range 100 {
		files = append(files, File{Name: fmt.Sprintf("name-%d", i), Node: uint64(i + 3)})
	}
	seen := 0
	for from := uint64(0); ; {
		b := appendDirents(nil, 512, from, files)
		if len(b) > 512 {
			t.Fatalf("%d bytes", len(b))
		}
		if len(b) == 0 {
			break
		}
		for len(b) > 0 {
			n := order.Uint32(b[16:])
			if got := string(b[24 : 24+n]); got != files[seen].Name || order.Uint64(b) != files[seen].Node {
				t.Fatalf("entry %d is %q", seen, got)
			}
			from = order.Uint64(b[8:])
			b = b[(24+n+7)&^7:]
			seen++
		}
	}
	if seen != len(files) {
		t.Errorf("%d of %d entries", seen, len(files))
	}
	if b := appendDirents(nil, 512, 1<<63, files); len(b) != 0 {
		t.Error("entries after the end")
	}
}

// memory is Files of byte slices.
type memory struct {
	content map[string][]byte
	block   chan struct{} // reads of "slow" wait for it
}

func (m *memory) names() []string {
	var out []string
	for n := range m.content {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

func (m *memory) Lookup(name string) (File, bool) {
	i := slices.Index(m.names(), name)
	return File{Name: name, Node: uint64(i + 3), Size: int64(len(m.content[name]))}, i >= 0
}

func (m *memory) Node(id uint64) (File, bool) {
	names := m.names()
	if id < 3 || id-3 >= uint64(len(names)) {
		return File{}, false
	}
	return m.Lookup(names[id-3])
}

func (m *memory) List() []File {
	var out []File
	for _, n := range m.names() {
		f, _ := m.Lookup(n)
		out = append(out, f)
	}
	return out
}

func (m *memory) ReadAt(ctx context.Context, node uint64, p []byte, off int64) error {
	f, _ := m.Node(node)
	switch f.Name {
	case "broken":
		return io.ErrUnexpectedEOF
	case "slow":
		select {
		case <-m.block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	copy(p, m.content[f.Name][off:])
	return nil
}

func (m *memory) Ready(node uint64, _ int, _ int64) bool {
	f, _ := m.Node(node)
	return f.Name != "slow"
}

func mount(t *testing.T, m *memory) (string, *Server) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts file systems")
	}
	dir := t.TempDir()
	c, err := Mount(dir, "test", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(c, m, slog.New(slog.DiscardHandler))
	done := make(chan error, 1)
	go func() { done <- s.Serve(4) }()
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error("serve:", err)
			}
		case <-time.After(10 * time.Second):
			t.Error("the server does not end with its mount")
		}
		c.Close()
	})
	if err := Prime(dir); err != nil {
		t.Fatal(err)
	}
	return dir, s
}

func TestServe(t *testing.T) {
	m := &memory{content: map[string][]byte{"a": []byte("hello"), "empty": nil, "big": bytes.Repeat([]byte("0123456789abcdef"), 300_001), "broken": make([]byte, 5000)}}
	dir, s := mount(t, m)
	for _, name := range []string{"a", "empty", "big"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, m.content[name]) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	if _, err := os.ReadFile(filepath.Join(dir, "broken")); !errors.Is(err, unix.EIO) {
		t.Errorf("broken: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "none")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("none: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "a", "b")); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("below a file: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(m.content) {
		t.Errorf("%v, %v", entries, err)
	}
	for what, err := range map[string]error{
		"mkdir":  os.Mkdir(filepath.Join(dir, "d"), 0o700),
		"remove": os.Remove(filepath.Join(dir, "a")),
		"chmod":  os.Chmod(filepath.Join(dir, "a"), 0o600),
		"xattr":  unix.Setxattr(filepath.Join(dir, "a"), "user.x", []byte("x"), 0),
	} {
		if err == nil {
			t.Errorf("%s of a read-only file system", what)
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Bsize != 4096 {
		t.Errorf("statfs: %+v, %v", st, err)
	}
	fi, err := os.Stat(filepath.Join(dir, "big"))
	if err != nil || fi.Size() != 4800016 || fi.Mode() != 0o444 {
		t.Errorf("%v, %v", fi, err)
	}
	if n, _ := s.Waiting(); n != 0 {
		t.Errorf("%d reads wait", n)
	}
}

// Messages that no kernel sends do no harm, and what can be answered is.
func TestOddRequests(t *testing.T) {
	m := &memory{content: map[string][]byte{"a": []byte("hello")}}
	fds := make([]int, 2)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	fds[0], fds[1] = pair[0], pair[1]
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	s := NewServer(Resume(fds[1], Params{}), m, slog.New(slog.DiscardHandler))
	huge := append(order.AppendUint64(make([]byte, 8), 1<<63), order.AppendUint32(nil, 1<<31)...)
	huge = append(huge, make([]byte, 40-len(huge))...)
	past := append(order.AppendUint64(make([]byte, 8), 1<<40), order.AppendUint32(nil, 4096)...)
	past = append(past, make([]byte, 40-len(past))...)
	for _, tt := range []struct {
		name  string
		in    []byte
		errno unix.Errno
	}{
		{"read of a huge range", message(opRead, 8, 3, huge), unix.EINVAL},
		{"read past the end", message(opRead, 8, 3, past), 0},
		{"read of an unknown node", message(opRead, 8, 99, past), unix.EIO},
		{"read of the directory", message(opRead, 8, 1, past), unix.EIO},
		{"attributes of an unknown node", message(opGetattr, 8, 99, nil), unix.ESTALE},
		{"lookup in a file", message(opLookup, 8, 3, []byte("a\x00")), unix.ENOENT},
		{"directory that is a file", message(opReaddir, 8, 3, past), unix.ENOTDIR},
		{"second init", message(opInit, 8, 0, make([]byte, 64)), unix.EPROTO},
		{"unknown operation", message(9999, 8, 3, nil), unix.ENOSYS},
		{"flush", message(25, 8, 3, make([]byte, 24)), unix.ENOSYS},
	} {
		r, err := parse(tt.in)
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		s.handle(r)
		out := make([]byte, 4096)
		n, err := unix.Read(fds[0], out)
		if err != nil || n < outHeaderLen || order.Uint32(out) != uint32(n) || order.Uint64(out[8:]) != 8 {
			t.Fatalf("%s: answer of %d bytes, %v", tt.name, n, err)
		}
		if got := unix.Errno(-int32(order.Uint32(out[4:]))); got != tt.errno {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
	s.handle(request{op: opInterrupt, interrupted: 12345})
	s.handle(request{op: opForget, node: 77})
}

// A reader that is killed gets away although its read is not answered yet.
func TestInterrupt(t *testing.T) {
	m := &memory{content: map[string][]byte{"slow": make([]byte, 4096)}, block: make(chan struct{})}
	dir, s := mount(t, m)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	proc, err := os.StartProcess("/bin/cat", []string{"cat", filepath.Join(dir, "slow")}, &os.ProcAttr{Files: []*os.File{null, null, null}})
	if err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(20 * time.Second)
	for n := 0; n == 0; n, _ = s.Waiting() {
		if time.Now().After(end) {
			t.Fatal("no read arrives")
		}
		time.Sleep(time.Millisecond)
	}
	if err := proc.Kill(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _, _ = proc.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("a killed reader waits for its read")
		close(m.block)
		<-ended
	}
}
