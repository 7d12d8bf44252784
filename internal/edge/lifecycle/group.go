package lifecycle

import (
	"context"
	"slices"
	"strings"
	"sync"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// groupWidth bounds how many sandboxes of a group are worked on at once.
const groupWidth = 16

// selected resolves a selector. IDs stand for themselves, and those that do not exist come back as outcomes; a job and labels
// stand for the sandboxes in a state that eligible accepts.
func (e *Edge) selected(s *harenav1.Selector, eligible func(sandbox.State) bool) ([]*box, []*harenav1.Outcome, error) {
	byRule := s.GetJob() != "" || len(s.GetLabels()) > 0
	switch {
	case len(s.GetIds()) == 0 && !byRule:
		return nil, nil, errs.E(errs.Invalid, "the selector selects nothing").WithHint("give IDs, a job or labels")
	case len(s.GetIds()) > 0 && byRule:
		return nil, nil, errs.E(errs.Invalid, "the selector has IDs and also a job or labels").WithHint("give one or the other")
	}
	if byRule {
		var boxes []*box
		for _, b := range e.snapshot() {
			if r := b.record(); eligible(r.State) && matches(r, s.GetJob(), s.GetLabels()) {
				boxes = append(boxes, b)
			}
		}
		slices.SortFunc(boxes, byAge)
		return boxes, nil, nil
	}
	var boxes []*box
	var missing []*harenav1.Outcome
	for _, raw := range s.GetIds() {
		id, err := sandbox.ParseID(raw)
		var b *box
		if err == nil {
			b, err = e.find(id)
		}
		if err != nil {
			missing = append(missing, outcome(raw, "", err))
			continue
		}
		if !slices.Contains(boxes, b) {
			boxes = append(boxes, b)
		}
	}
	return boxes, missing, nil
}

func matches(r *Record, job string, labels map[string]string) bool {
	if job != "" && r.Spec.GetJob() != job {
		return false
	}
	for k, v := range labels {
		if got, there := r.Spec.GetLabels()[k]; !there || got != v {
			return false
		}
	}
	return true
}

func inProject(have, want string) bool {
	return want == "" || have == want || strings.HasPrefix(have, want+"/")
}

func byAge(a, b *box) int {
	x, y := a.record(), b.record()
	if c := x.Created.Compare(y.Created); c != 0 {
		return c
	}
	return strings.Compare(string(a.id), string(b.id))
}

// each does something to every sandbox, some at a time, and returns the outcomes in the same order.
func (e *Edge) each(ctx context.Context, boxes []*box, do func(*box) error) []*harenav1.Outcome {
	outcomes := make([]*harenav1.Outcome, len(boxes))
	gate := make(chan struct{}, groupWidth)
	var wg sync.WaitGroup
	for i, b := range boxes {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			err := context.Cause(ctx)
			if err == nil {
				err = do(b)
			}
			outcomes[i] = outcome(string(b.id), b.state(), err)
		})
	}
	wg.Wait()
	return outcomes
}

func outcome(id string, state sandbox.State, err error) *harenav1.Outcome {
	o := &harenav1.Outcome{SandboxId: id, State: string(state)}
	if err != nil {
		o.Error, o.ErrorMessage = errs.Detail(err)
	}
	return o
}
