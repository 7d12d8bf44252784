package lifecycle

import "context"

// Packer makes layers of writable layers.
type Packer interface {
	// Begin checks what is asked and prepares, while the sandbox runs. invalid: name or rules.
	Begin(ctx context.Context, o PackOptions) (Packing, error)
	// Collect removes the layers of forks that nothing uses any more, as far as it has not done so before.
	Collect(ctx context.Context) error
}

// PackOptions say what to make of a writable layer.
type PackOptions struct {
	Project string
	// Name is name[:tag]; empty: the layer has none, and stays while somebody owns it.
	Name    string
	Sandbox string
	// Layers are those below, lowest first, and mounted.
	Layers []Layer
	// Earlier are layers whose content need not be stored again, if they still exist.
	Earlier []string
	// Clean has residue rules applied: the defaults, Rules, Keep.
	Clean bool
	Rules string
	Keep  []string
	// Examine has the result list paths and findings; Strict refuses to publish when there are findings.
	Examine, Strict bool
}

// Packing is one layer in the making. Calls come one at a time: Capture, Finish, Close.
type Packing interface {
	// Capture takes what is below upper, which nothing changes meanwhile. It returns as soon as upper may change again.
	Capture(ctx context.Context, upper string) error
	// Finish makes the layer and publishes it. pin is called with it before it can be collected. The answer has everything
	// but sandbox, phase and times. precondition: there are findings, with Strict.
	Finish(ctx context.Context, pin func(Layer) error) (*Packed, error)
	// Close removes what was not published.
	Close()
}

// Packed is a layer that was made of a writable layer. Paths are in the form of the API.
type Packed struct {
	Layer                                                Layer
	StoredBytes, LogicalBytes                            int64
	Added, Changed, Deleted, Cleaned                     []string
	AddedCount, ChangedCount, DeletedCount, CleanedCount int64
	Findings, Warnings                                   []string
}
