package layer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/blob/blobtest"
)

// age makes all that is in a store's directory older than the grace period.
func age(t *testing.T, root string) {
	t.Helper()
	old := time.Now().Add(-48 * time.Hour)
	for _, dir := range []string{"blobs", "manifests", "uses"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			return os.Chtimes(path, old, old)
		})
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
}

// Two nodes import what is old garbage in the store while both collect there: what names reach afterwards is whole, for a
// third node that has nothing.
func TestImportsWhileSharedIsCollected(t *testing.T) {
	ctx := context.Background()
	rounds := 4
	if testing.Short() {
		rounds = 2
	}
	root := t.TempDir()
	store, err := blob.NewDir(root)
	if err != nil {
		t.Fatal(err)
	}
	const layers = 12
	collected := 0
	for round := range rounds {
		files := func(i int) entry { return entry{"f", fmt.Sprintf("%d %0*d", i, 5000, i), 0} }
		old := openShared(t, store, fmt.Sprintf("old%03d", round))
		for i := range layers {
			l := importFiles(t, old, fmt.Sprintf("x%d", i), Base, files(i)).Layer
			if _, err := old.Remove(ctx, "", fmt.Sprintf("x%d", i)); err != nil {
				t.Fatal(err)
			}
			if err := old.remote.unuse(ctx, []Digest{l.Digest}); err != nil {
				t.Fatal(err)
			}
		}
		age(t, root)
		nodes := []*Store{openShared(t, store, fmt.Sprintf("aaa%03d", round)), openShared(t, store, fmt.Sprintf("bbb%03d", round))}
		var wg sync.WaitGroup
		var mu sync.Mutex
		for k, s := range nodes {
			wg.Go(func() {
				for i := k; i < layers; i += 2 {
					_, err := s.ImportTar(ctx, bytesOf(t, files(i)), ImportOptions{Name: fmt.Sprintf("x%d", i), Kind: Base, Source: "upload"})
					if err != nil {
						t.Errorf("round %d: import %d: %v", round, i, err)
					}
				}
			})
			wg.Go(func() {
				plan, err := s.CollectShared(ctx, SharedGCOptions{Grace: minGrace})
				if err != nil {
					t.Errorf("round %d: collect: %v", round, err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				collected += len(plan.Layers) + len(plan.Objects)
			})
		}
		wg.Wait()
		c := openShared(t, store, fmt.Sprintf("ccc%03d", round))
		for i := range layers {
			l, err := c.Resolve(ctx, "", fmt.Sprintf("x%d", i))
			if err != nil {
				t.Errorf("round %d: %v", round, err)
				continue
			}
			if problems, err := c.Verify(ctx, l.Digest, nil); err != nil || len(problems) > 0 {
				t.Errorf("round %d: layer %d: %v, %v", round, i, problems, err)
			}
			if _, err := c.Remove(ctx, "", fmt.Sprintf("x%d", i)); err != nil {
				t.Error(err)
			}
		}
		for _, s := range nodes { // what they use is garbage in the next round
			if err := s.walkManifests(ctx, func(d Digest) error { return s.remote.unuse(ctx, []Digest{d}) }); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.walkManifests(ctx, func(d Digest) error { return c.remote.unuse(ctx, []Digest{d}) }); err != nil {
			t.Fatal(err)
		}
	}
	if collected == 0 {
		t.Error("nothing was ever collected: the test tests nothing")
	}
	t.Logf("%d layers and objects were collected meanwhile", collected)
}

// The catalogue over a real S3 server: what the other tests of shared stores do, in short.
func TestSharedOverS3(t *testing.T) {
	ctx := context.Background()
	server := blobtest.Versity(t)
	o := server.Bucket(t, "some/where")
	t.Setenv("AWS_ACCESS_KEY_ID", o.Credentials.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", o.Credentials.SecretKey)
	store, err := blob.Open(ctx, server.URL(o), blob.Options{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := openShared(t, store, "aaaaaa"), openShared(t, store, "bbbbbb")
	for _, s := range []*Store{a, b} {
		if err := s.CheckShared(ctx); err != nil {
			t.Fatal(err)
		}
	}
	content := make([]byte, 9<<20) // more than one part, once it is noise
	for i := range content {
		content[i] = byte(i * i >> 7)
	}
	one := importFiles(t, a, "team/x:1", Base, entry{"f", string(content), 0}).Layer
	two := importFiles(t, a, "team/x:2", Base, entry{"f", string(content), 0}, entry{"g", "more", 0}).Layer
	for name, want := range map[string]Digest{"team/x:1": one.Digest, "team/x:2": two.Digest} {
		got, err := b.Resolve(ctx, "", name)
		if err != nil || got.Digest != want {
			t.Fatalf("%s: %v, %v", name, got.Digest, err)
		}
		if problems, err := b.Verify(ctx, want, nil); err != nil || len(problems) > 0 {
			t.Errorf("%s: %v, %v", name, problems, err)
		}
	}
	page, more, err := b.List(ctx, ListOptions{Limit: 1})
	if err != nil || len(page) != 1 || !more {
		t.Errorf("listed %v, %v, %v", page, more, err)
	}
	if _, err := b.Tag(ctx, "", "team/x:1", "team/x:2"); err != nil {
		t.Fatal(err)
	}
	a.forgetRecent()
	if got, err := a.Resolve(ctx, "", "team/x:2"); err != nil || got.Digest != one.Digest {
		t.Errorf("after the name moved: %v, %v", got.Digest, err)
	}
	if _, err := b.Remove(ctx, "", "team/x:2"); err != nil {
		t.Fatal(err)
	}
	a.forgetRecent()
	if _, err := a.Resolve(ctx, "", "team/x:2"); !errs.Is(err, errs.NotFound) {
		t.Errorf("after the name went: %v", err)
	}
	if plan, err := a.CollectShared(ctx, SharedGCOptions{}); err != nil || len(plan.Layers)+len(plan.Objects) > 0 {
		t.Errorf("what is young: %+v, %v", plan, err)
	}
}
