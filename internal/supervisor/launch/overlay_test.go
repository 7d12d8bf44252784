package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// The way for kernels that take no descriptors works on those that do, too.
func TestMountAttached(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	const idBase = 1 << 30
	dir, err := os.MkdirTemp("/var/tmp", "harena-attached-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for _, d := range []string{"a", "b", "upper/data", "upper/work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"a/both", "b/both", "b/below"} {
		if err := os.WriteFile(filepath.Join(dir, f), []byte(f), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	image, err := zygote.NewImage()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	userns, release, err := image.UserNamespace(idBase, idRange)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	mountsBefore, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	namespaceBefore, _ := os.Readlink("/proc/thread-self/ns/mnt")

	var opened []int
	keep := func(fd int, err error) (int, error) {
		if err == nil {
			opened = append(opened, fd)
		}
		return fd, err
	}
	defer func() {
		for _, fd := range opened {
			unix.Close(fd)
		}
	}()
	l, err := clones([]string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}, filepath.Join(dir, "upper/data"), filepath.Join(dir, "upper/work"), userns, keep)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := mountAttached(l, idBase, keep)
	if err != nil {
		t.Fatal(err)
	}
	root := os.NewFile(uintptr(fd), "overlay")
	defer root.Close()
	for name, want := range map[string]string{"both": "a/both", "below": "b/below"} {
		f, err := unix.Openat(fd, name, unix.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		n, _ := unix.Read(f, buf)
		unix.Close(f)
		if string(buf[:n]) != want {
			t.Errorf("%s is %q, want %q", name, buf[:n], want)
		}
	}
	if err := asOwner(idBase, func() error { return unix.Mkdirat(fd, "made", 0o700) }); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "upper/data/made"), &st); err != nil || st.Uid != 0 {
		t.Errorf("made inside: owner %d on disk, %v", st.Uid, err)
	}
	mountsAfter, _ := os.ReadFile("/proc/self/mountinfo")
	if strings.Contains(string(mountsAfter), dir) && !strings.Contains(string(mountsBefore), dir) {
		t.Errorf("a mount of the start is seen on the node:\n%s", mountsAfter)
	}
	if ns, _ := os.Readlink("/proc/thread-self/ns/mnt"); ns != namespaceBefore {
		t.Errorf("a thread stayed in another mount namespace: %s, was %s", ns, namespaceBefore)
	}
}
