package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"

	"github.com/harena-dev/harena/internal/errs"
)

func tarBytes(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func imageOfBytes(layers ...[]byte) *Image {
	img := &Image{}
	for _, b := range layers {
		img.Layers = append(img.Layers, Layer{Size: int64(len(b)), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(b)), nil
		}})
	}
	return img
}

func reg(name string, size int64) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeReg, Size: size, Mode: 0o644}
}

func hardlink(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}
}

func gz(b []byte) []byte {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write(b)
	_ = w.Close()
	return z.Bytes()
}

func TestPlanRefusesHostileLayers(t *testing.T) {
	many := make([]tar.Header, 30)
	for i := range many {
		many[i] = reg(fmt.Sprint(i), 0)
	}
	whole := tarBytes(t, reg("f", 5000))
	link := tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}
	for what, layers := range map[string][][]byte{
		"parent":           {tarBytes(t, reg("../f", 1))},
		"parent inside":    {tarBytes(t, reg("a/../../f", 1))},
		"link out":         {tarBytes(t, hardlink("f", "../../etc/shadow"))},
		"link to nothing":  {tarBytes(t, hardlink("f", "etc/shadow"))},
		"link to dir":      {tarBytes(t, tar.Header{Name: "d/", Typeflag: tar.TypeDir}, hardlink("f", "d"))},
		"link through":     {tarBytes(t, link), tarBytes(t, hardlink("f", "l/shadow"))},
		"link to removed":  {tarBytes(t, reg("a", 1)), tarBytes(t, reg(".wh.a", 0), hardlink("f", "a"))},
		"below a file":     {tarBytes(t, reg("a", 1), reg("a/b", 1))},
		"below a link":     {tarBytes(t, link, reg("l/passwd", 1))},
		"below a whiteout": {tarBytes(t, reg(".wh.a/b", 1))},
		"whiteout of ..":   {tarBytes(t, reg("a/.wh...", 0))},
		"empty whiteout":   {tarBytes(t, reg("a/.wh.", 0))},
		"root":             {tarBytes(t, reg(".", 0))},
		"too many":         {tarBytes(t, many...)},
		"too large":        {tarBytes(t, reg("a", 60_000)), gz(tarBytes(t, reg("b", 60_000)))},
		"cut off":          {whole[:3000]},
		"no tar":           {bytes.Repeat([]byte("x"), 3000)},
		"broken gzip":      {gz(whole)[:40]},
		"xz":               {[]byte("\xfd7zXZ\x00 and more")},
		"empty":            {nil},
	} {
		_, err := NewPlan(context.Background(), imageOfBytes(layers...), Options{MaxBytes: 100_000, MaxEntries: 20})
		if k := errs.KindOf(err); k != errs.Invalid && k != errs.Unsupported {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A stream of nothing but zeros behind the end of a tar is no way around the limits.
func TestPlanStopsBombs(t *testing.T) {
	r := &bounded{r: endless{}, left: 1 << 20, most: 1 << 20}
	if n, err := io.Copy(io.Discard, r); !errs.Is(err, errs.Invalid) || n > 1<<20 {
		t.Errorf("read %d: %v", n, err)
	}
	// A sparse file counts with the size it reads as.
	pax := tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 1 << 40, Mode: 0o644, Format: tar.FormatPAX}
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(&pax); err != nil {
		t.Fatal(err)
	}
	if _, err := NewPlan(context.Background(), imageOfBytes(b.Bytes()), Options{}); !errs.Is(err, errs.Invalid) {
		t.Error(err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// Digests that do not fit are found out before anything is written.
func TestPlanChecksDigests(t *testing.T) {
	b := tarBytes(t, reg("f", 1))
	for _, change := range []func(*Layer){
		func(l *Layer) { l.Digest = "sha256:" + strings.Repeat("0", 64) },
		func(l *Layer) { l.DiffID = "sha256:" + strings.Repeat("0", 64) },
	} {
		img := imageOfBytes(b)
		change(&img.Layers[0])
		if _, err := NewPlan(context.Background(), img, Options{}); !errs.Is(err, errs.Invalid) {
			t.Error(err)
		}
	}
}

func TestManifestsRefused(t *testing.T) {
	digest := `"sha256:` + strings.Repeat("a", 64) + `"`
	config := `"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":` + digest + `,"size":2}`
	layer := `{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":` + digest + `,"size":2}`
	for text, kind := range map[string]errs.Kind{
		`{"schemaVersion":2,` + config + `,"layers":[` + layer + `]}`:                                              "",
		`{"schemaVersion":1,"name":"x","tag":"y"}`:                                                                 errs.Unsupported,
		`{"schemaVersion":3,` + config + `}`:                                                                       errs.Invalid,
		`{"schemaVersion":2,` + config + `,"layers":[` + strings.Repeat(layer+",", maxLayers) + layer + `]}`:       errs.Invalid,
		`{"schemaVersion":2,` + config + `,"layers":[{"digest":"sha512:00"}]}`:                                     errs.Invalid,
		`{"schemaVersion":2,` + config + `,"layers":[` + strings.Replace(layer, `"size":2`, `"size":-2`, 1) + `]}`: errs.Invalid,
		`{"schemaVersion":2,` + config + `,"layers":[{"mediaType":"application/wasm","digest":` + digest + `}]}`:   errs.Invalid,
		`{"schemaVersion":2,"mediaType":"text/html",` + config + `}`:                                               errs.Invalid,
		`{"schemaVersion":2,"manifests":[{"digest":""}]}`:                                                          errs.Invalid,
		`{"schemaVersion":2,"manifests":[` + strings.Repeat(layer+",", maxIndex) + layer + `]}`:                    errs.Invalid,
		`[]`: errs.Invalid, ``: errs.Invalid, `{}`: errs.Invalid, `null`: errs.Invalid,
	} {
		if _, err := parseManifest([]byte(text)); errs.KindOf(err) != kind {
			t.Errorf("%.100s: %v", text, err)
		}
	}
	for text, kind := range map[string]errs.Kind{
		`{"os":"linux","rootfs":{"type":"layers","diff_ids":[` + digest + `]}}`:                                                  "",
		`{"os":"windows","rootfs":{"type":"layers","diff_ids":[` + digest + `]}}`:                                                errs.Unsupported,
		`{"os":"linux","rootfs":{"type":"layers","diff_ids":[]}}`:                                                                errs.Invalid,
		`{"os":"linux","config":{"Env":["A=\u0000"]},"rootfs":{"diff_ids":[` + digest + `]}}`:                                    errs.Invalid,
		`{"os":"linux","config":{"User":"` + strings.Repeat("x", maxConfigText+1) + `"},"rootfs":{"diff_ids":[` + digest + `]}}`: errs.Invalid,
		`x`: errs.Invalid,
	} {
		if _, _, err := parseConfig([]byte(text), 1); errs.KindOf(err) != kind {
			t.Errorf("%.100s: %v", text, err)
		}
	}
}

// Indexes that contain each other end somewhere.
func TestLayoutRecursion(t *testing.T) {
	a := &archive{members: map[string]member{"a": {link: "b"}, "b": {link: "a"}}}
	if _, err := a.open("a"); !errs.Is(err, errs.Invalid) {
		t.Error(err)
	}
}

// FuzzManifests: whatever the parsers take is within bounds.
func FuzzManifests(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"sha256:` + strings.Repeat("a", 64) + `","size":1,"platform":{"os":"linux","architecture":"amd64"}}]}`))
	f.Add([]byte(`{"os":"linux","rootfs":{"diff_ids":[]},"config":{"Env":["a=b"]}}`))
	f.Add([]byte(`[{"Config":"c","RepoTags":["a:b"],"Layers":["l"]}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if doc, err := parseManifest(b); err == nil {
			if (doc.image == nil) == (doc.index == nil) {
				t.Fatal("neither or both")
			}
			if doc.index != nil {
				if d, err := choose(doc.index); err == nil && len(d.Digest.Hex) != 64 {
					t.Fatalf("chose %v", d)
				}
			}
		}
		_, _, _ = parseConfig(b, 0)
		if images, err := parseDockerManifest(b); err == nil {
			_, _ = chooseDocker(images, "b")
		}
	})
}

// FuzzArchive: no archive makes the reader fail in another way than by an error of kind invalid.
func FuzzArchive(f *testing.F) {
	manifest := `[{"Config":"c","RepoTags":["a:b"],"Layers":["l"]}]`
	f.Add([]byte(manifest), []byte(`{"os":"linux","rootfs":{"diff_ids":[]}}`), tarBytes(f, reg("x", 1), reg(".wh.y", 0)))
	f.Fuzz(func(t *testing.T, manifest, config, layer []byte) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for name, content := range map[string][]byte{"manifest.json": manifest, "index.json": manifest, "c": config, "l": layer} {
			if w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Typeflag: tar.TypeReg}) == nil {
				_, _ = w.Write(content)
			}
		}
		_ = w.Close()
		for _, format := range []Format{Layout, DockerArchive} {
			img, err := OpenArchive(context.Background(), bytes.NewReader(b.Bytes()), int64(b.Len()), format, "")
			if err != nil {
				known(t, err)
				continue
			}
			_, err = NewPlan(context.Background(), img, Options{MaxBytes: 1 << 20, MaxEntries: 100})
			known(t, err)
		}
	})
}

func known(t *testing.T, err error) {
	t.Helper()
	switch errs.KindOf(err) {
	case "", errs.Invalid, errs.Unsupported, errs.NotFound:
	default:
		t.Fatalf("%v", err)
	}
}

// FuzzPlan: what a plan of any two layers writes is a whole tar with safe, distinct names.
func FuzzPlan(f *testing.F) {
	f.Add(tarBytes(f, reg("a/b", 3), hardlink("c", "a/b")), tarBytes(f, reg("a/.wh.b", 0), reg("a/.wh..wh..opq", 0), hardlink("d", "c")), int64(0))
	f.Add(tarBytes(f, reg("a", 3)), tarBytes(f, reg("a/b", 1)), int64(1))
	f.Fuzz(func(t *testing.T, one, two []byte, collapse int64) {
		plan, err := NewPlan(context.Background(), imageOfBytes(one, two), Options{Collapse: collapse, MaxBytes: 1 << 20, MaxEntries: 100})
		if err != nil {
			known(t, err)
			return
		}
		for i := range plan.Groups() {
			var b bytes.Buffer
			if err := plan.Write(context.Background(), i, &b); err != nil {
				known(t, err)
				return
			}
			seen := make(map[string]bool)
			r := tar.NewReader(&b)
			for {
				h, err := r.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				name := strings.TrimSuffix(h.Name, "/")
				if seen[name] || strings.HasPrefix(name, "/") && name != "" || strings.Contains("/"+name+"/", "/../") {
					t.Fatalf("entry %q", h.Name)
				}
				if i == 0 && strings.Contains("/"+name, "/.wh.") {
					t.Fatalf("the lowest group has %q", h.Name)
				}
				if h.Typeflag == tar.TypeLink && !seen[h.Linkname] {
					t.Fatalf("the link %q comes before %q", h.Name, h.Linkname)
				}
				seen[name] = true
			}
		}
	})
}
