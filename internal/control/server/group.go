package server

import (
	"context"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// maxSelected bounds the IDs of one selector.
const maxSelected = 10_000

// hasOutcomes is the answer to a group operation.
type hasOutcomes[M any] interface {
	*M
	GetOutcomes() []*harenav1.Outcome
}

// group fans a group operation out to the edges of the selected sandboxes, all
// at once, and puts the outcomes together: in the order of the selector's IDs, or sorted by ID.
//
// An edge that fails as a whole fails its own sandboxes when they were named by
// ID. With a job or labels nobody knows which those are, so the whole call fails;
// group operations may be repeated.
func group[Req, Res any, M hasOutcomes[Res]](ctx context.Context, s *Server, sel *harenav1.Selector, request func(*harenav1.Selector) *Req, call unaryCall[edgeClient, Req, Res]) ([]*harenav1.Outcome, error) {
	plan, err := planGroup(s, sel)
	if err != nil {
		return nil, err
	}
	failures := make([]error, len(plan.parts))
	outcomes := make([][]*harenav1.Outcome, len(plan.parts))
	var wg sync.WaitGroup
	for i, part := range plan.parts {
		wg.Go(func() {
			res, err := send(ctx, part.edge, connect.NewRequest(request(part.selector)), lifeOf, call)
			if err != nil {
				failures[i] = err
				return
			}
			outcomes[i] = M(res.Msg).GetOutcomes()
		})
	}
	wg.Wait()
	all := plan.refused
	failed := 0
	for i, part := range plan.parts {
		if failures[i] == nil {
			all = append(all, outcomes[i]...)
			continue
		}
		failed++
		for _, id := range part.selector.GetIds() {
			all = append(all, outcomeOf(id, errs.FromConnect(failures[i])))
		}
	}
	if failed > 0 && (failed == len(plan.parts) && len(plan.refused) == 0 || len(sel.GetIds()) == 0) {
		i := slices.IndexFunc(failures, func(err error) bool { return err != nil })
		return nil, failures[i]
	}
	sortOutcomes(all, sel.GetIds())
	return all, nil
}

type groupPart struct {
	edge     *Edge
	selector *harenav1.Selector
}

type groupPlan struct {
	parts   []groupPart
	refused []*harenav1.Outcome // IDs that no edge can be asked about
}

// planGroup splits a selector by edge.
func planGroup(s *Server, sel *harenav1.Selector) (groupPlan, error) {
	byQuery := sel.GetJob() != "" || len(sel.GetLabels()) > 0
	switch {
	case len(sel.GetIds()) == 0 && !byQuery:
		return groupPlan{}, errs.E(errs.Invalid, "the selector selects nothing").WithHint("give sandbox IDs, or a job, or labels")
	case len(sel.GetIds()) > 0 && byQuery:
		return groupPlan{}, errs.E(errs.Invalid, "the selector has IDs and also a job or labels").WithHint("give either IDs, or a job and labels")
	case len(sel.GetIds()) > maxSelected:
		return groupPlan{}, errs.OverLimit(errs.Invalid, "IDs of a selector", maxSelected, len(sel.GetIds()))
	}
	var plan groupPlan
	if byQuery {
		if err := sandbox.ValidateLabels(sel.GetLabels()); err != nil {
			return groupPlan{}, err
		}
		for _, e := range s.allEdges() {
			plan.parts = append(plan.parts, groupPart{e, sel})
		}
		return plan, nil
	}
	index := map[*Edge]int{}
	seen := map[string]bool{}
	for _, id := range sel.GetIds() {
		if seen[id] {
			continue
		}
		seen[id] = true
		e, err := s.edgeOf(id)
		if err != nil {
			plan.refused = append(plan.refused, outcomeOf(id, err))
			continue
		}
		i, ok := index[e]
		if !ok {
			i = len(plan.parts)
			index[e] = i
			plan.parts = append(plan.parts, groupPart{e, &harenav1.Selector{}})
		}
		plan.parts[i].selector.Ids = append(plan.parts[i].selector.Ids, id)
	}
	return plan, nil
}

func outcomeOf(id string, err error) *harenav1.Outcome {
	detail, message := errs.Detail(err)
	return &harenav1.Outcome{SandboxId: id, Error: detail, ErrorMessage: message}
}

func sortOutcomes(outcomes []*harenav1.Outcome, order []string) {
	position := map[string]int{}
	for i, id := range order {
		if _, ok := position[id]; !ok {
			position[id] = i
		}
	}
	slices.SortStableFunc(outcomes, func(a, b *harenav1.Outcome) int {
		if d := position[a.GetSandboxId()] - position[b.GetSandboxId()]; d != 0 {
			return d
		}
		return strings.Compare(a.GetSandboxId(), b.GetSandboxId())
	})
}

// merge runs read for every edge at once and hands their messages to take, one
// at a time and without buffering. The first error ends all.
func merge[M any](ctx context.Context, edges []*Edge, read func(ctx context.Context, e *Edge, take func(*M) error) error, take func(*M) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	var wg sync.WaitGroup
	var first error
	fail := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
			cancel(err)
		}
	}
	for _, e := range edges {
		wg.Go(func() {
			err := read(ctx, e, func(m *M) error {
				mu.Lock()
				defer mu.Unlock()
				if err := ctx.Err(); err != nil {
					return err
				}
				return take(m)
			})
			if err != nil {
				fail(err)
			}
		})
	}
	wg.Wait()
	return first
}

// Bounds of a page, as common.proto says.
const (
	defaultPage = 1000
	maxPage     = 10_000
)

// listPages reads one page of a listing that spans the edges: edge after edge in
// the order of their IDs. The token of a page is the ID of the edge to go on
// with, a dot, and that edge's own token.
func listPages[T any](s *Server, page *harenav1.Page, list func(*Edge, *harenav1.Page) ([]T, string, error)) ([]T, string, error) {
	size := page.GetSize()
	switch {
	case size < 0:
		return nil, "", errs.E(errs.Invalid, "a page size of %d is not valid", size).WithHint("use 1 to %d, or 0 for %d", maxPage, defaultPage)
	case size > maxPage:
		return nil, "", errs.OverLimit(errs.Invalid, "page size", maxPage, size)
	case size == 0:
		size = defaultPage
	}
	from, token, ok := strings.Cut(page.GetToken(), ".")
	if page.GetToken() != "" && !ok {
		return nil, "", errs.E(errs.Invalid, "the page token is not one that this server gave").WithHint("pass next_page_token of the previous answer")
	}
	var all []T
	for _, e := range s.allEdges() {
		if string(e.id) < from {
			continue
		}
		if string(e.id) != from {
			token = ""
		}
		left := size - int32(len(all)) //nolint:gosec // both are at most maxPage
		if left <= 0 {
			return all, string(e.id) + ".", nil
		}
		items, next, err := list(e, &harenav1.Page{Size: left, Token: token})
		if err != nil {
			return nil, "", err
		}
		all = append(all, items...)
		if next != "" {
			return all, string(e.id) + "." + next, nil
		}
	}
	return all, "", nil
}
