package scenario

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// imageRegistry is a registry that can be killed in the middle of a transfer and counts what it is asked for.
type imageRegistry struct {
	t       *testing.T
	handler http.Handler
	host    string
	server  *http.Server

	mu    sync.Mutex
	asked int64 // bytes of blobs that requests asked for
	blobs int   // GETs of blobs
	left  int64 // bytes until then is called
	then  func()
}

func newImageRegistry(t *testing.T, dir string) *imageRegistry {
	t.Helper()
	dir = filepath.Join(dir, "registry")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	r := &imageRegistry{t: t, handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)),
		registry.WithBlobHandler(registry.NewDiskBlobHandler(dir)))}
	r.start()
	t.Cleanup(r.kill)
	return r
}

// start serves, at the same address as before.
func (r *imageRegistry) start() {
	r.t.Helper()
	address := r.host
	if address == "" {
		address = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		r.t.Fatal(err)
	}
	r.host = l.Addr().String()
	r.server = &http.Server{Handler: r, ErrorLog: log.New(io.Discard, "", 0)}
	go func(s *http.Server) { _ = s.Serve(l) }(r.server)
}

// kill ends it and all connections.
func (r *imageRegistry) kill() { _ = r.server.Close() }

func (r *imageRegistry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
		r.mu.Lock()
		r.blobs++
		r.mu.Unlock()
		w = &watched{w, r}
	}
	r.handler.ServeHTTP(w, req)
}

// after lets f be called, once, when so many bytes of blobs were sent; the transfers in which that happens end with it.
func (r *imageRegistry) after(n int64, f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked, r.blobs, r.left, r.then = 0, 0, n, f
}

// counts returns how many bytes of blobs were asked for since after was called, and in how many requests.
func (r *imageRegistry) counts() (int64, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked, r.blobs
}

// watched is the answer to a GET of a blob.
type watched struct {
	http.ResponseWriter
	r *imageRegistry
}

func (w *watched) WriteHeader(code int) {
	if code == http.StatusOK || code == http.StatusPartialContent {
		var n int64
		_, _ = fmt.Sscan(w.Header().Get("Content-Length"), &n)
		w.r.mu.Lock()
		w.r.asked += n
		w.r.mu.Unlock()
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *watched) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.r.mu.Lock()
	then := w.r.then
	if w.r.left -= int64(n); then == nil || w.r.left > 0 {
		w.r.mu.Unlock()
		return n, err
	}
	w.r.then = nil
	w.r.mu.Unlock()
	then()
	panic(http.ErrAbortHandler)
}

// push pushes an image by a client that has nothing to do with Harena.
func (r *imageRegistry) push(ctx context.Context, repo string, img v1.Image) (string, error) {
	ref, err := name.ParseReference(r.host+"/"+repo, name.Insecure)
	if err != nil {
		return "", err
	}
	return ref.Name(), remote.Write(ref, img, remote.WithContext(ctx), remote.WithJobs(2), remote.WithTransport(&http.Transport{ResponseHeaderTimeout: 5 * time.Minute}))
}

// fileLayer is a layer whose blob is a file, compressed as its media type says.
type fileLayer struct {
	blob
	path string
}

var errNotNeeded = errors.New("a layer that is pushed as it is")

func (l *fileLayer) Digest() (v1.Hash, error)             { return v1.NewHash(l.blob.Digest) }
func (l *fileLayer) DiffID() (v1.Hash, error)             { return v1.NewHash(l.blob.DiffID) }
func (l *fileLayer) Size() (int64, error)                 { return l.blob.Size, nil }
func (l *fileLayer) Uncompressed() (io.ReadCloser, error) { return nil, errNotNeeded }
