package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"runtime/debug"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	passon "github.com/harena-dev/harena/internal/relay"
)

// plainRoutes adds the transfers that go over plain HTTP, see file.proto and layer.proto.
func (s *Server) plainRoutes(mux *http.ServeMux) {
	toSandbox := func(verb Verb) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			id := r.PathValue("id")
			s.forward(w, r, verb, "sandbox "+id, func() (*Edge, error) {
				r.Header.Set(HeaderSandbox, id)
				return s.edgeOf(id)
			})
		}
	}
	for _, what := range []string{"files", "tar"} {
		mux.HandleFunc("GET /v1/sandboxes/{id}/"+what, toSandbox(verbFilesRead))
		mux.HandleFunc("PUT /v1/sandboxes/{id}/"+what, toSandbox(verbFilesWrite))
	}
	layers := &layerService{s}
	mux.HandleFunc("POST /v1/layers", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		q.Set("project", projectOr(r.Context(), q.Get("project")))
		r.URL.RawQuery = q.Encode()
		s.forward(w, r, verbLayerWrite, "layer "+q.Get("name"), layers.edge)
	})
}

// forward passes a plain HTTP call on to an edge, byte by byte in both directions.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, verb Verb, resource string, find func() (*Edge, error)) {
	err := authorize(r.Context(), principalOf(r.Context()), verb, resource)
	if err == nil {
		err = validateRequestID(r.URL.Query().Get("request_id"))
	}
	if err != nil {
		s.writeError(w, r, err)
		return
	}
	edge, err := find()
	if err != nil {
		s.writeError(w, r, err)
		return
	}
	target, err := url.Parse(edge.url)
	if err != nil {
		s.writeError(w, r, fmt.Errorf("address of edge %s: %w", edge.id, err))
		return
	}
	// An edge may answer, or refuse, before it has read everything; with HTTP/1 net/http would otherwise take the rest of
	// the request away from the proxy at that moment. Other versions do it anyway and say that it is not supported.
	_ = http.NewResponseController(w).EnableFullDuplex()
	proxy := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(target)
			// SetURL's caller may have dropped parameters that do not parse; the edge decides about those.
			p.Out.URL.RawQuery = p.In.URL.RawQuery
		},
		Transport:     edge.transport,
		FlushInterval: -1, // at once
		ErrorLog:      slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			s.writeError(w, r, edge.failure(r.Context(), err))
		},
	}
	passon.Serve(proxy, w, r)
}

// writeError answers with an error in the protocol that the request speaks;
// plain HTTP calls get the JSON form of Connect.
func (s *Server) writeError(w http.ResponseWriter, r *http.Request, err error) {
	_ = s.errorWriter.Write(w, r, s.outgoing(r.Context(), r.URL.Path, err))
}

// logged writes one line a request at level debug, and answers panics outside of procedures.
func (s *Server) logged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		rec := &recorder{ResponseWriter: w}
		defer func() {
			p := recover()
			s.logRequest(r.Context(), r, rec, time.Since(start))
			if p == nil {
				return
			}
			if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
				panic(p)
			}
			s.Log.ErrorContext(r.Context(), "panic", "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
			if rec.status != 0 {
				panic(http.ErrAbortHandler) // an answer has begun: cut it off, so that it cannot be taken for whole
			}
			s.writeError(rec, r, errs.E(errs.Internal, "panic: %v", p))
		}()
		next.ServeHTTP(rec, r)
	})
}

// logRequest leaves out the query, which may hold paths of users, and all headers.
func (s *Server) logRequest(ctx context.Context, r *http.Request, rec *recorder, took time.Duration) {
	s.Log.DebugContext(ctx, "request", "method", r.Method, "path", r.URL.Path, "proto", r.Proto, "status", rec.status, "remote", r.RemoteAddr, "took", took)
}

// recorder remembers the status of an answer.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 || r.status < 200 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return r.ResponseWriter.Write(b)
}

// Flush implements http.Flusher, which Connect asks for by type.
func (r *recorder) Flush() { _ = http.NewResponseController(r.ResponseWriter).Flush() }

// Unwrap serves http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
