// Package snapshots makes layers of sandboxes' writable layers: it is what the life cycle asks to pack, made of the layer store
// and packdiff's rules.
package snapshots

import (
	"context"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/layer"
	"github.com/harena-dev/harena/internal/storage/packdiff"
)

// Mounts tells where layers are mounted.
type Mounts interface {
	// Acquire mounts a layer for owner, or finds it mounted.
	Acquire(ctx context.Context, d layer.Digest, owner string) (string, error)
	Release(owner string) error
	// Drop unmounts those of the layers that nobody owns.
	Drop(ds []layer.Digest) error
}

// Packer implements lifecycle.Packer.
type Packer struct {
	Store  *layer.Store
	Mounts Mounts
	Now    func() time.Time
	// InUse returns the layers that sandboxes have.
	InUse func() map[layer.Digest]bool
	held  memory
	// Examining is work for processors, and keeps the directories of all layers open on the way to where it is.
	examining examiners
}

// examiners gives out turns, as many as there are processors.
type examiners struct {
	once  sync.Once
	turns chan struct{}
}

func (x *examiners) take(ctx context.Context) (give func(), err error) {
	x.once.Do(func() { x.turns = make(chan struct{}, max(1, min(4, runtime.GOMAXPROCS(0)))) })
	select {
	case x.turns <- struct{}{}:
		return func() { <-x.turns }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// What all snapshots together, and one of them, may hold in memory of what their sandboxes wrote.
const (
	maxHeld    = 256 << 20
	maxHeldOne = 64 << 20
)

// memory gives out what of maxHeld is left.
type memory struct{ used atomic.Int64 }

func (m *memory) take() int64 {
	n := int64(maxHeldOne)
	if over := m.used.Add(n) - maxHeld; over > 0 {
		m.used.Add(-min(over, n))
		n -= min(over, n)
	}
	return n
}

func (m *memory) give(n int64) { m.used.Add(-n) }

var _ lifecycle.Packer = (*Packer)(nil)

// Begin implements lifecycle.Packer.
func (p *Packer) Begin(ctx context.Context, o lifecycle.PackOptions) (lifecycle.Packing, error) {
	var rules *packdiff.Rules
	if o.Clean {
		var err error
		if rules, err = packdiff.Parse(true, o.Rules, o.Keep); err != nil {
			return nil, err
		}
	}
	k := &packing{p: p, o: o, cleaner: packdiff.NewCleaner(rules), hold: p.held.take()}
	so := layer.SnapshotOptions{Project: o.Project, Name: o.Name, Source: "sandbox:" + o.Sandbox, Hold: k.hold}
	if o.Name == "" {
		so.Source = forkSource + o.Sandbox
	}
	if o.Clean {
		so.Rules, so.Choose = rules.Name(), k.cleaner.Choose
	}
	if err := p.begin(ctx, k, so); err != nil {
		k.Close()
		return nil, err
	}
	return k, nil
}

// forkSource begins the source of layers that forks have in common.
const forkSource = "fork:"

// Collect implements lifecycle.Packer.
func (p *Packer) Collect(ctx context.Context) error {
	plan, err := p.Store.CollectGarbage(ctx, layer.GCOptions{
		InUse: p.InUse, Only: func(l layer.Layer) bool { return strings.HasPrefix(l.Source, forkSource) },
	})
	if err != nil {
		return err
	}
	return p.Mounts.Drop(plan.Layers)
}

func (p *Packer) begin(ctx context.Context, k *packing, so layer.SnapshotOptions) error {
	o := k.o
	for _, l := range o.Layers {
		d, err := layer.ParseDigest(l.Digest)
		if err != nil {
			return err
		}
		so.Parents = append(so.Parents, d)
	}
	if err := p.inherit(&so); err != nil {
		return err
	}
	for _, s := range o.Earlier {
		d, err := layer.ParseDigest(s)
		if err != nil {
			return err
		}
		so.Earlier = append(so.Earlier, d)
	}
	k.below = so.Parents[:len(so.Parents)-so.Merge]
	var err error
	if k.draft, err = p.Store.NewDraft(so); err != nil {
		return err
	}
	return k.draft.Prepare(ctx)
}

// maxStacked is how many snapshots may lie on each other: the next one takes the place of all of them, which copies names and
// references to content, and so a chain of any length is mounted as fast as one.
const maxStacked = 4

// inherit decides how many snapshots below are merged, and takes over the config of the image that the sandbox was made from: the
// uppermost snapshot, else the uppermost base. A snapshot that is cleaned lies on such only that were cleaned by the same
// rules: others, and what lies on them, become a part of it, and are cleaned with it.
func (p *Packer) inherit(so *layer.SnapshotOptions) error {
	stacked := 0
	for _, d := range slices.Backward(so.Parents) {
		l, err := p.Store.Load(d)
		if err != nil {
			return err
		}
		if l.Kind != layer.Snapshot {
			break
		}
		stacked++
		if so.Rules != "" && l.Cleaned != so.Rules {
			so.Merge = stacked
		}
	}
	if stacked >= maxStacked {
		so.Merge = stacked
	}
	for _, want := range []layer.Kind{layer.Snapshot, layer.Base} {
		for _, d := range slices.Backward(so.Parents) {
			l, err := p.Store.Load(d)
			if err != nil {
				return err
			}
			if l.Kind == want {
				so.Config = l.Config
				return nil
			}
		}
	}
	return nil
}

type packing struct {
	p       *Packer
	o       lifecycle.PackOptions
	below   []layer.Digest // what the layer will lie on
	draft   *layer.Draft
	cleaner *packdiff.Cleaner
	hold    int64
}

// Close implements lifecycle.Packing.
func (k *packing) Close() {
	if k.draft != nil {
		k.draft.Close()
	}
	k.p.held.give(k.hold)
	k.hold = 0
}

// Capture implements lifecycle.Packing.
func (k *packing) Capture(ctx context.Context, upper string) error {
	return k.draft.Read(ctx, upper, erofs.Options{Choose: k.cleaner.Choose})
}

// Finish implements lifecycle.Packing.
func (k *packing) Finish(ctx context.Context, pin func(lifecycle.Layer) error) (*lifecycle.Packed, error) {
	if err := k.draft.Write(ctx); err != nil {
		return nil, err
	}
	out := &lifecycle.Packed{Warnings: quoteWarnings(k.draft.Result().Warnings)}
	sealed := make(chan error, 1)
	go func() { sealed <- k.draft.Seal(ctx) }() // the disk and the processors work side by side
	var err error
	if k.o.Examine {
		err = k.examine(ctx, out)
	}
	if serr := <-sealed; err == nil {
		err = serr
	}
	if err != nil {
		return nil, err
	}
	if k.o.Strict && len(out.Findings) > 0 {
		return out, refused(out.Findings)
	}
	l, err := k.draft.Publish(ctx, func(l layer.Layer) error {
		if pin == nil {
			return nil
		}
		return pin(k.named(l))
	})
	if err != nil {
		return nil, err
	}
	out.Layer = k.named(l)
	out.StoredBytes, out.LogicalBytes = l.Meta.Size+l.Blob.Size, l.LogicalBytes
	return out, nil
}

func (k *packing) named(l layer.Layer) lifecycle.Layer {
	name := k.o.Name
	if name == "" {
		name = string(l.Digest)
	}
	return lifecycle.Layer{Name: name, Digest: string(l.Digest), Kind: string(l.Kind)}
}

// examine compares what was packed with the layers below, which it holds mounted meanwhile: the sandbox may end before.
func (k *packing) examine(ctx context.Context, out *lifecycle.Packed) error {
	img, err := k.draft.Image()
	if err != nil {
		return err
	}
	owner := "snapshot-" + filepath.Base(k.draft.Dir())
	defer func() { _ = k.p.Mounts.Release(owner) }() // of what is mounted for the sandbox in any case
	var dirs []string
	for _, d := range k.below {
		dir, err := k.p.Mounts.Acquire(ctx, d, owner)
		if err != nil {
			return err
		}
		dirs = append(dirs, dir)
	}
	give, err := k.p.examining.take(ctx)
	if err != nil {
		return err
	}
	defer give()
	diff, err := packdiff.Examine(ctx, img, dirs, packdiff.Options{Now: k.p.Now(), Quality: true, Cleaner: k.cleaner})
	if err != nil {
		return err
	}
	out.Added, out.AddedCount = quoted(diff.Added)
	out.Changed, out.ChangedCount = quoted(diff.Changed)
	out.Deleted, out.DeletedCount = quoted(diff.Deleted)
	out.Cleaned, out.CleanedCount = quoted(k.cleaner.Cleaned)
	for _, f := range diff.Findings.All() {
		out.Findings = append(out.Findings, f.String())
	}
	return nil
}

func quoted(l packdiff.List) ([]string, int64) {
	out := make([]string, len(l.Paths))
	for i, p := range l.Paths {
		out[i] = packdiff.Quote(p)
	}
	return out, l.Count
}

// quoteWarnings makes what has names of files in it fit for messages that must be UTF-8.
func quoteWarnings(in []string) []string {
	out := make([]string, len(in))
	for i, w := range in {
		out[i] = strings.ToValidUTF8(w, "?")
	}
	return out
}

// refused is the error of a strict snapshot.
func refused(findings []string) error {
	const told = 5
	text := strings.Join(findings[:min(len(findings), told)], "; ")
	if n := len(findings) - told; n > 0 {
		text += "; …"
	}
	return errs.E(errs.Precondition, "the snapshot has %d findings: %s", len(findings), text).
		WithHint("mend them, or leave --strict out to take it in spite of them")
}
