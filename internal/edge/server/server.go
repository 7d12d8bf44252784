// Package server is the HTTP face of an edge: EdgeService and EventService, and the relay of everything that is about one
// sandbox to that sandbox's supervisor.
//
// It serves those who have decided who may call (the apiserver), and must be reachable by nobody else.
package server

import (
	"log/slog"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/api/harena/edge/v1/edgev1connect"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
)

// SandboxHeader names the sandbox of a call to ExecService or FileService. The caller sets it from the request.
const SandboxHeader = "Harena-Sandbox"

// Config of New.
type Config struct {
	// Layers serves LayerService and /v1/layers; without it they are unsupported.
	Layers http.Handler
	Log    *slog.Logger
}

// New returns the handler of an edge. It must be served with HTTP/2 (also without TLS) for calls that stream both ways.
func New(edge *lifecycle.Edge, c Config) http.Handler {
	options := connect.WithHandlerOptions(connect.WithInterceptors(interceptor{log: c.Log}), connect.WithCompression("gzip", nil, nil))
	mux := http.NewServeMux()
	mux.Handle(edgev1connect.NewEdgeServiceHandler(service{edge: edge}, options))
	mux.Handle(harenav1connect.NewEventServiceHandler(eventService{edge: edge}, options))
	r := newRelay(edge, c.Log)
	mux.HandleFunc(prefix(harenav1connect.ExecServiceName), func(w http.ResponseWriter, req *http.Request) {
		r.serve(w, req, req.Header.Get(SandboxHeader), records[req.URL.Path])
	})
	mux.HandleFunc(prefix(harenav1connect.FileServiceName), func(w http.ResponseWriter, req *http.Request) {
		r.serve(w, req, req.Header.Get(SandboxHeader), true)
	})
	mux.HandleFunc("/v1/sandboxes/{id}/{what...}", func(w http.ResponseWriter, req *http.Request) {
		what, _, _ := strings.Cut(req.PathValue("what"), "/")
		r.serve(w, req, req.PathValue("id"), what == "files" || what == "tar")
	})
	mux.HandleFunc(prefix(harenav1connect.DisplayServiceName), func(w http.ResponseWriter, req *http.Request) {
		r.refuse(w, req, lifecycle.NotBuilt("displays"))
	})
	layers := c.Layers
	if layers == nil {
		layers = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { r.refuse(w, req, lifecycle.NotBuilt("layers")) })
	}
	mux.Handle(prefix(harenav1connect.LayerServiceName), layers)
	mux.Handle("/v1/layers", layers)
	mux.Handle("/v1/layers/", layers)
	for _, path := range []string{"/livez", "/readyz"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	}
	return mux
}

// records are calls of ExecService that tell what was recorded, also of a failed sandbox: its supervisor for files answers an
// operation that is repeated from the journal, and starts nothing.
var records = map[string]bool{
	harenav1connect.ExecServiceRunProcedure:          true,
	harenav1connect.ExecServiceStartProcedure:        true,
	harenav1connect.ExecServiceConnectProcedure:      true,
	harenav1connect.ExecServiceListCommandsProcedure: true,
	harenav1connect.ExecServiceListSessionsProcedure: true,
	harenav1connect.ExecServiceLogProcedure:          true,
}

func prefix(service string) string { return "/" + service + "/" }
