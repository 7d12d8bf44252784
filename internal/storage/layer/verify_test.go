package layer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand"
	"os"
	"testing"
)

// TestVerifyFindsEachDamage: one byte flipped anywhere, an end that is missing or too much, or nothing at all, in each kind
// of object that a layer is made of, and in its manifest.
func TestVerifyFindsEachDamage(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	big := noise(9, 2<<20)
	old := importAgainst(t, s, "a", "", entry{"f", big, 0}).Layer
	l := importAgainst(t, s, "a", "", entry{"d/", "", 0}, entry{"d/f", big + noise(10, 1<<20) + "end", 0}, entry{"g", "small", 0}).Layer
	if len(l.Extra) != 1 || l.Index.Digest == "" || len(l.ExtraIndex) != 1 || l.Extra[0].Digest != old.Blob.Digest {
		t.Fatalf("manifest %+v", l.Manifest)
	}
	flips := 24
	if testing.Short() {
		flips = 6
	}
	rnd := rand.New(rand.NewSource(3))
	for what, path := range map[string]string{
		"metadata image": s.local.path(l.Meta.Digest), "data blob": s.local.path(l.Blob.Digest), "blob of another layer": s.local.path(l.Extra[0].Digest),
		"chunk index": s.local.path(l.Index.Digest), "index of the other blob": s.local.path(l.ExtraIndex[0].Digest), "manifest": s.manifestPath(l.Digest),
	} {
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		damaged := map[string][]byte{"empty": {}, "missing": nil, "one byte short": whole[:len(whole)-1], "one byte more": append(bytes.Clone(whole), 0), "half": whole[:len(whole)/2]}
		for k := range flips {
			at := rnd.Intn(len(whole))
			switch k {
			case 0:
				at = 0
			case 1:
				at = len(whole) - 1
			}
			b := bytes.Clone(whole)
			b[at] ^= 1 << rnd.Intn(8)
			damaged[fmt.Sprintf("byte %d flipped", at)] = b
		}
		replace := func(b []byte) {
			_ = os.Remove(path)
			if b == nil {
				return
			}
			if err := os.WriteFile(path, b, 0o400); err != nil {
				t.Fatal(err)
			}
		}
		for how, b := range damaged {
			replace(b)
			if problems, err := s.Verify(ctx, l.Digest, nil); len(problems) == 0 && (err == nil || path != s.manifestPath(l.Digest)) {
				t.Errorf("%s, %s: %v, %v", what, how, problems, err)
			}
		}
		replace(whole)
		sound(t, s, l.Digest)
	}
}
