package layer

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// A collector removes manifests before it knows for good that nobody uses them, see sharedGC. So that none is lost when it
// dies in between, it writes each to removingPrefix before and removes that when all is decided. What is found there later
// is put back, in the way in which layers are published, which is safe whatever other collectors do, even the one that
// was thought dead.
const (
	removingPrefix = "removing/"
	// restoredUses are uses that protect what was put back as those of a node protect what it publishes. They end after the grace period.
	restoredUses = "uses/restored/"
	// restoreAfter is when a collector is taken for dead: it decides within minutes.
	restoreAfter = 2 * stepTime
	// putBackTime bounds putting manifests back when nobody waits for the collection any more.
	putBackTime = 2 * time.Minute
)

func removingName(d Digest) string { return fan("removing", d, ".json") }

// restore puts back the layer if a collector died before it had decided about it, and tells whether the store has it now.
// One of which something is gone already was decided about.
func (r *sharedStore) restore(ctx context.Context, d Digest) (bool, error) {
	if _, err := r.store.Stat(ctx, manifestName(d)); !errs.Is(err, errs.NotFound) {
		return err == nil, err
	}
	info, err := r.store.Stat(ctx, removingName(d))
	if errs.Is(err, errs.NotFound) || err == nil && time.Since(info.Modified) < restoreAfter {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	b, err := blob.ReadAll(ctx, r.store, removingName(d), maxManifest)
	if errs.Is(err, errs.NotFound) {
		return false, nil // somebody else did
	}
	if err != nil {
		return false, err
	}
	m, err := decodeManifest(d, b)
	if err != nil {
		return false, err
	}
	if err := r.putBytes(ctx, restoredUses+d.Hex(), b); err != nil {
		return false, err
	}
	if err := r.awaitSteps(ctx); err != nil {
		return false, err
	}
	whole, err := r.hasAll(ctx, m)
	if err != nil {
		return false, err
	}
	if !whole {
		return false, r.store.Delete(ctx, removingName(d), restoredUses+d.Hex())
	}
	if err := r.putBytes(ctx, manifestName(d), b); err != nil {
		return false, err
	}
	return true, r.store.Delete(ctx, removingName(d))
}

// hasAll tells whether the store has all that a layer is made of.
func (r *sharedStore) hasAll(ctx context.Context, m *Manifest) (bool, error) {
	for _, p := range m.Parents {
		_, err := r.store.Stat(ctx, manifestName(p))
		if errs.Is(err, errs.NotFound) {
			if back, err := r.restore(ctx, p); err != nil || !back {
				return false, err
			}
		} else if err != nil {
			return false, err
		}
	}
	for _, o := range m.Objects() {
		_, err := r.store.Stat(ctx, blobName(o.Digest))
		if errs.Is(err, errs.NotFound) {
			_, err = r.store.Stat(ctx, rawName(o.Digest))
		}
		if errs.Is(err, errs.NotFound) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// restoreAll puts back what collectors that died have left, and ends uses of what was put back long ago.
func (g *sharedGC) restoreAll(ctx context.Context) error {
	err := g.r.list(ctx, removingPrefix, func(i blob.Info) error {
		d, ok := decodeHex(strings.TrimSuffix(filepath.Base(i.Name), ".json"))
		if !ok || i.Name != removingName(d) {
			return nil
		}
		there, err := g.r.restore(ctx, d)
		if there && i.Modified.Before(g.before) { // or its collector has yet to remove it
			return g.r.store.Delete(ctx, i.Name)
		}
		if errs.Is(err, errs.Precondition) || errs.Is(err, errs.Invalid) {
			g.problem("%s: %v", i.Name, err)
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	var ended []string
	err = g.r.list(ctx, restoredUses, func(i blob.Info) error {
		if i.Modified.Before(g.before) {
			ended = append(ended, i.Name)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return g.r.store.Delete(ctx, ended...)
}

// readManifest reads a manifest of the store, which is put back if that is due.
func (r *sharedStore) readManifest(ctx context.Context, d Digest) ([]byte, error) {
	b, err := blob.ReadAll(ctx, r.store, manifestName(d), maxManifest)
	if !errs.Is(err, errs.NotFound) {
		return b, err
	}
	back, rerr := r.restore(ctx, d)
	if rerr != nil {
		return nil, rerr
	}
	if !back {
		return nil, err
	}
	return blob.ReadAll(ctx, r.store, manifestName(d), maxManifest)
}

// removal is a set of manifests that are removed, and of which some may turn out to be in use.
type removal struct {
	g       *sharedGC
	content map[Digest][]byte
}

// begin writes down what is going to be removed.
func (v *removal) begin(ctx context.Context, garbage []Digest) error {
	for _, d := range garbage {
		b, err := blob.ReadAll(ctx, v.g.r.store, manifestName(d), maxManifest)
		if errs.Is(err, errs.NotFound) {
			continue // if it comes back, it is not garbage
		}
		if err != nil {
			return err
		}
		if err := v.g.r.putBytes(ctx, removingName(d), b); err != nil {
			return err
		}
		v.content[d] = b
	}
	return nil
}

// delete removes the objects that have a name for each manifest.
func (v *removal) delete(ctx context.Context, name func(Digest) string) error {
	for step := range slices.Chunk(slices.Sorted(maps.Keys(v.content)), deleteStep) {
		names := make([]string, len(step))
		for i, d := range step {
			names[i] = name(d)
		}
		if err := v.g.r.store.Delete(ctx, names...); err != nil {
			return err
		}
	}
	return nil
}

// keep marks what a manifest that is put back needs: its objects, and its parents, which may have been removed with it.
func (v *removal) keep(ctx context.Context, d Digest) {
	g := v.g
	g.keep[d], g.read[d] = true, true
	m, err := decodeManifest(d, v.content[d])
	if err != nil {
		g.problem("layer %s: %v", d, err)
		g.blind = true
		return
	}
	for _, o := range m.Objects() {
		g.named[o.Digest] = true
	}
	for _, p := range m.Parents {
		if v.content[p] == nil {
			g.mark(ctx, p)
		} else if !g.read[p] {
			v.keep(ctx, p)
		}
	}
}

// decide looks at names and uses again, and puts back what they need; when it cannot look, everything.
func (v *removal) decide(ctx context.Context) error {
	g := v.g
	err := g.markNames(ctx)
	if err == nil {
		err = g.markUses(ctx)
	}
	// Also when nobody waits for the collection any more.
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), putBackTime)
	defer stop()
	for d := range v.content {
		if err != nil || g.blind || g.keep[d] {
			v.keep(end, d)
		}
	}
	failed := []error{err}
	for d, b := range v.content {
		if !g.keep[d] {
			continue
		}
		if perr := g.r.putBytes(end, manifestName(d), b); perr != nil {
			return errors.Join(append(failed, perr)...) // the rest is for restore
		}
	}
	if g.blind {
		failed = append(failed, errs.E(errs.Precondition, "something was damaged while layers were collected").WithHint("run the collection again"))
	}
	return errors.Join(append(failed, v.delete(end, removingName))...)
}
