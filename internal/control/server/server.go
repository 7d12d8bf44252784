// Package server is the apiserver: it authenticates, authorises, places and
// relays. It holds no state of sandboxes; the first six characters of a sandbox
// ID name the edge that does.
//
// Everything is served by one handler: the harena.v1 services (Connect, gRPC,
// gRPC-web and JSON), the plain HTTP forms of file and layer transfer under
// /v1/, /livez and /readyz. Streams are relayed message by message or byte by
// byte and never held whole; a caller that goes away cancels the call to the edge.
package server

import (
	"context"
	"crypto/rand"
	"io"
	"log/slog"
	"math"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/control/tokens"
	"github.com/harena-dev/harena/internal/errs"
)

// Authenticator tells who a bearer token stands for; errors are of kind unauthenticated.
type Authenticator interface {
	Verify(token string) (tokens.Principal, error)
}

// Config is what a Server is made of. Edges and Tokens are required.
type Config struct {
	Edges     Edges
	Tokens    Authenticator
	Placement Placement    // default: Spread
	Log       *slog.Logger // default: discard
	Version   string
	Random    io.Reader // default: crypto/rand
	// BatchConcurrency bounds the creations of one BatchCreate that run at once; default 16.
	BatchConcurrency int
}

// Server is an apiserver.
type Server struct {
	Config
	errorWriter *connect.ErrorWriter
}

const (
	// maxMessage is the largest request message: 16 MiB of file content as base64
	// in JSON, with room for the rest.
	maxMessage = 24 << 20
	// maxShort is that of services that carry no content.
	maxShort = 4 << 20
)

// maxBytes is the largest request of a procedure.
func maxBytes(procedure string) int {
	for _, service := range []string{harenav1connect.ExecServiceName, harenav1connect.FileServiceName, harenav1connect.FunctionServiceName} {
		if strings.HasPrefix(procedure, "/"+service+"/") {
			return maxMessage
		}
	}
	return maxShort
}

// New makes a server.
func New(c Config) *Server {
	if c.Placement == nil {
		c.Placement = Spread
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Random == nil {
		c.Random = rand.Reader
	}
	if c.BatchConcurrency == 0 {
		c.BatchConcurrency = 16
	}
	return &Server{Config: c, errorWriter: connect.NewErrorWriter()}
}

// Handler returns what the server serves.
func (s *Server) Handler() http.Handler {
	opts := []connect.HandlerOption{
		connect.WithInterceptors(&gate{s}),
		connect.WithRecover(s.recovered),
		connect.WithConditionalHandlerOptions(func(spec connect.Spec) []connect.HandlerOption {
			return []connect.HandlerOption{connect.WithReadMaxBytes(maxBytes(spec.Procedure))}
		}),
		// Compressed requests are read; answers are never compressed: it would cost more than the network, and a
		// stream of output that compresses well would escape the windows that hold it back.
		connect.WithCompressMinBytes(math.MaxInt),
	}
	mux := http.NewServeMux()
	mux.Handle(harenav1connect.NewSandboxServiceHandler(&sandboxService{s: s}, opts...))
	mux.Handle(harenav1connect.NewExecServiceHandler(&execService{s}, opts...))
	mux.Handle(harenav1connect.NewFileServiceHandler(&fileService{s}, opts...))
	mux.Handle(harenav1connect.NewLayerServiceHandler(&layerService{s}, opts...))
	mux.Handle(harenav1connect.NewEventServiceHandler(&eventService{s}, opts...))
	mux.Handle(harenav1connect.NewFleetServiceHandler(&fleetService{s}, opts...))
	mux.Handle(harenav1connect.NewJobServiceHandler(&jobService{s}, opts...))
	mux.Handle(harenav1connect.NewIAMServiceHandler(&iamService{}, opts...))
	mux.Handle(harenav1connect.NewDisplayServiceHandler(harenav1connect.UnimplementedDisplayServiceHandler{}, opts...))
	mux.Handle(harenav1connect.NewFunctionServiceHandler(harenav1connect.UnimplementedFunctionServiceHandler{}, opts...))
	s.plainRoutes(mux)
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", s.ready)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.writeError(w, r, errs.E(errs.NotFound, "%s %.200s is not served here", r.Method, r.URL.Path).
			WithHint("API calls are POST /harena.v1.SERVICE/METHOD; see the files under api/harena/v1"))
	})
	return s.logged(s.authenticated(s.explained(mux)))
}

// ready answers 200 when at least one edge answers.
func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), probeTimeout)
	defer cancel()
	for _, e := range s.probeAll(ctx) {
		if e.GetState() != stateUnreachable {
			_, _ = io.WriteString(w, "ok\n")
			return
		}
	}
	http.Error(w, "no edge answers", http.StatusServiceUnavailable)
}

// probeTimeout bounds how long an edge that hangs can hold a fleet view.
const probeTimeout = 2 * time.Second
