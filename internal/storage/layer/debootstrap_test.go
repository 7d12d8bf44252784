package layer

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

func TestParseBootstrap(t *testing.T) {
	for in, want := range map[string]string{
		"debootstrap:bookworm":                    "debootstrap:bookworm",
		"debootstrap:bookworm:":                   "debootstrap:bookworm",
		"debootstrap:bookworm:python3,git,git":    "debootstrap:bookworm:git,python3",
		"debootstrap:bookworm:g++, libstdc++-12":  "",
		"debootstrap:bookworm: g++,libc6.1-dev":   "debootstrap:bookworm:g++,libc6.1-dev",
		"debootstrap:":                            "",
		"debootstrap:../../tmp/script":            "",
		"debootstrap:--foreign":                   "",
		"debootstrap:bookworm:--no-check-gpg":     "",
		"debootstrap:bookworm:a b":                "",
		"debootstrap:bookworm:git --no-check-gpg": "",
		"tar:x": "",
	} {
		if in == "debootstrap:bookworm:g++, libstdc++-12" {
			want = "debootstrap:bookworm:g++,libstdc++-12"
		}
		b, err := ParseBootstrap(in)
		got := ""
		if err == nil {
			got = b.String()
		} else if !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", in, err)
		}
		if got != want {
			t.Errorf("%q: got %q, want %q (%v)", in, got, want, err)
		}
	}
}

func TestBootstrapErrors(t *testing.T) {
	m := mirror{URI: "http://user:secret@deb.example/debian", Suite: "bookworm", Components: []string{"main"}}
	for _, c := range []struct {
		output string
		kind   errs.Kind
		text   string
	}{
		{"I: Resolving\nE: Couldn't find these debs: nosuch nomore", errs.NotFound, "has no package nosuch, nomore"},
		{"E: No such script: /usr/share/debootstrap/scripts/x", errs.NotFound, "does not know the suite"},
		{"tar: ./usr: Cannot write: No space left on device\nE: x", errs.Capacity, "no space left"},
		{"E: Failed getting release file http://x", errs.Precondition, "release file"},
		{"E: Release signed by unknown key (key id 1)", errs.Precondition, "not signed by a key"},
		{"E: Couldn't download packages: git", errs.Precondition, "did not deliver git"},
		{"W: Failure while configuring base packages.\nE: gave up", errs.Precondition, "Failure while configuring base packages.; gave up"},
		{"sh: strange", errs.Precondition, "sh: strange"},
		{"", errs.Precondition, "exit"},
	} {
		err := bootstrapError(context.Background(), Bootstrap{Suite: "bookworm"}, m, strings.Split(c.output, "\n"), errors.New("exit status 1"))
		err = diskError(err, "/data")
		if !errs.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", c.output, err)
		}
	}
}

func TestTrimCache(t *testing.T) {
	dir := t.TempDir()
	for i, n := range []string{"old", "middle", "new"} {
		p := filepath.Join(dir, n)
		if err := os.WriteFile(p, make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000*i), 0)
		if err := os.Chtimes(p, at, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := trimCache(dir, 250); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(left) != 2 || filepath.Base(left[0]) != "middle" {
		t.Errorf("left %v", left)
	}
}

func needDebootstrap(t *testing.T) {
	t.Helper()
	needRoot(t)
	if _, err := exec.LookPath("debootstrap"); err != nil {
		t.Skip("debootstrap is not installed")
	}
	m, err := readMachineSources("/")
	if err != nil {
		t.Fatal(err)
	}
	mir, err := m.mirrorOf("bookworm")
	if err != nil {
		t.Skipf("no mirror: %v", err)
	}
	if _, err := mir.check(context.Background()); err != nil {
		t.Skipf("no mirror: %v", err)
	}
}

// A real bootstrap, below a data directory that is mounted nosuid,nodev as a node's is.
func TestDebootstrap(t *testing.T) {
	if testing.Short() {
		t.Skip("takes about a minute")
	}
	needDebootstrap(t)
	dir := t.TempDir()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmountAll(t, dir) })
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	phases := make(map[string]int)
	b, err := ParseBootstrap("debootstrap:bookworm:hello")
	if err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	im, err := s.ImportDebootstrap(context.Background(), b, ImportOptions{
		Name: "debian:12", Kind: Base, Progress: func(p Progress) { phases[p.Phase]++ },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%v; %+v; warnings %v", time.Since(started), im.Layer, im.Warnings)
	for _, p := range []string{PhaseFetching, PhaseBuilding, PhaseStoring} {
		if phases[p] == 0 {
			t.Errorf("phase %s was not reported: %v", p, phases)
		}
	}
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
	if debs, _ := os.ReadDir(filepath.Join(dir, "cache", "debs")); len(debs) < 50 {
		t.Errorf("%d packages cached", len(debs))
	}
	m := openMounts(t, s, 0)
	root, err := m.Acquire(context.Background(), im.Layer.Digest, "x")
	if err != nil {
		t.Fatal(err)
	}
	checkBootstrapped(t, root)
	problems, err := s.Verify(context.Background(), im.Layer.Digest, nil)
	if err != nil || len(problems) != 0 {
		t.Errorf("verify: %v, %v", problems, err)
	}
	out, err := exec.Command("chroot", root, "/usr/bin/hello").CombinedOutput()
	if err != nil || string(out) != "Hello, world!\n" {
		t.Errorf("hello says %q, %v", out, err)
	}
	t.Run("cancel", func(t *testing.T) { cancelBootstrap(t, s) })
	t.Run("refusals", func(t *testing.T) { refuseBootstrap(t, s) })
}

func checkBootstrapped(t *testing.T, root string) {
	t.Helper()
	hostname, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"dev", "proc", "sys", "run", "tmp", "var/cache/apt", "var/lib/apt/lists"} {
		if e, err := os.ReadDir(filepath.Join(root, d)); err != nil || len(e) != 0 {
			t.Errorf("/%s holds %v, %v", d, e, err)
		}
	}
	for name, want := range map[string]string{"machine-id": "", "resolv.conf": "", "hostname": "localhost\n"} {
		if b, err := os.ReadFile(filepath.Join(root, "etc", name)); err != nil || string(b) != want {
			t.Errorf("/etc/%s is %q, %v", name, b, err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(root, "etc/apt/sources.list")); err != nil || !strings.Contains(string(b), " bookworm main") {
		t.Errorf("sources.list: %q, %v", b, err)
	}
	if info, err := os.Stat(filepath.Join(root, "usr/bin/passwd")); err != nil || info.Mode()&os.ModeSetuid == 0 {
		t.Errorf("passwd: %v, %v", info, err)
	}
	if info, err := os.Stat(root); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("root: %v, %v", info, err)
	}
	err = filepath.WalkDir(filepath.Join(root, "etc"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if len(hostname) > 3 && strings.Contains(string(b), hostname) {
			t.Errorf("%s names this machine", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// A bootstrap that is cancelled in the middle leaves no process, mount or file.
func cancelBootstrap(t *testing.T, s *Store) {
	b := Bootstrap{Suite: "bookworm"}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	_, err := s.ImportDebootstrap(ctx, b, ImportOptions{Name: "cancelled", Kind: Base, Progress: func(p Progress) {
		if strings.HasPrefix(p.Message, "Extracting") {
			cancel()
		}
	}})
	if !errs.Is(err, errs.Cancelled) {
		t.Errorf("got %v", err)
	}
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
	mounts, err := readMountInfo()
	if err != nil {
		t.Error(err)
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.point, s.dir+"/") {
			t.Errorf("left mounted: %s", m.point)
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if b, _ := os.ReadFile(p); strings.Contains(string(b), s.tmp()) {
			t.Errorf("still running: %q", b)
		}
	}
}

func refuseBootstrap(t *testing.T, s *Store) {
	for source, kind := range map[string]errs.Kind{
		"debootstrap:bookwurm":                      errs.NotFound,
		"debootstrap:bookworm:no-such-package-here": errs.NotFound,
	} {
		b, err := ParseBootstrap(source)
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.ImportDebootstrap(context.Background(), b, ImportOptions{Name: "x", Kind: Base})
		var e *errs.Error
		if !errors.As(err, &e) || e.Kind != kind || e.Hint == "" {
			t.Errorf("%s: %v", source, err)
		}
		t.Logf("%s: %v", source, err)
	}
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
}
