package snapshots_test

import (
	"archive/tar"
	"bytes"
	"context"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/edge/snapshots"
	"github.com/harena-dev/harena/internal/storage/layer"
)

type fixture struct {
	t      *testing.T
	dir    string
	store  *layer.Store
	packer *snapshots.Packer
	base   lifecycle.Layer
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	dir := t.TempDir()
	store, err := layer.Open(dir, layer.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "root/", Mode: 0o700, Typeflag: tar.TypeDir}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	im, err := store.ImportTar(context.Background(), &b, layer.ImportOptions{Name: "os", Kind: layer.Base, Source: "upload"})
	if err != nil {
		t.Fatal(err)
	}
	return &fixture{t, dir, store, &snapshots.Packer{Store: store, Now: time.Now}, lifecycle.Layer{Digest: string(im.Layer.Digest)}}
}

// snapshot packs files, a path and its content each, over layers.
func (f *fixture) snapshot(o lifecycle.PackOptions, files map[string]string) *lifecycle.Packed {
	f.t.Helper()
	upper := f.t.TempDir()
	for path, content := range files {
		path = filepath.Join(upper, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			f.t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			f.t.Fatal(err)
		}
	}
	o.Sandbox = "box"
	k, err := f.packer.Begin(context.Background(), o)
	if err != nil {
		f.t.Fatal(err)
	}
	defer k.Close()
	if err := k.Capture(context.Background(), upper); err != nil {
		f.t.Fatal(err)
	}
	p, err := k.Finish(context.Background(), nil)
	if err != nil {
		f.t.Fatal(err)
	}
	return p
}

// reaches tells whether anything that a layer or its parents name holds text.
func (f *fixture) reaches(digest, text string) bool {
	f.t.Helper()
	l, err := f.store.Load(layer.Digest(digest))
	if err != nil {
		f.t.Fatal(err)
	}
	found := false
	for _, o := range l.Objects() {
		seen := false
		err := filepath.WalkDir(f.dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() == o.Digest.Hex() && d.Type().IsRegular() {
				b, rerr := os.ReadFile(path)
				seen, found, err = true, found || bytes.Contains(b, []byte(text)), rerr
			}
			return err
		})
		if err != nil || !seen && o.Size > 0 {
			f.t.Fatalf("object %s: found %v, %v", o.Digest, seen, err)
		}
	}
	for _, p := range l.Parents {
		found = f.reaches(string(p), text) || found
	}
	return found
}

func noise(seed uint64, n int) string {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	b := make([]byte, n)
	_, _ = r.Read(b)
	return string(b)
}

// TestCleanedChain: what a cleaned snapshot names holds nothing of what its rules clean, whatever the snapshots before it held.
func TestCleanedChain(t *testing.T) {
	f := newFixture(t)
	const secret = "PLANTED-SECRET-PLANTED-SECRET"
	data := noise(1, 1<<20)
	files := map[string]string{"root/.ssh/id": secret + noise(2, 8000), "root/.bash_history": secret, "tmp/x/y": secret, "work/data": data}
	base := []lifecycle.Layer{f.base}
	dirty := f.snapshot(lifecycle.PackOptions{Name: "dirty", Layers: base}, files)
	if !f.reaches(dirty.Layer.Digest, secret) {
		t.Fatal("the search finds nothing")
	}
	clean := f.snapshot(lifecycle.PackOptions{Name: "clean", Layers: base, Earlier: []string{dirty.Layer.Digest}, Clean: true}, files)
	edited := map[string]string{"root/.ssh/id": secret, "work/data": data[:500_000] + "x" + data[500_001:]}
	again := f.snapshot(lifecycle.PackOptions{Name: "again", Layers: base, Earlier: []string{clean.Layer.Digest}, Clean: true}, edited)
	if again.StoredBytes > 64<<10 {
		t.Errorf("an edit stores %d bytes", again.StoredBytes)
	}
	// With more rules than before, what only these clean must not be there.
	more := f.snapshot(lifecycle.PackOptions{
		Name: "more", Layers: base, Earlier: []string{again.Layer.Digest}, Clean: true, Rules: "/work/data",
	}, map[string]string{"work/data": data, "work/other": "other"})
	if f.reaches(more.Layer.Digest, data[:64]) {
		t.Error("what a new rule cleans is in a blob of an earlier snapshot")
	}
	// On a snapshot, and on the layer of a fork, that were not cleaned.
	fork := f.snapshot(lifecycle.PackOptions{Layers: append(base, dirty.Layer)}, map[string]string{"root/.netrc": secret})
	stack := append(base, dirty.Layer, fork.Layer)
	upon := f.snapshot(lifecycle.PackOptions{Name: "upon", Layers: stack, Clean: true}, map[string]string{"work/new": "new"})
	l, err := f.store.Load(layer.Digest(upon.Layer.Digest))
	if err != nil || len(l.Parents) != 1 || l.LogicalBytes != int64(len(data)+3) {
		t.Errorf("parents %v, %d bytes, %v", l.Parents, l.LogicalBytes, err)
	}
	kept := f.snapshot(lifecycle.PackOptions{Name: "kept", Layers: stack}, nil)
	if !f.reaches(kept.Layer.Digest, secret) {
		t.Error("a snapshot that is not to be cleaned was")
	}
	// Upon one that was cleaned by the same rules it lies.
	next := f.snapshot(lifecycle.PackOptions{Name: "next", Layers: append(base, upon.Layer), Clean: true}, map[string]string{"work/newer": "newer"})
	if l, err := f.store.Load(layer.Digest(next.Layer.Digest)); err != nil || len(l.Parents) != 2 {
		t.Errorf("parents %v, %v", l.Parents, err)
	}
	for _, s := range []*lifecycle.Packed{clean, again, upon, next} {
		if f.reaches(s.Layer.Digest, secret) {
			t.Errorf("%s: the secret is in what it names", s.Layer.Name)
		}
	}
}
