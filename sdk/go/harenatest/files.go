package harenatest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"sort"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

// files keeps one tree for all sandboxes: paths of regular files; a directory
// exists when something is below it.
type files struct {
	harenav1connect.UnimplementedFileServiceHandler
	s *Server
}

func (h *files) Stat(_ context.Context, r *connect.Request[harenav1.StatRequest]) (*connect.Response[harenav1.StatResponse], error) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	p := path.Clean(r.Msg.GetPath())
	if b, ok := h.s.files[p]; ok {
		return connect.NewResponse(&harenav1.StatResponse{Info: &harenav1.FileInfo{Path: p, Type: "file", Mode: 0o644, Size: int64(len(b))}}), nil
	}
	for name := range h.s.files {
		if strings.HasPrefix(name, strings.TrimSuffix(p, "/")+"/") {
			return connect.NewResponse(&harenav1.StatResponse{Info: &harenav1.FileInfo{Path: p, Type: "directory", Mode: 0o755}}), nil
		}
	}
	return nil, notFound(p)
}

func (h *files) Remove(_ context.Context, r *connect.Request[harenav1.RemoveRequest]) (*connect.Response[harenav1.RemoveResponse], error) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	if _, ok := h.s.files[r.Msg.GetPath()]; !ok && !r.Msg.GetMissingOk() {
		return nil, notFound(r.Msg.GetPath())
	}
	delete(h.s.files, r.Msg.GetPath())
	return connect.NewResponse(&harenav1.RemoveResponse{}), nil
}

func refuse(w http.ResponseWriter, r *http.Request, err error) {
	_ = connect.NewErrorWriter().Write(w, r, err)
}

func (s *Server) getFile(w http.ResponseWriter, r *http.Request) {
	p := r.URL.Query().Get("path")
	b, ok := s.File(p)
	if !ok {
		refuse(w, r, notFound(p))
		return
	}
	http.ServeContent(w, r, "", created().AsTime(), bytes.NewReader(b))
}

func (s *Server) putFile(w http.ResponseWriter, r *http.Request) {
	p := r.URL.Query().Get("path")
	b, err := io.ReadAll(r.Body)
	if err != nil {
		refuse(w, r, err)
		return
	}
	if strings.HasPrefix(p, "/readonly/") {
		refuse(w, r, failure(connect.CodePermissionDenied, "denied", p+" cannot be written", "write elsewhere"))
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[p] = b
}

func (s *Server) getTar(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir := strings.TrimSuffix(r.URL.Query().Get("path"), "/") + "/"
	var names []string
	for name := range s.files {
		if strings.HasPrefix(name, dir) {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	t := tar.NewWriter(w)
	for _, name := range names {
		_ = t.WriteHeader(&tar.Header{Name: strings.TrimPrefix(name, dir), Mode: 0o644, Size: int64(len(s.files[name])), Typeflag: tar.TypeReg})
		_, _ = t.Write(s.files[name])
	}
	_ = t.Close()
}

func (s *Server) putTar(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := tar.NewReader(r.Body)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		var b []byte
		if err == nil {
			b, err = io.ReadAll(t)
		}
		if err != nil {
			refuse(w, r, failure(connect.CodeInvalidArgument, "invalid", err.Error(), "send a tar"))
			return
		}
		if h.Typeflag == tar.TypeReg {
			s.files[path.Join(r.URL.Query().Get("path"), h.Name)] = b
		}
	}
}

type layers struct {
	harenav1connect.UnimplementedLayerServiceHandler
	s *Server
}

// postLayer reads a tar and keeps how many entries it has.
func (s *Server) postLayer(w http.ResponseWriter, r *http.Request) {
	l := &harenav1.Layer{Digest: "sha256:" + strings.Repeat("cd", 32), Kind: r.URL.Query().Get("kind"), Names: []string{r.URL.Query().Get("name")}, Created: created(), Source: "tar"}
	t := tar.NewReader(r.Body)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			refuse(w, r, failure(connect.CodeInvalidArgument, "invalid", "the stream is not a tar: "+err.Error(), "send a tar"))
			return
		}
		l.Files++
		l.LogicalBytes += h.Size
	}
	s.mu.Lock()
	s.layers[l.Names[0]] = l
	s.mu.Unlock()
	b, _ := protojson.MarshalOptions{UseProtoNames: true}.Marshal(&harenav1.ImportResponse{Phase: "done", Layer: l, Warnings: []string{"trusted.x was left out"}})
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
}

func (h *layers) List(context.Context, *connect.Request[harenav1.ListLayersRequest]) (*connect.Response[harenav1.ListLayersResponse], error) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	res := &harenav1.ListLayersResponse{}
	for _, l := range h.s.layers {
		res.Layers = append(res.Layers, l)
	}
	sort.Slice(res.Layers, func(i, j int) bool { return res.Layers[i].GetNames()[0] < res.Layers[j].GetNames()[0] })
	return connect.NewResponse(res), nil
}

func (h *layers) Get(_ context.Context, r *connect.Request[harenav1.GetLayerRequest]) (*connect.Response[harenav1.GetLayerResponse], error) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	l, ok := h.s.layers[r.Msg.GetName()]
	if !ok {
		return nil, notFound("layer " + r.Msg.GetName())
	}
	return connect.NewResponse(&harenav1.GetLayerResponse{Layer: l}), nil
}

// Import takes debootstrap: sources.
func (h *layers) Import(_ context.Context, r *connect.Request[harenav1.ImportRequest], out *connect.ServerStream[harenav1.ImportResponse]) error {
	if !strings.HasPrefix(r.Msg.GetSource(), "debootstrap:") {
		return failure(connect.CodeUnimplemented, "unsupported", r.Msg.GetSource()+" cannot be imported yet", "use another source")
	}
	for _, m := range []*harenav1.ImportResponse{
		{Phase: "fetching", DoneBytes: 1, TotalBytes: 2}, {Phase: "building"},
		{Phase: "done", Layer: &harenav1.Layer{Digest: "sha256:" + strings.Repeat("ef", 32), Kind: "base", Names: []string{r.Msg.GetName()}}},
	} {
		if err := out.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// Verify finds every layer intact but "damaged".
func (h *layers) Verify(_ context.Context, r *connect.Request[harenav1.VerifyLayerRequest], out *connect.ServerStream[harenav1.VerifyLayerResponse]) error {
	m := &harenav1.VerifyLayerResponse{DoneBytes: 1, TotalBytes: 1, Done: true}
	if r.Msg.GetName() == "damaged" {
		m.Problems = []string{"object 1 has another digest"}
	}
	return out.Send(m)
}

func (h *layers) CollectGarbageProgress(_ context.Context, _ *connect.Request[harenav1.CollectGarbageRequest], out *connect.ServerStream[harenav1.CollectGarbageProgressResponse]) error {
	return out.Send(&harenav1.CollectGarbageProgressResponse{Phase: "done", Digests: []string{"sha256:dead"}, FreedBytes: 2048})
}

func (h *layers) CollectGarbage(context.Context, *connect.Request[harenav1.CollectGarbageRequest]) (*connect.Response[harenav1.CollectGarbageResponse], error) {
	return connect.NewResponse(&harenav1.CollectGarbageResponse{Digests: []string{"sha256:dead"}, FreedBytes: 2048}), nil
}
