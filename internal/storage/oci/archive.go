package oci

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/harena-dev/harena/internal/errs"
)

// Format says how an archive holds an image.
type Format string

// The formats.
const (
	Layout        Format = "oci"            // an OCI image layout (image-spec, image-layout.md)
	DockerArchive Format = "docker-archive" // what docker save writes
)

// ParseFormat checks s, which comes from outside.
func ParseFormat(s string) (Format, error) {
	switch f := Format(s); f {
	case Layout, DockerArchive:
		return f, nil
	}
	return "", errs.E(errs.Invalid, "format %.40q is not known", s).WithHint("use tar, oci or docker-archive")
}

// maxMembers bounds the files of an archive that holds an image.
const maxMembers = 20000

// member is a file inside an archive.
type member struct {
	off, size int64
	link      string // another member that it stands for
}

// archive gives random access to the files of a tar that lies on disk.
type archive struct {
	r       io.ReaderAt
	members map[string]member
}

// openArchive indexes a plain tar of a size.
func openArchive(ctx context.Context, r io.ReaderAt, size int64) (*archive, error) {
	a := &archive{r: r, members: make(map[string]member)}
	at := io.NewSectionReader(r, 0, size)
	t := tar.NewReader(at)
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return a, nil
		}
		if err != nil {
			return nil, errs.E(errs.Invalid, "the archive is damaged or cut off: %w", err).WithHint("check it with tar -t, and send it again")
		}
		if n >= maxMembers {
			return nil, errs.OverLimit(errs.Invalid, "files in an archive of an image", maxMembers, n+1)
		}
		if n := max(len(h.Name), len(h.Linkname)); n > maxPath { // PAX has names of a megabyte
			return nil, errs.OverLimit(errs.Invalid, "length of a path in an archive of an image", maxPath, n)
		}
		name := path.Clean("/" + h.Name)[1:]
		switch h.Typeflag {
		case tar.TypeReg:
			if isSparse(h) {
				return nil, errs.E(errs.Invalid, "the file %.200q in the archive is sparse", h.Name).WithHint("make the archive without --sparse")
			}
			// tar.Reader reads whole headers only, so here the content begins.
			off, err := at.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			if h.Size < 0 || h.Size > size-off {
				return nil, errs.E(errs.Invalid, "the archive is cut off in %.200q", h.Name).WithHint("send it again")
			}
			a.members[name] = member{off: off, size: h.Size}
		case tar.TypeSymlink: // docker save stores equal layers once
			a.members[name] = member{link: path.Clean("/" + path.Join(path.Dir(name), h.Linkname))[1:]}
		case tar.TypeLink:
			a.members[name] = member{link: path.Clean("/" + h.Linkname)[1:]}
		}
	}
}

// isSparse tells whether the content of a header is stored in another form than it reads.
func isSparse(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return h.Typeflag == tar.TypeGNUSparse
}

// open returns a file of the archive.
func (a *archive) open(name string) (*io.SectionReader, error) {
	at := path.Clean("/" + name)[1:]
	const hops = 5
	for range hops {
		m, ok := a.members[at]
		if !ok {
			break
		}
		if m.link == "" {
			return io.NewSectionReader(a.r, m.off, m.size), nil
		}
		at = m.link
	}
	return nil, errs.E(errs.Invalid, "the archive has no file %.200q", name).WithHint("check that the archive is whole, and which of oci: and docker-archive: it is")
}

func (a *archive) read(name string, most int) ([]byte, error) {
	r, err := a.open(name)
	if err != nil {
		return nil, err
	}
	if r.Size() > int64(most) {
		return nil, errs.OverLimit(errs.Invalid, fmt.Sprintf("bytes of %.200q in the archive", name), most, r.Size())
	}
	return io.ReadAll(r)
}

// blob reads a small blob of a layout and checks it.
func (a *archive) blob(d v1.Hash, most int) ([]byte, error) {
	b, err := a.read(blobPath(d), most)
	if err != nil {
		return nil, err
	}
	return b, checkDigest(b, d.Hex)
}

func blobPath(d v1.Hash) string { return "blobs/" + d.Algorithm + "/" + d.Hex }

func checkDigest(b []byte, want string) error {
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != want {
		return badDigest("sha256:"+want, "sha256:"+hex.EncodeToString(sum[:]))
	}
	return nil
}

func badDigest(want, got string) error {
	return errs.E(errs.Invalid, "%s has the digest %s: its content was changed or damaged", want, got).WithHint("make or fetch the image again")
}

// OpenArchive reads the image that ref names from a plain tar; an empty ref means
// the only one, or the one for this machine. r must stay readable while the image is used.
func OpenArchive(ctx context.Context, r io.ReaderAt, size int64, format Format, ref string) (*Image, error) {
	a, err := openArchive(ctx, r, size)
	if err != nil {
		return nil, err
	}
	if format == DockerArchive {
		return a.docker(ref)
	}
	return a.layout(ref)
}

// layer makes the layer that lies in a file of the archive.
func (a *archive) layer(name string) (Layer, error) {
	r, err := a.open(name)
	if err != nil {
		return Layer{}, err
	}
	return Layer{Size: r.Size(), Open: func() (io.ReadCloser, error) {
		r, err := a.open(name)
		return io.NopCloser(r), err
	}}, nil
}

// refName is the annotation by which a layout names its images (image-spec, annotations.md).
const refName = "org.opencontainers.image.ref.name"

// containerdName is what containerd and docker save add: the full name.
const containerdName = "io.containerd.image.name"

func (a *archive) layout(ref string) (*Image, error) {
	b, err := a.read("index.json", maxManifest)
	if err != nil {
		return nil, err
	}
	doc, err := parseManifest(b)
	if err != nil {
		return nil, err
	}
	if doc.index == nil {
		return nil, errs.E(errs.Invalid, "index.json of the layout is not an index")
	}
	index := doc.index
	if ref != "" {
		named := slices.DeleteFunc(slices.Clone(index.Manifests), func(d v1.Descriptor) bool {
			return d.Annotations[refName] != ref && d.Annotations[containerdName] != ref && d.Digest.String() != ref
		})
		if len(named) == 0 {
			return nil, errs.E(errs.NotFound, "the layout has no image %.100q", ref).WithHint("it has: %.500s", strings.Join(names(index), ", "))
		}
		index = &v1.IndexManifest{Manifests: named}
		if len(named) == 1 {
			index.Manifests[0].Platform = nil // it was asked for; its config is checked
		}
	}
	for range maxIndexDepth {
		d, err := choose(index)
		if err != nil {
			return nil, err
		}
		b, err := a.blob(d.Digest, maxManifest)
		if err != nil {
			return nil, err
		}
		if doc, err = parseManifest(b); err != nil {
			return nil, err
		}
		if doc.image != nil {
			return a.fromManifest(d.Digest, doc.image)
		}
		index = doc.index
	}
	return nil, errs.OverLimit(errs.Invalid, "indexes inside indexes", maxIndexDepth, maxIndexDepth+1)
}

func names(index *v1.IndexManifest) []string {
	var out []string
	for _, d := range index.Manifests {
		name := d.Annotations[refName]
		if name == "" {
			name = d.Digest.String()
		}
		out = append(out, name)
	}
	return out
}

func (a *archive) fromManifest(digest v1.Hash, m *v1.Manifest) (*Image, error) {
	b, err := a.blob(m.Config.Digest, maxConfig)
	if err != nil {
		return nil, err
	}
	config, ids, err := parseConfig(b, len(m.Layers))
	if err != nil {
		return nil, err
	}
	img := &Image{Source: "oci:" + digest.String(), Config: config}
	for i, d := range m.Layers {
		l, err := a.layer(blobPath(d.Digest))
		if err != nil {
			return nil, err
		}
		if l.Size != d.Size {
			return nil, errs.E(errs.Invalid, "the layer %s has %d bytes, the manifest says %d", d.Digest, l.Size, d.Size)
		}
		l.Digest, l.DiffID = d.Digest.String(), ids[i].String()
		img.Layers = append(img.Layers, l)
	}
	return img, nil
}

// dockerImage is an entry of manifest.json in an archive of docker save.
type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// parseDockerManifest reads manifest.json.
func parseDockerManifest(b []byte) ([]dockerImage, error) {
	if err := checkValues(b); err != nil {
		return nil, err
	}
	var images []dockerImage
	if err := json.Unmarshal(b, &images); err != nil {
		return nil, errs.E(errs.Invalid, "manifest.json of the archive is not valid: %w", err)
	}
	if n := len(images); n > maxIndex {
		return nil, errs.OverLimit(errs.Invalid, "images of an archive", maxIndex, n)
	}
	for _, i := range images {
		if n := len(i.Layers); n > maxLayers {
			return nil, errs.OverLimit(errs.Invalid, "layers of an image", maxLayers, n)
		}
	}
	return images, nil
}

// chooseDocker picks the image that ref names: TAG as docker shows it, or its last part.
func chooseDocker(images []dockerImage, ref string) (*dockerImage, error) {
	var have []string
	var match []*dockerImage
	for i := range images {
		have = append(have, images[i].RepoTags...)
		if ref == "" || slices.ContainsFunc(images[i].RepoTags, func(t string) bool {
			return t == ref || t == ref+":latest" || t[strings.LastIndexByte(t, ':')+1:] == ref
		}) {
			match = append(match, &images[i])
		}
	}
	hint := fmt.Sprintf("it has: %.500s", strings.Join(have, ", "))
	switch {
	case len(match) == 1:
		return match[0], nil
	case len(images) == 0:
		return nil, errs.E(errs.Invalid, "the archive holds no image").WithHint("write it with docker save NAME:TAG")
	case len(match) == 0:
		return nil, errs.E(errs.NotFound, "the archive has no image %.100q", ref).WithHint("%s", hint)
	}
	return nil, errs.E(errs.Invalid, "%d images of the archive match %.100q", len(match), ref).WithHint("say which one: %s", hint)
}

func (a *archive) docker(ref string) (*Image, error) {
	b, err := a.read("manifest.json", maxManifest)
	if err != nil {
		return nil, err
	}
	images, err := parseDockerManifest(b)
	if err != nil {
		return nil, err
	}
	chosen, err := chooseDocker(images, ref)
	if err != nil {
		return nil, err
	}
	if b, err = a.read(chosen.Config, maxConfig); err != nil {
		return nil, err
	}
	config, ids, err := parseConfig(b, len(chosen.Layers))
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b) // the image ID
	img := &Image{Source: "docker-archive:sha256:" + hex.EncodeToString(sum[:]), Config: config}
	for i, name := range chosen.Layers {
		l, err := a.layer(name)
		if err != nil {
			return nil, err
		}
		l.DiffID = ids[i].String()
		img.Layers = append(img.Layers, l)
	}
	return img, nil
}
