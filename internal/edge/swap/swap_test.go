package swap

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

func TestParseSwaps(t *testing.T) {
	got := parseSwaps("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/zram1 partition\t1024\t\t4\t\t100\n/a\\040b/swapfile file 8 0 -2\nnonsense\nx y z w v\n")
	want := []area{{"/dev/zram1", 1 << 20, 4 << 10}, {"/a b/swapfile", 8 << 10, 0}}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestHeader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, size := range []int64{0, 4096, 1 << 45} {
		if _, err := makeHeader(size, [16]byte{}, "x"); !errs.Is(err, errs.Invalid) {
			t.Errorf("swap of %d bytes: %v", size, err)
		}
	}
	b, err := makeHeader(1<<20, [16]byte{1}, "harena-abcdefz")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := labelOf(path); got != "harena-abcdefz" {
		t.Errorf("label %q", got)
	}
	for _, content := range []string{"", string(make([]byte, 8192))} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := labelOf(path); got != "" {
			t.Errorf("label %q of no swap", got)
		}
	}
}

func active(t *testing.T, s *Swap) int {
	t.Helper()
	all, err := s.sys.list()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, a := range all {
		if l := labelOf(a.path); l == s.label("z") || l == s.label("f") {
			n++
		}
	}
	return n
}

// TestNode makes real swap, finds it again, changes and removes it.
func TestNode(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("swap needs root")
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-swap-")
	if err != nil {
		t.Fatal(err)
	}
	size := func(n int64) *int64 { return &n }
	last := &Swap{}
	t.Cleanup(func() {
		if last.dir != "" {
			if err := last.Remove(); err != nil {
				t.Error(err)
			}
		}
		_ = os.RemoveAll(dir)
	})
	open := func(w Want) *Swap {
		t.Helper()
		s, err := Open(dir, "abcdef", w)
		if errs.Is(err, errs.Unsupported) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		last = s
		return s
	}
	zrams := len((&Swap{sys: system{sys: "/sys"}}).zrams())
	if s := open(Want{}); active(t, s) != 0 {
		t.Error("swap that nobody asked for")
	}
	if s := open(Want{Zram: size(8 << 20), File: size(4<<20 + 5)}); active(t, s) != 2 {
		t.Errorf("%d areas, want 2", active(t, s))
	}
	if s := open(Want{}); active(t, s) != 2 {
		t.Errorf("after a restart: %d areas, want 2", active(t, s))
	}
	// As a kill between two steps leaves it.
	for _, name := range last.zrams() {
		if path := last.sys.device(name); labelOf(path) == last.label("z") {
			if err := swapOff(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	if s := open(Want{Zram: size(8 << 20)}); active(t, s) != 2 {
		t.Errorf("after a kill: %d areas, want 2", active(t, s))
	}
	if s := open(Want{Zram: size(16 << 20), File: size(0)}); active(t, s) != 1 {
		t.Errorf("another size: %d areas, want 1", active(t, s))
	}
	if err := last.Remove(); err != nil || active(t, last) != 0 {
		t.Errorf("removed: %v, %d areas", err, active(t, last))
	}
	if s := open(Want{}); active(t, s) != 1 {
		t.Errorf("up again: %d areas, want 1", active(t, s))
	}
	if c := last.Checks(); len(c) != 1 || c[0].GetStatus() != "ok" {
		t.Errorf("checks: %v", c)
	}
	if s := open(Want{Zram: size(0)}); active(t, s) != 0 {
		t.Errorf("switched off: %d areas", active(t, s))
	}
	if n := len(last.zrams()); n != zrams {
		t.Errorf("%d zram devices, there were %d", n, zrams)
	}
	for _, w := range []Want{{Zram: size(-1)}, {File: size(100)}} {
		if _, err := Open(dir, "abcdef", w); !errs.Is(err, errs.Invalid) {
			t.Errorf("%v: %v", w, err)
		}
	}
}
