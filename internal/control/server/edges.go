package server

import (
	"context"
	"errors"
	"net/http"
	"sort"
	"time"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/api/harena/edge/v1/edgev1connect"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// HeaderSandbox carries the sandbox ID of a relayed call, so that the edge can
// pass it on without decoding it.
const HeaderSandbox = "Harena-Sandbox"

// Edges is how an apiserver reaches edges.
type Edges interface {
	// IDs lists the known edges, sorted.
	IDs() []sandbox.EdgeID
	// Client returns the connection to an edge; false when it is not known.
	Client(id sandbox.EdgeID) (*Edge, bool)
}

// Edge is a connection to one edge, over HTTP.
type Edge struct {
	id        sandbox.EdgeID
	url       string
	transport http.RoundTripper

	life   edgev1connect.EdgeServiceClient
	exec   harenav1connect.ExecServiceClient
	file   harenav1connect.FileServiceClient
	layer  harenav1connect.LayerServiceClient
	events harenav1connect.EventServiceClient
}

// NewEdge makes the connection to the edge that serves under url by transport.
func NewEdge(id sandbox.EdgeID, url string, transport http.RoundTripper) *Edge {
	// No Timeout: calls end with their caller.
	c := &http.Client{Transport: transport}
	plain := connect.WithAcceptCompression("gzip", nil, nil) // answers come as they are
	return &Edge{
		id: id, url: url, transport: transport,
		life:   edgev1connect.NewEdgeServiceClient(c, url, plain),
		exec:   harenav1connect.NewExecServiceClient(c, url, plain),
		file:   harenav1connect.NewFileServiceClient(c, url, plain),
		layer:  harenav1connect.NewLayerServiceClient(c, url, plain),
		events: harenav1connect.NewEventServiceClient(c, url, plain),
	}
}

// Static is a fixed set of edges.
type Static map[sandbox.EdgeID]*Edge

// NewStatic makes a set of the edges.
func NewStatic(edges ...*Edge) Static {
	s := Static{}
	for _, e := range edges {
		s[e.id] = e
	}
	return s
}

// IDs implements Edges.
func (s Static) IDs() []sandbox.EdgeID {
	ids := make([]sandbox.EdgeID, 0, len(s))
	for id := range s {
		ids = append(ids, id)
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	return ids
}

// Client implements Edges.
func (s Static) Client(id sandbox.EdgeID) (*Edge, bool) {
	e, ok := s[id]
	return e, ok
}

// edgeOf returns the edge of a sandbox ID that comes from outside.
func (s *Server) edgeOf(id string) (*Edge, error) {
	parsed, err := sandbox.ParseID(id)
	if err != nil {
		return nil, err
	}
	e, ok := s.Edges.Client(parsed.Edge())
	if !ok {
		return nil, errs.E(errs.NotFound, "sandbox %s is on edge %s, which this server does not know", id, parsed.Edge()).
			On("sandbox %s", id).WithHint("check the ID with `harena ps`, and that HARENA_URL names the right server")
	}
	return e, nil
}

// edgeNamed returns the edge with the ID, or the only one when it is empty.
func (s *Server) edgeNamed(id string) (*Edge, error) {
	if id == "" {
		return s.onlyEdge(errs.Invalid, "name an edge: there are several")
	}
	parsed, err := sandbox.ParseEdgeID(id)
	if err != nil {
		return nil, err
	}
	e, ok := s.Edges.Client(parsed)
	if !ok {
		return nil, errs.E(errs.NotFound, "edge %s is not known", id).On("edge %s", id).WithHint("`harena fleet ls` lists the edges")
	}
	return e, nil
}

// onlyEdge returns the only edge, or an error of the kind when there are several.
func (s *Server) onlyEdge(kind errs.Kind, several string) (*Edge, error) {
	ids := s.Edges.IDs()
	if len(ids) == 0 {
		return nil, errs.E(errs.Capacity, "no edge is connected").WithHint("start one, or wait until it has joined; `harena fleet ls` lists them")
	}
	if len(ids) > 1 {
		return nil, errs.E(kind, "%s", several).WithHint("`harena fleet ls` lists the edges")
	}
	e, _ := s.Edges.Client(ids[0])
	return e, nil
}

// allEdges returns the connections of all known edges, sorted by ID.
func (s *Server) allEdges() []*Edge {
	var edges []*Edge
	for _, id := range s.Edges.IDs() {
		if e, ok := s.Edges.Client(id); ok {
			edges = append(edges, e)
		}
	}
	return edges
}

// failure explains an error of a call to the edge. What the edge itself said is
// kept as it is; what broke on the way becomes capacity, which callers may retry.
func (e *Edge) failure(ctx context.Context, err error) error {
	if err == nil || connect.IsWireError(err) {
		return err
	}
	if ctx.Err() != nil {
		return errs.E(errs.KindOf(ctx.Err()), "the call was given up: %w", context.Cause(ctx))
	}
	var ce *connect.Error
	if errors.As(err, &ce) && ce.Code() == connect.CodeDeadlineExceeded {
		return errs.E(errs.Timeout, "edge %s did not answer in time", e.id).On("edge %s", e.id)
	}
	return errs.E(errs.Capacity, "edge %s cannot be reached, or the connection to it broke: %w", e.id, errBroken).
		On("edge %s", e.id).WithHint("try again; `harena fleet ls` shows whether it is healthy")
}

// errBroken marks errors that an edge did not answer with.
var errBroken = errors.New("no answer")

const (
	endedTime = 2 * time.Second
	endedStep = 50 * time.Millisecond
)

// ended explains a call about a sandbox that broke off in the middle: when the sandbox came to its end, its state and reason
// say more than a connection that broke. Other errors stay what they are.
func (e *Edge) ended(ctx context.Context, id string, err error) error {
	if !errors.Is(err, errBroken) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, endedTime)
	defer cancel()
	// The edge may know of the end a moment later than the connection.
	for {
		res, gerr := e.life.Get(ctx, connect.NewRequest(&harenav1.GetRequest{Id: id}))
		if connect.IsWireError(gerr) {
			return gerr
		}
		if gerr != nil {
			return err
		}
		sb := res.Msg.GetSandbox()
		switch sandbox.State(sb.GetState()) {
		case sandbox.Failed:
			return notRunning(sb, "its files can still be read; `harena stop` removes it")
		case sandbox.Stopped, sandbox.Stopping:
			return notRunning(sb, "create a new one")
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(endedStep):
		}
	}
}

func notRunning(sb *harenav1.Sandbox, hint string) error {
	why := ""
	if sb.GetReason() != "" {
		why = " (" + sb.GetReason() + ")"
	}
	return errs.E(errs.Precondition, "sandbox %s is %s%s", sb.GetId(), sb.GetState(), why).On("sandbox %s", sb.GetId()).WithHint("%s", hint)
}
