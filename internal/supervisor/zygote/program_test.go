package zygote

import (
	"encoding/binary"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/confine"
)

// at reads what a program's address points to.
func at(t *testing.T, code []byte, addr uint64) []byte {
	t.Helper()
	if addr < base || addr >= base+uint64(len(code)) {
		t.Fatalf("address %#x is outside the program", addr)
	}
	return code[addr-base:]
}

func stringAt(t *testing.T, code []byte, addr uint64) string {
	s, _, ok := strings.Cut(string(at(t, code, addr)), "\x00")
	if !ok {
		t.Fatalf("string at %#x has no end", addr)
	}
	return s
}

func TestEncode(t *testing.T) {
	p := NewProgram()
	p.Clone = 0x1234
	f := p.File(os.Stdin)
	p.IntoCgroup(f)
	s := p.NewSlot()
	p.Call("odd", 7, "abc", 5)
	p.Call("open", 8, f, []byte{1, 2, 3}, ^uint64(99)).Into(s).Unless(unix.ENOENT, func() {
		p.Call("use", 9, s)
		p.Call("close", 10, s)
	})
	p.Exec([]string{"/a", "/b"}, []string{"x"}, nil)
	code, err := p.encode()
	if err != nil {
		t.Fatal(err)
	}
	e := binary.NativeEndian
	if c, g, n := e.Uint64(code), int64(e.Uint64(code[8:])), e.Uint64(code[16:]); c != 0x1234 || g != 1 || n != 5 {
		t.Fatalf("header has %#x, %d, %d", c, g, n)
	}
	steps := at(t, code, e.Uint64(code[24:]))
	if e.Uint64(code[24:])%8 != 0 {
		t.Error("steps are not aligned")
	}
	step := func(i int) []byte { return steps[i*stepSize : (i+1)*stepSize] }
	arg := func(i, k int) uint64 { return e.Uint64(step(i)[8+8*k:]) }
	if got := stringAt(t, code, arg(0, 0)); got != "abc" || arg(0, 1) != 5 {
		t.Errorf("first step has %q, %d", got, arg(0, 1))
	}
	second := step(1)
	if nr, ignore := e.Uint16(second), e.Uint16(second[2:]); nr != 8 || ignore != uint16(unix.ENOENT) {
		t.Errorf("second step is %d, unless %d", nr, ignore)
	}
	if skip, store, slots := second[4], second[5], second[6]; skip != 2 || store != uint8(s) || slots != 1 {
		t.Errorf("second step skips %d, stores in %d, slots %b", skip, store, slots)
	}
	if b := at(t, code, arg(1, 1)); !slices.Equal(b[:3], []byte{1, 2, 3}) || arg(1, 1)%8 != 0 {
		t.Errorf("bytes are %v at %#x", b[:3], arg(1, 1))
	}
	paths := at(t, code, arg(4, 0))
	if a, b, end := stringAt(t, code, e.Uint64(paths)), stringAt(t, code, e.Uint64(paths[8:])), e.Uint64(paths[16:]); a != "/a" || b != "/b" || end != 0 {
		t.Errorf("paths are %q, %q, %d", a, b, end)
	}
	if env := at(t, code, arg(4, 2)); e.Uint64(env) != 0 {
		t.Error("the environment is not empty")
	}
	if got := p.names(); !slices.Equal(got, []string{"odd", "open", "use", "close", "exec"}) {
		t.Errorf("names are %q", got)
	}
	for range maxSlots {
		p.NewSlot()
	}
	if _, err := p.encode(); err == nil {
		t.Error("a program with too many slots is encoded")
	}
}

// TestSpawnOrder holds the order on which the confinement of a command depends.
func TestSpawnOrder(t *testing.T) {
	p := spawnProgram(Spec{
		Paths: []string{"/x"}, Argv: []string{"x"}, Cwd: "/", UID: 1000, NoNewPrivs: true, Terminal: true,
		Stdin: os.Stdin, Stdout: os.Stdin, Stderr: os.Stdin, Cgroup: os.Stdin,
	})
	want := []string{
		"setsid", "stdio", "stdio", "stdio", "terminal", "cgroup-namespace", "no-new-privs", "seccomp",
		"groups", "gid", "uid", "undumpable", "capabilities", "chdir", "descriptors", "signals", "exec",
	}
	if got := p.names(); !slices.Equal(got, want) {
		t.Errorf("steps are %q, want %q", got, want)
	}
	if got := spawnProgram(Spec{Paths: []string{"/x"}, Argv: []string{"x"}, Stdout: os.Stdin, Stderr: os.Stdin, Cgroup: os.Stdin}).names(); !slices.Equal(got[:5], []string{"setsid", "stdin", "stdin", "stdio", "stdio"}) {
		t.Errorf("without standard input steps are %q", got)
	}
	// The filter must let pass all that comes after it.
	allowed := map[uint16]bool{
		unix.SYS_SETGROUPS: true, unix.SYS_SETRESGID: true, unix.SYS_SETRESUID: true, unix.SYS_PRCTL: true, unix.SYS_CAPSET: true,
		unix.SYS_CHDIR: true, unix.SYS_CLOSE_RANGE: true, unix.SYS_RT_SIGPROCMASK: true, opExec: true,
	}
	after := slices.IndexFunc(p.steps, func(s Step) bool { return s.nr == unix.SYS_SECCOMP })
	for _, s := range p.steps[after+1:] {
		if !allowed[s.nr] {
			t.Errorf("step %s after the filter is call %d", s.Name, s.nr)
		}
	}
	for i, s := range p.steps {
		if int(s.nr) == unix.SYS_SETRESUID && p.steps[i+1].Name != "undumpable" {
			t.Errorf("step %d changes the user, and then the process may be dumpable", i)
		}
	}
}

func TestCapabilitiesOfSpawn(t *testing.T) {
	for uid, want := range map[uint32]uint64{0: confine.Capabilities, 1: 0, 65534: 0} {
		p := spawnProgram(Spec{UID: uid, Paths: []string{"/x"}, Argv: []string{"x"}, Stdin: os.Stdin, Stdout: os.Stdin, Stderr: os.Stdin, Cgroup: os.Stdin})
		code, err := p.encode()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range p.steps {
			if s.Name != "capabilities" {
				continue
			}
			data := at(t, code, s.args[1])
			e := binary.NativeEndian
			effective, permitted, inheritable := e.Uint32(data), e.Uint32(data[4:]), e.Uint32(data[8:])
			if uint64(effective) != want || uint64(permitted) != want || inheritable != 0 {
				t.Errorf("uid %d: %#x, %#x, %#x", uid, effective, permitted, inheritable)
			}
		}
	}
}
