// Package layer keeps immutable layers: what they are, where they lie on disk,
// the names that point at them, how they are imported, stacked and mounted.
//
// A layer is a manifest that names an EROFS metadata image and its data blobs by
// their SHA-256: one of its own and those of other layers that have content of it. The digest of a layer is the SHA-256 of its manifest, so equal
// content from an equal source is one layer however often it is imported.
// A layer exists exactly when its manifest does; objects that no manifest names
// are garbage. Names (tags) are mutable pointers, kept per project.
//
// The store has one writing process (the server that holds DIR/lock).
package layer

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// Digest is "sha256:" and 64 hexadecimal digits.
type Digest string

const digestPrefix = "sha256:"

var hexPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// ParseDigest checks s, which comes from outside.
func ParseDigest(s string) (Digest, error) {
	if !strings.HasPrefix(s, digestPrefix) || !hexPattern.MatchString(s[len(digestPrefix):]) {
		return "", errs.E(errs.Invalid, "%.80q is not a digest", s).
			WithHint("a digest is sha256: and 64 hexadecimal digits in lower case")
	}
	return Digest(s), nil
}

// Hex returns the digits without the prefix.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), digestPrefix) }

func digestOf(b []byte) Digest {
	sum := sha256.Sum256(b)
	return sumDigest(sum[:])
}

func sumDigest(sum []byte) Digest { return Digest(digestPrefix + hex.EncodeToString(sum)) }

// Kind says what a layer is for.
type Kind string

// The kinds.
const (
	Base      Kind = "base"      // an operating system; the lowest of a stack
	Workspace Kind = "workspace" // what is worked on
	Toolkit   Kind = "toolkit"   // tools put above the workspace
	Snapshot  Kind = "snapshot"  // what a sandbox changed
	VMImage   Kind = "vm-image"  // a bootable disk
)

// ParseKind checks s, which comes from outside; empty means Base.
func ParseKind(s string) (Kind, error) {
	switch k := Kind(s); k {
	case "":
		return Base, nil
	case Base, Workspace, Toolkit, Snapshot, VMImage:
		return k, nil
	}
	return "", errs.E(errs.Invalid, "layer kind %.40q is not known", s).
		WithHint("use one of base, workspace, toolkit, snapshot, vm-image")
}

// Object names stored bytes.
type Object struct {
	Digest Digest `json:"digest"`
	Size   int64  `json:"size"`
	// Root, of a data blob, is blob.Index.Root in hexadecimal: with it each frame that a store gives can be checked, not only
	// the whole. Manifests of older versions have none.
	Root string `json:"root,omitempty"`
}

// ImageConfig is what an image asks of a sandbox made from it.
type ImageConfig struct {
	Env        []string          `json:"env,omitempty"` // NAME=value
	WorkingDir string            `json:"working_dir,omitempty"`
	User       string            `json:"user,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
}

// Versions of the manifest's format. A change that an older binary would misread
// increases it: an image with blobs of other layers cannot be mounted without them.
const (
	schemaPlain = 1
	schemaExtra = 2 // Extra is not empty
	schema      = schemaExtra
)

// maxExtra bounds Extra; see erofs.MaxDevices.
const maxExtra = 16

// Manifest describes a layer. It holds no time: when a layer came to be is a
// property of a store's copy (the manifest file's modification time), not of the content.
type Manifest struct {
	Schema int    `json:"schema"`
	Kind   Kind   `json:"kind"`
	Meta   Object `json:"meta"`
	Blob   Object `json:"blob"`
	// Extra are data blobs of other layers that the image also refers to, in the
	// order of its device slots from 2 on. ExtraUsed says how many bytes of each it
	// refers to, every block counted once; ExtraIndex names their chunk indexes (empty
	// digests where there is none), as the layers that they are of may be gone.
	Extra      []Object `json:"extra,omitempty"`
	ExtraUsed  []int64  `json:"extra_used,omitempty"`
	ExtraIndex []Object `json:"extra_index,omitempty"`
	// Index is the chunk index of Blob, by which later layers are written against
	// it. It is made of Blob alone; without one (layers of older versions, empty
	// blobs) it is computed where it is wanted.
	Index Object `json:"index,omitzero"`
	// LogicalBytes is the sum of the sizes of the files in it.
	LogicalBytes int64       `json:"logical_bytes"`
	Files        int64       `json:"files"`
	Source       string      `json:"source"`
	Config       ImageConfig `json:"config"`
	// Parents are the layers below a snapshot, or below the topmost piece of a base
	// that was imported in pieces; lowest first.
	Parents []Digest `json:"parents,omitempty"`
	// Cleaned names the rules by which a snapshot was cleaned: in none of the blobs that it names, but for those that its
	// parents name, lies the content of a file that they had left out. Empty: it was not cleaned.
	Cleaned string `json:"cleaned,omitempty"`
}

// Blobs returns the data blobs of the image in the order of its device slots.
func (m *Manifest) Blobs() []Object { return append([]Object{m.Blob}, m.Extra...) }

// Objects returns every object that the manifest names, some perhaps twice.
func (m *Manifest) Objects() []Object {
	out := append([]Object{m.Meta}, m.Blobs()...)
	for _, x := range append([]Object{m.Index}, m.ExtraIndex...) {
		if x.Digest != "" {
			out = append(out, x)
		}
	}
	return out
}

// check refuses what encode never wrote.
func (m *Manifest) check() error {
	for _, o := range m.Objects() {
		if _, err := ParseDigest(string(o.Digest)); err != nil {
			return err
		}
		if o.Size < 0 {
			return errs.E(errs.Invalid, "object %s has %d bytes", o.Digest, o.Size)
		}
		if o.Root != "" && !hexPattern.MatchString(o.Root) {
			return errs.E(errs.Invalid, "%.80q is not the root of an index", o.Root)
		}
	}
	for _, d := range m.Parents {
		if _, err := ParseDigest(string(d)); err != nil {
			return err
		}
	}
	if n := len(m.Extra); n > maxExtra {
		return errs.OverLimit(errs.Invalid, "data blobs of other layers", maxExtra, n)
	}
	if len(m.ExtraUsed) != len(m.Extra) || len(m.ExtraIndex) != len(m.Extra) {
		return errs.E(errs.Invalid, "%d data blobs of other layers have %d counts of bytes and %d chunk indexes", len(m.Extra), len(m.ExtraUsed), len(m.ExtraIndex))
	}
	for i, n := range m.ExtraUsed {
		if n < 0 || n > m.Extra[i].Size {
			return errs.E(errs.Invalid, "%d of %d bytes of %s are in use", n, m.Extra[i].Size, m.Extra[i].Digest)
		}
	}
	return nil
}

// encode returns the manifest's bytes, the same for equal manifests: fields in
// declared order, map keys sorted, no HTML escapes, a final newline.
func (m *Manifest) encode() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(m); err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return b.Bytes(), nil
}

// decodeManifest reads what encode wrote and checks it against its digest.
func decodeManifest(d Digest, b []byte) (*Manifest, error) {
	if got := digestOf(b); got != d {
		return nil, errs.E(errs.Precondition, "the manifest of layer %s is damaged: its digest is %s", d, got).
			On("layer %s", d).WithHint("remove the layer's names, collect garbage and import it again")
	}
	m := new(Manifest)
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("decode manifest %s: %w", d, err)
	}
	if m.Schema > schema {
		return nil, errs.E(errs.Unsupported, "layer %s has manifest schema %d, this version reads up to %d", d, m.Schema, schema).
			On("layer %s", d).WithHint("use the version of harena that made it, or a newer one")
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("decode manifest %s: %w", d, err)
	}
	return m, nil
}

// Layer is a manifest with its digest and the time at which this store got it.
// It is immutable: do not change what its slices and maps hold.
type Layer struct {
	Digest  Digest
	Created time.Time
	Manifest
}
