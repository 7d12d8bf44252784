package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// noise returns n bytes that compress to nothing less and are always the same.
func noise(seed byte, n int) string {
	p := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(p)
	return string(p)
}

func importAgainst(t testing.TB, s *Store, name, against string, entries ...entry) *Imported {
	t.Helper()
	im, err := s.ImportTar(context.Background(), bytes.NewReader(tarOf(t, entries...)), ImportOptions{Name: name, Kind: Base, Source: "upload", Against: against})
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func sound(t testing.TB, s *Store, d Digest) {
	t.Helper()
	if problems, err := s.Verify(context.Background(), d, nil); err != nil || len(problems) > 0 {
		t.Errorf("verify %s: %v, %v", d, problems, err)
	}
}

// TestImportAgainstOlderVersion: a name imported again stores what changed, is
// whole, and outlives the version that it was written against.
func TestImportAgainstOlderVersion(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	big := noise(1, 3<<20)
	old := importAgainst(t, s, "os:1", "", entry{"big", big, 0}, entry{"gone", noise(2, 100_000), 0}).Layer
	edited := big[:2<<20] + "one line" + big[2<<20+8:]
	after := []entry{{"big", edited, 0}, {"usr/copy", big, 0}}
	im := importAgainst(t, s, "os:1", "", after...)
	l := im.Layer
	if l.Schema != schemaExtra || len(l.Extra) != 1 || l.Extra[0] != old.Blob || l.Blob.Size != 4096 || l.ExtraUsed[0] != 3<<20 || l.ExtraIndex[0] != old.Index || im.Existed {
		t.Errorf("manifest %+v", l.Manifest)
	}
	sound(t, s, l.Digest)
	for what, want := range map[Digest]Usage{old.Digest: {old.Blob.Size - 3<<20, 3 << 20}, l.Digest: {4096, 3 << 20}} {
		x, err := s.Load(what)
		if err != nil {
			t.Fatal(err)
		}
		for _, exact := range []bool{true, false} {
			if u, err := s.Usage(ctx, x, exact); err != nil || u != want {
				t.Errorf("usage of %s, exact %v: %+v, %v, want %+v", what, exact, u, err, want)
			}
		}
	}

	// Nothing new: the same layer. Another name starts from nothing, unless told.
	if again := importAgainst(t, s, "os:1", "", after...); again.Layer.Digest != l.Digest || !again.Existed {
		t.Errorf("the same content again is %s, not %s", again.Layer.Digest, l.Digest)
	}
	alone := importAgainst(t, s, "other:1", "", after...).Layer
	if len(alone.Extra) != 0 || alone.Blob.Size != 3<<20+4096 {
		t.Errorf("under another name: %+v", alone.Manifest)
	}
	none := importAgainst(t, s, "os:1", AgainstNone, after...).Layer
	if none.Digest != alone.Digest {
		t.Errorf("against none: %+v", none.Manifest)
	}
	third := importAgainst(t, s, "third:1", "other:1, "+string(l.Digest), entry{"f", big, 0}).Layer
	if third.Blob.Size != 0 || len(third.Extra) != 1 {
		t.Errorf("against two: %+v", third.Manifest)
	}
	sound(t, s, third.Digest)
	if _, err := s.ImportTar(ctx, bytes.NewReader(tarOf(t)), ImportOptions{Name: "x", Kind: Base, Against: "no-such"}); !errs.Is(err, errs.NotFound) {
		t.Errorf("against what is not there: %v", err)
	}

	// The old version goes, its blob stays.
	for _, n := range []string{"os:1", "third:1", "other:1"} {
		if _, err := s.Remove(ctx, "", n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.CollectGarbage(ctx, GCOptions{InUse: func() map[Digest]bool { return map[Digest]bool{l.Digest: true} }}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(old.Digest); !errs.Is(err, errs.NotFound) {
		t.Errorf("the old version: %v", err)
	}
	sound(t, s, l.Digest)
	dir, err := m.Acquire(ctx, l.Digest, "one")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"big": edited, "usr/copy": big} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

// TestLittleUseIsCopied: a version of which little is left is not kept for it.
func TestLittleUseIsCopied(t *testing.T) {
	s := openStore(t, t.TempDir())
	big := noise(3, 2<<20)
	importAgainst(t, s, "a", "", entry{"f", big, 0})
	l := importAgainst(t, s, "a", "", entry{"f", big[:100_000], 0}, entry{"g", noise(4, 100_000), 0}).Layer
	if len(l.Extra) != 0 || l.Blob.Size != 50*4096 {
		t.Errorf("manifest %+v", l.Manifest)
	}
	sound(t, s, l.Digest)
}

// TestEveryModeWithSeveralDevices: extra devices are mounted however images are.
func TestEveryModeWithSeveralDevices(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 4)
	var all []entry
	var names []string
	for i := range byte(5) {
		e := entry{fmt.Sprintf("f%d", i), noise(10+i, 50_000), 0}
		all = append(all, e)
		name := fmt.Sprintf("part:%d", i)
		importAgainst(t, s, name, "", e)
		names = append(names, name)
	}
	l := importAgainst(t, s, "all", strings.Join(names, ","), append(all, entry{"own", noise(20, 5000), 0})...).Layer
	if len(l.Extra) != 5 || l.Blob.Size != 8192 {
		t.Fatalf("manifest %+v", l.Manifest)
	}
	for _, mode := range []MountMode{ModeDirect, ModeFile, ModeLoop} {
		t.Run(string(mode), func(t *testing.T) {
			m := &Mounts{store: s, dir: m.dir, mode: mode, entries: make(map[Digest]*mountEntry)}
			dir, err := m.Acquire(context.Background(), l.Digest, "x")
			if err != nil {
				t.Skipf("not on this kernel: %v", err)
			}
			for _, e := range all {
				if b, err := os.ReadFile(filepath.Join(dir, e.name)); err != nil || string(b) != e.content {
					t.Errorf("%s: %d bytes, %v", e.name, len(b), err)
				}
			}
			if err := m.Release("x"); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestVerifyOfExtras: damage in another layer's blob or in a chunk index is found.
func TestVerifyOfExtras(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	big := noise(5, 2<<20)
	old := importAgainst(t, s, "a", "", entry{"f", big, 0}).Layer
	l := importAgainst(t, s, "a", "", entry{"f", big + "more", 0}).Layer
	if old.Index.Digest == "" || len(l.Extra) != 1 {
		t.Fatalf("manifest %+v", l.Manifest)
	}
	for what, d := range map[string]Digest{"the blob of the other layer": old.Blob.Digest, "its chunk index": old.Index.Digest} {
		path := s.local.path(d)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		bad := bytes.Clone(b)
		bad[len(bad)-50] ^= 1
		for _, content := range [][]byte{bad, b[:len(b)-4096], nil} {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			if content != nil {
				if err := os.WriteFile(path, content, 0o400); err != nil {
					t.Fatal(err)
				}
			}
			if problems, err := s.Verify(ctx, l.Digest, nil); err != nil || len(problems) == 0 {
				t.Errorf("%s damaged: %v, %v", what, problems, err)
			}
		}
		_ = os.Remove(path)
		if err := os.WriteFile(path, b, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	sound(t, s, l.Digest)

	// A lost index is computed again, from the blob, and goes with it.
	if err := os.Remove(s.local.path(old.Index.Digest)); err != nil {
		t.Fatal(err)
	}
	for _, spoil := range []bool{false, true} {
		if spoil {
			if err := os.WriteFile(s.indexPath(old.Blob.Digest), []byte("harenaCI"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		n := importAgainst(t, s, "b", string(old.Digest), entry{"g", big, 0}).Layer
		if n.Blob.Size != 0 || len(n.Extra) != 1 {
			t.Errorf("without its index: %+v", n.Manifest)
		}
	}
	for _, n := range []string{"a", "b"} {
		if _, err := s.Remove(ctx, "", n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.CollectGarbage(ctx, GCOptions{InUse: func() map[Digest]bool { return nil }}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(s.indexPath(old.Blob.Digest)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the index of a blob that is gone: %v", err)
	}
}

// TestWhatIsWrittenAgainstStays: a collection during an import keeps what it refers to.
func TestWhatIsWrittenAgainstStays(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	big := noise(6, 1<<20)
	old := importAgainst(t, s, "a", "", entry{"f", big, 0}).Layer
	open, err := s.OpenLayers(ctx, []Digest{old.Digest})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(ctx, "", "a"); err != nil {
		t.Fatal(err)
	}
	nothing := GCOptions{InUse: func() map[Digest]bool { return nil }}
	if _, err := s.CollectGarbage(ctx, nothing); err != nil {
		t.Fatal(err)
	}
	sound(t, s, old.Digest)
	open.Close()
	open.Close() // twice is once
	if _, err := s.CollectGarbage(ctx, nothing); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(old.Digest); !errs.Is(err, errs.NotFound) {
		t.Errorf("after Close: %v", err)
	}
	if _, err := s.OpenLayers(ctx, []Digest{old.Digest}); !errs.Is(err, errs.NotFound) || len(s.pinned()) != 0 {
		t.Errorf("a layer that is gone: %v, pinned %v", err, s.pinned())
	}
}

// TestSnapshotsMerge: snapshots upon snapshots store what changed; one that merges
// them shows the same, without storing their content.
func TestSnapshotsMerge(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 8)
	content := noise(7, 1<<20)
	base := importAgainst(t, s, "os", "", entry{"etc/conf", "conf", 0}, entry{"lib", content, 0}).Layer
	stack := []Digest{base.Digest}
	take := func(dir string, merge int) Layer {
		t.Helper()
		d, err := s.NewDraft(SnapshotOptions{Parents: stack, Merge: merge, Source: "sandbox:x", Name: "snap"})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if err := errors.Join(d.Read(ctx, dir, erofs.Options{}), d.Write(ctx)); err != nil {
			t.Fatal(err)
		}
		l, err := d.Publish(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		sound(t, s, l.Digest)
		return l
	}
	text := []byte(strings.Repeat("a line of text, one of many\n", 100_000))
	for i := range 3 {
		dir := t.TempDir()
		copy(text[1_000_000+i*10:], "edited")
		for name, b := range map[string][]byte{"text": text, "lib": []byte(content), fmt.Sprint("new", i): []byte("x")} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if i > 0 {
			if err := unix.Mknod(filepath.Join(dir, fmt.Sprint("new", i-1)), unix.S_IFCHR, 0); err != nil {
				t.Skip(err)
			}
		}
		l := take(dir, 0)
		if i > 0 && l.Blob.Size+l.Meta.Size > 64<<10 {
			t.Errorf("an edit of one line stores %d and %d bytes", l.Blob.Size, l.Meta.Size)
		}
		stack = append(stack, l.Digest)
	}
	upper := t.TempDir()
	if err := os.WriteFile(upper+"/last", []byte("last"), 0o600); err != nil {
		t.Fatal(err)
	}
	merged := take(upper, 3)
	if !slices.Equal(merged.Parents, stack[:1]) || merged.Blob.Size != 4096 || merged.LogicalBytes != int64(len(text)+len(content)+5) {
		t.Errorf("manifest %+v", merged.Manifest)
	}
	dir, err := m.Acquire(ctx, merged.Digest, "x")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for name := range erofstest.ReadTree(t, dir) {
		names = append(names, name)
	}
	slices.Sort(names)
	// Of new0 and new1 nothing is below, but a whiteout in a directory of both is not listed.
	if want := []string{".", "last", "lib", "new0", "new1", "new2", "text"}; !slices.Equal(names, want) {
		t.Errorf("names %v", names)
	}
	if b, err := os.ReadFile(dir + "/text"); err != nil || !bytes.Equal(b, text) {
		t.Errorf("text: %d bytes, %v", len(b), err)
	}
}
