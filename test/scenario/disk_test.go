package scenario

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// A file system with quotas holds a sandbox exactly at its limit; it can go on when it has removed something.
func TestDiskLimitOnAVolume(t *testing.T) {
	o := secondNode(t, "--data-size", "1g")
	o.must(t, "layer", "import", "--name", "bb:1", "dir:"+busyboxTree(t))
	if doctor := o.must(t, "doctor"); !strings.Contains(doctor, "quota groups") || !strings.Contains(doctor, "copies share blocks") {
		t.Errorf("doctor: %s", doctor)
	}
	id := o.must(t, "create", "--image", "bb:1", "--disk", "32m")
	other := o.must(t, "create", "--image", "bb:1", "--disk", "32m")
	r := o.cli(t, "exec", id, "--", "dd", "if=/dev/urandom", "of=/big", "bs=1M", "count=64")
	if r.code == 0 || !strings.Contains(r.stderr, "uota") {
		t.Fatalf("64 MiB below a limit of 32: %+v", r)
	}
	o.must(t, "exec", other, "--", "dd", "if=/dev/urandom", "of=/big", "bs=1M", "count=24")
	o.must(t, "exec", id, "--", "rm", "/big")
	// The space of removed files comes back with the next commit of the file system.
	deadline := time.Now().Add(time.Minute)
	for o.cli(t, "exec", id, "--", "dd", "if=/dev/urandom", "of=/small", "bs=1M", "count=8").code != 0 {
		if time.Now().After(deadline) {
			t.Fatal("nothing can be written a minute after the file was removed")
		}
		time.Sleep(time.Second)
	}
	// Everything is found again after the server was killed, and after the node was down.
	o.kill()
	if err := o.start(); err != nil {
		t.Fatal(err)
	}
	if got := o.must(t, "exec", id, "--", "wc", "-c", "/small"); !strings.HasPrefix(got, "8388608") {
		t.Errorf("after a restart: %q", got)
	}
	o.must(t, "stop", id, other)
	if layers := o.must(t, "layer", "ls"); !strings.Contains(layers, "bb:1") {
		t.Errorf("layers: %s", layers)
	}
}

// A sandbox that may grow larger than the volume fills what is for sandboxes; the node works on, and stopping it is all that others need.
func TestFullVolumeIsFreedByAStop(t *testing.T) {
	o := secondNode(t, "--data-size", "1g")
	o.must(t, "layer", "import", "--name", "bb:1", "dir:"+busyboxTree(t))
	for round := range 2 {
		hog := o.must(t, "create", "--image", "bb:1", "--disk", "10g")
		if r := o.cli(t, "exec", hog, "--", "dd", "if=/dev/zero", "of=/big", "bs=1M", "count=2048"); r.code == 0 || !strings.Contains(r.stderr, "uota") {
			t.Fatalf("2 GiB on a volume of 1: %+v", r)
		}
		if r := o.cli(t, "create", "--image", "bb:1"); r.code == 0 || !strings.Contains(r.stderr, "free disk") || !strings.Contains(r.stderr, "stop sandboxes") {
			t.Errorf("creation on a full volume: %+v", r)
		}
		if round == 1 { // what is on record of it can be changed
			o.kill()
			if err := o.start(); err != nil {
				t.Fatal(err)
			}
		}
		o.must(t, "stop", hog)
		id := o.must(t, "create", "--image", "bb:1")
		o.must(t, "exec", id, "--", "dd", "if=/dev/zero", "of=/some", "bs=1M", "count=64")
		o.must(t, "stop", id)
		if out := o.must(t, "ps", "--all"); !strings.Contains(out, hog) || strings.Contains(out, "supervisor-lost") {
			t.Errorf("ps --all: %s", out)
		}
	}
	if out := o.must(t, "doctor"); !strings.Contains(out, "nothing failed, nothing leaked") {
		t.Error(out)
	}
}

// So do ext4 and XFS with project quotas: the kernel bounds exactly, and root inside can neither leave its project nor take another's.
func TestDiskLimitByProject(t *testing.T) {
	if the.own == nil {
		t.Skip("starts a node of its own, which belongs on the machine of the suite's own node")
	}
	leave := filepath.Join(t.TempDir(), "leave")
	if err := os.WriteFile(leave, compiled(t, "project.c"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, fs := range []struct {
		name string
		mkfs []string
	}{
		{"ext4", []string{"mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"}},
		{"xfs", []string{"mkfs.xfs", "-q"}},
	} {
		t.Run(fs.name, func(t *testing.T) {
			o := secondNodeIn(t, quotaVolume(t, fs.mkfs))
			o.must(t, "layer", "import", "--name", "bb:1", "dir:"+busyboxTree(t))
			if doctor := o.must(t, "doctor"); !strings.Contains(doctor, "project quotas bound writable layers") {
				t.Errorf("doctor: %s", doctor)
			}
			id := o.must(t, "create", "--image", "bb:1", "--disk", "32m")
			other := o.must(t, "create", "--image", "bb:1", "--disk", "32m")
			full := func(when string) {
				t.Helper()
				r := o.cli(t, "exec", id, "--", "dd", "if=/dev/urandom", "of=/big", "bs=1M", "count=64")
				if r.code == 0 || !strings.Contains(r.stderr, "uota") && !strings.Contains(r.stderr, "No space left") {
					t.Fatalf("%s, 64 MiB below a limit of 32: %+v", when, r)
				}
			}
			full("at first")
			o.must(t, "exec", other, "--", "dd", "if=/dev/urandom", "of=/big", "bs=1M", "count=24")
			// It goes on when it has removed something.
			o.must(t, "exec", id, "--", "rm", "/big")
			o.must(t, "exec", id, "--", "dd", "if=/dev/urandom", "of=/small", "bs=1M", "count=8")
			// Another project, or none for what is made in a directory, would not be counted.
			o.must(t, "cp", leave, id+":/leave")
			o.must(t, "exec", id, "--", "mkdir", "/dir")
			if r := o.cli(t, "exec", id, "--", "/leave", "/small", "/dir"); r.code != 1 || !strings.Contains(r.stdout, "/small: project 12") || !strings.Contains(r.stdout, "/dir: project 12") {
				t.Errorf("inside, projects of files are changed: %+v", r)
			}
			full("after attempts to leave the project")
			o.must(t, "exec", id, "--", "rm", "/big")
			// Limits and what was written are found again after the server was killed; forks have limits of their own.
			o.kill()
			if err := o.start(); err != nil {
				t.Fatal(err)
			}
			if got := o.must(t, "exec", id, "--", "wc", "-c", "/small"); !strings.HasPrefix(got, "8388608") {
				t.Errorf("after a restart: %q", got)
			}
			full("after a restart")
			o.must(t, "exec", id, "--", "rm", "/big")
			fork := o.must(t, "fork", id)
			if r := o.cli(t, "exec", fork, "--", "dd", "if=/dev/urandom", "of=/more", "bs=1M", "count=64"); r.code == 0 {
				t.Errorf("a fork writes 64 MiB below a limit of 32: %+v", r)
			}
			o.must(t, "stop", id, other, fork)
		})
	}
}

// quotaVolume makes a file system with project quotas in a file, and mounts it.
func quotaVolume(t *testing.T, mkfs []string) string {
	t.Helper()
	if _, err := exec.LookPath(mkfs[0]); err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-quota-")
	if err != nil {
		t.Fatal(err)
	}
	image, mount := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	t.Cleanup(func() { _ = os.Remove(dir) })
	t.Cleanup(func() { _ = os.Remove(image) })
	if err := errors.Join(os.Mkdir(mount, 0o755), os.WriteFile(image, nil, 0o600), os.Truncate(image, 1<<30)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(mount) })
	if out, err := exec.Command(mkfs[0], append(mkfs[1:], image)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", mkfs, err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop,prjquota", image, mount).CombinedOutput(); err != nil {
		t.Skipf("this kernel has no project quotas for it: %s", out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", mount).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return mount
}

// Elsewhere a sandbox that exceeds its limit is ended, and its files stay.
func TestDiskLimitIsWatched(t *testing.T) {
	if the.own == nil {
		t.Skip("the node's disk is not known to be without quotas")
	}
	b := create(t, func(s *harenav1.SandboxSpec) { s.Limits = &harenav1.Limits{Disk: 16 << 20} })
	b.write("/kept", []byte("kept"))
	b.start(&harenav1.Command{Shell: "while :; do dd if=/dev/zero bs=1M count=8 >>/big 2>/dev/null || exit; sleep 0.2; done"})
	deadline := time.Now().Add(time.Minute)
	for b.get().GetState() == "running" && time.Now().Before(deadline) {
		time.Sleep(100 * time.Millisecond)
	}
	if s := b.get(); s.GetState() != "failed" || s.GetReason() != "disk-full" || !strings.Contains(s.GetMessage(), "disk limit") {
		t.Fatalf("state %s, reason %s, message %q", s.GetState(), s.GetReason(), s.GetMessage())
	}
	if got := string(b.read("/kept")); got != "kept" {
		t.Errorf("its files are lost: %q", got)
	}
}
