package bench

import (
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"runtime"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	push "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// serveRegistry serves bench:1, an image of one layer, and returns the registry's address.
func serveRegistry(layerFile string) (addr string, stop func(), err error) {
	blobs, err := os.MkdirTemp("/var/tmp", "harena-bench-registry-")
	if err != nil {
		return "", nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		os.RemoveAll(blobs)
		return "", nil, err
	}
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithBlobHandler(registry.NewDiskBlobHandler(blobs)))
	s := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.Serve(l) }()
	stop = func() {
		s.Close()
		os.RemoveAll(blobs)
	}
	if err := pushImage(l.Addr().String()+"/bench:1", layerFile); err != nil {
		stop()
		return "", nil, err
	}
	return l.Addr().String(), stop, nil
}

func pushImage(ref, layerFile string) error {
	tag, err := name.NewTag(ref, name.Insecure)
	if err != nil {
		return err
	}
	layer, err := tarball.LayerFromFile(layerFile)
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return err
	}
	return push.Write(tag, image)
}
