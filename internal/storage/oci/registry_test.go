package oci

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/harena-dev/harena/internal/errs"
)

// server is a registry whose answers can be watched and spoiled.
type server struct {
	*httptest.Server
	host string
	tls  bool

	mu    sync.Mutex
	auth  func(w http.ResponseWriter, r *http.Request) bool
	spoil func(w http.ResponseWriter, r *http.Request) http.ResponseWriter // of GETs of blobs; nil: answered
	sent  int64                                                            // bytes of blobs
	blobs int                                                              // GETs of blobs
}

func newServer(t *testing.T, secure bool) *server {
	t.Helper()
	s := &server{tls: secure}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		auth, spoil := s.auth, s.spoil
		s.mu.Unlock()
		if auth != nil && !auth(w, r) {
			return
		}
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			w = &counted{w, s}
			s.mu.Lock()
			s.blobs++
			s.mu.Unlock()
			if spoil != nil {
				if w = spoil(w, r); w == nil {
					return
				}
			}
		}
		inner.ServeHTTP(w, r)
	})
	if secure {
		s.Server = httptest.NewUnstartedServer(h)
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.StartTLS()
	} else {
		s.Server = httptest.NewServer(h)
	}
	t.Cleanup(s.Close)
	s.host = s.Listener.Addr().String()
	return s
}

func (s *server) set(auth func(http.ResponseWriter, *http.Request) bool, spoil func(http.ResponseWriter, *http.Request) http.ResponseWriter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.auth, s.spoil, s.sent, s.blobs = auth, spoil, 0, 0
}

func (s *server) counts() (int64, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent, s.blobs
}

type counted struct {
	http.ResponseWriter
	s *server
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.s.mu.Lock()
	c.s.sent += int64(n)
	c.s.mu.Unlock()
	return n, err
}

// cut closes the connection after a number of bytes.
type cut struct {
	http.ResponseWriter
	left int
	// until, if set, is waited for before.
	until <-chan struct{}
}

func (c *cut) Write(p []byte) (int, error) {
	if len(p) > c.left {
		_, _ = c.ResponseWriter.Write(p[:c.left])
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		if c.until != nil {
			<-c.until
		}
		panic(http.ErrAbortHandler)
	}
	c.left -= len(p)
	return c.ResponseWriter.Write(p)
}

func (c *cut) Unwrap() http.ResponseWriter     { return c.ResponseWriter }
func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func forThis(t *testing.T, img v1.Image) v1.Image {
	t.Helper()
	f, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	f = f.DeepCopy()
	f.OS, f.Architecture = "linux", runtime.GOARCH
	if img, err = mutate.ConfigFile(img, f); err != nil {
		t.Fatal(err)
	}
	return img
}

func randomImage(t *testing.T, layers int) v1.Image {
	t.Helper()
	img, err := random.Image(300_000, int64(layers))
	if err != nil {
		t.Fatal(err)
	}
	return forThis(t, img)
}

func (s *server) push(t *testing.T, repo string, img v1.Image) {
	t.Helper()
	ref, err := name.ParseReference(s.host+"/"+repo, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithTransport(s.Client().Transport)); err != nil {
		t.Fatal(err)
	}
}

func atOnce(ctx context.Context, _ int) error { return ctx.Err() }

func newRegistry(t *testing.T, access map[string]RegistryAccess) *Registry {
	t.Helper()
	return &Registry{Access: &Access{Registries: access}, Cache: NewCache(filepath.Join(t.TempDir(), "blobs"), DefaultCacheBytes), Pause: atOnce}
}

// fetch fetches an image and reads all of it.
func fetch(t *testing.T, r *Registry, ref string) (*Image, error) {
	t.Helper()
	img, err := r.Fetch(context.Background(), ref)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { img.Close() })
	_, err = NewPlan(context.Background(), img, Options{})
	return img, err
}

func wantKind(t *testing.T, what string, err error, kind errs.Kind) {
	t.Helper()
	var e *errs.Error
	if kind == "" && err != nil || kind != "" && (!errors.As(err, &e) || errs.KindOf(err) != kind) {
		t.Errorf("%s: %v, want kind %q", what, err, kind)
	} else if kind != "" && kind != errs.Cancelled && e.Hint == "" {
		t.Errorf("%s: no hint in %v", what, err)
	}
}

func TestFetchIndexAndCache(t *testing.T) {
	s := newServer(t, false)
	mine, other := randomImage(t, 4), randomImage(t, 1)
	idx := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.DockerManifestList),
		mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: mine, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}}})
	ref, err := name.ParseReference(s.host + "/team/img:multi")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(ref, idx); err != nil {
		t.Fatal(err)
	}
	r := newRegistry(t, nil)
	var last, total int64
	r.Progress = func(_ string, done, of int64) { last, total = done, of }
	s.set(nil, nil)
	img, err := fetch(t, r, s.host+"/team/img:multi")
	if err != nil {
		t.Fatal(err)
	}
	digest, err := mine.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if want := "registry://" + s.host + "/team/img@" + digest.String(); img.Source != want || len(img.Layers) != 4 {
		t.Errorf("source %s with %d layers, want %s", img.Source, len(img.Layers), want)
	}
	if last != total || total < 4*300_000 {
		t.Errorf("progress ended at %d of %d", last, total)
	}
	if _, n := s.counts(); n != 5 {
		t.Errorf("%d blobs fetched", n)
	}
	if _, err := fetch(t, r, s.host+"/team/img@"+digest.String()); err != nil {
		t.Fatal(err)
	}
	if _, n := s.counts(); n != 5 {
		t.Errorf("%d blobs fetched after the second time", n)
	}
	// A blob that the disk spoiled is found out, and fetched again the next time.
	l := img.Layers[2].Digest
	if err := os.WriteFile(r.Cache.path(strings.TrimPrefix(l, "sha256:")), make([]byte, img.Layers[2].Size), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := r.Fetch(context.Background(), s.host+"/team/img:multi")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	_, err = NewPlan(context.Background(), again, Options{})
	wantKind(t, "spoiled cache", err, errs.Invalid)
	if err := again.Forget(); err != nil {
		t.Fatal(err)
	}
	if _, err := fetch(t, r, s.host+"/team/img:multi"); err != nil {
		t.Error(err)
	}
}

func TestFetchAuth(t *testing.T) {
	s := newServer(t, false)
	s.push(t, "private/img:1", randomImage(t, 2))
	basic := func(w http.ResponseWriter, r *http.Request) bool {
		if u, p, _ := r.BasicAuth(); u == "u" && p == "p" {
			return true
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		return false
	}
	issued := 0
	token := func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/token" {
			if u, p, ok := r.BasicAuth(); ok && (u != "u" || p != "p") || r.URL.Query().Get("scope") != "repository:private/img:pull" {
				w.WriteHeader(http.StatusUnauthorized)
				return false
			}
			issued++
			fmt.Fprintf(w, `{"token":%q,"expires_in":60}`, "t"+base64.StdEncoding.EncodeToString([]byte(r.Header.Get("Authorization"))))
			return false
		}
		if got := r.Header.Get("Authorization"); got == "Bearer t"+base64.StdEncoding.EncodeToString([]byte("Basic dTpw")) {
			return true
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="x",scope="repository:private/img:pull"`, s.host))
		w.WriteHeader(http.StatusUnauthorized)
		return false
	}
	static := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == "Bearer given" {
			return true
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/none",service="x"`, s.host))
		w.WriteHeader(http.StatusUnauthorized)
		return false
	}
	for what, c := range map[string]struct {
		auth   func(http.ResponseWriter, *http.Request) bool
		access RegistryAccess
		kind   errs.Kind
	}{
		"basic":        {basic, RegistryAccess{Username: "u", Password: "p"}, ""},
		"basic, wrong": {basic, RegistryAccess{Username: "u", Password: "secret"}, errs.Denied},
		"basic, none":  {basic, RegistryAccess{}, errs.Denied},
		"token":        {token, RegistryAccess{Username: "u", Password: "p"}, ""},
		"token, wrong": {token, RegistryAccess{Username: "u", Password: "secret"}, errs.Denied},
		"token, none":  {token, RegistryAccess{}, errs.Denied},
		"given":        {static, RegistryAccess{Token: "given"}, ""},
		"given, wrong": {static, RegistryAccess{Token: "secret"}, errs.Denied},
	} {
		s.set(c.auth, nil)
		_, err := fetch(t, newRegistry(t, map[string]RegistryAccess{s.host: c.access}), s.host+"/private/img:1")
		wantKind(t, what, err, c.kind)
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: password in %v", what, err)
		}
	}
	if issued == 0 {
		t.Error("no token was asked for")
	}
}

// Connections that end again and again cost no byte twice.
func TestFetchResumes(t *testing.T) {
	s := newServer(t, false)
	s.push(t, "img:1", randomImage(t, 2))
	r := newRegistry(t, nil)
	s.set(nil, func(w http.ResponseWriter, _ *http.Request) http.ResponseWriter { return &cut{w, 40_000, nil} })
	img, err := fetch(t, r, s.host+"/img:1")
	if err != nil {
		t.Fatal(err)
	}
	sent, n := s.counts()
	if size := img.Layers[0].Size + img.Layers[1].Size; sent > size+10_000 || n < 16 {
		t.Errorf("%d bytes sent in %d requests for %d", sent, n, size)
	}

	// A registry that knows no ranges and never gets through is given up too.
	r = newRegistry(t, nil)
	s.set(nil, func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		r.Header.Del("Range")
		return &cut{w, 40_000, nil}
	})
	_, err = fetch(t, r, s.host+"/img:1")
	wantKind(t, "no ranges", err, errs.Precondition)

	// One that makes no progress is given up, and what arrived is kept.
	r = newRegistry(t, nil)
	s.set(nil, func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		if r.Header.Get("Range") != "" {
			w.WriteHeader(http.StatusBadGateway)
			return nil
		}
		return &cut{w, 100_000, nil}
	})
	_, err = fetch(t, r, s.host+"/img:1")
	wantKind(t, "no progress", err, errs.Precondition)
	s.set(nil, nil)
	if _, err := fetch(t, r, s.host+"/img:1"); err != nil {
		t.Fatal(err)
	}
	if sent, _ := s.counts(); sent > 2*300_000-50_000 { // the end of what was sent may be lost with its connection
		t.Errorf("%d bytes sent after an interruption", sent)
	}
}

// A client that gives up leaves parts that the next one continues; a damaged part is found out.
func TestFetchCancelled(t *testing.T) {
	s := newServer(t, false)
	s.push(t, "img:1", randomImage(t, 1))
	r := newRegistry(t, nil)
	s.set(nil, func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		return &cut{w, 60_000, r.Context().Done()}
	})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r.Progress = func(_ string, done, _ int64) {
		if done > 50_000 {
			cancel()
		}
	}
	if _, err := r.Fetch(ctx, s.host+"/img:1"); !errs.Is(err, errs.Cancelled) {
		t.Fatal(err)
	}
	r.Progress = nil
	s.set(nil, nil)
	parts, err := filepath.Glob(filepath.Join(r.Cache.dir, "*"+partial))
	if err != nil || len(parts) != 1 {
		t.Fatal(parts, err)
	}
	if err := os.WriteFile(parts[0], bytes.Repeat([]byte("x"), 70_000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := fetch(t, r, s.host+"/img:1"); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(r.Cache.dir, "*"+partial)); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestFetchMirrors(t *testing.T) {
	origin, mirror := newServer(t, false), newServer(t, false)
	img := randomImage(t, 2)
	origin.push(t, "team/img:1", img)
	mirror.push(t, "cache/team/img:1", img)
	access := map[string]RegistryAccess{origin.host: {Mirrors: []string{"127.0.0.1:1", mirror.host + "/cache"}}}
	origin.set(nil, nil)
	mirror.set(nil, nil)
	if _, err := fetch(t, newRegistry(t, access), origin.host+"/team/img:1"); err != nil {
		t.Fatal(err)
	}
	if _, n := origin.counts(); n != 0 {
		t.Errorf("%d blobs came from the origin", n)
	}
	// A mirror that spoils content is no obstacle.
	mirror.set(nil, func(w http.ResponseWriter, _ *http.Request) http.ResponseWriter {
		_, _ = w.Write(make([]byte, 300_000))
		return nil
	})
	if _, err := fetch(t, newRegistry(t, access), origin.host+"/team/img:1"); err != nil {
		t.Error(err)
	}
	origin.set(nil, nil)
	if _, err := fetch(t, newRegistry(t, access), origin.host+"/team/missing:1"); !errs.Is(err, errs.NotFound) {
		t.Error(err)
	}
}

func TestFetchRefusals(t *testing.T) {
	s := newServer(t, false)
	good := randomImage(t, 1)
	s.push(t, "good:1", good)
	file, err := good.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.Architecture = "riscv64"
	foreign, err := mutate.ConfigFile(good, file)
	if err != nil {
		t.Fatal(err)
	}
	s.push(t, "foreign:1", foreign)
	artifact, err := mutate.AppendLayers(good, static.NewLayer([]byte("chart"), "application/vnd.cncf.helm.chart.content.v1.tar+gzip"))
	if err != nil {
		t.Fatal(err)
	}
	s.push(t, "artifact:1", artifact)
	for ref, kind := range map[string]errs.Kind{
		"/good:2": errs.NotFound, "/none:1": errs.NotFound, "/foreign:1": errs.Unsupported, "/artifact:1": errs.Invalid,
		"/good:1": "", "/Bad": errs.Invalid,
	} {
		_, err := fetch(t, newRegistry(t, nil), s.host+ref)
		wantKind(t, ref, err, kind)
	}
	_, err = fetch(t, newRegistry(t, nil), "127.0.0.1:1/x")
	wantKind(t, "unreachable", err, errs.Precondition)
	s.set(nil, func(w http.ResponseWriter, _ *http.Request) http.ResponseWriter {
		_, _ = w.Write(make([]byte, 300_000))
		return nil
	})
	_, err = fetch(t, newRegistry(t, nil), s.host+"/good:1")
	wantKind(t, "spoiled", err, errs.Invalid)
	// A registry that leads to what it should not.
	s.set(nil, func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		http.Redirect(w, r, "http://169.254.169.254/latest/meta-data", http.StatusTemporaryRedirect)
		return nil
	})
	_, err = fetch(t, newRegistry(t, nil), s.host+"/good:1")
	if !errs.Is(err, errs.Denied) {
		t.Errorf("redirect: %v", err)
	}
}

func TestFetchTLS(t *testing.T) {
	s := newServer(t, true)
	s.push(t, "img:1", randomImage(t, 1))
	_, err := fetch(t, newRegistry(t, nil), s.host+"/img:1")
	wantKind(t, "unknown authority", err, errs.Precondition)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = fetch(t, newRegistry(t, map[string]RegistryAccess{s.host: {CAFile: ca}}), s.host+"/img:1"); err != nil {
		t.Error(err)
	}
}

func TestGuard(t *testing.T) {
	passed := errors.New("passed")
	inner := roundTrip(func(*http.Request) (*http.Response, error) { return nil, passed })
	for url, want := range map[string][2]bool{ // for a remote registry, for one on loopback
		"https://registry.example/v2/":  {true, true},
		"http://registry.example/v2/":   {false, false},
		"http://10.0.0.1:5000/v2/":      {false, false},
		"http://127.0.0.1:5000/v2/":     {false, true},
		"https://[::1]:5000/v2/":        {false, true},
		"https://localhost/v2/":         {false, true},
		"https://[::ffff:127.0.0.1]/v2": {false, true},
		"https://169.254.169.254/v2/":   {false, false},
		"https://[fe80::1]/v2/":         {false, false},
		"https://0.0.0.0/v2/":           {false, false},
		"https://[::ffff:169.254.1.1]/": {false, false},
		"file://localhost/etc/passwd":   {false, false},
	} {
		for i, loopback := range []bool{false, true} {
			req := httptest.NewRequest(http.MethodGet, url, nil)
			_, err := (&guard{inner: inner, host: "registry.example", loopback: loopback}).RoundTrip(req)
			if got := errors.Is(err, passed); got != want[i] {
				t.Errorf("%s, loopback %v: %v", url, loopback, err)
			}
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestReadAccess(t *testing.T) {
	p := filepath.Join(t.TempDir(), "registries.json")
	if a, err := ReadAccess(p); err != nil || len(a.Registries) != 0 {
		t.Error(a, err)
	}
	// The default registry has a name that people write and another that is asked.
	short := strings.TrimPrefix(name.DefaultRegistry, "index.")
	for text, kind := range map[string]errs.Kind{
		`{"registries":{"` + short + `":{"username":"u","mirrors":["m:5000"]}}}`: "",
		`{"registries":{"hub.example":{"user":"u"}}}`:                            errs.Precondition,
		`{`: errs.Precondition,
	} {
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := ReadAccess(p)
		wantKind(t, text, err, kind)
		if err == nil && a.of(name.DefaultRegistry).Username != "u" {
			t.Errorf("%+v", a)
		}
	}
}

func TestTrim(t *testing.T) {
	c := NewCache(t.TempDir(), 250)
	for i, n := range []string{"old", "busy" + partial, "middle", "new"} {
		if err := os.WriteFile(c.path(n), make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000*i), 0)
		if err := os.Chtimes(c.path(n), at, at); err != nil {
			t.Fatal(err)
		}
	}
	defer c.lock("busy")()
	if err := c.Trim(); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(c.path("*"))
	if len(left) != 2 || filepath.Base(left[0]) != "busy"+partial || filepath.Base(left[1]) != "new" {
		t.Errorf("left %v", left)
	}
}
