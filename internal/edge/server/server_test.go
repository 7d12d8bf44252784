package server

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
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
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/memory"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

type noLayers struct{}

func (noLayers) Compose(context.Context, string, *harenav1.SandboxSpec) (lifecycle.Composition, error) {
	return lifecycle.Composition{}, nil
}
func (noLayers) Hold() func()                                                { return func() {} }
func (noLayers) Acquire(context.Context, string, []string) ([]string, error) { return nil, nil }
func (noLayers) Adopt(string, []string) error                                { return nil }
func (noLayers) Release(string) error                                        { return nil }
func (noLayers) Leaks() ([]backend.Leak, error)                              { return nil, nil }
func (noLayers) Checks(context.Context) []*harenav1.Check                    { return nil }

// guest is a supervisor for tests.
type guest struct {
	harenav1connect.UnimplementedExecServiceHandler
	cancelled chan struct{}
	calls     atomic.Int32
}

func (g *guest) Start(_ context.Context, req *connect.Request[harenav1.StartRequest]) (*connect.Response[harenav1.StartResponse], error) {
	g.calls.Add(1)
	if req.Msg.GetCommand().GetShell() == "fail" {
		return nil, errs.ToConnect(errs.E(errs.Exists, "said by the supervisor").WithHint("hint"))
	}
	resp := connect.NewResponse(&harenav1.StartResponse{Started: &harenav1.Started{CommandId: req.Header().Get("Authorization") + "c1"}})
	resp.Trailer().Set("Some-Trailer", "kept")
	return resp, nil
}

// Run sends a piece as often as the tag says, each when it was told so by nothing but the flow of the stream.
func (g *guest) Run(ctx context.Context, req *connect.Request[harenav1.RunRequest], stream *connect.ServerStream[harenav1.RunResponse]) error {
	piece := make([]byte, 64<<10) // that compression does not make small
	_, _ = rand.Read(piece)
	if req.Msg.GetCommand().GetShell() == "once" {
		if err := stream.Send(&harenav1.RunResponse{Output: &harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: []byte("first")}}}); err != nil {
			return err
		}
		<-ctx.Done()
		close(g.cancelled)
		return ctx.Err()
	}
	for ctx.Err() == nil {
		if err := stream.Send(&harenav1.RunResponse{Output: &harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: piece}}}); err != nil {
			break
		}
		g.calls.Add(1)
	}
	close(g.cancelled)
	return ctx.Err()
}

type fixture struct {
	t    *testing.T
	node *memory.Node
	edge *lifecycle.Edge
	dir  *datadir.Dir
	url  string
	http *http.Client

	guest *guest
	plain http.HandlerFunc
	opts  memory.Options
}

func newFixture(t *testing.T, change func(*fixture)) *fixture {
	t.Helper()
	f := &fixture{t: t, guest: &guest{cancelled: make(chan struct{})}, plain: http.NotFound}
	if change != nil {
		change(f)
	}
	root, err := os.MkdirTemp("", "edgeserver")
	if err != nil {
		t.Fatal(err)
	}
	f.node, err = memory.NewNode("", func(sandbox.ID) http.Handler {
		mux := http.NewServeMux()
		mux.Handle(harenav1connect.NewExecServiceHandler(f.guest))
		mux.HandleFunc("/v1/sandboxes/", func(w http.ResponseWriter, r *http.Request) { f.plain(w, r) })
		return mux
	})
	if err != nil {
		t.Fatal(err)
	}
	f.dir, err = datadir.Open(filepath.Join(root, "data"), datadir.Options{Rand: rand.Reader, Slots: filepath.Join(root, "slots"), NoMount: true})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	f.edge, err = lifecycle.Open(t.Context(), lifecycle.Config{
		Dir: f.dir, Backends: []backend.Backend{memory.New(f.node, f.opts)}, Layers: noLayers{}, Rand: rand.Reader, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Handler: New(f.edge, Config{Log: log}), Protocols: protocols}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	f.url = "http://" + listener.Addr().String()
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: h2}
	f.http = &http.Client{Transport: transport}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		_ = server.Close()
		<-served
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := f.edge.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		_ = f.dir.Close()
		_ = f.node.Close()
		_ = os.RemoveAll(root)
	})
	return f
}

func (f *fixture) client() edgev1connect.EdgeServiceClient {
	return edgev1connect.NewEdgeServiceClient(f.http, f.url)
}

func (f *fixture) exec(options ...connect.ClientOption) harenav1connect.ExecServiceClient {
	return harenav1connect.NewExecServiceClient(f.http, f.url, options...)
}

func (f *fixture) create() string {
	f.t.Helper()
	resp, err := f.client().Create(f.t.Context(), connect.NewRequest(&edgev1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: "base"}}))
	if err != nil {
		f.t.Fatal(err)
	}
	return resp.Msg.GetSandbox().GetId()
}

// to names the sandbox of a request as the apiserver does.
func to[T any](id string, m *T) *connect.Request[T] {
	req := connect.NewRequest(m)
	req.Header().Set(SandboxHeader, id)
	return req
}

func start(id, shell string) *connect.Request[harenav1.StartRequest] {
	return to(id, &harenav1.StartRequest{SandboxId: id, Command: &harenav1.Command{Shell: shell}})
}

func TestEdgeService(t *testing.T) {
	f := newFixture(t, nil)
	c := f.client()
	ctx := t.Context()
	id := f.create()
	if got, err := c.Get(ctx, connect.NewRequest(&harenav1.GetRequest{Id: id})); err != nil || got.Msg.GetSandbox().GetState() != "running" || got.Header().Get(requestHeader) == "" {
		t.Errorf("get: %v, %v", got, err)
	}
	if got, err := c.List(ctx, connect.NewRequest(&harenav1.ListRequest{})); err != nil || len(got.Msg.GetSandboxes()) != 1 {
		t.Errorf("list: %v, %v", got, err)
	}
	if got, err := c.Probe(ctx, connect.NewRequest(&edgev1.ProbeRequest{})); err != nil || got.Msg.GetEdge().GetMemoryAvailableBytes() <= 0 {
		t.Errorf("probe: %v, %v", got, err)
	}
	if got, err := c.Doctor(ctx, connect.NewRequest(&harenav1.DoctorRequest{})); err != nil || len(got.Msg.GetChecks()) < 5 {
		t.Errorf("doctor: %v, %v", got, err)
	}
	if _, err := c.Drain(ctx, connect.NewRequest(&harenav1.DrainRequest{Edge: "zzzzzz"})); !errs.Is(errs.FromConnect(err), errs.NotFound) {
		t.Errorf("drain of another edge: %v", err)
	}
	_, err := c.Get(ctx, connect.NewRequest(&harenav1.GetRequest{Id: "short"}))
	var known *errs.Error
	if !errors.As(errs.FromConnect(err), &known) || known.Kind != errs.Invalid || known.Hint == "" || connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("a bad ID: %v", err)
	}
	// Calls that name nothing are told so; what is not built says that it is not.
	for name, c := range map[string]struct {
		kind errs.Kind
		call func() error
	}{
		"pause":  {errs.Invalid, func() error { _, err := c.Pause(ctx, connect.NewRequest(&harenav1.PauseRequest{})); return err }},
		"resume": {errs.Invalid, func() error { _, err := c.Resume(ctx, connect.NewRequest(&harenav1.ResumeRequest{})); return err }},
		"fork":   {errs.Invalid, func() error { _, err := c.Fork(ctx, connect.NewRequest(&harenav1.ForkRequest{})); return err }},
		"network": {errs.Invalid, func() error {
			_, err := c.SetNetwork(ctx, connect.NewRequest(&harenav1.SetNetworkRequest{}))
			return err
		}},
		"guard": {errs.Unsupported, func() error {
			_, err := c.SetGuard(ctx, connect.NewRequest(&harenav1.SetGuardRequest{}))
			return err
		}},
		"snapshot": {errs.Invalid, func() error {
			s, err := c.Snapshot(ctx, connect.NewRequest(&harenav1.SnapshotRequest{}))
			if err != nil {
				return err
			}
			s.Receive()
			return s.Err()
		}},
	} {
		if err := errs.FromConnect(c.call()); !errs.Is(err, c.kind) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got, err := c.Stop(ctx, connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Ids: []string{id}}})); err != nil || got.Msg.GetOutcomes()[0].GetState() != "stopped" {
		t.Errorf("stop: %v, %v", got, err)
	}
}

// TestJSON calls a unary method as curl would.
func TestJSON(t *testing.T) {
	f := newFixture(t, nil)
	resp, err := http.Post(f.url+"/harena.edge.v1.EdgeService/Get", "application/json", strings.NewReader(`{"id":"nope"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var e struct{ Code, Message string }
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Code != "invalid_argument" || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("%d %v, %v", resp.StatusCode, e, err)
	}
}

func TestEventsAndWatch(t *testing.T) {
	f := newFixture(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	events := harenav1connect.NewEventServiceClient(f.http, f.url)
	follow, err := events.Follow(ctx, connect.NewRequest(&harenav1.FollowEventsRequest{Filter: &harenav1.EventFilter{Kind: "sandbox."}}))
	if err != nil {
		t.Fatal(err)
	}
	watch, err := f.client().Watch(ctx, connect.NewRequest(&harenav1.WatchRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if !watch.Receive() || !watch.Msg().GetSynced() {
		t.Fatalf("watch does not begin: %v", watch.Err())
	}
	id := f.create()
	var kinds []string
	for len(kinds) < 2 && follow.Receive() {
		kinds = append(kinds, follow.Msg().GetEvent().GetKind())
	}
	if !slices.Equal(kinds, []string{"sandbox.created", "sandbox.running"}) {
		t.Errorf("followed %v, %v", kinds, follow.Err())
	}
	for watch.Receive() {
		if s := watch.Msg().GetSandbox(); s.GetId() == id && s.GetState() == "running" {
			break
		}
	}
	if watch.Err() != nil {
		t.Errorf("watch: %v", watch.Err())
	}
	list, err := events.List(ctx, connect.NewRequest(&harenav1.ListEventsRequest{Page: &harenav1.Page{Size: 2}}))
	if err != nil || len(list.Msg.GetEvents()) != 2 || list.Msg.GetNextPageToken() == "" {
		t.Errorf("list: %v, %v", list, err)
	}
	if _, err := events.Verify(ctx, connect.NewRequest(&harenav1.VerifyEventsRequest{})); !errs.Is(errs.FromConnect(err), errs.Unsupported) {
		t.Errorf("verify: %v", err)
	}
}

func TestRelayUnary(t *testing.T) {
	f := newFixture(t, nil)
	id := f.create()
	for name, options := range map[string][]connect.ClientOption{"connect": nil, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()}} {
		c := f.exec(options...)
		req := start(id, "ok")
		req.Header().Set("Authorization", "Bearer secret")
		resp, err := c.Start(t.Context(), req)
		if err != nil || resp.Msg.GetStarted().GetCommandId() != "c1" {
			t.Errorf("%s: %v, %v", name, resp, err)
			continue
		}
		if resp.Trailer().Get("Some-Trailer") != "kept" {
			t.Errorf("%s: trailers %v", name, resp.Trailer())
		}
		_, err = c.Start(t.Context(), start(id, "fail"))
		var known *errs.Error
		if !errors.As(errs.FromConnect(err), &known) || known.Kind != errs.Exists || known.Hint != "hint" {
			t.Errorf("%s: error of the supervisor is %v", name, err)
		}
		_, err = c.Start(t.Context(), start("", "ok"))
		if !errs.Is(errs.FromConnect(err), errs.Invalid) {
			t.Errorf("%s: no sandbox named: %v", name, err)
		}
		_, err = c.Start(t.Context(), start(id[:6]+"aaaaaaaaaaaaaa", "ok"))
		if !errs.Is(errs.FromConnect(err), errs.NotFound) {
			t.Errorf("%s: no such sandbox: %v", name, err)
		}
	}
}

func TestRelayStates(t *testing.T) {
	var broken atomic.Bool
	f := newFixture(t, func(f *fixture) {
		f.opts.Fail = func(method string, _ sandbox.ID) error {
			if method == "dial" && broken.Load() {
				return errors.New("connection refused")
			}
			return nil
		}
	})
	id := f.create()
	broken.Store(true)
	_, err := f.exec().Start(t.Context(), start(id, "ok"))
	if connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("supervisor that does not answer: %v", err)
	}
	broken.Store(false)
	f.node.Kill(sandbox.ID(id), "")
	_, err = f.exec().Start(t.Context(), start(id, "ok"))
	if e := errs.FromConnect(err); !errs.Is(e, errs.Precondition) || !strings.Contains(e.Error(), "failed (supervisor-lost)") {
		t.Errorf("dying sandbox: %v", e)
	}
	// From then on a supervisor for what it left behind answers, which knows what was recorded and starts nothing.
	calls := f.guest.calls.Load()
	if _, err = f.exec().Start(t.Context(), start(id, "ok")); err != nil || f.guest.calls.Load() == calls {
		t.Errorf("failed sandbox: %v", err)
	}
	if _, err := f.client().Stop(t.Context(), connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Ids: []string{id}}})); err != nil {
		t.Fatal(err)
	}
	_, err = f.exec().Start(t.Context(), start(id, "ok"))
	if e := errs.FromConnect(err); !errs.Is(e, errs.Precondition) || !strings.Contains(e.Error(), "stopped") {
		t.Errorf("stopped sandbox: %v", e)
	}
}

// TestRelayStream: the first piece arrives while the call goes on, and a caller that goes away ends it on the other side.
func TestRelayStream(t *testing.T) {
	f := newFixture(t, nil)
	id := f.create()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := f.exec().Run(ctx, to(id, &harenav1.RunRequest{Command: &harenav1.Command{Shell: "once"}}))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() || string(stream.Msg().GetOutput().GetStdout()) != "first" {
		t.Fatalf("first piece: %v", stream.Err())
	}
	cancel()
	select {
	case <-f.guest.cancelled:
	case <-time.After(20 * time.Second):
		t.Fatal("the supervisor was not told that the caller went away")
	}
}

// TestRelayBackPressure: a caller that does not read stops the supervisor from sending, within what buffers hold.
func TestRelayBackPressure(t *testing.T) {
	f := newFixture(t, nil)
	id := f.create()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := f.exec().Run(ctx, to(id, &harenav1.RunRequest{Command: &harenav1.Command{Shell: "flood"}}))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	// It must come to a stand: the count does not change any more. 64 KiB a call; buffers of two connections hold a few MiB.
	var last int32
	still := 0
	for deadline := time.Now().Add(20 * time.Second); still < 20 && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if now := f.guest.calls.Load(); now == last {
			still++
		} else {
			last, still = now, 0
		}
	}
	if still < 20 || last > 1000 {
		t.Errorf("the supervisor sent %d pieces to a caller that does not read", last)
	}
	cancel()
	<-f.guest.cancelled
}

func TestRelayPlain(t *testing.T) {
	var got struct {
		sync.Mutex
		sum, header int
	}
	f := newFixture(t, func(f *fixture) {
		f.plain = func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut {
				n, _ := io.Copy(io.Discard, r.Body)
				got.Lock()
				got.sum = int(n)
				got.Unlock()
				w.WriteHeader(http.StatusCreated)
				return
			}
			http.ServeContent(w, r, "f", time.Time{}, strings.NewReader("0123456789"+r.URL.RawQuery))
		}
	})
	id := f.create()
	url := f.url + "/v1/sandboxes/" + id + "/files?path=/a%0Ab"
	for name, client := range map[string]*http.Client{"HTTP/2": f.http, "HTTP/1.1": {Transport: &http.Transport{DisableKeepAlives: true}}} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		req.Header.Set("Range", "bytes=2-4")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusPartialContent || string(body) != "234" || resp.Header.Get("Content-Range") != "bytes 2-4/21" {
			t.Errorf("%s: range: %d %q %v", name, resp.StatusCode, body, resp.Header)
		}
		const size = 20 << 20
		req, _ = http.NewRequestWithContext(t.Context(), http.MethodPut, url, io.LimitReader(zeros{}, size))
		resp, err = client.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_ = resp.Body.Close()
		got.Lock()
		if resp.StatusCode != http.StatusCreated || got.sum != size {
			t.Errorf("%s: put: %d, %d bytes", name, resp.StatusCode, got.sum)
		}
		got.Unlock()
		req, _ = http.NewRequestWithContext(t.Context(), http.MethodPut, f.url+"/v1/sandboxes/"+id[:6]+"aaaaaaaaaaaaaa/tar", io.LimitReader(zeros{}, size))
		resp, err = client.Do(req)
		if err != nil {
			t.Logf("%s: an answer came before the request was sent: %v", name, err)
			continue
		}
		var e struct {
			Code    string
			Details []struct {
				Type  string
				Debug map[string]string
			}
		}
		if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || resp.StatusCode != http.StatusNotFound || e.Code != "not_found" ||
			len(e.Details) != 1 || e.Details[0].Type != "harena.v1.ErrorDetail" || e.Details[0].Debug["kind"] != "not-found" {
			t.Errorf("%s: no such sandbox: %d %v %v", name, resp.StatusCode, e, err)
		}
		_ = resp.Body.Close()
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestPanicsStayInside(t *testing.T) {
	i := interceptor{log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	call := i.WrapUnary(func(context.Context, connect.AnyRequest) (connect.AnyResponse, error) { panic("secret") })
	_, err := call(t.Context(), connect.NewRequest(&harenav1.GetRequest{}))
	if connect.CodeOf(err) != connect.CodeInternal || strings.Contains(err.Error(), "secret") {
		t.Errorf("panic became %v", err)
	}
	if id := requestID(http.Header{requestHeader: {"a b"}}); id == "a b" {
		t.Error("an odd request ID is taken")
	}
	if id := requestID(http.Header{requestHeader: {"abc"}}); id != "abc" {
		t.Error("a request ID is not taken")
	}
}

// TestNothingIsCompressed: whatever a caller accepts.
func TestNothingIsCompressed(t *testing.T) {
	f := newFixture(t, nil)
	for range 50 {
		f.create()
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+edgev1connect.EdgeServiceListProcedure, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := f.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.Header.Get("Content-Encoding") != "" || !json.Valid(body) {
		t.Errorf("%s: %v, %.50q, %v", resp.Status, resp.Header, body, err)
	}
}
