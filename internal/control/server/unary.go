package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/harena-dev/harena/internal/errs"
)

// explained answers calls of procedures that never reach one, in the form of all errors: Connect refuses them before its
// interceptors, without a body or in its own words.
func (s *Server) explained(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/harena.v1.") {
			next.ServeHTTP(w, r)
			return
		}
		m := methodOf(r.URL.Path)
		if err := unusable(m, r); err != nil {
			s.writeError(w, r, err)
			return
		}
		if m.IsStreamingServer() || m.IsStreamingClient() {
			next.ServeHTTP(w, r)
			return
		}
		held := &heldError{ResponseWriter: w}
		next.ServeHTTP(held, r)
		held.finish()
	})
}

// methodOf finds the procedure of a path; nil when there is none.
func methodOf(path string) protoreflect.MethodDescriptor {
	name := strings.ReplaceAll(strings.TrimPrefix(path, "/"), "/", ".")
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil {
		return nil
	}
	m, _ := d.(protoreflect.MethodDescriptor)
	return m
}

// unusable says why a request can be no call of m.
func unusable(m protoreflect.MethodDescriptor, r *http.Request) error {
	if m == nil {
		return errs.E(errs.NotFound, "there is no procedure %.200s", r.URL.Path).WithHint("see the files under api/harena/v1")
	}
	if r.Method != http.MethodPost {
		return errs.E(errs.Invalid, "%.20s is not called with %.20s", m.Name(), r.Method).WithHint("use POST")
	}
	kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	switch unary := !m.IsStreamingServer() && !m.IsStreamingClient(); {
	case strings.HasPrefix(kind, "application/grpc"):
		return nil
	case unary && kind != "application/json" && kind != "application/proto":
		return errs.E(errs.Invalid, "content type %.80q is not one of a call of %s", kind, m.Name()).WithHint("use Content-Type: application/json")
	case !unary && kind != "application/connect+json" && kind != "application/connect+proto":
		return errs.E(errs.Invalid, "content type %.80q is not one of a call of %s, which answers with a stream", kind, m.Name()).
			WithHint("use an SDK, or the streams of Connect: Content-Type: application/connect+json, each message after a byte of flags and its length in 4 bytes")
	}
	if most := int64(maxBytes(r.URL.Path)); r.ContentLength > most {
		return errs.OverLimit(errs.Invalid, "bytes of a request", most, r.ContentLength)
	}
	return nil
}

// heldError holds an error back until it is whole. Everything else passes.
type heldError struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

// WriteHeader implements http.ResponseWriter.
func (h *heldError) WriteHeader(status int) {
	if status >= http.StatusBadRequest && h.Header().Get("Content-Type") == "application/json" {
		h.status = status
		return
	}
	h.ResponseWriter.WriteHeader(status)
}

// Write implements io.Writer.
func (h *heldError) Write(b []byte) (int, error) {
	if h.status != 0 {
		return h.body.Write(b)
	}
	return h.ResponseWriter.Write(b)
}

// Flush implements http.Flusher.
func (h *heldError) Flush() {
	if h.status == 0 {
		_ = http.NewResponseController(h.ResponseWriter).Flush()
	}
}

// Unwrap serves http.ResponseController.
func (h *heldError) Unwrap() http.ResponseWriter { return h.ResponseWriter }

// finish sends a held error, with a detail if it has none.
func (h *heldError) finish() {
	if h.status == 0 {
		return
	}
	body := h.body.Bytes()
	var wire struct {
		Code    connect.Code      `json:"code"`
		Message string            `json:"message"`
		Details []json.RawMessage `json:"details"`
	}
	if json.Unmarshal(body, &wire) == nil && len(wire.Details) == 0 {
		// The writer wants a request only to know the protocol.
		h.Header().Del("Content-Length")
		r := &http.Request{Method: http.MethodPost, Header: http.Header{"Content-Type": {"application/json"}}}
		_ = connect.NewErrorWriter().Write(h.ResponseWriter, r, errs.ToConnect(inOurWords(wire.Code, wire.Message)))
		return
	}
	h.ResponseWriter.WriteHeader(h.status)
	_, _ = h.ResponseWriter.Write(body)
}

// inOurWords makes an error of what Connect says of a message that it could not read.
func inOurWords(code connect.Code, message string) error {
	if code == connect.CodeResourceExhausted && strings.HasPrefix(message, "message size") {
		return errs.E(errs.Invalid, "the request is too large: %s", message)
	}
	if rest, ok := strings.CutPrefix(message, "unmarshal message: "); ok {
		if strings.HasPrefix(rest, "unmarshal into ") { // a type of Go, then the reason
			if _, reason, found := strings.Cut(rest, ": "); found {
				rest = reason
			}
		}
		rest = strings.TrimLeft(strings.TrimPrefix(rest, "proto:"), " \u00a0")
		return errs.E(errs.Invalid, "the request is not the JSON of its message: %s", rest).WithHint("see the files under api/harena/v1")
	}
	return errs.FromConnect(connect.NewError(code, fmt.Errorf("%s", message)))
}
