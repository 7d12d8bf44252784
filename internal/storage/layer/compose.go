package layer

import (
	"slices"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Named is a layer with the name under which the caller asked for it, for messages.
type Named struct {
	Name  string
	Layer Layer
}

// Stack is what a sandbox is to be made of.
type Stack struct {
	Image Named // a base or a snapshot
	// Parents are the layers of Image.Layer.Parents, in that order.
	Parents   []Layer
	Workspace *Named
	Toolkits  []Named // later ones lie above earlier ones
}

// Composition is the answer of Compose.
type Composition struct {
	// Layers are lowest first, without repetition. One that only the image
	// brings, as its parent, has its digest as name.
	Layers []Named
	// Digests are those of Layers, in the same order.
	Digests []Digest
	// Config is the image's.
	Config ImageConfig
}

// Compose orders the layers of a sandbox: base, workspace, toolkits, snapshots.
// A snapshot used as image brings the layers it was taken over; toolkits that are
// added lie below it, so that what the sandbox had changed stays on top. A wrong
// kind is an error of kind invalid that says how the layer can be used.
func Compose(in Stack) (Composition, error) {
	var lower, snapshots []Named
	var hasWorkspace Digest
	switch in.Image.Layer.Kind {
	case Base:
		for _, p := range in.Parents { // a large image in several pieces
			lower = append(lower, Named{Name: string(p.Digest), Layer: p})
		}
		lower = append(lower, in.Image)
	case Snapshot:
		for _, p := range in.Parents {
			n := Named{Name: string(p.Digest), Layer: p}
			if p.Kind == Snapshot {
				snapshots = append(snapshots, n)
				continue
			}
			if p.Kind == Workspace {
				hasWorkspace = p.Digest
			}
			lower = append(lower, n)
		}
		snapshots = append(snapshots, in.Image)
	default:
		return Composition{}, wrongKind(in.Image, "an image must be a base or a snapshot")
	}
	if w := in.Workspace; w != nil {
		if w.Layer.Kind != Workspace {
			return Composition{}, wrongKind(*w, "a workspace is needed here")
		}
		if hasWorkspace != "" && hasWorkspace != w.Layer.Digest {
			return Composition{}, errs.E(errs.Invalid, "snapshot %s was taken over another workspace than %s", in.Image.Name, w.Name).
				On("layer %s", w.Name).WithHint("leave the workspace out: the snapshot brings its own")
		}
		lower = append(lower, *w)
	}
	for _, t := range in.Toolkits {
		if t.Layer.Kind != Toolkit {
			return Composition{}, wrongKind(t, "a toolkit is needed here")
		}
		lower = append(lower, t)
	}
	layers := distinct(append(lower, snapshots...))
	if n := len(layers); n > sandbox.MaxLayers {
		return Composition{}, errs.OverLimit(errs.Invalid, "layers of a sandbox", sandbox.MaxLayers, n)
	}
	c := Composition{Layers: layers, Config: in.Image.Layer.Config}
	for _, l := range layers {
		c.Digests = append(c.Digests, l.Layer.Digest)
	}
	return c, nil
}

// distinct drops all but the first of equal layers: overlayfs refuses a lower
// directory that is given twice (ELOOP), and a repetition adds nothing.
func distinct(in []Named) []Named {
	out := make([]Named, 0, len(in))
	for _, n := range in {
		if !slices.ContainsFunc(out, func(o Named) bool { return o.Layer.Digest == n.Layer.Digest }) {
			out = append(out, n)
		}
	}
	return out
}

func wrongKind(n Named, what string) error {
	hint := ""
	switch n.Layer.Kind {
	case Base:
		hint = "give a base as the image (--image)"
	case Workspace:
		hint = "give a workspace beside an image (--workspace)"
	case Toolkit:
		hint = "give a toolkit beside an image (--toolkit)"
	case Snapshot:
		hint = "give a snapshot as the image (--image)"
	case VMImage:
		hint = "a vm-image runs with --backend vm only"
	}
	return errs.E(errs.Invalid, "layer %s is a %s: %s", n.Name, n.Layer.Kind, what).
		On("layer %s", n.Name).WithHint("%s", hint)
}
