package oci

import (
	"bytes"
	"io"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/harena-dev/harena/internal/errs"
)

// Bounds of what an image may consist of. They are far above what exists.
const (
	maxManifest   = 4 << 20 // as the distribution specification advises
	maxConfig     = 8 << 20
	maxLayers     = 512
	maxIndex      = 1000 // manifests of an index
	maxIndexDepth = 3
	maxConfigList = 4096    // entries of env, cmd, labels …
	maxConfigText = 1 << 20 // bytes of them all: they end in the layer's manifest
	maxValues     = 100_000 // of a document in JSON: parsed, a value of two bytes can take 150
)

// checkValues bounds what parsing a document takes: the values of its lists and objects, valid or not.
func checkValues(b []byte) error {
	n, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && (c == ',' || c == '[' || c == '{'):
			n++
		}
	}
	if n > maxValues {
		return errs.OverLimit(errs.Invalid, "values in a manifest or config of an image", maxValues, n)
	}
	return nil
}

// Config is what an image asks of a container made from it.
type Config struct {
	Env        []string
	WorkingDir string
	User       string
	Entrypoint []string
	Cmd        []string
	Labels     map[string]string
}

// Layer is one layer of an image, lowest first in Image.Layers.
type Layer struct {
	// Digest is that of the bytes Open gives, DiffID that of the tar in them; "" is not checked.
	Digest, DiffID string
	Size           int64
	// Open may be called more than once.
	Open func() (io.ReadCloser, error)
}

// Image is an image whose layers can be read. Close it after use.
type Image struct {
	// Source names the content, such as oci:sha256:… of the manifest.
	Source string
	Config Config
	Layers []Layer
	close  func() error
	forget func() error
}

// Forget drops the layers from the cache that they came from. Call it when they turn
// out to be damaged: cached blobs are not synced, so a crash of the machine may spoil them.
func (i *Image) Forget() error {
	if i.forget == nil {
		return nil
	}
	return i.forget()
}

// Close releases the files of the image.
func (i *Image) Close() error {
	if i.close == nil {
		return nil
	}
	return i.close()
}

// Platform is what the image must have been made for: this machine's.
func platform() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

// document is a parsed manifest: an image's or an index.
type document struct {
	image *v1.Manifest
	index *v1.IndexManifest
}

// parseManifest reads a manifest of either kind. Its content is what counts: the
// media type outside may be missing or wrong.
func parseManifest(b []byte) (*document, error) {
	if len(b) > maxManifest {
		return nil, errs.OverLimit(errs.Invalid, "bytes of an image manifest", maxManifest, len(b))
	}
	if err := checkValues(b); err != nil {
		return nil, err
	}
	m, err := v1.ParseManifest(bytes.NewReader(b))
	if err != nil {
		return nil, errs.E(errs.Invalid, "the manifest is not valid: %w", err)
	}
	mt := string(m.MediaType)
	switch {
	case strings.Contains(mt, "manifest.v1+prettyjws"), m.SchemaVersion == 1:
		return nil, errs.E(errs.Unsupported, "the image has a manifest of schema 1, which is obsolete").
			WithHint("push the image again with a current tool")
	case m.SchemaVersion != 2:
		return nil, errs.E(errs.Invalid, "the manifest has schema version %d, not 2", m.SchemaVersion)
	case m.Config.Digest.Hex == "" && (mt == "" || m.MediaType.IsIndex()):
		index, err := v1.ParseIndexManifest(bytes.NewReader(b))
		if err != nil {
			return nil, errs.E(errs.Invalid, "the index is not valid: %w", err)
		}
		if n := len(index.Manifests); n > maxIndex {
			return nil, errs.OverLimit(errs.Invalid, "manifests of an index", maxIndex, n)
		}
		for _, d := range index.Manifests {
			if err := checkDescriptor(d); err != nil {
				return nil, err
			}
		}
		return &document{index: index}, nil
	case mt != "" && !m.MediaType.IsImage():
		return nil, errs.E(errs.Invalid, "the manifest has the media type %.100q, which is no image's", mt).
			WithHint("name a container image")
	}
	if n := len(m.Layers); n > maxLayers {
		return nil, errs.OverLimit(errs.Invalid, "layers of an image", maxLayers, n)
	}
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if err := checkDescriptor(d); err != nil {
			return nil, err
		}
	}
	for _, d := range m.Layers {
		if !d.MediaType.IsLayer() {
			return nil, errs.E(errs.Invalid, "it has a layer of media type %.100q, which is no file system's", string(d.MediaType)).
				WithHint("name a container image, not another artifact")
		}
	}
	return &document{image: m}, nil
}

func checkDescriptor(d v1.Descriptor) error {
	// v1.Hash checks the digits of what it parses; a missing one is empty.
	if d.Digest.Algorithm != "sha256" || len(d.Digest.Hex) != 64 {
		return errs.E(errs.Invalid, "the manifest names %.100q, which is not a SHA-256 digest", d.Digest.String())
	}
	if d.Size < 0 {
		return errs.E(errs.Invalid, "the manifest gives %s a size of %d", d.Digest, d.Size)
	}
	return nil
}

// choose picks the manifest of an index that suits this machine.
func choose(index *v1.IndexManifest) (v1.Descriptor, error) {
	want := platform()
	var offered []string
	var unnamed []v1.Descriptor
	for _, d := range index.Manifests {
		switch {
		case d.Annotations["vnd.docker.reference.type"] != "": // attestations
		case d.Platform == nil:
			unnamed = append(unnamed, d)
		case d.Platform.OS == want.OS && d.Platform.Architecture == want.Architecture:
			return d, nil
		default:
			if s := d.Platform.String(); !slices.Contains(offered, s) && len(offered) < 20 {
				offered = append(offered, s)
			}
		}
	}
	// A manifest without a platform shows it in its config, which is checked later.
	if len(unnamed) == 1 && len(offered) == 0 {
		return unnamed[0], nil
	}
	if len(unnamed) > 1 && len(offered) == 0 {
		return v1.Descriptor{}, errs.E(errs.Invalid, "it holds %d images", len(unnamed)).WithHint("say which one: add :NAME or a digest to the source")
	}
	return v1.Descriptor{}, wrongPlatform(strings.Join(offered, ", "))
}

func wrongPlatform(offered string) error {
	if offered == "" {
		offered = "none"
	}
	return errs.E(errs.Unsupported, "the image is not made for %s, but for %.400s", platform(), offered).
		WithHint("build or pull it for %s (docker build --platform)", platform())
}

// parseConfig reads the config of an image with a number of layers.
func parseConfig(b []byte, layers int) (Config, []v1.Hash, error) {
	var c Config
	if len(b) > maxConfig {
		return c, nil, errs.OverLimit(errs.Invalid, "bytes of an image config", maxConfig, len(b))
	}
	if err := checkValues(b); err != nil {
		return c, nil, err
	}
	f, err := v1.ParseConfigFile(bytes.NewReader(b))
	if err != nil {
		return c, nil, errs.E(errs.Invalid, "the image config is not valid: %w", err)
	}
	want := platform()
	if f.OS != "" && f.OS != want.OS || f.Architecture != "" && f.Architecture != want.Architecture {
		return c, nil, wrongPlatform(f.OS + "/" + f.Architecture)
	}
	if n := len(f.RootFS.DiffIDs); n != layers {
		return c, nil, errs.E(errs.Invalid, "the image config names %d layers, the manifest %d", n, layers)
	}
	for _, d := range f.RootFS.DiffIDs {
		if d.Algorithm != "sha256" || len(d.Hex) != 64 {
			return c, nil, errs.E(errs.Invalid, "the image config names %.100q, which is not a SHA-256 digest", d.String())
		}
	}
	c = Config{
		Env: f.Config.Env, WorkingDir: f.Config.WorkingDir, User: f.Config.User,
		Entrypoint: f.Config.Entrypoint, Cmd: f.Config.Cmd, Labels: f.Config.Labels,
	}
	return c, f.RootFS.DiffIDs, c.check()
}

// check bounds what is kept of a config and refuses what no process could be given.
func (c *Config) check() error {
	n, text := 0, len(c.WorkingDir)+len(c.User)
	nul := strings.ContainsRune(c.WorkingDir+c.User, 0)
	for _, list := range [][]string{c.Env, c.Entrypoint, c.Cmd} {
		for _, s := range list {
			n, text = n+1, text+len(s)
			nul = nul || strings.ContainsRune(s, 0)
		}
	}
	for k, v := range c.Labels {
		n, text = n+1, text+len(k)+len(v)
	}
	switch {
	case n > maxConfigList:
		return errs.OverLimit(errs.Invalid, "variables, arguments and labels of an image", maxConfigList, n)
	case text > maxConfigText:
		return errs.OverLimit(errs.Invalid, "bytes of variables, arguments and labels of an image", maxConfigText, text)
	case nul:
		return errs.E(errs.Invalid, "the image config has a NUL byte in a variable, an argument, the user or the directory")
	}
	// Variables without a name cannot be set; Docker ignores those too.
	c.Env = slices.DeleteFunc(slices.Clone(c.Env), func(s string) bool { return strings.IndexByte(s, '=') < 1 })
	return nil
}
