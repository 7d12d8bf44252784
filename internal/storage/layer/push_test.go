package layer

import (
	"bytes"
	"context"
	"io"
	"slices"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

func bytesOf(t testing.TB, entries ...entry) io.Reader { return bytes.NewReader(tarOf(t, entries...)) }

// A name that a node had before it got a store is its own until it is pushed.
func TestPush(t *testing.T) {
	ctx := context.Background()
	data := t.TempDir()
	alone := openStore(t, data)
	if _, err := alone.Push(ctx, "", "x:1", nil); !errs.Is(err, errs.Precondition) {
		t.Errorf("push without a store: %v", err)
	}
	below := importFiles(t, alone, "x:1", Base, entry{"f", string(make([]byte, 9000)) + "end", 0}).Layer
	store := blob.NewMemory()
	s, err := Open(data, Limits{}, WithShared(store, SharedOptions{Node: "aaaaaa", URL: "test"}))
	if err != nil {
		t.Fatal(err)
	}
	other := openShared(t, store, "bbbbbb")
	if _, err := other.Resolve(ctx, "", "x:1"); !errs.Is(err, errs.NotFound) {
		t.Errorf("before it is pushed: %v", err)
	}
	if got, err := s.Resolve(ctx, "", "x:1"); err != nil || s.Place(got) != "local" {
		t.Errorf("on its own node: %s, %v", s.Place(got), err)
	}
	// Of the two, only the one that was asked for; by digest, without a name.
	importFiles(t, other, "x:1", Base, entry{"f", "another node's", 0})
	if l, err := s.Push(ctx, "", string(below.Digest), nil); err != nil || l.Digest != below.Digest {
		t.Fatalf("%v, %v", l.Digest, err)
	}
	other.forgetRecent()
	if got, err := other.Resolve(ctx, "", "x:1"); err != nil || got.Digest == below.Digest {
		t.Errorf("a push by digest moved the name: %v", err)
	}
	if problems, err := other.verifyShared(ctx, below.Digest); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	phases := map[string]bool{}
	if _, err := s.Push(ctx, "", "x:1", func(p Progress) { phases[p.Phase] = true }); err != nil || !phases[PhaseStoring] {
		t.Fatalf("%v, %v", phases, err)
	}
	other.forgetRecent()
	if got, err := other.Resolve(ctx, "", "x:1"); err != nil || got.Digest != below.Digest {
		t.Errorf("after it was pushed: %v, %v", got.Digest, err)
	}
	if got, err := s.Resolve(ctx, "", "x:1"); err != nil || s.Place(got) != "shared" {
		t.Errorf("on its own node: %s, %v", s.Place(got), err)
	}
	if _, err := s.readTag(Ref{Project: DefaultProject, Name: "x", Tag: "1"}); !errs.Is(err, errs.NotFound) {
		t.Errorf("the node's own name hides the shared one still: %v", err)
	}
	if _, err := s.Push(ctx, "", "nothing", nil); !errs.Is(err, errs.NotFound) {
		t.Errorf("push of nothing: %v", err)
	}
}

// seen lets projects see what they are allowed to.
type seen map[string][]Digest

func (v seen) Visible(project string, _ Ref, l Layer) bool {
	return slices.Contains(v[project], l.Digest)
}

// What a project may not see does not exist for it, by name or digest, alone or in a stack, and cannot be named or pushed.
func TestVisibility(t *testing.T) {
	ctx := context.Background()
	v := seen{}
	s, err := Open(t.TempDir(), Limits{}, WithShared(blob.NewMemory(), SharedOptions{Node: "aaaaaa", URL: "test"}), WithVisibility(v))
	if err != nil {
		t.Fatal(err)
	}
	l := importFiles(t, s, "x:1", Base, entry{"f", "secret", 0}).Layer
	v["mine"] = []Digest{l.Digest}
	v[DefaultProject] = []Digest{l.Digest}
	if got, err := s.Resolve(ctx, "mine", string(l.Digest)); err != nil || got.Digest != l.Digest {
		t.Errorf("who may see it: %v", err)
	}
	if _, err := s.Resolve(ctx, "", "x:1"); err != nil {
		t.Errorf("by name: %v", err)
	}
	v[DefaultProject] = nil
	_, resolve := s.Resolve(ctx, "", "x:1")
	_, pinned := s.Resolve(ctx, "theirs", string(l.Digest))
	_, compose := s.Compose(ctx, "theirs", string(l.Digest), "", nil)
	_, tag := s.Tag(ctx, "theirs", string(l.Digest), "y")
	_, push := s.Push(ctx, "theirs", string(l.Digest), nil)
	_, against := s.ImportTar(ctx, bytesOf(t, entry{"f", "new", 0}), ImportOptions{Project: "theirs", Name: "z", Kind: Base, Against: string(l.Digest)})
	for what, err := range map[string]error{"by name": resolve, "by digest": pinned, "in a stack": compose, "to name it": tag, "to push it": push, "to import against it": against} {
		if !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
