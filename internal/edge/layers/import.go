package layers

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/layer"
	"github.com/harena-dev/harena/internal/storage/oci"
)

// Import implements LayerServiceHandler: it makes a layer from a source that this
// node can reach by itself.
func (s *Service) Import(ctx context.Context, req *connect.Request[harenav1.ImportRequest], stream *connect.ServerStream[harenav1.ImportResponse]) error {
	m := req.Msg
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	progress := func(p layer.Progress) {
		err := stream.Send(&harenav1.ImportResponse{Phase: p.Phase, Message: p.Message, DoneBytes: p.Done, TotalBytes: p.Total})
		if err != nil {
			cancel(err) // nobody waits for it any more
		}
	}
	res, err := do(ctx, s.requests, m.GetProject(), m.GetRequestId(), m, func() (*harenav1.ImportResponse, error) {
		return s.importSource(ctx, m, progress)
	})
	if err != nil {
		return s.fail("Import", err)
	}
	return stream.Send(res)
}

func (s *Service) importSource(ctx context.Context, m *harenav1.ImportRequest, progress func(layer.Progress)) (*harenav1.ImportResponse, error) {
	kind, err := layer.ParseKind(m.GetKind())
	if err != nil {
		return nil, err
	}
	o := layer.ImportOptions{Project: m.GetProject(), Name: m.GetName(), Kind: kind, Progress: progress, Against: m.GetAgainst()}
	scheme, _, _ := strings.Cut(m.GetSource(), ":")
	switch scheme {
	case "debootstrap":
		b, err := layer.ParseBootstrap(m.GetSource())
		if err != nil {
			return nil, err
		}
		im, err := s.c.Store.ImportDebootstrap(ctx, b, o)
		return s.imported(ctx, o, im, err)
	case "registry":
		reference, ok := strings.CutPrefix(m.GetSource(), "registry://")
		if !ok {
			return nil, errs.E(errs.Invalid, "source %.80q is not known", m.GetSource()).WithHint("use registry://HOST[:PORT]/REPOSITORY[:TAG]")
		}
		o.Collapse = m.GetCollapse()
		im, err := s.c.Store.ImportRegistry(ctx, reference, o)
		return s.imported(ctx, o, im, err)
	case "tar", "dir", "oci", "docker-archive":
		return nil, errs.E(errs.Invalid, "the server does not read %s: sources of its own disk", scheme).
			WithHint("send the archive as the body of POST /v1/layers, as `harena layer import` does")
	}
	return nil, errs.E(errs.Invalid, "source %.80q is not known", m.GetSource()).
		WithHint("use debootstrap:SUITE[:PKG,PKG] or registry://REF, or send an archive to POST /v1/layers")
}

// imported records an import and makes its answer.
func (s *Service) imported(ctx context.Context, o layer.ImportOptions, im *layer.Imported, err error) (*harenav1.ImportResponse, error) {
	if err != nil {
		return nil, err
	}
	s.event("layer.imported", "imported "+o.Name, o.Project, o.Name, im.Layer)
	p, err := s.describe(ctx, o.Project, im.Layer)
	if err != nil {
		return nil, err
	}
	message := "imported " + o.Name
	if im.Existed {
		message = o.Name + " has content that was here already"
	}
	total := im.Layer.Meta.Size + im.Layer.Blob.Size
	return &harenav1.ImportResponse{Phase: "done", Message: message, DoneBytes: total, TotalBytes: total, Layer: p, Warnings: im.Warnings, Existed: im.Existed}, nil
}

// uploadSource is the source of layers that came as a body. It names no file of
// the sender, so that equal content is one layer whoever sends it.
const uploadSource = "tar"

// ImportHandler serves POST /v1/layers?name=N[&kind=K&project=P&request_id=R&against=A] with
// a tar archive, plain or compressed, as body. With format=oci the archive holds
// an OCI image layout, with format=docker-archive what docker save writes; then
// ref=REF picks one of several images and collapse=BYTES bounds merging. The answer is an ImportResponse as
// JSON; errors are those of Connect's unary calls.
func (s *Service) ImportHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		res, err := s.importBody(r)
		if err != nil {
			discard(w, r)
			// Answers nobody reads fail here; there is nothing to do about it.
			_ = connect.NewErrorWriter().Write(w, r, s.fail("import", err))
			return
		}
		// A repeated request has not read its body.
		discard(w, r)
		b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(res)
		if err != nil {
			_ = connect.NewErrorWriter().Write(w, r, s.fail("import", err))
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b)
	})
}

func (s *Service) importBody(r *http.Request) (*harenav1.ImportResponse, error) {
	if r.Method != http.MethodPost {
		return nil, errs.E(errs.Unsupported, "method %.20q is not served here", r.Method).WithHint("send the archive with POST")
	}
	q := r.URL.Query()
	m := &harenav1.ImportRequest{
		RequestId: q.Get("request_id"), Project: q.Get("project"), Name: q.Get("name"), Kind: q.Get("kind"), Source: uploadSource,
		Against: q.Get("against"),
	}
	if m.GetName() == "" {
		return nil, errs.E(errs.Invalid, "no name was given").WithHint("add ?name=NAME[:TAG]")
	}
	kind, err := layer.ParseKind(m.GetKind())
	if err != nil {
		return nil, err
	}
	var format oci.Format
	if f := q.Get("format"); f != "" && f != uploadSource {
		if format, err = oci.ParseFormat(f); err != nil {
			return nil, err
		}
		m.Source = f + ":" + q.Get("ref")
		if c := q.Get("collapse"); c != "" {
			if m.Collapse, err = strconv.ParseInt(c, 10, 64); err != nil || m.GetCollapse() < 0 {
				return nil, errs.E(errs.Invalid, "collapse %.40q is not a number of bytes", c).WithHint("leave it out for the default of 3 GB")
			}
		}
	}
	ctx := r.Context()
	return do(ctx, s.requests, m.GetProject(), m.GetRequestId(), m, func() (*harenav1.ImportResponse, error) {
		o := layer.ImportOptions{Project: m.GetProject(), Name: m.GetName(), Kind: kind, Source: uploadSource, Against: m.GetAgainst()}
		if format != "" {
			o.Collapse = m.GetCollapse()
			im, err := s.c.Store.ImportArchive(ctx, r.Body, format, q.Get("ref"), o)
			return s.imported(ctx, o, im, err)
		}
		im, err := s.c.Store.ImportTar(ctx, r.Body, o)
		return s.imported(ctx, o, im, err)
	})
}

const (
	maxDiscard  = 256 << 20
	discardTime = 10 * time.Second
)

// discard reads what is left of a body before the answer is sent: an HTTP/1
// client that is still sending when the connection closes may never see the answer.
func discard(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.ProtoMajor != 1 {
		return
	}
	// Errors (a recorder in tests has no deadline) cost nothing but the bound in time.
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(discardTime))
	_, _ = io.CopyN(io.Discard, r.Body, maxDiscard)
	_ = c.SetReadDeadline(time.Time{})
}
