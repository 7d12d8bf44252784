package launch_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/supervisor/launch"
)

func TestChecks(t *testing.T) {
	requireRoot(t)
	root, err := openCgroups()
	mustDo(t, err)
	dir := scratch(t)
	base := int(3_900_000_000 + 65536*idBases.Add(1))
	for _, c := range launch.Checks(launch.Probe{Dir: dir, Layer: dir, Group: root.Dir(), IDBase: base}) {
		t.Log(c)
		if c.GetStatus() != "ok" && c.GetName() != "procfs.pidns" && c.GetName() != "node.shared-limits" {
			t.Errorf("%s: %s: %s", c.GetName(), c.GetStatus(), c.GetDetail())
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestChecksTell: a file system without mapped IDs is reported, and a start on it refused, with what to do.
func TestChecksTell(t *testing.T) {
	requireRoot(t)
	// ramfs has no FS_ALLOW_IDMAP.
	dir := scratch(t)
	mustDo(t, unix.Mount("none", dir, "ramfs", 0, ""))
	t.Cleanup(func() { mustDo(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	base := int(3_900_000_000 + 65536*idBases.Add(1))
	got := map[string]string{}
	for _, c := range launch.Checks(launch.Probe{Dir: dir, IDBase: base}) {
		got[c.GetName()] = c.GetStatus()
		if c.GetName() == "overlay.idmap" && c.GetHint() == "" {
			t.Errorf("no hint: %v", c)
		}
	}
	if got["overlay.idmap"] != "unsupported" || got["overlay.layer"] != "unverified" || got["cgroup.start-and-kill"] != "unverified" {
		t.Errorf("statuses are %v", got)
	}
}

// TestFileSystems starts on writable layers of other file systems.
func TestFileSystems(t *testing.T) {
	requireRoot(t)
	dir := scratch(t)
	mustDo(t, unix.Mount("none", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""))
	t.Cleanup(func() { mustDo(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	mustDo(t, os.MkdirAll(dir+"/upper/data", 0o755), os.MkdirAll(dir+"/upper/work", 0o755))
	b := start(t, options{edit: func(l *guestv1.Launch) { l.Upper, l.Work = dir+"/upper/data", dir+"/upper/work" }})
	if got := b.sh(t, "echo x > /made; cat /made"); got != "x\n" {
		t.Errorf("on tmpfs: %q", got)
	}
}
