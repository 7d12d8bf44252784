package layer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

func TestCompose(t *testing.T) {
	of := func(kind Kind, name string) Layer {
		return Layer{Digest: Digest(name), Manifest: Manifest{Kind: kind, Config: ImageConfig{User: "user of " + name}}}
	}
	named := func(kind Kind, name string) Named { return Named{name, of(kind, name)} }
	ptr := func(n Named) *Named { return &n }
	base, ws, t1, t2, snap := named(Base, "base"), named(Workspace, "ws"), named(Toolkit, "t1"), named(Toolkit, "t2"), named(Snapshot, "snap")
	parents := []Layer{of(Base, "b0"), of(Workspace, "w0"), of(Toolkit, "k0"), of(Snapshot, "s0")}
	many := make([]Named, 70)
	for i := range many {
		many[i] = named(Toolkit, fmt.Sprint("t", i))
	}
	for _, c := range []struct {
		name string
		in   Stack
		want string // digests, or the start of the error and a word of its hint
	}{
		{"base alone", Stack{Image: base}, "base"},
		{"all kinds", Stack{Image: base, Workspace: ptr(ws), Toolkits: []Named{t2, t1}}, "base ws t2 t1"},
		{"a toolkit twice", Stack{Image: base, Toolkits: []Named{t1, t2, t1}}, "base t1 t2"},
		{"snapshot", Stack{Image: snap, Parents: parents}, "b0 w0 k0 s0 snap"},
		{"snapshot and toolkits", Stack{Image: snap, Parents: parents, Toolkits: []Named{t1, named(Toolkit, "k0")}}, "b0 w0 k0 t1 s0 snap"},
		{"snapshot and its own workspace", Stack{Image: snap, Parents: parents, Workspace: ptr(named(Workspace, "w0"))}, "b0 w0 k0 s0 snap"},
		{"snapshot and another workspace", Stack{Image: snap, Parents: parents, Workspace: ptr(ws)}, "error: snapshot snap was taken over another|leave the workspace out"},
		{"workspace as image", Stack{Image: ws}, "error: layer ws is a workspace|--workspace"},
		{"toolkit as image", Stack{Image: t1}, "error: layer t1 is a toolkit|--toolkit"},
		{"base as workspace", Stack{Image: base, Workspace: ptr(base)}, "error: layer base is a base|--image"},
		{"vm-image as image", Stack{Image: named(VMImage, "vm")}, "error: layer vm is a vm-image|--backend vm"},
		{"workspace as toolkit", Stack{Image: base, Toolkits: []Named{ws}}, "error: layer ws is a workspace|--workspace"},
		{"too many", Stack{Image: base, Toolkits: many}, "error: the limit of layers of a sandbox is 64, asked 71|"},
	} {
		got, err := Compose(c.in)
		if want, isError := strings.CutPrefix(c.want, "error: "); isError {
			message, hint, _ := strings.Cut(want, "|")
			var e *errs.Error
			if !errors.As(err, &e) || e.Kind != errs.Invalid || !strings.HasPrefix(e.Message, message) || !strings.Contains(e.Hint, hint) {
				t.Errorf("%s: got %v", c.name, err)
			}
			continue
		}
		var want []Digest
		for _, d := range strings.Fields(c.want) {
			want = append(want, Digest(d))
		}
		if err != nil || !slices.Equal(got.Digests, want) {
			t.Errorf("%s: got %v, %v, want %s", c.name, got.Digests, err, c.want)
		}
		if got.Config.User != "user of "+c.in.Image.Name {
			t.Errorf("%s: config of %q", c.name, got.Config.User)
		}
	}
}
