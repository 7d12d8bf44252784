package scenario

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// blob is a layer in a file, as it is pushed.
type blob struct {
	Digest, DiffID string
	Size           int64
	Compression    string // gzip, zstd or none
}

func (l *fileLayer) MediaType() (types.MediaType, error) {
	switch l.Compression {
	case "gzip":
		return types.DockerLayer, nil // the index of media types is mixed too
	case "zstd":
		return types.OCILayerZStd, nil
	}
	return types.OCIUncompressedLayer, nil
}

func (l *fileLayer) Compressed() (io.ReadCloser, error) { return os.Open(l.path) }

// treeImage is a tree on this machine and the layers that amount to it. GNU tar reads the tree, and unpacks layers into it.
type treeImage struct {
	t      *testing.T
	dir    string // of layers
	tree   string
	layers []*fileLayer
}

func newTreeImage(t *testing.T, dir string) *treeImage {
	t.Helper()
	m := &treeImage{t: t, dir: dir, tree: filepath.Join(dir, "tree")}
	if err := os.Mkdir(m.tree, 0o755); err != nil {
		t.Fatal(err)
	}
	return m
}

// sh runs a script at the root of the tree.
func (m *treeImage) sh(script string, args ...string) {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), "bash", append([]string{"-euo", "pipefail", "-c", script, "bash"}, args...)...)
	cmd.Dir = m.tree
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("%.200s: %v: %s", script, err, out)
	}
}

// packed is what a layer has: paths of the tree, with all below them.
type packed struct {
	compression string
	paths       []string
	dirs        []string          // without what is in them
	flags       []string          // of tar
	marks       []string          // whiteouts
	links       map[string]string // to files of layers below
}

// pack makes a layer of the tree and puts it upon the others.
func (m *treeImage) pack(p packed) {
	m.t.Helper()
	m.layers = append(m.layers, m.layer(p))
}

func (m *treeImage) layer(p packed) *fileLayer {
	m.t.Helper()
	path := filepath.Join(m.dir, fmt.Sprintf("layer-%d-%d", len(m.layers), os.Getpid()))
	for n := 0; ; n++ { // one that is put in later has a name of its own
		if _, err := os.Lstat(path); err != nil {
			break
		}
		path += "+"
	}
	l, err := p.write(m.t.Context(), m.tree, path)
	if err != nil {
		m.t.Fatal(err)
	}
	return l
}

func (p packed) write(ctx context.Context, tree, path string) (_ *fileLayer, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	digest, diffID := sha256.New(), sha256.New()
	stored := io.MultiWriter(f, digest)
	var packer io.WriteCloser
	switch p.compression {
	case "gzip":
		packer, err = gzip.NewWriterLevel(stored, gzip.BestSpeed)
	case "zstd":
		packer, err = zstd.NewWriter(stored, zstd.WithEncoderLevel(zstd.SpeedFastest))
	default:
		packer = unpacked{stored}
	}
	if err != nil {
		return nil, err
	}
	out := io.MultiWriter(packer, diffID)
	// Its entries come before those of GNU tar, whose end marker ends the archive.
	w := tar.NewWriter(out)
	for _, mark := range p.marks {
		if err := w.WriteHeader(&tar.Header{Name: mark, Typeflag: tar.TypeReg, Mode: 0o644}); err != nil {
			return nil, err
		}
	}
	for name, target := range p.links {
		if err := w.WriteHeader(&tar.Header{Name: name, Linkname: target, Typeflag: tar.TypeLink, Mode: 0o644}); err != nil {
			return nil, err
		}
	}
	if err := w.Flush(); err != nil {
		return nil, err
	}
	args := append([]string{"-c", "-C", tree, "--format=pax", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--no-wildcards", "--anchored"}, p.flags...)
	args = append(args, "--no-recursion")
	args = append(append(args, p.parents()...), "--recursion")
	cmd := exec.CommandContext(ctx, "tar", append(args, p.paths...)...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = out, &said
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("tar: %w: %s", err, &said)
	}
	if err := packer.Close(); err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return &fileLayer{blob{"sha256:" + hex.EncodeToString(digest.Sum(nil)), "sha256:" + hex.EncodeToString(diffID.Sum(nil)), info.Size(), p.compression}, path}, nil
}

// parents are the directories on the way, which layers have too: what is put into them changes their times.
func (p packed) parents() []string {
	seen := map[string]bool{}
	out := slices.Clone(p.dirs)
	for _, path := range p.paths {
		for at := filepath.Dir(path); !seen[at] && path != "."; at = filepath.Dir(at) {
			seen[at] = true
			out = append(out, at)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

type unpacked struct{ io.Writer }

func (unpacked) Close() error { return nil }

// unpack unpacks the layers as they are into the tree.
func (m *treeImage) unpack(layers []*fileLayer) {
	m.t.Helper()
	for _, l := range layers {
		f, err := os.Open(l.path)
		if err != nil {
			m.t.Fatal(err)
		}
		var r io.Reader = f
		switch l.Compression {
		case "gzip":
			r, err = gzip.NewReader(f)
		case "zstd":
			var d *zstd.Decoder
			if d, err = zstd.NewReader(f); err == nil {
				defer d.Close()
				r = d
			}
		}
		if err != nil {
			m.t.Fatal(err)
		}
		cmd := exec.CommandContext(m.t.Context(), "tar", "-x", "-p", "-C", m.tree, "--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*")
		cmd.Stdin = r
		if out, err := cmd.CombinedOutput(); err != nil {
			m.t.Fatalf("unpack %s: %v: %s", l.path, err, out)
		}
		f.Close()
	}
}

// image is what is pushed.
func (m *treeImage) image(layers ...*fileLayer) v1.Image {
	m.t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "FROM_IMAGE=yes"}, WorkingDir: "/srv"}})
	if err == nil {
		var adds []mutate.Addendum
		for _, l := range layers {
			mt, _ := l.MediaType()
			adds = append(adds, mutate.Addendum{Layer: l, MediaType: mt})
		}
		img, err = mutate.Append(img, adds...)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return img
}

// largeBase makes the layers of Debian packages, or takes those that an earlier run made and kept in the user's cache.
func (m *treeImage) largeBase() {
	m.t.Helper()
	script, err := os.ReadFile(filepath.Join("testdata", "large.sh"))
	if err != nil {
		m.t.Fatal(err)
	}
	home, err := os.UserCacheDir()
	if err != nil {
		m.t.Fatal(err)
	}
	sum := sha256.Sum256(script)
	kept := filepath.Join(home, "harena", "large-"+hex.EncodeToString(sum[:8]))
	if layers := keptLayers(kept); layers != nil {
		m.layers = layers
		m.unpack(layers)
		return
	}
	// As package scripts have changed it: unpacked it would have another order of names.
	cmd := exec.CommandContext(m.t.Context(), "unshare", "-m", "-i", "-u", "-p", "--fork", "--kill-child", "--mount-proc", "bash", "-c", string(script), "large.sh", m.tree)
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("testdata/large.sh: %v: %s", err, out[max(0, len(out)-4000):])
	}
	big := [][]string{{"usr/lib/jvm", "usr/lib/llvm-14", "usr/lib/python3"}, {"usr/lib/ghc", "usr/lib/go-1.19", "usr/lib/rustlib"}}
	rest := packed{compression: "gzip", paths: []string{"."}}
	for _, path := range append(big[0], big[1]...) {
		rest.flags = append(rest.flags, "--exclude=./"+path)
	}
	m.pack(rest)
	m.pack(packed{compression: "zstd", paths: big[0]})
	m.pack(packed{compression: "gzip", paths: big[1]})
	if err := keepLayers(kept, m.layers); err != nil {
		m.t.Fatal(err)
	}
}

const keptIndex = "layers.json"

func keptLayers(dir string) []*fileLayer {
	b, err := os.ReadFile(filepath.Join(dir, keptIndex))
	if err != nil {
		return nil
	}
	var blobs []blob
	if json.Unmarshal(b, &blobs) != nil {
		return nil
	}
	var out []*fileLayer
	for _, b := range blobs {
		path := filepath.Join(dir, strings.TrimPrefix(b.Digest, "sha256:"))
		if info, err := os.Stat(path); err != nil || info.Size() != b.Size {
			return nil
		}
		out = append(out, &fileLayer{b, path})
	}
	return out
}

// keepLayers moves layers to where the next run finds them; the index comes last.
func keepLayers(dir string, layers []*fileLayer) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var blobs []blob
	for _, l := range layers {
		to := filepath.Join(dir, strings.TrimPrefix(l.blob.Digest, "sha256:"))
		if out, err := exec.Command("mv", "--", l.path, to).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		l.path = to
		blobs = append(blobs, l.blob)
	}
	b, err := json.Marshal(blobs)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, keptIndex), b, 0o644)
}
