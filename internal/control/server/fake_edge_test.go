package server_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	"github.com/harena-dev/harena/api/harena/edge/v1/edgev1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/control/server"
	"github.com/harena-dev/harena/internal/control/tokens"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// fakeEdge implements what an edge serves, over a real HTTP server.
type fakeEdge struct {
	edgev1connect.UnimplementedEdgeServiceHandler
	id   sandbox.EdgeID
	url  string
	stop func()

	full      atomic.Bool // refuses creations
	creating  atomic.Int64
	most      atomic.Int64 // creations at once
	slow      time.Duration
	cancelled chan struct{} // one for each stream whose caller went away
	sent      atomic.Int64  // messages of endless streams

	mu       sync.Mutex
	created  map[string]*harenav1.Sandbox
	requests []*edgev1.CreateRequest
	header   http.Header // of the last call
	stops    []*harenav1.StopRequest
	leases   []*harenav1.LeaseJobRequest
	// What it answers about jobs, leases, pauses.
	jobs   []*harenav1.Job
	lease  *harenav1.JobLease
	pauses []*harenav1.Outcome
}

func newFakeEdge(t *testing.T, id sandbox.EdgeID) *fakeEdge {
	f := &fakeEdge{id: id, created: map[string]*harenav1.Sandbox{}, cancelled: make(chan struct{}, 100)}
	mux := http.NewServeMux()
	mux.Handle(edgev1connect.NewEdgeServiceHandler(f))
	mux.Handle(harenav1connect.NewExecServiceHandler(&fakeExec{f: f}))
	mux.Handle(harenav1connect.NewFileServiceHandler(&fakeFile{f: f}))
	mux.Handle(harenav1connect.NewLayerServiceHandler(&fakeLayer{f: f}))
	mux.Handle(harenav1connect.NewEventServiceHandler(&fakeEvent{f: f}))
	mux.HandleFunc("/v1/", f.plain)
	f.url, f.stop = serve(t, mux)
	return f
}

func serve(t *testing.T, h http.Handler) (url string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := server.NewHTTPServer(h, slog.New(slog.DiscardHandler))
	go func() { _ = srv.Serve(l) }()
	stop = func() { _ = srv.Close() }
	t.Cleanup(stop)
	return "http://" + l.Addr().String(), stop
}

func (f *fakeEdge) edge() *server.Edge {
	dial := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", strings.TrimPrefix(f.url, "http://"))
	}
	return server.NewEdge(f.id, f.url, server.NewEdgeTransport(dial))
}

func (f *fakeEdge) seen(h http.Header) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.header = h.Clone()
}

func (f *fakeEdge) lastHeader() http.Header {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.header
}

func (f *fakeEdge) sandboxID(n string) string {
	return string(f.id) + strings.Repeat("a", 14-len(n)) + n
}

func (f *fakeEdge) Create(ctx context.Context, r *connect.Request[edgev1.CreateRequest]) (*connect.Response[harenav1.CreateResponse], error) {
	f.seen(r.Header())
	now := f.creating.Add(1)
	defer f.creating.Add(-1)
	for {
		if most := f.most.Load(); now <= most || f.most.CompareAndSwap(most, now) {
			break
		}
	}
	if f.slow > 0 {
		select {
		case <-time.After(f.slow):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if f.full.Load() {
		return nil, errs.ToConnect(errs.OverLimit(errs.Capacity, "sandboxes of edge "+string(f.id), 1, 2).On("edge %s", f.id).WithHint("try later"))
	}
	if r.Msg.GetSpec().GetImage() == "missing" {
		return nil, errs.ToConnect(errs.E(errs.NotFound, "there is no layer missing").On("layer missing").WithHint("import it"))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, r.Msg)
	sb := &harenav1.Sandbox{Id: r.Msg.GetId(), State: "running", Project: r.Msg.GetProject(), Spec: r.Msg.GetSpec()}
	f.created[sb.GetId()] = sb
	return connect.NewResponse(&harenav1.CreateResponse{Sandbox: sb, Explanation: []string{"admission: fine"}}), nil
}

func (f *fakeEdge) Get(_ context.Context, r *connect.Request[harenav1.GetRequest]) (*connect.Response[harenav1.GetResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if sb := f.created[r.Msg.GetId()]; sb != nil {
		return connect.NewResponse(&harenav1.GetResponse{Sandbox: sb}), nil
	}
	return nil, errs.ToConnect(errs.E(errs.NotFound, "sandbox %s does not exist", r.Msg.GetId()).On("sandbox %s", r.Msg.GetId()).WithHint("see ps"))
}

// List has three sandboxes, two a page at most.
func (f *fakeEdge) List(_ context.Context, r *connect.Request[harenav1.ListRequest]) (*connect.Response[harenav1.ListResponse], error) {
	all := []string{f.sandboxID("1"), f.sandboxID("2"), f.sandboxID("3")}
	start := 0
	if r.Msg.GetPage().GetToken() != "" {
		start = int(r.Msg.GetPage().GetToken()[0] - '0')
	}
	end := min(start+2, start+int(r.Msg.GetPage().GetSize()), len(all))
	res := &harenav1.ListResponse{}
	for _, id := range all[start:end] {
		res.Sandboxes = append(res.Sandboxes, &harenav1.Sandbox{Id: id})
	}
	if end < len(all) {
		res.NextPageToken = string(rune('0' + end))
	}
	return connect.NewResponse(res), nil
}

func (f *fakeEdge) Stop(_ context.Context, r *connect.Request[harenav1.StopRequest]) (*connect.Response[harenav1.StopResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stops = append(f.stops, r.Msg)
	ids := r.Msg.GetSelector().GetIds()
	if len(ids) == 0 {
		ids = []string{f.sandboxID("j")}
	}
	res := &harenav1.StopResponse{}
	for _, id := range ids {
		res.Outcomes = append(res.Outcomes, &harenav1.Outcome{SandboxId: id, State: "stopped"})
	}
	return connect.NewResponse(res), nil
}

// Watch sends one sandbox, then synced, then waits.
func (f *fakeEdge) Watch(ctx context.Context, _ *connect.Request[harenav1.WatchRequest], out *connect.ServerStream[harenav1.WatchResponse]) error {
	_ = out.Send(&harenav1.WatchResponse{Sandbox: &harenav1.Sandbox{Id: f.sandboxID("w")}})
	_ = out.Send(&harenav1.WatchResponse{Synced: true})
	<-ctx.Done()
	f.cancelled <- struct{}{}
	return ctx.Err()
}

func (f *fakeEdge) Probe(context.Context, *connect.Request[edgev1.ProbeRequest]) (*connect.Response[edgev1.ProbeResponse], error) {
	return connect.NewResponse(&edgev1.ProbeResponse{Edge: &harenav1.Edge{Id: string(f.id), State: "healthy"}}), nil
}

// plain echoes what it was sent, after a line about the request.
func (f *fakeEdge) plain(w http.ResponseWriter, r *http.Request) {
	f.seen(r.Header)
	switch {
	case r.URL.Query().Get("path") == "/none":
		_ = connect.NewErrorWriter().Write(w, r, errs.ToConnect(errs.E(errs.NotFound, "/none does not exist").On("path /none").WithHint("look")))
		return
	case r.URL.Query().Get("path") == "/endless":
		block := make([]byte, 64<<10)
		for r.Context().Err() == nil {
			if _, err := w.Write(block); err != nil {
				break
			}
			f.sent.Add(1)
		}
		f.cancelled <- struct{}{}
		return
	case r.URL.Query().Get("path") == "/cut":
		_, _ = io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("X-Query", r.URL.RawQuery)
	w.Header().Set("Content-Range", r.Header.Get("Range"))
	_ = http.NewResponseController(w).EnableFullDuplex()
	_, _ = io.WriteString(w, r.Method+" "+r.URL.Path+"\n")
	_ = http.NewResponseController(w).Flush()
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Body.Read(buf)
		_, _ = w.Write(buf[:n])
		_ = http.NewResponseController(w).Flush()
		if err != nil {
			return
		}
	}
}

type fakeExec struct {
	harenav1connect.UnimplementedExecServiceHandler
	f *fakeEdge
}

// Run: "endless" prints until its caller goes away, "fail" fails after one
// message, "panic" panics; others print their words and end with 3.
func (h *fakeExec) Run(ctx context.Context, r *connect.Request[harenav1.RunRequest], out *connect.ServerStream[harenav1.RunResponse]) error {
	h.f.seen(r.Header())
	send := func(o *harenav1.Output) error { return out.Send(&harenav1.RunResponse{Output: o}) }
	_ = send(&harenav1.Output{Event: &harenav1.Output_Started{Started: &harenav1.Started{CommandId: "c1", Pid: 7}}})
	switch r.Msg.GetCommand().GetShell() {
	case "endless":
		block := bytes.Repeat([]byte("x"), 64<<10)
		for ctx.Err() == nil {
			if err := send(&harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: block}}); err != nil {
				break
			}
			h.f.sent.Add(1)
		}
		h.f.cancelled <- struct{}{}
		return ctx.Err()
	case "fail":
		return errs.ToConnect(errs.OverLimit(errs.Quota, "commands", 5, 6).On("sandbox x").WithHint("fewer"))
	case "internal":
		return errors.New("a secret of the edge")
	case "die": // its supervisor is killed
		h.f.mu.Lock()
		h.f.created[r.Msg.GetSandboxId()] = &harenav1.Sandbox{Id: r.Msg.GetSandboxId(), State: "running"}
		h.f.mu.Unlock()
		go func() { // the edge sees the end of the process after that of the connection
			time.Sleep(100 * time.Millisecond)
			h.f.mu.Lock()
			defer h.f.mu.Unlock()
			h.f.created[r.Msg.GetSandboxId()] = &harenav1.Sandbox{Id: r.Msg.GetSandboxId(), State: "failed", Reason: "supervisor-lost"}
		}()
		panic(http.ErrAbortHandler)
	case "break":
		panic(http.ErrAbortHandler)
	}
	_ = send(&harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: []byte(r.Msg.GetCommand().GetShell())}})
	return send(&harenav1.Output{Event: &harenav1.Output_Result{Result: &harenav1.Result{ExitCode: 3}}})
}

func (h *fakeExec) Start(ctx context.Context, r *connect.Request[harenav1.StartRequest]) (*connect.Response[harenav1.StartResponse], error) {
	h.f.seen(r.Header())
	switch r.Msg.GetCommand().GetShell() {
	case "fail":
		return nil, errs.ToConnect(errs.OverLimit(errs.Quota, "commands", 5, 6).On("sandbox x").WithHint("fewer"))
	case "hang":
		<-ctx.Done()
		h.f.cancelled <- struct{}{}
		return nil, ctx.Err()
	}
	return connect.NewResponse(&harenav1.StartResponse{Started: &harenav1.Started{CommandId: "c1"}}), nil
}

type fakeFile struct {
	harenav1connect.UnimplementedFileServiceHandler
	f *fakeEdge
}

func (h *fakeFile) Read(_ context.Context, r *connect.Request[harenav1.ReadRequest]) (*connect.Response[harenav1.ReadResponse], error) {
	h.f.seen(r.Header())
	return connect.NewResponse(&harenav1.ReadResponse{Content: []byte("content of " + r.Msg.GetPath())}), nil
}

type fakeLayer struct {
	harenav1connect.UnimplementedLayerServiceHandler
	f *fakeEdge
}

func (h *fakeLayer) Get(_ context.Context, r *connect.Request[harenav1.GetLayerRequest]) (*connect.Response[harenav1.GetLayerResponse], error) {
	return connect.NewResponse(&harenav1.GetLayerResponse{Layer: &harenav1.Layer{Names: []string{r.Msg.GetProject() + "/" + r.Msg.GetName()}}}), nil
}

type fakeEvent struct {
	harenav1connect.UnimplementedEventServiceHandler
	f *fakeEdge
}

func (h *fakeEvent) Follow(ctx context.Context, _ *connect.Request[harenav1.FollowEventsRequest], out *connect.ServerStream[harenav1.FollowEventsResponse]) error {
	_ = out.Send(&harenav1.FollowEventsResponse{Event: &harenav1.Event{Edge: string(h.f.id)}})
	<-ctx.Done()
	return ctx.Err()
}

// node is an apiserver in front of fake edges.
type node struct {
	url, token string
	edges      []*fakeEdge
	log        *logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newNode(t *testing.T, ids ...sandbox.EdgeID) *node {
	t.Helper()
	n := &node{log: &logBuffer{}}
	var edges []*server.Edge
	for _, id := range ids {
		f := newFakeEdge(t, id)
		n.edges = append(n.edges, f)
		edges = append(edges, f.edge())
	}
	store, err := tokens.Open(t.TempDir()+"/tokens.json", testRandom{}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	if _, n.token, err = store.Create(tokens.FormHarena, tokens.RoleAdmin, tokens.DefaultProject); err != nil {
		t.Fatal(err)
	}
	s := server.New(server.Config{
		Edges: server.NewStatic(edges...), Tokens: store, Version: "v1",
		Placement: func(spec *harenav1.SandboxSpec, edges []sandbox.EdgeID, seed string) []sandbox.EdgeID {
			if spec.GetImage() == "panic" {
				panic("a secret")
			}
			return server.Spread(spec, edges, seed)
		},
		Log: slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	n.url, _ = serve(t, s.Handler())
	return n
}

// testRandom is not random.
type testRandom struct{}

func (testRandom) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(i)
	}
	return len(b), nil
}

// client makes HTTP calls with the token, over HTTP/2.
func (n *node) client(t *testing.T) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: bearer{tr, n.token}}
}

type bearer struct {
	next  http.RoundTripper
	token string
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// kindOf checks an error that crossed the wire.
func kindOf(t *testing.T, err error, kind errs.Kind, hint string) *errs.Error {
	t.Helper()
	var e *errs.Error
	if !errors.As(errs.FromConnect(err), &e) || e.Kind != kind || e.Hint == "" || !strings.Contains(e.Hint, hint) {
		t.Errorf("got %#v, want kind %s and a hint with %q", errs.FromConnect(err), kind, hint)
		return &errs.Error{}
	}
	return e
}

func wait(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-within(t).Done():
		t.Fatalf("%s did not happen", what)
	}
}
