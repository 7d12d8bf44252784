package layers

import (
	"context"
	"fmt"
	"slices"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// Reach implements LayerServiceHandler.
func (s *Service) Reach(ctx context.Context, req *connect.Request[harenav1.ReachRequest]) (*connect.Response[harenav1.ReachResponse], error) {
	res, err := s.reach(ctx, req.Msg)
	if err != nil {
		return nil, s.fail("Reach", err)
	}
	return connect.NewResponse(res), nil
}

func (s *Service) reach(ctx context.Context, m *harenav1.ReachRequest) (*harenav1.ReachResponse, error) {
	ref, err := layer.ParseRef(m.GetProject(), m.GetName())
	if err != nil {
		return nil, err
	}
	if ref.Digest != "" {
		return nil, errs.E(errs.Invalid, "%s is a digest, which never changes", m.GetName()).WithHint("give a name[:tag]; `harena layer show` has the names of a digest")
	}
	now, err := s.c.Store.Resolve(ctx, m.GetProject(), m.GetName())
	if err != nil {
		return nil, err
	}
	var next *layer.Layer
	if m.GetNext() != "" {
		l, err := s.c.Store.Resolve(ctx, m.GetProject(), m.GetNext())
		if err != nil {
			return nil, err
		}
		next = &l
	}
	res := &harenav1.ReachResponse{Name: ref.String(), Digest: string(now.Digest)}
	var earlier []layer.Digest
	for _, d := range s.c.Store.Earlier(ref) {
		if d != now.Digest {
			earlier = append(earlier, d)
		}
	}
	res.Earlier = texts(earlier)
	names, err := s.c.Store.NamesOf(ctx, ref.Project, now.Digest)
	if err != nil {
		return nil, err
	}
	res.Names = slices.DeleteFunc(names, func(n string) bool { return n == ref.String() })
	if err := s.reachSandboxes(res, ref); err != nil {
		return nil, err
	}
	for _, d := range append([]layer.Digest{now.Digest}, earlier...) {
		if err := s.reachLayers(ctx, res, ref.Project, d, d == now.Digest); err != nil {
			return nil, err
		}
	}
	res.Effects = effects(res, now, next)
	return res, nil
}

// reachSandboxes lists those that were made from a layer under this name.
func (s *Service) reachSandboxes(res *harenav1.ReachResponse, ref layer.Ref) error {
	if s.c.Sandboxes == nil {
		return nil
	}
	all, err := s.c.Sandboxes(ref.Project)
	if err != nil {
		return err
	}
	for _, b := range all {
		for _, l := range b.GetLayers() {
			r, err := layer.ParseRef(ref.Project, l.GetName())
			if err != nil || r != ref {
				continue
			}
			res.Sandboxes = append(res.Sandboxes, &harenav1.ReachSandbox{
				Id: b.GetId(), State: b.GetState(), Job: b.GetJob(), Digest: l.GetDigest(), Current: l.GetDigest() == res.GetDigest(),
			})
		}
	}
	return nil
}

// reachLayers lists layers that were made on a digest.
func (s *Service) reachLayers(ctx context.Context, res *harenav1.ReachResponse, project string, d layer.Digest, current bool) error {
	children, err := s.c.Store.Children(ctx, d)
	if err != nil {
		return err
	}
	for _, c := range children {
		l, err := s.c.Store.Load(c)
		if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Precondition) {
			continue // collected meanwhile, or damaged
		}
		if err != nil {
			return err
		}
		names, err := s.c.Store.NamesOf(ctx, project, c)
		if err != nil {
			return err
		}
		res.Layers = append(res.Layers, &harenav1.ReachLayer{Digest: string(c), Kind: string(l.Kind), Names: names, Parent: string(d), Current: current})
	}
	return nil
}

// effects says what pointing the name elsewhere does. Pure.
func effects(r *harenav1.ReachResponse, now layer.Layer, next *layer.Layer) []string {
	current, older := 0, 0
	for _, b := range r.GetSandboxes() {
		if b.GetCurrent() {
			current++
		} else {
			older++
		}
	}
	to := "another layer"
	if next != nil {
		to = string(next.Digest)
	}
	out := []string{fmt.Sprintf("new sandboxes that name %s get %s", r.GetName(), to)}
	if next != nil && next.Digest == now.Digest {
		out = []string{r.GetName() + " points at " + to + " already: nothing changes"}
	}
	if next != nil && next.Kind != now.Kind {
		out = append(out, fmt.Sprintf("the kind changes from %s to %s: creations that name it where a %s is needed are refused", now.Kind, next.Kind, now.Kind))
	}
	if current+older > 0 {
		out = append(out, fmt.Sprintf("%d sandboxes keep the present layer and %d keep an earlier one, until they end", current, older))
	}
	if n := len(r.GetLayers()); n > 0 {
		out = append(out, fmt.Sprintf("%d layers were made on it and keep what is below them: make them anew to have the change", n))
	}
	if n := len(r.GetNames()); n > 0 {
		out = append(out, fmt.Sprintf("%d other names go on pointing at the present layer", n))
	}
	return out
}
