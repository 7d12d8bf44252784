package layers

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/layer"
)

type noMounts struct{ dropped []layer.Digest }

func (m *noMounts) Drop(ds []layer.Digest) error {
	m.dropped = append(m.dropped, ds...)
	return nil
}

type fixture struct {
	url    string
	client harenav1connect.LayerServiceClient
	store  *layer.Store
	mounts *noMounts
	inUse  map[layer.Digest]bool

	mu     sync.Mutex
	events []string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	store, err := layer.Open(t.TempDir(), layer.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{store: store, mounts: &noMounts{}, inUse: make(map[layer.Digest]bool)}
	svc := New(Config{
		Store: store, Mounts: f.mounts, InUse: func() map[layer.Digest]bool { return f.inUse }, Log: slog.New(slog.DiscardHandler),
		Event: func(kind, _ string, attrs map[string]string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.events = append(f.events, kind+" "+attrs["name"]+" "+attrs["project"])
		},
	})
	mux := http.NewServeMux()
	mux.Handle(harenav1connect.NewLayerServiceHandler(svc))
	mux.Handle("/v1/layers", svc.ImportHandler())
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	f.url = srv.URL
	f.client = harenav1connect.NewLayerServiceClient(srv.Client(), srv.URL)
	return f
}

func archive(t *testing.T, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "f", Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// upload posts a body and returns the answer, or the error as a client decodes it.
func (f *fixture) upload(t *testing.T, body io.Reader, query ...string) (*harenav1.ImportResponse, error) {
	t.Helper()
	q := url.Values{}
	for i := 0; i < len(query); i += 2 {
		q.Set(query[i], query[i+1])
	}
	res, err := http.Post(f.url+"/v1/layers?"+q.Encode(), "application/x-tar", body)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if ct := res.Header.Get("Content-Type"); ct != "application/json" {
		t.Errorf("content type %q", ct)
	}
	if res.StatusCode != http.StatusOK {
		var wire struct {
			Code, Message string
			Details       []struct {
				Type  string
				Debug struct{ Kind, Resource, Hint string }
			}
		}
		if err := json.Unmarshal(b, &wire); err != nil || len(wire.Details) != 1 {
			t.Fatalf("error body %s: %v", b, err)
		}
		d := wire.Details[0]
		return nil, &errs.Error{Kind: errs.Kind(d.Debug.Kind), Message: wire.Message, Hint: d.Debug.Hint}
	}
	if !bytes.Contains(b, []byte(`"logical_bytes"`)) {
		t.Errorf("not proto field names: %s", b)
	}
	m := &harenav1.ImportResponse{}
	if err := protojson.Unmarshal(b, m); err != nil {
		t.Fatal(err)
	}
	return m, nil
}

func TestUploadAndNames(t *testing.T) {
	f := newFixture(t)
	ctx := context.Background()
	im, err := f.upload(t, bytes.NewReader(archive(t, "content")), "name", "a:1", "kind", "toolkit", "project", "lab/x")
	if err != nil {
		t.Fatal(err)
	}
	l := im.GetLayer()
	if im.GetPhase() != "done" || l.GetKind() != "toolkit" || l.GetFiles() != 1 || l.GetLogicalBytes() != 7 || l.GetUniqueBytes() == 0 ||
		!slices.Equal(l.GetNames(), []string{"a:1"}) || l.GetCreated().AsTime().IsZero() {
		t.Errorf("answer %v", im)
	}
	got, err := f.client.Get(ctx, connect.NewRequest(&harenav1.GetLayerRequest{Project: "lab/x", Name: "a:1"}))
	if err != nil || got.Msg.GetLayer().GetDigest() != l.GetDigest() {
		t.Errorf("get: %v, %v", got, err)
	}
	_, err = f.client.Get(ctx, connect.NewRequest(&harenav1.GetLayerRequest{Name: "a:1"}))
	if err = errs.FromConnect(err); !errs.Is(err, errs.NotFound) {
		t.Errorf("another project: %v", err)
	}
	tagged, err := f.client.Tag(ctx, connect.NewRequest(&harenav1.TagRequest{Project: "lab/x", Source: "a:1", Name: "b"}))
	if err != nil || !slices.Equal(tagged.Msg.GetLayer().GetNames(), []string{"a:1", "b:latest"}) {
		t.Errorf("tag: %v, %v", tagged, err)
	}
	if _, err := f.upload(t, bytes.NewReader(archive(t, "content")), "name", "c", "project", "lab/x"); err != nil {
		t.Fatal(err)
	}
	var names []string
	req := &harenav1.ListLayersRequest{Project: "lab/x", Page: &harenav1.Page{Size: 1}}
	for {
		res, err := f.client.List(ctx, connect.NewRequest(req))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range res.Msg.GetLayers() {
			names = append(names, l.GetNames()...)
			if l.GetSharedBytes() == 0 || l.GetUniqueBytes() != 0 {
				t.Errorf("equal content of two kinds is not shared: %v", l)
			}
		}
		if req.Page.Token = res.Msg.GetNextPageToken(); req.Page.Token == "" {
			break
		}
	}
	if strings.Join(names, " ") != "a:1 b:latest c:latest" {
		t.Errorf("listed %v", names)
	}
	for _, n := range []string{"a:1", "b"} {
		if res, err := f.client.Remove(ctx, connect.NewRequest(&harenav1.RemoveLayerRequest{Project: "lab/x", Name: n})); err != nil || res.Msg.GetDigest() != l.GetDigest() {
			t.Errorf("remove %s: %v, %v", n, res, err)
		}
	}
	want := []string{"layer.imported a:1 lab/x", "layer.tagged b lab/x", "layer.imported c lab/x", "layer.removed a:1 lab/x", "layer.removed b lab/x"}
	if !slices.Equal(f.events, want) {
		t.Errorf("events %q", f.events)
	}

	dry, err := f.client.CollectGarbage(ctx, connect.NewRequest(&harenav1.CollectGarbageRequest{DryRun: true}))
	if err != nil || !slices.Equal(dry.Msg.GetDigests(), []string{l.GetDigest()}) {
		t.Errorf("dry run: %v, %v", dry, err)
	}
	f.inUse[layer.Digest(l.GetDigest())] = true
	if res, err := f.client.CollectGarbage(ctx, connect.NewRequest(&harenav1.CollectGarbageRequest{})); err != nil || len(res.Msg.GetDigests()) != 0 {
		t.Errorf("collected what is in use: %v, %v", res, err)
	}
	clear(f.inUse)
	if res, err := f.client.CollectGarbage(ctx, connect.NewRequest(&harenav1.CollectGarbageRequest{})); err != nil || len(res.Msg.GetDigests()) != 1 || len(f.mounts.dropped) != 1 {
		t.Errorf("collect: %v, %v", res, err)
	}
}

func TestUploadErrors(t *testing.T) {
	f := newFixture(t)
	good := archive(t, "x")
	for _, c := range []struct {
		name  string
		body  io.Reader
		query []string
		kind  errs.Kind
	}{
		{"no name", bytes.NewReader(good), nil, errs.Invalid},
		{"bad name", bytes.NewReader(good), []string{"name", "../x"}, errs.Invalid},
		{"bad kind", bytes.NewReader(good), []string{"name", "a", "kind", "thing"}, errs.Invalid},
		{"bad project", bytes.NewReader(good), []string{"name", "a", "project", "../x"}, errs.Invalid},
		{"bad request_id", bytes.NewReader(good), []string{"name", "a", "request_id", "a\x01"}, errs.Invalid},
		{"vm-image", bytes.NewReader(good), []string{"name", "a", "kind", "vm-image"}, errs.Unsupported},
		{"empty", nil, []string{"name", "a"}, errs.Invalid},
		{"text", strings.NewReader(strings.Repeat("text", 1000)), []string{"name", "a"}, errs.Invalid},
		// Much is still to come when the refusal is known: the client must see it all the same.
		{"long", io.MultiReader(strings.NewReader("text"), io.LimitReader(zeros{}, 20<<20)), []string{"name", "../x"}, errs.Invalid},
	} {
		_, err := f.upload(t, c.body, c.query...)
		var e *errs.Error
		if !errors.As(err, &e) || e.Kind != c.kind || e.Hint == "" {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	res, err := http.Get(f.url + "/v1/layers?name=a")
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusNotImplemented {
		t.Errorf("GET: status %d", res.StatusCode)
	}
	if len(f.events) != 0 {
		t.Errorf("events %q", f.events)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestRepeatedUpload(t *testing.T) {
	f := newFixture(t)
	args := []string{"name", "a", "request_id", "r1"}
	if _, err := f.upload(t, strings.NewReader("broken"), args...); err == nil {
		t.Fatal("broken archive was imported")
	}
	first, err := f.upload(t, bytes.NewReader(archive(t, "one")), args...) // a failure is not remembered
	if err != nil {
		t.Fatal(err)
	}
	second, err := f.upload(t, bytes.NewReader(archive(t, "two")), args...)
	if err != nil || second.GetLayer().GetDigest() != first.GetLayer().GetDigest() {
		t.Errorf("repeated: %v, %v", second, err)
	}
	if _, err := f.upload(t, bytes.NewReader(archive(t, "two")), "name", "b", "request_id", "r1"); !errs.Is(err, errs.Exists) {
		t.Errorf("the ID of another request: %v", err)
	}
	if len(f.events) != 1 {
		t.Errorf("events %q", f.events)
	}
}

func TestImportSources(t *testing.T) {
	f := newFixture(t)
	for source, kind := range map[string]errs.Kind{
		"registry://": errs.Invalid, "registry://A/B": errs.Invalid, "registry:x": errs.Invalid, "registry://127.0.0.1:1/x": errs.Precondition, "oci:/x": errs.Invalid, "docker-archive:/x": errs.Invalid, "tar:/etc/passwd": errs.Invalid,
		"dir:/": errs.Invalid, "debootstrap:../x": errs.Invalid, "": errs.Invalid, "what": errs.Invalid,
	} {
		stream, err := f.client.Import(context.Background(), connect.NewRequest(&harenav1.ImportRequest{Name: "a", Source: source}))
		if err != nil {
			t.Fatal(err)
		}
		for stream.Receive() {
			if stream.Msg().GetLayer() != nil {
				t.Errorf("%q: %v", source, stream.Msg())
			}
		}
		var e *errs.Error
		if err := errs.FromConnect(stream.Err()); !errors.As(err, &e) || e.Kind != kind || e.Hint == "" {
			t.Errorf("%q: %v", source, err)
		}
		stream.Close()
	}
}

func TestVerifyStream(t *testing.T) {
	f := newFixture(t)
	for _, existed := range []bool{false, true} {
		if res, err := f.upload(t, bytes.NewReader(archive(t, "content")), "name", "a"); err != nil || res.GetExisted() != existed {
			t.Fatalf("existed %v: %v, %v", existed, res, err)
		}
	}
	stream, err := f.client.Verify(context.Background(), connect.NewRequest(&harenav1.VerifyLayerRequest{Name: "a"}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var last *harenav1.VerifyLayerResponse
	for stream.Receive() {
		last = stream.Msg()
	}
	if err := stream.Err(); err != nil || !last.GetDone() || len(last.GetProblems()) != 0 || last.GetDoneBytes() == 0 {
		t.Errorf("%v, %v", last, err)
	}
}

func TestRequestsRunOnce(t *testing.T) {
	r := newRequests()
	ask := &harenav1.TagRequest{Name: "a"}
	var runs int // guarded by the promise under test; the race detector checks it
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			_, err := do(context.Background(), r, "", "id", ask, func() (*harenav1.TagResponse, error) {
				runs++
				if runs < 3 {
					return nil, errs.E(errs.Capacity, "not yet")
				}
				return &harenav1.TagResponse{}, nil
			})
			if err != nil && !errs.Is(err, errs.Capacity) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if runs != 3 {
		t.Errorf("ran %d times", runs)
	}
	// A call that panics does not block the next.
	func() {
		defer func() { _ = recover() }()
		_, _ = do(context.Background(), r, "", "panics", ask, func() (*harenav1.TagResponse, error) { panic("x") })
	}()
	if _, err := do(context.Background(), r, "", "panics", ask, func() (*harenav1.TagResponse, error) { return &harenav1.TagResponse{}, nil }); err != nil {
		t.Error(err)
	}
	// One that waits goes when its context ends.
	ctx, cancel := context.WithCancel(context.Background())
	_, err := do(context.Background(), r, "", "slow", ask, func() (*harenav1.TagResponse, error) {
		cancel()
		_, err := do(ctx, r, "", "slow", ask, func() (*harenav1.TagResponse, error) { return nil, errors.New("ran twice") })
		return nil, err
	})
	if !errs.Is(err, errs.Cancelled) {
		t.Errorf("got %v", err)
	}
}

// An image comes as the body of a POST that says its format.
func TestUploadImage(t *testing.T) {
	f := newFixture(t)
	content := archive(t, "hello")
	sum := sha256.Sum256(content)
	config := fmt.Sprintf(`{"os":"linux","config":{"Cmd":["x"],"Env":["A=b"]},"rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, sum)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, text := range map[string]string{
		"manifest.json": `[{"Config":"c.json","RepoTags":["img:1"],"Layers":["l.tar"]}]`, "c.json": config, "l.tar": string(content),
	} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var first string
	for range 2 { // the second is answered without its body being looked at
		res, err := f.upload(t, bytes.NewReader(b.Bytes()), "name", "img", "format", "docker-archive", "ref", "img:1", "request_id", "r", "collapse", "5000")
		if err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = res.GetLayer().GetDigest()
		}
		if l := res.GetLayer(); l.GetDigest() != first || l.GetFiles() != 1 || l.GetConfig().GetCmd()[0] != "x" || l.GetConfig().GetEnv()[0] != "A=b" {
			t.Errorf("layer %v", l)
		}
	}
	for _, c := range []struct {
		kind  errs.Kind
		query []string
	}{
		{errs.Invalid, []string{"format", "zip"}},
		{errs.Invalid, []string{"format", "oci"}}, // it is no layout
		{errs.NotFound, []string{"format", "docker-archive", "ref", "other"}},
		{errs.Invalid, []string{"format", "docker-archive", "collapse", "-1"}},
		{errs.Invalid, []string{"format", "docker-archive", "collapse", "x"}},
		{errs.Exists, []string{"format", "docker-archive", "request_id", "r"}},
	} {
		_, err := f.upload(t, bytes.NewReader(b.Bytes()), append([]string{"name", "img"}, c.query...)...)
		var e *errs.Error
		if !errors.As(err, &e) || e.Kind != c.kind || e.Hint == "" {
			t.Errorf("%q: %v", c.query, err)
		}
	}
}
