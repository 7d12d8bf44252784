package layer

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/harena-dev/harena/internal/errs"
)

func TestParseRef(t *testing.T) {
	hex := strings.Repeat("0a", 32)
	long := strings.Repeat("x", 201)
	for _, c := range []struct{ project, in, want string }{
		{"", "debian", "default debian:latest"},
		{"lab/team", "lib/python:3.12_rc.1-x", "lab/team lib/python:3.12_rc.1-x"},
		{"", "a..b", "default a..b:latest"},
		{"", "sha256:" + hex, "default sha256:" + hex},
		{"", "sha256:" + hex[1:], ""},
		{"", "sha256:" + strings.ToUpper(hex), ""},
		{"", "", ""},
		{"", ":tag", ""},
		{"", "debian:", ""},
		{"", "Debian", ""},
		{"", "../etc", ""},
		{"", "a/../b", ""},
		{"", "a//b", ""},
		{"", "/a", ""},
		{"", "a/", ""},
		{"", "a:..", ""},
		{"", "a:.", ""},
		{"", "a:b/c", ""},
		{"", "a:b:c", ""},
		{"", "a\n", ""},
		{"", "a:b\n", ""},
		{"", "a\x00", ""},
		{"", "a+b", ""},
		{"", long, ""},
		{"", "a:" + strings.Repeat("t", 129), ""},
		{"..", "a", ""},
		{"lab/../x", "a", ""},
		{long, "a", ""},
	} {
		r, err := ParseRef(c.project, c.in)
		got := ""
		if err == nil {
			got = r.Project + " " + r.String()
		} else if !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: error of kind %s", c.in, errs.KindOf(err))
		}
		if got != c.want {
			t.Errorf("%q in %q: got %q, want %q (%v)", c.in, c.project, got, c.want, err)
		}
	}
}

func TestManifestIsDeterministic(t *testing.T) {
	m := Manifest{
		Schema: schema, Kind: Base, Meta: Object{Digest: Digest(digestPrefix + strings.Repeat("1", 64)), Size: 1}, Blob: Object{Digest: Digest(digestPrefix + strings.Repeat("2", 64)), Size: 2},
		Source: "a<b>&c", Config: ImageConfig{Labels: map[string]string{"z": "1", "a": "2", "m": "3"}},
	}
	first, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if b, _ := m.encode(); !bytes.Equal(b, first) {
			t.Fatal("encoded differently")
		}
	}
	if _, err := decodeManifest(digestOf(first), first); err != nil {
		t.Error(err)
	}
	if _, err := decodeManifest(digestOf(first), bytes.Replace(first, []byte("base"), []byte("Base"), 1)); err == nil {
		t.Error("a changed manifest was accepted")
	}
	newer := bytes.Replace(first, []byte(`"schema": 2`), []byte(`"schema": 3`), 1)
	if _, err := decodeManifest(digestOf(newer), newer); !errs.Is(err, errs.Unsupported) {
		t.Errorf("newer schema: %v", err)
	}
}

// files lists regular files below the store, relative.
func files(t *testing.T, s *Store) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(s.dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			rel, _ := filepath.Rel(s.dir, path)
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestSameImportTwiceIsOneLayer(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	a := importFiles(t, s, "a:1", Base, entry{"f", "content", 0})
	before := files(t, s)
	b := importFiles(t, s, "a:1", Base, entry{"f", "content", 0})
	if a.Layer.Digest != b.Layer.Digest || a.Existed || !b.Existed {
		t.Errorf("digests %s and %s, existed %v %v", a.Layer.Digest, b.Layer.Digest, a.Existed, b.Existed)
	}
	if after := files(t, s); !slices.Equal(before, after) {
		t.Errorf("files before %v, after %v", before, after)
	}
	c := importFiles(t, s, "a:1", Toolkit, entry{"f", "content", 0})
	if c.Layer.Digest == a.Layer.Digest || c.Layer.Blob != a.Layer.Blob {
		t.Error("another kind must be another layer with the same objects")
	}
	s = openStore(t, dir)
	l, err := s.Resolve(context.Background(), "", "a:1")
	if err != nil || l.Digest != c.Layer.Digest || !l.Created.Equal(c.Layer.Created) {
		t.Errorf("after reopening: %v, %v", l, err)
	}
}

func TestCompressedArchives(t *testing.T) {
	plain := tarOf(t, entry{"f", strings.Repeat("content ", 10000), 0})
	var gz, zs bytes.Buffer
	w := gzip.NewWriter(&gz)
	_, _ = w.Write(plain)
	w.Close()
	z, err := zstd.NewWriter(&zs)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = z.Write(plain)
	z.Close()
	s := openStore(t, t.TempDir())
	load := func(b []byte) (*Imported, error) {
		return s.ImportTar(context.Background(), bytes.NewReader(b), ImportOptions{Name: "x", Kind: Base, Source: "tar"})
	}
	want, err := load(plain)
	if err != nil {
		t.Fatal(err)
	}
	broken := bytes.Clone(gz.Bytes())
	broken[len(broken)-6] ^= 1 // the CRC
	for name, c := range map[string]struct {
		in   []byte
		kind errs.Kind
	}{
		"gzip": {gz.Bytes(), ""}, "zstd": {zs.Bytes(), ""},
		"padded": {append(bytes.Clone(plain), make([]byte, 9000)...), ""},
		"empty":  {nil, errs.Invalid}, "text": {[]byte(strings.Repeat("no archive ", 100)), errs.Invalid},
		"cut": {plain[:20000], errs.Invalid}, "cut gzip": {gz.Bytes()[:gz.Len()/2], errs.Invalid}, "cut zstd": {zs.Bytes()[:zs.Len()/2], errs.Invalid},
		"crc": {broken, errs.Invalid}, "zip": {[]byte("PK\x03\x04rest"), errs.Invalid},
		"xz": {[]byte("\xfd7zXZ\x00rest"), errs.Unsupported}, "no end": {plain[:512], errs.Invalid},
		"garbage zstd": {[]byte("\x28\xb5\x2f\xfd\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), errs.Invalid},
	} {
		got, err := load(c.in)
		switch {
		case errs.KindOf(err) != c.kind:
			t.Errorf("%s: kind %q, want %q: %v", name, errs.KindOf(err), c.kind, err)
		case err == nil && got.Layer.Digest != want.Layer.Digest:
			t.Errorf("%s: another layer", name)
		}
	}
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
}

func TestImportRefusals(t *testing.T) {
	s := openStore(t, t.TempDir())
	for _, c := range []struct {
		o    ImportOptions
		kind errs.Kind
	}{
		{ImportOptions{Name: "a", Kind: Snapshot}, errs.Invalid},
		{ImportOptions{Name: "a", Kind: VMImage}, errs.Unsupported},
		{ImportOptions{Name: "a", Kind: "thing"}, errs.Invalid},
		{ImportOptions{Name: "A", Kind: Base}, errs.Invalid},
		{ImportOptions{Name: digestPrefix + strings.Repeat("a", 64), Kind: Base}, errs.Invalid},
		{ImportOptions{Name: "a", Project: "../x", Kind: Base}, errs.Invalid},
	} {
		_, err := s.ImportTar(context.Background(), strings.NewReader("unread"), c.o)
		if !errs.Is(err, c.kind) {
			t.Errorf("%+v: %v", c.o, err)
		}
	}
	// A limit, a reader that fails, and a context that ends.
	data := tarOf(t, entry{"f", strings.Repeat("x", 1<<20), 0})
	small, err := Open(t.TempDir(), Limits{MaxBytes: 1000})
	if err != nil {
		t.Fatal(err)
	}
	o := ImportOptions{Name: "a", Kind: Base}
	if _, err := small.ImportTar(context.Background(), bytes.NewReader(data), o); !errs.Is(err, errs.Invalid) {
		t.Errorf("over the limit: %v", err)
	}
	lost := errors.New("connection lost")
	in := io.MultiReader(bytes.NewReader(data[:5000]), readFunc(func([]byte) (int, error) { return 0, lost }))
	if _, err := s.ImportTar(context.Background(), in, o); !errors.Is(err, lost) {
		t.Errorf("failing reader: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	in = io.MultiReader(bytes.NewReader(data[:5000]), readFunc(func([]byte) (int, error) { cancel(); return 1, nil }))
	if _, err := s.ImportTar(ctx, in, o); !errs.Is(err, errs.Cancelled) {
		t.Errorf("cancelled: %v", err)
	}
	if left := append(files(t, s), files(t, small)...); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestTagsAndListing(t *testing.T) {
	s := openStore(t, t.TempDir())
	ctx := context.Background()
	a := importFiles(t, s, "a:1", Base, entry{"f", "a", 0}).Layer
	b := importFiles(t, s, "a/b", Toolkit, entry{"f", "b", 0}).Layer // a name and tag that could clash as paths
	if _, err := s.Tag(context.Background(), "", "a:1", "a:b"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Tag(context.Background(), "", string(b.Digest), "c"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Tag(context.Background(), "", "a:1", string(b.Digest)); !errs.Is(err, errs.Invalid) {
		t.Errorf("tag onto a digest: %v", err)
	}
	if _, err := s.Tag(context.Background(), "", "nothing", "c"); !errs.Is(err, errs.NotFound) {
		t.Errorf("tag of nothing: %v", err)
	}
	for ref, want := range map[string]Digest{"a:1": a.Digest, "a:b": a.Digest, "a/b": b.Digest, "c": b.Digest, string(a.Digest): a.Digest} {
		if l, err := s.Resolve(context.Background(), "", ref); err != nil || l.Digest != want {
			t.Errorf("%s: %v, %v", ref, l.Digest, err)
		}
	}
	_, err := s.Resolve(context.Background(), "", "a")
	var e *errs.Error
	if !errors.As(err, &e) || e.Kind != errs.NotFound || !strings.Contains(e.Hint, "tags 1, b") {
		t.Errorf("a missing tag: %v, hint %q", err, e.Hint)
	}
	if _, err := s.Resolve(context.Background(), "other", "a:1"); !errs.Is(err, errs.NotFound) {
		t.Errorf("another project sees the name: %v", err)
	}

	page, more, err := s.List(ctx, ListOptions{Limit: 1})
	if err != nil || !more || len(page) != 1 || !slices.Equal(page[0].Names, []string{"a/b:latest", "c:latest"}) {
		t.Errorf("first page %v %v %v", page, more, err)
	}
	page, more, err = s.List(ctx, ListOptions{Limit: 1, After: page[0].Cursor()})
	if err != nil || more || len(page) != 1 || !slices.Equal(page[0].Names, []string{"a:1", "a:b"}) {
		t.Errorf("second page %v %v %v", page, more, err)
	}
	if page, more, err = s.List(ctx, ListOptions{Limit: 9, Kind: Base}); err != nil || more || len(page) != 1 || page[0].Digest != a.Digest {
		t.Errorf("bases %v %v %v", page, more, err)
	}

	// What is kept in memory for listings must be what a store that reads the disk lists.
	if _, err := s.Tag(context.Background(), "", "a:1", "late"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(context.Background(), "", "late"); err != nil {
		t.Fatal(err)
	}
	fresh := openStore(t, filepath.Dir(s.dir))
	for _, d := range []Digest{a.Digest, b.Digest} {
		kept, err1 := s.NamesOf(ctx, "", d)
		read, err2 := fresh.NamesOf(ctx, "", d)
		if err1 != nil || err2 != nil || !slices.Equal(kept, read) || len(kept) == 0 {
			t.Errorf("names of %s: kept %v, on disk %v, %v, %v", d, kept, read, err1, err2)
		}
	}

	if d, err := s.Remove(context.Background(), "", "a:1"); err != nil || d != a.Digest {
		t.Errorf("remove: %v, %v", d, err)
	}
	if _, err := s.Remove(context.Background(), "", "a:1"); !errs.Is(err, errs.NotFound) {
		t.Errorf("remove twice: %v", err)
	}
	if _, err := s.Resolve(context.Background(), "", string(a.Digest)); err != nil {
		t.Errorf("content went with a name: %v", err)
	}
	if _, err := s.Remove(ctx, "", "a:b"); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(filepath.Dir(filepath.Dir(s.tagPath(ownTree, Ref{Project: DefaultProject, Name: "a", Tag: "1"}))))
	if err != nil || len(left) != 2 { // of a/b and c
		t.Errorf("directories of names: %v, %v", left, err)
	}
}

func TestGarbage(t *testing.T) {
	s := openStore(t, t.TempDir())
	ctx := context.Background()
	nothing := func() map[Digest]bool { return nil }
	kept := importFiles(t, s, "kept", Base, entry{"f", "kept", 0}).Layer
	used := importFiles(t, s, "used", Base, entry{"f", "used", 0}).Layer
	gone := importFiles(t, s, "gone", Base, entry{"f", "gone", 0}).Layer
	shared := importFiles(t, s, "shared", Toolkit, entry{"f", "kept", 0}).Layer // same objects as kept
	other, err := s.ImportTar(ctx, bytes.NewReader(tarOf(t, entry{"f", "other", 0})), ImportOptions{Project: "lab/x", Name: "a/b", Kind: Base})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"used", "gone", "shared"} {
		if _, err := s.Remove(context.Background(), "", n); err != nil {
			t.Fatal(err)
		}
	}
	inUse := func() map[Digest]bool { return map[Digest]bool{used.Digest: true} }
	plan, err := s.CollectGarbage(ctx, GCOptions{InUse: inUse, DryRun: true})
	if err != nil {
		t.Fatal(err)
	}
	want := []Digest{gone.Digest, shared.Digest}
	slices.Sort(want)
	if !slices.Equal(plan.Layers, want) || len(plan.Objects) != 1 || plan.Objects[0].Digest != gone.Blob.Digest || plan.Bytes != gone.Blob.Size { // metadata does not differ
		t.Errorf("plan %+v", plan)
	}
	if _, err := s.Load(gone.Digest); err != nil {
		t.Errorf("the plan had an effect: %v", err)
	}
	done, err := s.CollectGarbage(ctx, GCOptions{InUse: inUse})
	if err != nil || !slices.Equal(done.Layers, want) || done.Bytes != plan.Bytes {
		t.Errorf("collected %+v, %v", done, err)
	}
	if _, err := s.Load(gone.Digest); !errs.Is(err, errs.NotFound) {
		t.Errorf("the layer is still there: %v", err)
	}
	for _, l := range []Layer{kept, used, other.Layer} {
		if problems, err := s.Verify(ctx, l.Digest, nil); err != nil || len(problems) != 0 {
			t.Errorf("layer %s: %v, %v", l.Digest, problems, err)
		}
	}
	if done, err = s.CollectGarbage(ctx, GCOptions{InUse: nothing}); err != nil || !slices.Equal(done.Layers, []Digest{used.Digest}) {
		t.Errorf("collected %+v, %v", done, err)
	}
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
	again := importFiles(t, s, "gone", Base, entry{"f", "gone", 0})
	if again.Layer.Digest != gone.Digest || again.Existed {
		t.Errorf("imported again: %+v", again)
	}
}

func TestGarbageKeepsParents(t *testing.T) {
	s := openStore(t, t.TempDir())
	ctx := context.Background()
	base := importFiles(t, s, "base", Base, entry{"f", "base", 0}).Layer
	m := base.Manifest
	m.Kind, m.Parents = Snapshot, []Digest{base.Digest}
	im, err := s.publishAll(ctx, Ref{Project: DefaultProject, Name: "snap", Tag: "1"}, []*staged{{dir: "/nonexistent", manifest: m}}, nil) // its objects are there
	if err != nil {
		t.Fatal(err)
	}
	snap := im.Layer
	if _, err := s.Remove(context.Background(), "", "base"); err != nil {
		t.Fatal(err)
	}
	plan, err := s.CollectGarbage(ctx, GCOptions{InUse: func() map[Digest]bool { return nil }})
	if err != nil || len(plan.Layers) != 0 {
		t.Errorf("collected %+v, %v", plan, err)
	}
	c, err := s.Compose(context.Background(), "", "snap:1", "", nil)
	if err != nil || !slices.Equal(c.Digests, []Digest{base.Digest, snap.Digest}) {
		t.Errorf("composition %v, %v", c, err)
	}
}

// The collector runs while layers are imported and removed: a name always leads to a whole layer.
func TestGarbageAgainstImports(t *testing.T) {
	s := openStore(t, t.TempDir())
	ctx, cancel := context.WithCancel(context.Background())
	collected := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := s.CollectGarbage(context.Background(), GCOptions{}); err != nil {
				collected <- err
				return
			}
		}
		collected <- nil
	}()
	for i := range 60 {
		name := fmt.Sprintf("n%d", i%3)
		d := importFiles(t, s, name, Base, entry{"f", fmt.Sprint(i % 2), 0}).Layer.Digest
		if problems, err := s.Verify(ctx, d, nil); err != nil || len(problems) > 0 {
			t.Fatalf("round %d: %v, %v", i, problems, err)
		}
		if _, err := s.Remove(context.Background(), "", name); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-collected; err != nil {
		t.Error(err)
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	ctx := context.Background()
	content := make([]byte, 100_000)
	rand.New(rand.NewSource(1)).Read(content)
	l := importFiles(t, s, "a", Base, entry{"d/", "", 0}, entry{"d/f", string(content), 0}).Layer
	var last, total int64
	problems, err := s.Verify(ctx, l.Digest, func(d, t int64) { last, total = d, t })
	if err != nil || len(problems) != 0 || last != total || total < 100_000 {
		t.Fatalf("a sound layer: %v, %v, %d of %d", problems, err, last, total)
	}
	damage := func(what string, d Digest, f func(path string) error) {
		path := s.local.path(d)
		sound, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := f(path); err != nil {
			t.Fatal(err)
		}
		problems, err := s.Verify(ctx, l.Digest, nil)
		if err != nil || len(problems) == 0 {
			t.Errorf("%s: %v, %v", what, problems, err)
		}
		_ = os.Remove(path)
		if err := os.WriteFile(path, sound, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	flip := func(at int64) func(string) error {
		return func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			b := make([]byte, 1)
			if _, err := f.ReadAt(b, at); err != nil {
				return err
			}
			_, err = f.WriteAt([]byte{b[0] ^ 0x40}, at)
			return err
		}
	}
	damage("a bit of the blob", l.Blob.Digest, flip(50_000))
	damage("a bit of the superblock", l.Meta.Digest, flip(1100))
	damage("a short blob", l.Blob.Digest, func(p string) error { return os.Truncate(p, 4096) })
	damage("no blob", l.Blob.Digest, os.Remove)
	damage("an empty metadata image", l.Meta.Digest, func(p string) error { return os.Truncate(p, 0) })
	if problems, err := s.Verify(ctx, l.Digest, nil); err != nil || len(problems) != 0 {
		t.Errorf("after the repair: %v, %v", problems, err)
	}
	if err := flip(5)(s.manifestPath(l.Digest)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Verify(ctx, l.Digest, nil); err == nil {
		t.Error("a damaged manifest was not noticed")
	}
	if _, err := s.Remove(context.Background(), "", "a"); err != nil {
		t.Fatal(err)
	}
	if plan, err := s.CollectGarbage(ctx, GCOptions{InUse: func() map[Digest]bool { return nil }}); err != nil || len(plan.Layers) != 1 || len(plan.Objects) != 2 {
		t.Errorf("the damaged layer is not collected: %+v, %v", plan, err)
	}
}
