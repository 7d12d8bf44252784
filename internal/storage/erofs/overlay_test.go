package erofs_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// overlay mounts layers, the topmost first, with an upper directory unless it is
// "", and returns a path to the root.
func overlay(t *testing.T, upper string, lowers ...string) string {
	t.Helper()
	if upper != "" {
		for _, d := range []string{"data", "work"} {
			if err := os.Mkdir(filepath.Join(upper, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	fd, err := tryOverlay(t, upper, lowers)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.15 detached mounts are refused
		for _, lower := range lowers {
			attach(t, lower)
		}
		fd, err = tryOverlay(t, upper, lowers)
	}
	if err != nil {
		t.Fatalf("mount overlay: %v", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fmt.Sprintf("/proc/self/fd/%d", fd)
}

func tryOverlay(t *testing.T, upper string, lowers []string) (int, error) {
	t.Helper()
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Skipf("no overlay file system: %v", err)
	}
	defer unix.Close(fs)
	set := func(key, value string) {
		t.Helper()
		if err := unix.FsconfigSetString(fs, key, value); err != nil {
			t.Fatalf("fsconfig %s: %v", key, err)
		}
	}
	for _, lower := range lowers {
		set("lowerdir+", lower)
	}
	if upper != "" {
		set("upperdir", filepath.Join(upper, "data"))
		set("workdir", filepath.Join(upper, "work"))
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
}

// attach gives a detached mount, which /proc/self/fd names, a place until the test ends. One that has a place keeps it.
func attach(t *testing.T, mount string) {
	t.Helper()
	var fd int
	if _, err := fmt.Sscanf(mount, "/proc/self/fd/%d", &fd); err != nil {
		return
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(append([]byte("\n"), mounts...), fmt.Appendf(nil, "\n%d ", st.Mnt_id)) {
		return
	}
	dir := t.TempDir()
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatalf("attach %s: %v", mount, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// baseLayer is what the layers of the tests below are put upon.
func baseLayer(t *testing.T) string {
	t.Helper()
	im, _ := fromTar(t, bytes.NewReader(archive(t,
		file("keep", "base"), file("gone", "base"), file("changed", "base"),
		folder("opaque"), file("opaque/old", "base"), folder("merged"), file("merged/old", "base"), file("merged/gone", "base"),
		folder("replaced"), file("replaced/old", "base"), folder("renamed"), file("renamed/a", "base"),
	)), erofs.Options{})
	return im.mount(t)
}

// TestOverlayWhiteouts: the kernel takes translated whiteouts for what they mean.
func TestOverlayWhiteouts(t *testing.T) {
	base := baseLayer(t)
	top, _ := fromTar(t, bytes.NewReader(archive(t,
		file(".wh.gone", ""), file("opaque/.wh..wh..opq", ""), file("opaque/new", "top"),
		file("merged/.wh.gone", ""), file("merged/new", "top"), folder("replaced"), file(".wh.replaced", ""), file("replaced/new", "top"),
	)), erofs.Options{OCIWhiteouts: true})
	root := overlay(t, "", top.mount(t), base)
	want := map[string]bool{
		"keep": true, "gone": false, "opaque/old": false, "opaque/new": true, "merged/old": true, "merged/gone": false,
		"merged/new": true, "replaced/old": false, "replaced/new": true,
	}
	for path, exists := range want {
		if _, err := os.Lstat(filepath.Join(root, path)); (err == nil) != exists {
			t.Errorf("%s: %v", path, err)
		}
	}
	for dir, names := range map[string]int{"opaque": 1, "merged": 2, "replaced": 1} {
		if got, err := os.ReadDir(filepath.Join(root, dir)); err != nil || len(got) != names {
			t.Errorf("%s lists %v, %v", dir, got, err)
		}
	}
}

// TestSnapshotOfUpper: a writable layer, packed and put in its place, gives the
// same tree.
func TestSnapshotOfUpper(t *testing.T) {
	base, upper := baseLayer(t), t.TempDir()
	live := overlay(t, upper, base)
	at := func(p string) string { return filepath.Join(live, p) }
	for _, step := range []func() error{
		func() error { return os.Remove(at("gone")) },
		func() error { return os.WriteFile(at("changed"), []byte("new"), 0o600) },
		func() error { return os.Chmod(at("merged"), 0o700) },
		func() error { return os.Remove(at("merged/gone")) },
		func() error { return os.WriteFile(at("merged/new"), nil, 0o600) },
		func() error { return os.RemoveAll(at("replaced")) },
		func() error { return os.Mkdir(at("replaced"), 0o755) },
		func() error { return os.WriteFile(at("replaced/new"), []byte("new"), 0o644) },
		func() error { return os.Symlink("keep", at("link")) },
		func() error { return os.Link(at("merged/new"), at("hard")) },
		func() error { return unix.Mkfifo(at("fifo"), 0o600) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	top, res := fromDir(t, filepath.Join(upper, "data"), erofs.Options{KeepTrusted: true})
	if len(res.Warnings) > 0 {
		t.Errorf("warnings: %q", res.Warnings)
	}
	top.fsck(t)
	erofstest.Compare(t, live, overlay(t, "", top.mount(t), base))
}
