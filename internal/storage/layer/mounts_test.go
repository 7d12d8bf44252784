package layer

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

func TestImportedTarIsMounted(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	big := strings.Repeat("0123456789abcdef", 1<<16)
	im := importFiles(t, s, "tools:1", Toolkit, entry{name: "opt/"}, entry{"opt/big", big, 0o600}, entry{"opt/su", "x", 0o4755})
	dir, err := m.Acquire(context.Background(), im.Layer.Digest, "one")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("mode %s", m.Mode())
	if want := filepath.Join(s.mounts, im.Layer.Digest.Hex()); dir != want {
		t.Errorf("directory %s, want %s", dir, want)
	}
	got, err := os.ReadFile(filepath.Join(dir, "opt/big"))
	if err != nil || string(got) != big {
		t.Errorf("read back %d bytes, %v", len(got), err)
	}
	info, err := os.Stat(filepath.Join(dir, "opt/su"))
	if err != nil || info.Mode() != 0o755|os.ModeSetuid {
		t.Errorf("mode of the setuid file: %v, %v", info, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "x"), nil, 0o600); err == nil {
		t.Error("the mount can be written")
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if st.Flags&unix.ST_NODEV == 0 || st.Flags&unix.ST_RDONLY == 0 || st.Flags&unix.ST_NOSUID != 0 {
		t.Errorf("mount flags %#x: want nodev and read-only, not nosuid", st.Flags)
	}
}

func TestEachMountMode(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	im := importFiles(t, s, "a", Base, entry{"f", strings.Repeat("content ", 3000), 0})
	for _, mode := range []MountMode{ModeDirect, ModeFile, ModeLoop} {
		t.Run(string(mode), func(t *testing.T) {
			m := &Mounts{store: s, dir: m.dir, mode: mode, entries: make(map[Digest]*mountEntry)}
			dir, err := m.Acquire(context.Background(), im.Layer.Digest, "x")
			if err != nil {
				t.Skipf("not on this kernel: %v", err)
			}
			b, err := os.ReadFile(filepath.Join(dir, "f"))
			if err != nil || string(b) != strings.Repeat("content ", 3000) {
				t.Errorf("read back %d bytes, %v", len(b), err)
			}
			if err := m.Release("x"); err != nil {
				t.Error(err)
			}
			if n := mountCount(t, dir); n != 0 {
				t.Errorf("%d mounts left", n)
			}
		})
	}
}

func mountCount(t *testing.T, dir string) int {
	t.Helper()
	below, err := mountsBelow(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(below)
}

func TestConcurrentAcquireMountsOnce(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 0)
	im := importFiles(t, s, "a", Base, entry{"f", "content", 0})
	for round := range 5 {
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				owner := string(rune('A' + i))
				dir, err := m.Acquire(context.Background(), im.Layer.Digest, owner)
				if err != nil {
					t.Error(err)
					return
				}
				if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != "content" {
					t.Errorf("read %q, %v", b, err)
				}
				if i%2 == 1 {
					if err := m.Release(owner); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if n := mountCount(t, m.path(im.Layer.Digest)); n != 1 {
			t.Fatalf("round %d: mounted %d times", round, n)
		}
		for i := range 50 {
			if err := m.Release(string(rune('A' + i))); err != nil {
				t.Error(err)
			}
		}
		if n := mountCount(t, m.path(im.Layer.Digest)); n != 0 {
			t.Fatalf("round %d: still mounted %d times", round, n)
		}
	}
}

// Owners come and go while nothing is kept: every Acquire must see the content.
func TestAcquireAgainstUnmount(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 0)
	im := importFiles(t, s, "a", Base, entry{"f", "content", 0})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			owner := string(rune('A' + i))
			for range 40 {
				dir, err := m.Acquire(context.Background(), im.Layer.Digest, owner)
				if err != nil {
					t.Error(err)
					return
				}
				if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != "content" {
					t.Errorf("read %q, %v", b, err)
					return
				}
				if err := m.Release(owner); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := mountCount(t, s.mounts); n != 1 { // the private mount itself
		t.Errorf("%d mounts left", n-1)
	}
	if len(m.entries) != 0 {
		t.Errorf("%d entries left", len(m.entries))
	}
}

func TestIdleMountsAreBounded(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 2)
	var ds []Digest
	for _, n := range []string{"a", "b", "c", "d"} {
		d := importFiles(t, s, n, Base, entry{"f", n, 0}).Layer.Digest
		ds = append(ds, d)
		if _, err := m.Acquire(context.Background(), d, n); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []string{"b", "a", "d", "c"} {
		if err := m.Release(n); err != nil {
			t.Fatal(err)
		}
	}
	if idle := m.Idle(); len(idle) != 2 || idle[0] != ds[3] || idle[1] != ds[2] {
		t.Errorf("idle mounts %v, want d and c", idle)
	}
	if n := mountCount(t, s.mounts); n != 3 {
		t.Errorf("%d mounts", n-1)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if n := mountCount(t, s.mounts); n != 0 {
		t.Errorf("%d mounts after Close", n)
	}
}

func TestMountsAreFoundAgain(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	m := openMounts(t, s, 4)
	used := importFiles(t, s, "used", Base, entry{"f", "used", 0}).Layer.Digest
	idle := importFiles(t, s, "idle", Base, entry{"f", "idle", 0}).Layer.Digest
	for _, d := range []Digest{used, idle} {
		if _, err := m.Acquire(context.Background(), d, "x"); err != nil {
			t.Fatal(err)
		}
	}

	s = openStore(t, dir)
	m = openMounts(t, s, 4)
	m.Adopt(used, "x")
	if n := mountCount(t, s.mounts); n != 3 {
		t.Errorf("%d mounts after reopening", n-1)
	}
	if _, err := m.Acquire(context.Background(), used, "y"); err != nil {
		t.Fatal(err)
	}
	if n := mountCount(t, m.path(used)); n != 1 {
		t.Errorf("mounted %d times", n)
	}
	if got := m.Idle(); len(got) != 1 || got[0] != idle {
		t.Errorf("idle: %v", got)
	}
	if err := m.Close(); !errs.Is(err, errs.Precondition) {
		t.Errorf("Close with owners: %v", err)
	}
	if err := m.Sweep(); err != nil {
		t.Fatal(err)
	}
	if n := mountCount(t, s.mounts); n != 2 {
		t.Errorf("%d mounts after the sweep", n-1)
	}
	if err := m.Release("x"); err != nil {
		t.Fatal(err)
	}
	if !m.InUse()[used] {
		t.Error("y lost the layer when x released it")
	}
}

func TestLeaks(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	d := importFiles(t, s, "a", Base, entry{"f", "x", 0}).Layer.Digest
	dir, err := m.Acquire(context.Background(), d, "x")
	if err != nil {
		t.Fatal(err)
	}
	if leaks, err := m.Leaks(); err != nil || len(leaks) != 0 {
		t.Fatalf("leaks of a healthy node: %v, %v", leaks, err)
	}
	if _, err := m.mount(context.Background(), d, false); err != nil { // a second mount over the first
		t.Fatal(err)
	}
	other := filepath.Join(s.mounts, "other")
	stray := filepath.Join(s.mounts, strings.Repeat("0", 64))
	for _, p := range []string{other, stray} {
		if err := os.Mkdir(p, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("none", other, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	leaks, err := m.Leaks()
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]string)
	for _, l := range leaks {
		found[l.Name] = l.Kind
		if err := l.Release(); err != nil {
			t.Errorf("release %s: %v", l.Name, err)
		}
	}
	if len(found) != 3 || found[dir] != "mount" || found[other] != "mount" || found[stray] != "directory" {
		t.Errorf("leaks: %v", found)
	}
	leaks, err = m.Leaks() // the directory under the foreign mount shows now
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leaks {
		if err := l.Release(); err != nil {
			t.Error(err)
		}
	}
	if leaks, err := m.Leaks(); err != nil || len(leaks) != 0 {
		t.Errorf("leaks after release: %v, %v", leaks, err)
	}
	if n := mountCount(t, dir); n != 1 {
		t.Errorf("the layer is mounted %d times", n)
	}
}

func TestAcquireUnknownLayer(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	_, err := m.Acquire(context.Background(), Digest(digestPrefix+strings.Repeat("a", 64)), "x")
	if !errs.Is(err, errs.NotFound) {
		t.Errorf("got %v", err)
	}
	if len(m.entries) != 0 || len(m.InUse()) != 0 {
		t.Error("a failed Acquire left an owner")
	}
}

func TestLongDataPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120), strings.Repeat("e e", 40))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	m := openMounts(t, s, 0)
	d := importFiles(t, s, "a", Base, entry{"f", "x", 0}).Layer.Digest
	mounted, err := m.Acquire(context.Background(), d, "x")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(mounted, "f")); err != nil || string(b) != "x" {
		t.Errorf("read %q, %v", b, err)
	}
	if found, err := m.scan(); err != nil || found.layers[d] != 1 {
		t.Errorf("found %v, %v", found, err)
	}
}

// TestLostMount: a layer whose mount was taken away from outside is mounted again, not given out as an empty directory.
func TestLostMount(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	d := importFiles(t, s, "a", Base, entry{"f", "x", 0}).Layer.Digest
	for _, owner := range []string{"x", "x", "y"} {
		dir, err := m.Acquire(context.Background(), d, owner)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(dir, "f")); err != nil {
			t.Errorf("acquired for %s: %v", owner, err)
		}
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	for _, owner := range []string{"x", "y"} {
		if err := m.Release(owner); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Sweep(); err != nil {
		t.Errorf("a mount that is gone cannot be given up: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestDamagedLayer: whoever uses it is told so, and the other layers are not affected.
func TestDamagedLayer(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	torn := importFiles(t, s, "torn", Base, entry{"f", "x", 0}).Layer
	cut := importFiles(t, s, "cut", Base, entry{"f", "y", 0}).Layer
	fine := importFiles(t, s, "fine", Base, entry{"other", "other", 0}).Layer
	if err := os.Truncate(s.local.path(cut.Meta.Digest), 100); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.manifestPath(torn.Digest), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.forget([]Digest{torn.Digest})
	for _, d := range []Digest{torn.Digest, cut.Digest} {
		if _, err := m.Acquire(context.Background(), d, "x"); !errs.Is(err, errs.Precondition) || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("%s: %v", d, err)
		}
	}
	if _, err := m.Acquire(context.Background(), fine.Digest, "x"); err != nil {
		t.Error(err)
	}
	n := 0
	if err := s.walkManifests(context.Background(), func(Digest) error { n++; return nil }); err != nil || n != 3 {
		t.Errorf("%d layers, %v", n, err)
	}
	if err := m.Release("x"); err != nil {
		t.Error(err)
	}
	if err := m.Sweep(); err != nil {
		t.Error(err)
	}
}
