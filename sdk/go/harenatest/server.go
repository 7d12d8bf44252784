// Package harenatest is a stand-in for a Harena server, in memory, for tests of
// what uses the SDK: it keeps the API's promises about IDs, states, commands and
// their recorded output, but runs nothing. See Server for the commands it knows.
package harenatest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sort"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

// Token is the one that a Server accepts.
const Token = "hrn_for-tests"

// Edge is the first part of all its sandbox IDs.
const Edge = "testaa"

// Server is an http.Handler. Sandboxes of any image but "missing" can be created. Commands, by the name of the program:
//
//	echo WORDS…        prints the words
//	err WORDS…         prints the words on standard error
//	both WORDS…        prints "out" and "err" on either stream
//	bytes HEX          prints bytes
//	exit N             ends with N
//	kill N             dies of signal N
//	cat                prints its input
//	spew N             prints N bytes, see Pattern, on both streams
//	block              runs until it gets a signal, prints its name and ends with 128+n
//	timeout            ends as after a time-out
//	anything else      cannot be found
type Server struct {
	mux *http.ServeMux

	mu        sync.Mutex
	sandboxes map[string]*harenav1.Sandbox
	requests  map[string]string // request ID → sandbox or command
	layers    map[string]*harenav1.Layer
	files     map[string][]byte
	commands  map[string]*command
	next      int
	renewals  int
}

// New makes a server without sandboxes and with one layer, debian:12.
func New() *Server {
	s := &Server{
		mux: http.NewServeMux(), sandboxes: map[string]*harenav1.Sandbox{}, requests: map[string]string{},
		layers: map[string]*harenav1.Layer{}, files: map[string][]byte{}, commands: map[string]*command{},
	}
	s.layers["debian:12"] = &harenav1.Layer{Digest: "sha256:" + strings.Repeat("ab", 32), Kind: "base", Names: []string{"debian:12"}, Files: 3, LogicalBytes: 3 << 20, Created: created(),
		Config: &harenav1.ImageConfig{Entrypoint: []string{"exit"}, Cmd: []string{"5"}}}
	opts := connect.WithInterceptors()
	s.mux.Handle(harenav1connect.NewSandboxServiceHandler(&sandboxes{s: s}, opts))
	s.mux.Handle(harenav1connect.NewExecServiceHandler(&execs{s: s}, opts))
	s.mux.Handle(harenav1connect.NewFileServiceHandler(&files{s: s}, opts))
	s.mux.Handle(harenav1connect.NewLayerServiceHandler(&layers{s: s}, opts))
	s.mux.Handle(harenav1connect.NewFleetServiceHandler(&fleet{s: s}, opts))
	s.mux.Handle(harenav1connect.NewEventServiceHandler(&events{s: s}, opts))
	s.mux.HandleFunc("GET /v1/sandboxes/{id}/files", s.getFile)
	s.mux.HandleFunc("PUT /v1/sandboxes/{id}/files", s.putFile)
	s.mux.HandleFunc("GET /v1/sandboxes/{id}/tar", s.getTar)
	s.mux.HandleFunc("PUT /v1/sandboxes/{id}/tar", s.putTar)
	s.mux.HandleFunc("POST /v1/layers", s.postLayer)
	return s
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != harenav1connect.FleetServiceVersionProcedure && r.Header.Get("Authorization") != "Bearer "+Token {
		_ = connect.NewErrorWriter().Write(w, r, failure(connect.CodeUnauthenticated, "unauthenticated", "the token is not known", "use the right one"))
		return
	}
	s.mux.ServeHTTP(w, r)
}

// Sandbox returns a sandbox by ID, nil when there is none.
func (s *Server) Sandbox(id string) *harenav1.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb, ok := s.sandboxes[id]
	if !ok {
		return nil
	}
	return proto.Clone(sb).(*harenav1.Sandbox)
}

// Live counts sandboxes that have not ended.
func (s *Server) Live() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, sb := range s.sandboxes {
		if sb.GetState() == "running" {
			n++
		}
	}
	return n
}

// Started counts the commands that were ever started.
func (s *Server) Started() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.commands)
}

// File returns the content of a file that was written, whatever the sandbox.
func (s *Server) File(path string) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.files[path]
	return b, ok
}

// created is when everything came to be.
func created() *timestamppb.Timestamp { return &timestamppb.Timestamp{Seconds: 1_700_000_000} }

func failure(code connect.Code, kind, message, hint string) error {
	err := connect.NewError(code, errors.New(message))
	if d, derr := connect.NewErrorDetail(&harenav1.ErrorDetail{Kind: kind, Hint: hint}); derr == nil {
		err.AddDetail(d)
	}
	return err
}

func notFound(what string) error {
	return failure(connect.CodeNotFound, "not-found", what+" does not exist", "look it up")
}

type sandboxes struct {
	harenav1connect.UnimplementedSandboxServiceHandler
	s *Server
}

func (h *sandboxes) Create(_ context.Context, r *connect.Request[harenav1.CreateRequest]) (*connect.Response[harenav1.CreateResponse], error) {
	sb, err := h.s.create(r.Msg.GetRequestId(), r.Msg.GetSpec())
	if err != nil {
		return nil, err
	}
	res := &harenav1.CreateResponse{Sandbox: sb, Timings: []*harenav1.Timing{{Step: "start", Micros: 1500}}}
	if r.Msg.GetExplain() {
		res.Explanation = []string{"placement: edge " + Edge}
	}
	return connect.NewResponse(res), nil
}

func (s *Server) create(request string, spec *harenav1.SandboxSpec) (*harenav1.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, ok := s.requests[request]; ok && request != "" {
		return s.sandboxes[id], nil
	}
	if spec.GetImage() == "missing" {
		return nil, failure(connect.CodeNotFound, "not-found", "there is no layer missing:latest", "`harena layer import` makes one")
	}
	s.next++
	id := fmt.Sprintf("%s%014d", Edge, s.next)
	s.requests[request] = id
	s.sandboxes[id] = &harenav1.Sandbox{
		Id: id, State: "running", Backend: "container", Image: spec.GetImage(), Labels: spec.GetLabels(), Job: spec.GetJob(),
		Project: "default", Created: created(), Spec: spec, Edge: Edge,
	}
	return s.sandboxes[id], nil
}

func (h *sandboxes) BatchCreate(_ context.Context, r *connect.Request[harenav1.BatchCreateRequest], out *connect.ServerStream[harenav1.BatchCreateResponse]) error {
	for i := range r.Msg.GetCount() {
		sb, err := h.s.create(fmt.Sprint(r.Msg.GetRequestId(), i), r.Msg.GetSpec())
		item := &harenav1.BatchCreateResponse{Index: i, Sandbox: sb}
		if err != nil {
			item.Error, item.ErrorMessage = &harenav1.ErrorDetail{Kind: "not-found"}, err.Error()
		}
		if err := out.Send(item); err != nil {
			return err
		}
	}
	return nil
}

func (h *sandboxes) Get(_ context.Context, r *connect.Request[harenav1.GetRequest]) (*connect.Response[harenav1.GetResponse], error) {
	sb := h.s.Sandbox(r.Msg.GetId())
	if sb == nil {
		return nil, notFound("sandbox " + r.Msg.GetId())
	}
	return connect.NewResponse(&harenav1.GetResponse{Sandbox: sb}), nil
}

func (h *sandboxes) List(_ context.Context, r *connect.Request[harenav1.ListRequest]) (*connect.Response[harenav1.ListResponse], error) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	res := &harenav1.ListResponse{}
	for _, sb := range h.s.sandboxes {
		if (r.Msg.GetAll() || sb.GetState() == "running") && matches(sb, r.Msg.GetJob(), r.Msg.GetLabels()) {
			res.Sandboxes = append(res.Sandboxes, proto.Clone(sb).(*harenav1.Sandbox))
		}
	}
	sort.Slice(res.Sandboxes, func(i, j int) bool { return res.Sandboxes[i].GetId() < res.Sandboxes[j].GetId() })
	// Two a page, so that clients have to turn pages.
	start := 0
	_, _ = fmt.Sscan(r.Msg.GetPage().GetToken(), &start)
	start = min(start, len(res.Sandboxes))
	end := min(start+2, len(res.Sandboxes))
	if end < len(res.Sandboxes) {
		res.NextPageToken = fmt.Sprint(end)
	}
	res.Sandboxes = res.Sandboxes[start:end]
	return connect.NewResponse(res), nil
}

func matches(sb *harenav1.Sandbox, job string, labels map[string]string) bool {
	for k, v := range labels {
		if sb.GetLabels()[k] != v {
			return false
		}
	}
	return job == "" || sb.GetJob() == job
}

// selected calls each for the sandboxes of a selector; unknown IDs fail.
func (s *Server) selected(sel *harenav1.Selector, each func(*harenav1.Sandbox)) []*harenav1.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := sel.GetIds()
	if len(ids) == 0 {
		for id, sb := range s.sandboxes {
			if matches(sb, sel.GetJob(), sel.GetLabels()) {
				ids = append(ids, id)
			}
		}
		sort.Strings(ids)
	}
	var out []*harenav1.Outcome
	for _, id := range ids {
		sb, ok := s.sandboxes[id]
		if !ok {
			out = append(out, &harenav1.Outcome{SandboxId: id, Error: &harenav1.ErrorDetail{Kind: "not-found"}, ErrorMessage: "sandbox " + id + " does not exist"})
			continue
		}
		each(sb)
		out = append(out, &harenav1.Outcome{SandboxId: id, State: sb.GetState()})
	}
	return out
}

func (h *sandboxes) Stop(_ context.Context, r *connect.Request[harenav1.StopRequest]) (*connect.Response[harenav1.StopResponse], error) {
	return connect.NewResponse(&harenav1.StopResponse{Outcomes: h.s.selected(r.Msg.GetSelector(), func(sb *harenav1.Sandbox) { sb.State = "stopped" })}), nil
}

func (h *sandboxes) SetLifetime(_ context.Context, r *connect.Request[harenav1.SetLifetimeRequest]) (*connect.Response[harenav1.SetLifetimeResponse], error) {
	return connect.NewResponse(&harenav1.SetLifetimeResponse{Outcomes: h.s.selected(r.Msg.GetSelector(), func(*harenav1.Sandbox) { h.s.renewals++ })}), nil
}

type fleet struct {
	harenav1connect.UnimplementedFleetServiceHandler
	s *Server
}

func edge(state string) *harenav1.Edge {
	return &harenav1.Edge{Id: Edge, State: state, CpuCores: 2, MemoryBytes: 4 << 30, MemoryAvailableBytes: 3 << 30, Version: "test"}
}

func (*fleet) ListEdges(context.Context, *connect.Request[harenav1.ListEdgesRequest]) (*connect.Response[harenav1.ListEdgesResponse], error) {
	return connect.NewResponse(&harenav1.ListEdgesResponse{Edges: []*harenav1.Edge{edge("healthy")}}), nil
}

func (*fleet) Drain(context.Context, *connect.Request[harenav1.DrainRequest]) (*connect.Response[harenav1.DrainResponse], error) {
	return connect.NewResponse(&harenav1.DrainResponse{Edge: edge("draining")}), nil
}

func (*fleet) Undrain(context.Context, *connect.Request[harenav1.UndrainRequest]) (*connect.Response[harenav1.UndrainResponse], error) {
	return connect.NewResponse(&harenav1.UndrainResponse{Edge: edge("healthy")}), nil
}

// Doctor finds a leak on the edge "leaky0".
func (*fleet) Doctor(_ context.Context, r *connect.Request[harenav1.DoctorRequest]) (*connect.Response[harenav1.DoctorResponse], error) {
	res := &harenav1.DoctorResponse{Clean: true, Checks: []*harenav1.Check{{Name: "cgroup", Status: "ok", Detail: "v2"}}}
	if r.Msg.GetEdge() == "leaky0" {
		res.Clean = false
		res.Checks = append(res.Checks, &harenav1.Check{Name: "leak.mounts", Status: "leaked", Detail: "1: /x", Hint: "restart"})
	}
	return connect.NewResponse(res), nil
}

func (*fleet) Version(context.Context, *connect.Request[harenav1.VersionRequest]) (*connect.Response[harenav1.VersionResponse], error) {
	return connect.NewResponse(&harenav1.VersionResponse{Version: "test", Api: "harena.v1"}), nil
}

type events struct {
	harenav1connect.UnimplementedEventServiceHandler
	s *Server
}

func event() *harenav1.Event {
	return &harenav1.Event{Seq: 1, Time: created(), Kind: "sandbox.running", SandboxId: Edge + "00000000000001", Project: "default", Edge: Edge, Message: "it runs"}
}

func (*events) List(context.Context, *connect.Request[harenav1.ListEventsRequest]) (*connect.Response[harenav1.ListEventsResponse], error) {
	return connect.NewResponse(&harenav1.ListEventsResponse{Events: []*harenav1.Event{event()}}), nil
}

// Follow sends one event and ends.
func (*events) Follow(_ context.Context, _ *connect.Request[harenav1.FollowEventsRequest], out *connect.ServerStream[harenav1.FollowEventsResponse]) error {
	return out.Send(&harenav1.FollowEventsResponse{Event: event()})
}
