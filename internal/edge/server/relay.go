package server

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"sync"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/internal/edge/guestconn"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/errs"
	passon "github.com/harena-dev/harena/internal/relay"
	"github.com/harena-dev/harena/internal/sandbox"
)

// relay passes calls on to supervisors. Nothing is held back in either direction; a slow side slows the other down by the flow
// control of HTTP/2; when one side goes away the other's call ends.
type relay struct {
	edge   *lifecycle.Edge
	proxy  *httputil.ReverseProxy
	errors *connect.ErrorWriter
	log    *slog.Logger
}

// statusGone is what logs say of calls whose caller went away.
const statusGone = 499

type useKey struct{}

// target is what a call in the proxy is about.
type target struct {
	id  sandbox.ID
	use *lifecycle.Use
}

func newRelay(edge *lifecycle.Edge, log *slog.Logger) *relay {
	r := &relay{edge: edge, errors: connect.NewErrorWriter(), log: log}
	r.proxy = &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			t := p.In.Context().Value(useKey{}).(target)
			p.Out.URL.Scheme, p.Out.URL.Host = "http", guestconn.Host(t.id)
			p.Out.Host = p.Out.URL.Host
			// The supervisor is told who may call by nobody: whatever arrives at its socket may.
			p.Out.Header.Del("Authorization")
			p.Out.Header.Del("Cookie")
		},
		Transport:     edge.Transport(),
		FlushInterval: -1,
		BufferPool:    &buffers{},
		ErrorHandler:  r.failed,
		ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	return r
}

func (r *relay) serve(w http.ResponseWriter, req *http.Request, name string, files bool) {
	id, err := sandbox.ParseID(name)
	if err == nil && id.Edge() != r.edge.ID() {
		err = errs.E(errs.NotFound, "sandbox %s is not of edge %s", id, r.edge.ID()).On("sandbox %s", id)
	}
	var use *lifecycle.Use
	if err == nil {
		use, err = r.edge.Enter(req.Context(), id, files)
	}
	if err != nil {
		r.refuse(w, req, err)
		return
	}
	defer use.Leave()
	// A caller with HTTP/1.1 may still be sending when the answer begins. Not every writer can; then it cannot.
	_ = http.NewResponseController(w).EnableFullDuplex()
	passon.Serve(r.proxy, w, req.WithContext(context.WithValue(req.Context(), useKey{}, target{id: id, use: use})))
}

// failed answers when the supervisor could not be reached, or did not begin an answer.
func (r *relay) failed(w http.ResponseWriter, req *http.Request, err error) {
	if req.Context().Err() != nil {
		// The caller went away; nobody reads this.
		w.WriteHeader(statusGone)
		return
	}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		r.refuse(w, req, errs.OverLimit(errs.Invalid, "bytes of the request", tooLarge.Limit, "more"))
		return
	}
	t := req.Context().Value(useKey{}).(target)
	r.log.Info("a supervisor could not be reached", "sandbox", t.id, "err", err)
	r.refuse(w, req, t.use.Lost(req.Context(), err))
}

// refuse answers with an error in the protocol of the call.
func (r *relay) refuse(w http.ResponseWriter, req *http.Request, err error) {
	if errs.Is(err, errs.Internal) {
		r.log.Error("call failed", "path", req.URL.Path, "err", err)
	}
	// What the caller is still sending must not stop it from reading the answer.
	_, _ = io.CopyN(io.Discard, req.Body, 64<<10)
	// Plain HTTP calls get the JSON form of Connect, details included.
	if werr := r.errors.Write(w, req, errs.ToConnect(err)); werr != nil {
		r.log.Debug("an error could not be sent", "err", werr)
	}
}

// buffers keeps the proxy's buffers for the next call.
type buffers struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
