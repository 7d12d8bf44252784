package datadir

import (
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// The real thing: a file with a btrfs, mounted on the directory that it lies in.
func TestVolume(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := exec.LookPath("mkfs.btrfs"); err != nil {
		t.Skip(err)
	}
	dir := filepath.Join(t.TempDir(), "data")
	slots := t.TempDir()
	open := func(size int64) (*Dir, error) {
		return Open(dir, Options{Rand: rand.Reader, Slots: slots, Size: size})
	}
	t.Cleanup(func() {
		for range 4 {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	if _, err := open(MinVolume - 1); errs.KindOf(err) != errs.Invalid {
		t.Fatalf("a volume that is too small: %v", err)
	}
	d, err := open(MinVolume)
	if err != nil {
		t.Skip("no volume can be mounted here: ", err)
	}
	kept := filepath.Join(dir, "events", "kept")
	if err := os.WriteFile(kept, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	capacity := func() int64 {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		if st.Type != unix.BTRFS_SUPER_MAGIC || st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 {
			t.Fatalf("type %x, flags %x", st.Type, st.Flags)
		}
		return int64(st.Blocks) * st.Bsize
	}
	if !d.OwnVolume() || capacity() != MinVolume {
		t.Fatalf("own volume %v, %d bytes", d.OwnVolume(), capacity())
	}
	edge := d.Edge()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	// A restart of the server finds it mounted; another size has to wait.
	if d, err = open(0); err != nil || d.Edge() != edge {
		t.Fatalf("a restart: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := open(2 * MinVolume); errs.KindOf(err) != errs.Precondition {
		t.Fatalf("growing what is mounted: %v", err)
	}
	if d, err = open(0); err != nil {
		t.Fatal(err)
	}
	if err := d.Down(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(kept); !os.IsNotExist(err) {
		t.Fatalf("the volume is still mounted: %v", err)
	}
	if _, err := Inspect(dir); errs.KindOf(err) != errs.NotFound {
		t.Fatalf("inspect: %v", err)
	}
	// It grows, keeps what it has, and does not shrink; also while somebody else keeps the loop device from going.
	if d, err = open(0); err != nil {
		t.Fatal(err)
	}
	device, err := exec.Command("findmnt", "-n", "-o", "SOURCE", dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	holder, err := os.Open(strings.Fields(string(device))[0])
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close()
	if err := d.Down(); err != nil {
		t.Fatal(err)
	}
	if d, err = open(MinVolume + 512<<20); err != nil {
		t.Fatal(err)
	}
	holder.Close()
	if _, err := os.Lstat(kept); err != nil || d.Edge() != edge || capacity() != MinVolume+512<<20 {
		t.Fatalf("after growing: %v, edge %s, %d bytes", err, d.Edge(), capacity())
	}
	if err := d.Down(); err != nil {
		t.Fatal(err)
	}
	if _, err := open(MinVolume); errs.KindOf(err) != errs.Precondition {
		t.Fatalf("shrinking: %v", err)
	}
	if out, err := exec.Command("losetup", "-a").Output(); err != nil || strings.Contains(string(out), dir) {
		t.Errorf("a loop device is left: %s %v", out, err)
	}
}

// A directory that is in use without a volume is not hidden below one.
func TestVolumeOverDataIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	slots := t.TempDir()
	used, foreign := t.TempDir(), t.TempDir()
	d, err := Open(used, Options{Rand: rand.Reader, Slots: slots})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Down(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(foreign, "mine"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{used, foreign} {
		if _, err := Open(dir, Options{Rand: rand.Reader, Slots: slots, Size: MinVolume}); errs.KindOf(err) != errs.Precondition {
			t.Errorf("%s: %v", dir, err)
		}
		if _, err := os.Lstat(filepath.Join(dir, volumeName)); err == nil {
			t.Error("a volume was made")
		}
	}
}
