package scenario

import (
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
