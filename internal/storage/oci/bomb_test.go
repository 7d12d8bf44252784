package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/harena-dev/harena/internal/errs"
)

// most returns how many bytes of live objects, or such that were not collected yet, f had beyond what was there before.
func most(f func()) int64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() int64 {
		metrics.Read(sample)
		return int64(sample[0].Value.Uint64())
	}
	runtime.GC()
	before, peak := read(), int64(0)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			peak = max(peak, read()-before)
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	f()
	close(stop)
	wg.Wait()
	return peak
}

// Documents of the size that is allowed, made of as many values as go into it, are refused without being parsed.
func TestManifestsOfManyValues(t *testing.T) {
	fill := func(head, value, tail string, size int) []byte {
		n := (size - len(head) - len(tail)) / (len(value) + 1)
		return []byte(head + strings.Repeat(value+",", n-1) + value + tail)
	}
	parse := map[string]func([]byte) error{
		"manifest": func(b []byte) error { _, err := parseManifest(b); return err },
		"config":   func(b []byte) error { _, _, err := parseConfig(b, 1); return err },
		"docker":   func(b []byte) error { _, err := parseDockerManifest(b); return err },
	}
	for what, c := range map[string]struct {
		parser, head, value, tail string
		size                      int
	}{
		"layers":          {"manifest", `{"schemaVersion":2,"layers":[`, `{}`, `]}`, maxManifest},
		"wrong layers":    {"manifest", `{"schemaVersion":2,"layers":[`, `0`, `]}`, maxManifest},
		"manifests":       {"manifest", `{"schemaVersion":2,"manifests":[`, `{}`, `]}`, maxManifest},
		"history":         {"config", `{"history":[`, `{}`, `]}`, maxConfig},
		"lists":           {"config", `{"x":[`, `[]`, `]}`, maxConfig},
		"images":          {"docker", `[`, `{}`, `]`, maxManifest},
		"behind a string": {"config", `{"a\"b":"\\","history":[`, `0`, `]}`, maxConfig},
	} {
		b := fill(c.head, c.value, c.tail, c.size)
		var err error
		if n := most(func() { err = parse[c.parser](b) }); n > 8<<20 {
			t.Errorf("%s: %d MiB", what, n>>20)
		}
		if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "values") {
			t.Errorf("%s: %v", what, err)
		}
	}
	// As many as images have are fine, and commas in strings do not count.
	text := `{"os":"linux","config":{"Labels":{"a":"` + strings.Repeat(",", 2*maxValues) + `"}},"rootfs":{"diff_ids":[]}}`
	if _, _, err := parseConfig([]byte(text), 0); err != nil {
		t.Error(err)
	}
}

// Paths of many components cost what their entries allow, not what their components multiply to.
func TestPlanOfDeepPaths(t *testing.T) {
	deep := func(n, k int) tar.Header { return reg(fmt.Sprintf("%d/%s", k, strings.Repeat("a/", n)+"f"), 0) }
	var hs []tar.Header
	for k := range 400 {
		hs = append(hs, deep(2000, k))
	}
	layer := tarBytes(t, hs...)
	var err error
	n := most(func() {
		_, err = NewPlan(context.Background(), imageOfBytes(layer), Options{MaxEntries: 10_000})
	})
	if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "directories") {
		t.Error(err)
	}
	if n > 32<<20 {
		t.Errorf("%d MiB", n>>20)
	}
	// Whiteouts at such paths make directories in each group above.
	layers := [][]byte{tarBytes(t, hs[:4]...), tarBytes(t, reg("big", 100))}
	for k := range 4 {
		layers = append(layers, tarBytes(t, reg(fmt.Sprintf("%d/%s.wh.f", k, strings.Repeat("a/", 2000)), 0), reg(fmt.Sprint("big", k), 100)))
	}
	if _, err := NewPlan(context.Background(), imageOfBytes(layers...), Options{MaxEntries: 12_000, Collapse: 1}); !errs.Is(err, errs.Invalid) {
		t.Error(err)
	}
	if _, err := NewPlan(context.Background(), imageOfBytes(layers...), Options{MaxEntries: 20_000, Collapse: 1}); err != nil {
		t.Error(err)
	}
}

func TestArchiveOfLongNames(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: strings.Repeat("n", 900_000), Typeflag: tar.TypeReg, Format: tar.FormatPAX}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenArchive(context.Background(), bytes.NewReader(b.Bytes()), int64(b.Len()), Layout, ""); !errs.Is(err, errs.Invalid) {
		t.Error(err)
	}
}

// What a name means is looked at when it is dialled: it may be chosen by the registry.
func TestCheckDial(t *testing.T) {
	for address, want := range map[string][3]bool{ // dialRemote, dialLoopback, dialAny
		"192.0.2.1:443":              {true, true, true},
		"10.0.0.1:443":               {true, true, true},
		"127.0.0.1:443":              {false, true, true},
		"[::1]:443":                  {false, true, true},
		"[::ffff:127.0.0.1]:443":     {false, true, true},
		"169.254.169.254:443":        {false, false, true},
		"[fe80::1%eth0]:443":         {false, false, true},
		"[::ffff:169.254.169.254]:1": {false, false, true},
		"0.0.0.0:443":                {false, false, true},
		"/run/socket":                {false, false, true},
	} {
		for rule := range dialAny + 1 {
			err := checkDial(context.WithValue(context.Background(), dialKey{}, rule), "tcp", address, nil)
			if (err == nil) != want[rule] {
				t.Errorf("%s, rule %d: %v", address, rule, err)
			}
			if err != nil && !errs.Is(err, errs.Denied) {
				t.Errorf("%s: %v", address, err)
			}
		}
	}
	if a := netip.MustParseAddr("ff02::1"); !neverRegistry(a) {
		t.Error(a)
	}
}

// The transport's connections are made under the rule of the request, and what is refused says why.
func TestDialRules(t *testing.T) {
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	tr, err := newTransport("")
	if err != nil {
		t.Fatal(err)
	}
	defer tr.CloseIdleConnections()
	tr.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig
	// A name which the transport, unlike the guard, takes for this machine.
	addr := s.Listener.Addr().String()
	dial := tr.DialContext
	tr.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) { return dial(ctx, network, addr) }
	proxied := false
	g := &guard{inner: tr, host: "mine.example", proxy: func(*http.Request) (*url.URL, error) {
		if proxied {
			return url.Parse("http://proxy.example")
		}
		return nil, nil
	}}
	get := func(host string) error {
		res, err := (&http.Client{Transport: g}).Get("https://" + host + "/")
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	if err := get("other.example"); !errs.Is(err, errs.Denied) {
		t.Errorf("another's name for this machine: %v", err)
	}
	if err := get("mine.example"); errs.Is(err, errs.Denied) {
		t.Errorf("the registry's own: %v", err)
	}
	proxied = true
	if err := get("third.example"); errs.Is(err, errs.Denied) {
		t.Errorf("a proxy's: %v", err)
	}
}

// Answers that do not end, at any place, end the fetch.
func TestFetchFromARegistryThatStalls(t *testing.T) {
	for _, at := range []string{"/v2/", "/token", "/v2/a/manifests/1"} {
		var asked atomic.Int64
		done := make(chan struct{})
		var s *httptest.Server
		s = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == at {
				asked.Add(1)
				if at == "/v2/" { // the body of an error is read
					w.WriteHeader(http.StatusInternalServerError)
				}
				_, _ = io.WriteString(w, `{"`)
				_ = http.NewResponseController(w).Flush()
				<-done
				return
			}
			switch {
			case r.URL.Path == "/v2/" && at == "/token":
				w.Header().Set("WWW-Authenticate", `Bearer realm="`+s.URL+`/token"`)
				w.WriteHeader(http.StatusUnauthorized)
			case r.URL.Path == "/v2/":
			default:
				w.WriteHeader(http.StatusNotFound)
			}
		}))
		repo, err := name.NewRepository(s.Listener.Addr().String()+"/a", name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		f := &fetcher{Registry: newRegistry(t, nil), endpoints: []*endpoint{{repo: repo, patience: 50 * time.Millisecond}}}
		_, _, err = f.resolve(context.Background(), "1")
		wantKind(t, at, err, errs.Precondition)
		if asked.Load() == 0 {
			t.Errorf("%s was not asked for", at)
		}
		close(done)
		s.Close()
	}
}

// Credentials stay with the registry that they are for: redirects of blobs and manifests to another host do not get them.
func TestRedirectsGetNoCredentials(t *testing.T) {
	var leaked atomic.Int64
	origin := newServer(t, false)
	img := randomImage(t, 1)
	origin.push(t, "img:1", img)
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
			leaked.Add(1)
		}
		if u, p, ok := r.BasicAuth(); ok || u+p != "" {
			leaked.Add(1)
		}
		origin.Config.Handler.ServeHTTP(w, r)
	}))
	defer other.Close()
	var moved atomic.Int64
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, _, ok := r.BasicAuth(); !ok {
			w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.URL.Path == "/v2/" {
			return
		}
		moved.Add(1)
		http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	defer front.Close()
	host := front.Listener.Addr().String()
	r := newRegistry(t, map[string]RegistryAccess{host: {Username: "u", Password: "p"}})
	if _, err := fetch(t, r, host+"/img:1"); err != nil {
		t.Fatal(err)
	}
	if leaked.Load() != 0 || moved.Load() < 3 {
		t.Errorf("%d of %d redirected requests had credentials", leaked.Load(), moved.Load())
	}
}
