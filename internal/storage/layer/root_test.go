package layer

import (
	"bytes"
	"context"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// A manifest names the root that the index of its data blob has in the store, also for blobs of other layers, and what
// serves blobs is told.
func TestManifestKeepsRoots(t *testing.T) {
	ctx := context.Background()
	store := blob.NewMemory()
	a := openShared(t, store, "aaaaaa")
	noise := make([]byte, 700<<10)
	rnd := rand.NewChaCha8([32]byte{7})
	_, _ = rnd.Read(noise)
	one := importFiles(t, a, "x:1", Base, entry{"f", string(noise), 0}).Layer
	two := importFiles(t, a, "x:1", Base, entry{"f", string(noise), 0}, entry{"g", strings.Repeat("more", 5000), 0}).Layer
	if len(two.Extra) != 1 || two.Extra[0] != one.Blob || two.Blob.Root == "" {
		t.Fatalf("blobs of the second: %+v, of the first: %+v", two.Blobs(), one.Blob)
	}
	for _, b := range two.Blobs() {
		x, err := blob.ReadIndex(ctx, store, blobName(b.Digest), b.Size)
		if err != nil || x.Root().String() != b.Root {
			t.Errorf("blob %s: the index has the root %v, the manifest %s; %v", b.Digest, x.Root(), b.Root, err)
		}
	}
	if one.Meta.Root != "" || one.Index.Root != "" {
		t.Errorf("objects that are fetched whole have roots: %+v", one.Manifest)
	}
}

// Manifests without roots stay what they are, and what is no root is refused.
func TestManifestsWithoutRoots(t *testing.T) {
	m := Manifest{Schema: schemaPlain, Kind: Base, Meta: Object{Digest: digestOf([]byte("m")), Size: 1}, Blob: Object{Digest: digestOf([]byte("b")), Size: 1}}
	old, err := m.encode()
	if err != nil || bytes.Contains(old, []byte("root")) {
		t.Fatalf("%s, %v", old, err)
	}
	got, err := decodeManifest(digestOf(old), old)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := got.encode(); err != nil || !bytes.Equal(again, old) {
		t.Errorf("%s, %v", again, err)
	}
	m.Blob.Root = "../etc"
	bad, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decodeManifest(digestOf(bad), bad); !errs.Is(err, errs.Invalid) {
		t.Errorf("a root that is none: %v", err)
	}
}
