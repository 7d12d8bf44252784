// Package layers serves harena.v1.LayerService and the import of tar streams
// over plain HTTP. The apiserver has decided who may call.
package layers

import (
	"context"
	"log/slog"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// Mounts is what the service needs of a node's mounts; *layer.Mounts has it.
type Mounts interface {
	// Drop unmounts those of the layers that nobody owns.
	Drop(ds []layer.Digest) error
}

// Config is what a Service is made of.
type Config struct {
	Store  *layer.Store
	Mounts Mounts
	// InUse returns the digests that sandboxes have on record or mounted. It is
	// called while no layer can be resolved under Store.Hold.
	InUse func() map[layer.Digest]bool
	// Event records what happened; attributes are among layer, name, kind, project, source.
	Event func(kind, message string, attrs map[string]string)
	// Sandboxes lists the sandboxes of a project that have not been forgotten; nil: there are none.
	Sandboxes func(project string) ([]*harenav1.Sandbox, error)
	Log       *slog.Logger
}

// Service implements harenav1connect.LayerServiceHandler.
type Service struct {
	c        Config
	requests *requests
}

var _ harenav1connect.LayerServiceHandler = (*Service)(nil)

// New makes the service.
func New(c Config) *Service {
	return &Service{c: c, requests: newRequests()}
}

// fail makes err fit for the wire; what a caller is not told is logged.
func (s *Service) fail(call string, err error) error {
	if errs.Is(err, errs.Internal) {
		s.c.Log.Error("layer call failed", "call", call, "error", err)
	}
	return errs.ToConnect(err)
}

const (
	defaultPage = 1000
	maxPage     = 10000
)

// List implements LayerServiceHandler.
func (s *Service) List(ctx context.Context, req *connect.Request[harenav1.ListLayersRequest]) (*connect.Response[harenav1.ListLayersResponse], error) {
	res, err := s.list(ctx, req.Msg)
	if err != nil {
		return nil, s.fail("List", err)
	}
	return connect.NewResponse(res), nil
}

func (s *Service) list(ctx context.Context, m *harenav1.ListLayersRequest) (*harenav1.ListLayersResponse, error) {
	o := layer.ListOptions{Project: m.GetProject(), After: m.GetPage().GetToken(), Limit: int(m.GetPage().GetSize())}
	if m.GetKind() != "" {
		kind, err := layer.ParseKind(m.GetKind())
		if err != nil {
			return nil, err
		}
		o.Kind = kind
	}
	switch {
	case o.Limit == 0:
		o.Limit = defaultPage
	case o.Limit < 0 || o.Limit > maxPage:
		return nil, errs.OverLimit(errs.Invalid, "page.size", maxPage, o.Limit)
	}
	page, more, err := s.c.Store.List(ctx, o)
	if err != nil {
		return nil, err
	}
	res := &harenav1.ListLayersResponse{}
	for _, l := range page {
		u, err := s.c.Store.Usage(ctx, l.Layer, false)
		if err != nil {
			return nil, err
		}
		p := s.toProto(l.Layer, l.Names, u)
		if l.Problem != "" {
			p = &harenav1.Layer{Digest: string(l.Digest), Names: slices.Clone(l.Names), Problem: l.Problem}
		}
		res.Layers = append(res.Layers, p)
	}
	if more {
		res.NextPageToken = page[len(page)-1].Cursor()
	}
	return res, nil
}

// Get implements LayerServiceHandler.
func (s *Service) Get(ctx context.Context, req *connect.Request[harenav1.GetLayerRequest]) (*connect.Response[harenav1.GetLayerResponse], error) {
	l, err := s.c.Store.Resolve(ctx, req.Msg.GetProject(), req.Msg.GetName())
	if err != nil {
		return nil, s.fail("Get", err)
	}
	p, err := s.describe(ctx, req.Msg.GetProject(), l)
	if err != nil {
		return nil, s.fail("Get", err)
	}
	return connect.NewResponse(&harenav1.GetLayerResponse{Layer: p}), nil
}

// Tag implements LayerServiceHandler.
func (s *Service) Tag(ctx context.Context, req *connect.Request[harenav1.TagRequest]) (*connect.Response[harenav1.TagResponse], error) {
	m := req.Msg
	res, err := do(ctx, s.requests, m.GetProject(), m.GetRequestId(), m, func() (*harenav1.TagResponse, error) {
		l, err := s.c.Store.Tag(ctx, m.GetProject(), m.GetSource(), m.GetName())
		if err != nil {
			return nil, err
		}
		s.event("layer.tagged", "tagged "+m.GetName(), m.GetProject(), m.GetName(), l)
		p, err := s.describe(ctx, m.GetProject(), l)
		return &harenav1.TagResponse{Layer: p}, err
	})
	if err != nil {
		return nil, s.fail("Tag", err)
	}
	return connect.NewResponse(res), nil
}

// Remove implements LayerServiceHandler.
func (s *Service) Remove(ctx context.Context, req *connect.Request[harenav1.RemoveLayerRequest]) (*connect.Response[harenav1.RemoveLayerResponse], error) {
	m := req.Msg
	res, err := do(ctx, s.requests, m.GetProject(), m.GetRequestId(), m, func() (*harenav1.RemoveLayerResponse, error) {
		d, err := s.c.Store.Remove(ctx, m.GetProject(), m.GetName())
		if err != nil {
			return nil, err
		}
		s.event("layer.removed", "removed the name "+m.GetName(), m.GetProject(), m.GetName(), layer.Layer{Digest: d})
		return &harenav1.RemoveLayerResponse{Digest: string(d)}, nil
	})
	if err != nil {
		return nil, s.fail("Remove", err)
	}
	return connect.NewResponse(res), nil
}

// verifyEvery thins the progress of Verify out, in bytes.
const verifyEvery = 64 << 20

// Verify implements LayerServiceHandler.
func (s *Service) Verify(ctx context.Context, req *connect.Request[harenav1.VerifyLayerRequest], stream *connect.ServerStream[harenav1.VerifyLayerResponse]) error {
	l, err := s.c.Store.Resolve(ctx, req.Msg.GetProject(), req.Msg.GetName())
	if err != nil {
		return s.fail("Verify", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var last, done, total int64
	problems, err := s.c.Store.Verify(ctx, l.Digest, func(d, t int64) {
		done, total = d, t
		if done-last < verifyEvery {
			return
		}
		last = done
		if err := stream.Send(&harenav1.VerifyLayerResponse{DoneBytes: done, TotalBytes: total}); err != nil {
			cancel(err) // nobody listens any more
		}
	})
	if err != nil {
		return s.fail("Verify", err)
	}
	if len(problems) > 0 {
		s.c.Log.Error("layer is damaged", "layer", l.Digest, "problems", problems)
	}
	return stream.Send(&harenav1.VerifyLayerResponse{DoneBytes: done, TotalBytes: max(done, total), Problems: problems, Done: true})
}

func (s *Service) event(kind, message, project, name string, l layer.Layer) {
	attrs := map[string]string{"layer": string(l.Digest), "name": name, "project": project}
	if project == "" {
		attrs["project"] = layer.DefaultProject
	}
	if l.Kind != "" {
		attrs["kind"], attrs["source"] = string(l.Kind), l.Source
	}
	s.c.Event(kind, message, attrs)
}

// describe returns a layer as the API shows it.
func (s *Service) describe(ctx context.Context, project string, l layer.Layer) (*harenav1.Layer, error) {
	names, err := s.c.Store.NamesOf(ctx, project, l.Digest)
	if err != nil {
		return nil, err
	}
	u, err := s.c.Store.Usage(ctx, l, true)
	if err != nil {
		return nil, err
	}
	return s.toProto(l, names, u), nil
}

func (s *Service) toProto(l layer.Layer, names []string, u layer.Usage) *harenav1.Layer {
	p := &harenav1.Layer{
		Digest: string(l.Digest), Kind: string(l.Kind), Names: slices.Clone(names), Created: timestamppb.New(l.Created),
		LogicalBytes: l.LogicalBytes, UniqueBytes: u.Unique, SharedBytes: u.Shared, MetadataBytes: l.Meta.Size, Files: l.Files, Source: l.Source, Place: s.c.Store.Place(l),
		Config: &harenav1.ImageConfig{
			Env: l.Config.Env, WorkingDir: l.Config.WorkingDir, User: l.Config.User,
			Entrypoint: l.Config.Entrypoint, Cmd: l.Config.Cmd, Labels: l.Config.Labels,
		},
	}
	for _, d := range l.Parents {
		p.Parents = append(p.Parents, string(d))
	}
	return p
}
