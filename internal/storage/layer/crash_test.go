package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// A server is killed at random moments: whatever is visible afterwards is whole.
func TestKillDuringImports(t *testing.T) {
	dir := t.TempDir()
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	layers := 0
	for round := range rounds {
		runVictim(t, dir, time.Duration(20+rand.Intn(150))*time.Millisecond)
		s := openStore(t, dir)
		if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
			t.Fatalf("round %d: left in tmp: %v", round, tmp)
		}
		// Every name resolves, and every layer, named or not, is whole.
		page, _, err := s.List(context.Background(), ListOptions{Limit: 100})
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for _, l := range page {
			for _, n := range l.Names {
				if _, err := s.Resolve(context.Background(), "", n); err != nil {
					t.Errorf("round %d: %s: %v", round, n, err)
				}
			}
		}
		err = s.walkManifests(context.Background(), func(d Digest) error {
			layers++
			problems, err := s.Verify(context.Background(), d, nil)
			if len(problems) > 0 {
				t.Errorf("round %d: layer %s: %v", round, d, problems)
			}
			return err
		})
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if _, err := s.CollectGarbage(context.Background(), GCOptions{}); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		plan, err := s.CollectGarbage(context.Background(), GCOptions{DryRun: true})
		if err != nil || len(plan.Layers)+len(plan.Objects) != 0 {
			t.Errorf("round %d: garbage left: %+v, %v", round, plan, err)
		}
	}
	if layers == 0 {
		t.Error("no import was ever finished: the test shows nothing")
	}
}

// runVictim imports in another process and kills it some time after it began.
func runVictim(t *testing.T, dir string, after time.Duration) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "HARENA_TEST_IMPORT_FOREVER="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Errorf("the victim does not start: %v", err)
	}
	time.Sleep(after)
	_ = cmd.Process.Kill()
	rest, _ := io.ReadAll(out)
	_ = cmd.Wait()
	if len(rest) > 0 {
		t.Errorf("the victim says %s", rest)
	}
}

// tmpfs mounts a file system of some size for one test.
func tmpfs(t *testing.T, size string) string {
	t.Helper()
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

func TestFullDisk(t *testing.T) {
	dir := tmpfs(t, "8m")
	s := openStore(t, dir)
	kept := importFiles(t, s, "kept", Base, entry{"f", "kept", 0}).Layer
	before := files(t, s)
	noise := make([]byte, 12<<20)
	rand.New(rand.NewSource(1)).Read(noise)
	archive := tarOf(t, entry{"noise", string(noise), 0})
	_, err := s.ImportTar(context.Background(), bytes.NewReader(archive), ImportOptions{Name: "big", Kind: Base})
	var e *errs.Error
	if !errors.As(err, &e) || e.Kind != errs.Capacity || e.Hint == "" || !strings.Contains(e.Error(), "full") {
		t.Errorf("got %v", err)
	}
	if after := files(t, s); strings.Join(after, " ") != strings.Join(before, " ") {
		t.Errorf("before %v, after %v", before, after)
	}

	// Full already when the names are to be written.
	fill, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(fill, bytes.NewReader(noise))
	fill.Close()
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill: %v", err)
	}
	if _, err := s.Tag(context.Background(), "", "kept", "again"); !errs.Is(err, errs.Capacity) {
		t.Errorf("tag: %v", err)
	}
	if _, err := s.Resolve(context.Background(), "", "again"); !errs.Is(err, errs.NotFound) {
		t.Errorf("half a tag: %v", err)
	}
	if l, err := s.Resolve(context.Background(), "", "kept"); err != nil || l.Digest != kept.Digest {
		t.Errorf("reading on a full disk: %v", err)
	}
	// Space can be made on a full disk.
	if _, err := s.Remove(context.Background(), "", "kept"); err != nil {
		t.Fatal(err)
	}
	if plan, err := s.CollectGarbage(context.Background(), GCOptions{}); err != nil || len(plan.Layers) != 1 {
		t.Errorf("collect: %+v, %v", plan, err)
	}
}

func TestReadOnlyDisk(t *testing.T) {
	dir := tmpfs(t, "8m")
	s := openStore(t, dir)
	importFiles(t, s, "kept", Base, entry{"f", "kept", 0})
	importFiles(t, s, "gone", Base, entry{"f", "gone", 0})
	if _, err := s.Remove(context.Background(), "", "gone"); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	_, importErr := s.ImportTar(context.Background(), bytes.NewReader(tarOf(t)), ImportOptions{Name: "a", Kind: Base})
	_, tagErr := s.Tag(context.Background(), "", "kept", "again")
	_, removeErr := s.Remove(context.Background(), "", "kept")
	_, gcErr := s.CollectGarbage(context.Background(), GCOptions{})
	for what, err := range map[string]error{"import": importErr, "tag": tagErr, "remove": removeErr, "gc": gcErr} {
		var e *errs.Error
		if !errors.As(err, &e) || e.Kind != errs.Precondition || !strings.Contains(e.Error(), "read-only") || !strings.Contains(e.Hint, dir) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := s.Resolve(context.Background(), "", "kept"); err != nil {
		t.Errorf("reading: %v", err)
	}
	empty := tmpfs(t, "1m")
	if err := unix.Mount("", empty, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(empty, Limits{}); !errs.Is(err, errs.Precondition) {
		t.Errorf("open: %v", err)
	}
}

// What a bootstrap mounted and a kill left is detached, not emptied.
func TestOpenUnmountsWhatIsLeft(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	s := openStore(t, dir)
	outside := t.TempDir()
	precious := filepath.Join(outside, "precious")
	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(s.tmp(), "bootstrap-1", "root", "dev")
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmountAll(t, dir) })
	for range 2 {
		if err := unix.Mount(outside, left, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	s = openStore(t, dir)
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Errorf("removed through a mount: %v", err)
	}
}
