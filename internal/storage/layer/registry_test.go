package layer

import (
	"archive/tar"
	"context"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/harena-dev/harena/internal/errs"
)

// A registry's image becomes a layer, also after its cached blobs were spoiled and found out.
func TestImportRegistry(t *testing.T) {
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	img := imageOf(t, [][]byte{tarLayer(t, []tarEntry{{tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644}, "content"}})}, v1.Config{Cmd: []string{"c"}})
	source := srv.Listener.Addr().String() + "/team/img:1"
	ref, err := name.ParseReference(source)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := openStore(t, dir)
	fetched := false
	o := ImportOptions{Name: "img", Kind: Base, Progress: func(p Progress) {
		fetched = fetched || p.Phase == PhaseFetching && strings.HasPrefix(p.Message, "layer 1 of 1")
	}}
	im, err := s.ImportRegistry(context.Background(), source, o)
	if err != nil {
		t.Fatal(err)
	}
	if im.Layer.Files != 1 || im.Layer.Config.Cmd[0] != "c" || !strings.HasPrefix(im.Layer.Source, "registry://"+srv.Listener.Addr().String()+"/team/img@sha256:") || !fetched {
		t.Errorf("%+v, progress %v", im.Layer, fetched)
	}
	blobs, err := filepath.Glob(filepath.Join(dir, "cache", "blobs", "*"))
	if err != nil || len(blobs) != 2 {
		t.Fatal(blobs, err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	d, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(dir, "cache", "blobs", d.Hex)
	info, err := os.Stat(blob)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(blob, make([]byte, info.Size()), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportRegistry(context.Background(), source, o); !errs.Is(err, errs.Invalid) {
		t.Errorf("spoiled cache: %v", err)
	}
	again, err := s.ImportRegistry(context.Background(), source, o)
	if err != nil || again.Layer.Digest != im.Layer.Digest || !again.Existed {
		t.Errorf("%+v, %v", again, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "registries.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportRegistry(context.Background(), source, o); !errs.Is(err, errs.Precondition) {
		t.Errorf("broken registries.json: %v", err)
	}
}
