package server

import (
	"context"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// Snapshot fans out to the edges of the selected sandboxes and passes on what each says. Where an edge fails as a whole, the
// sandboxes that were named by ID fail, each by itself; with a job or labels nobody knows which those are, so the call fails.
func (h *sandboxService) Snapshot(ctx context.Context, r *connect.Request[harenav1.SnapshotRequest], out *connect.ServerStream[harenav1.SnapshotResponse]) error {
	plan, err := planGroup(h.s, r.Msg.GetSelector())
	if err != nil {
		return err
	}
	named := len(r.Msg.GetSelector().GetIds()) > 0
	several := len(r.Msg.GetSelector().GetIds()) > 1
	for _, o := range plan.refused {
		m := &harenav1.SnapshotResponse{SandboxId: o.GetSandboxId(), Phase: "failed", Error: o.GetError(), ErrorMessage: o.GetErrorMessage()}
		if err := out.Send(m); err != nil {
			return err
		}
	}
	parts := map[*Edge]*harenav1.SnapshotRequest{}
	var edges []*Edge
	for _, p := range plan.parts {
		m := proto.Clone(r.Msg).(*harenav1.SnapshotRequest)
		m.Selector, m.Project = p.selector, projectOr(ctx, r.Msg.GetProject())
		if several && len(p.selector.GetIds()) == 1 {
			// The edge sees one sandbox and would use the name as it is.
			m.Name = nameForOne(m.GetName(), p.selector.GetIds()[0])
		}
		parts[p.edge] = m
		edges = append(edges, p.edge)
	}
	return merge(ctx, edges, func(ctx context.Context, e *Edge, take func(*harenav1.SnapshotResponse) error) error {
		ended := map[string]bool{}
		err := receive(ctx, e, connect.NewRequest(parts[e]), lifeOf, edgeClient.Snapshot, func(m *harenav1.SnapshotResponse) error {
			if p := m.GetPhase(); p == "done" || p == "failed" {
				ended[m.GetSandboxId()] = true
			}
			return take(m)
		})
		// What is wrong with the request itself is one error, not one a sandbox.
		if err == nil || !named || errs.Is(errs.FromConnect(err), errs.Invalid) || ctx.Err() != nil {
			return err
		}
		detail, message := errs.Detail(errs.FromConnect(err))
		for _, id := range parts[e].GetSelector().GetIds() {
			if ended[id] {
				continue
			}
			if err := take(&harenav1.SnapshotResponse{SandboxId: id, Phase: "failed", Error: detail, ErrorMessage: message}); err != nil {
				return err
			}
		}
		return nil
	}, out.Send)
}

// nameForOne is a name with "-ID" before its tag.
func nameForOne(name, id string) string {
	base, tag, tagged := strings.Cut(name, ":")
	if tagged {
		tag = ":" + tag
	}
	return base + "-" + id + tag
}
