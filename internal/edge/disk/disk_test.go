package disk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/disk"
)

// mounted makes a file system in a file and mounts it.
func mounted(t *testing.T, size int64, options string, mkfs ...string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := exec.LookPath(mkfs[0]); err != nil {
		t.Skip(err)
	}
	img := filepath.Join(t.TempDir(), "image")
	dir := t.TempDir()
	if err := os.WriteFile(img, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(img, size); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(mkfs[0], append(mkfs[1:], img)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", mkfs, err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop"+options, img, dir).CombinedOutput(); err != nil {
		t.Skipf("this kernel does not mount it: %s", out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// asOverlayfs makes the calling goroutine do what overlayfs does for a sandbox: write without the capability to exceed quotas
// (fs/overlayfs/super.c), which ext4 would respect.
func asOverlayfs(t *testing.T) (undo func()) {
	t.Helper()
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all, less [2]unix.CapUserData
	if err := unix.Capget(&header, &all[0]); err != nil {
		t.Fatal(err)
	}
	less = all
	less[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	if err := unix.Capset(&header, &less[0]); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Capset(&header, &all[0]); err != nil {
			t.Error(err)
		}
		runtime.UnlockOSThread()
	}
}

// fill writes until it fails and returns the bytes that a file got.
func fill(t *testing.T, path string, most int) (int, error) {
	t.Helper()
	defer asOverlayfs(t)()
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	block := bytes.Repeat([]byte{0xa5}, 64<<10)
	n := 0
	for n < most {
		k, err := f.Write(block)
		n += k
		if err != nil {
			return n, err
		}
	}
	return n, f.Sync()
}

// fillFiles makes empty files until it fails, which it has to do at most before there are more.
func fillFiles(t *testing.T, dir string, most int) {
	t.Helper()
	defer asOverlayfs(t)()
	for i := range most + 1 {
		err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600)
		if errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC) {
			if i < most/2 {
				t.Errorf("only %d files could be made where %d may be", i, most)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Errorf("more than %d files were made", most)
}

func TestQuotas(t *testing.T) {
	for _, fs := range []struct {
		name    string
		mode    disk.Mode
		options string
		mkfs    []string
	}{
		{"btrfs", disk.ModeSubvolume, "", []string{"mkfs.btrfs", "-q", "-m", "single"}},
		{"ext4", disk.ModeProject, ",prjquota", []string{"mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"}},
		{"xfs", disk.ModeProject, ",prjquota", []string{"mkfs.xfs", "-q"}},
	} {
		t.Run(fs.name, func(t *testing.T) {
			root := mounted(t, 400<<20, fs.options, fs.mkfs...)
			d, err := disk.Open(root, true)
			if err != nil {
				t.Fatal(err)
			}
			if d.Mode() != fs.mode {
				if fs.mode == disk.ModeProject && d.Mode() == disk.ModeWatch {
					t.Skip("this kernel has no project quotas for it")
				}
				t.Fatalf("mode %s, want %s", d.Mode(), fs.mode)
			}
			const limit = 8 << 20
			a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
			for _, p := range []string{a, b} {
				if err := d.Make(p, limit); err != nil {
					t.Fatal(err)
				}
				for _, sub := range []string{"data", "work"} {
					if err := os.Mkdir(filepath.Join(p, sub), 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}
			n, err := fill(t, filepath.Join(a, "data", "f"), 2*limit)
			if n > limit || !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC) {
				t.Fatalf("%d bytes were written below a limit of %d: %v", n, limit, err)
			}
			if n < limit/2 {
				t.Fatalf("only %d bytes could be written below a limit of %d", n, limit)
			}
			if used, ok := d.Used(a); !ok || used > limit || used < int64(n)/2 {
				t.Errorf("used %d (%v), %d bytes were written", used, ok, n)
			}
			// Its neighbour is not concerned, and files move between the two directories of a layer.
			if _, err := fill(t, filepath.Join(b, "work", "f"), limit/2); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(filepath.Join(b, "work", "f"), filepath.Join(b, "data", "f")); err != nil {
				t.Fatal(err)
			}
			if err := d.SetLimit(a, 2*limit); err != nil {
				t.Fatal(err)
			}
			if _, err := fill(t, filepath.Join(a, "data", "g"), limit/2); err != nil {
				t.Fatalf("a raised limit does not count: %v", err)
			}
			if fs.mode == disk.ModeProject {
				fillFiles(t, filepath.Join(b, "data"), limit/4096)
			}
			parent, err := os.Open(root)
			if err != nil {
				t.Fatal(err)
			}
			defer parent.Close()
			if erased := disk.Erase(int(parent.Fd()), "a"); erased != (fs.mode == disk.ModeSubvolume) {
				t.Errorf("erased at once: %v", erased)
			}
			if disk.Erase(int(parent.Fd()), "b/data") || disk.Erase(int(parent.Fd()), "nothing") {
				t.Error("what is no subvolume was erased")
			}
		})
	}
}

// TestCopy: a copy has what was written before it, through a mapping too, and nothing that was written after it.
func TestCopy(t *testing.T) {
	root := mounted(t, 400<<20, "", "mkfs.btrfs", "-q", "-m", "single")
	d, err := disk.Open(root, true)
	if err != nil || !d.Copies() {
		t.Fatalf("copies %v, %v", d.Copies(), err)
	}
	a := filepath.Join(root, "a")
	if err := d.Make(a, 64<<20); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(a, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(m) }()
	for _, round := range []string{"one", "two"} {
		copy(m[4096:], round)
		if err := errors.Join(os.WriteFile(filepath.Join(a, "g"), []byte(round), 0o600), os.Link(filepath.Join(a, "g"), filepath.Join(a, "link-"+round))); err != nil {
			t.Fatal(err)
		}
		if err := d.Copy(a, filepath.Join(root, round)); err != nil {
			t.Fatal(err)
		}
		copy(m[4096:], "xxx")
		if err := os.WriteFile(filepath.Join(a, "g"), []byte("xxx"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, round := range []string{"one", "two"} {
		b, err := os.ReadFile(filepath.Join(root, round, "f"))
		if err != nil || len(b) != 1<<20 || string(b[4096:4099]) != round {
			t.Errorf("%s: %d bytes, %v", round, len(b), err)
		}
		if b, err := os.ReadFile(filepath.Join(root, round, "link-"+round)); err != nil || string(b) != round {
			t.Errorf("%s: %q, %v", round, b, err)
		}
		if err := os.WriteFile(filepath.Join(root, round, "h"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("a copy was written to: %v", err)
		}
	}
	parent, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	if !disk.Erase(int(parent.Fd()), "one") {
		t.Error("a copy was not erased")
	}
	if err := d.Copy(filepath.Join(root, "nothing"), filepath.Join(root, "x")); err == nil {
		t.Error("nothing was copied")
	}
}

func TestPlainFileSystemIsWatched(t *testing.T) {
	root := mounted(t, 64<<20, "", "mkfs.ext4", "-q")
	d, err := disk.Open(root, true)
	if err == nil && d.Copy(root, filepath.Join(root, "x")) == nil {
		t.Error("copied at once")
	}
	if err != nil || d.Mode() != disk.ModeWatch || d.Reflinks() {
		t.Fatalf("mode %s, reflinks %v, %v", d.Mode(), d.Reflinks(), err)
	}
}

func TestMeasure(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, n int) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), bytes.Repeat([]byte{1}, n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	size := func() int64 {
		t.Helper()
		n, err := disk.Measure(context.Background(), dir)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	empty := size()
	write("a", 1<<20)
	if n := size() - empty; n < 1<<20 || n > 1<<20+64<<10 {
		t.Errorf("a file of 1 MiB counts %d", n)
	}
	one := size()
	if err := os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/usr", filepath.Join(dir, "c")); err != nil {
		t.Fatal(err)
	}
	if n := size() - one; n > 64<<10 {
		t.Errorf("a second name and a link count %d", n)
	}
	// Deeper than descriptors are held for, and than a path can name.
	if err := syscall.Mkdir(filepath.Join(dir, "deep"), 0o700); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(filepath.Join(dir, "deep"), unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 2200 {
		if err := unix.Mkdirat(fd, "dd", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "dd", unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	if n := size() - one; n < 2200*4096 {
		t.Errorf("2,200 nested directories count %d", n)
	}
}

func TestUnlinkedFilesCount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir := t.TempDir()
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	merged := filepath.Join(dir, "merged")
	options := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", dir)
	if err := unix.Mount("overlay", merged, "overlay", 0, options); err != nil {
		t.Skip("no overlay on this file system: ", err)
	}
	defer unix.Unmount(merged, 0)
	f, err := os.Create(filepath.Join(merged, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	pids := []int{os.Getpid(), os.Getpid()}
	before := disk.Unlinked(pids)
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	if n := disk.Unlinked(pids) - before; n < 1<<20 || n > 2<<20 {
		t.Errorf("a file of 1 MiB without a name counts %d", n)
	}
}
