package lifecycle

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// maxAsked is how old a call may be of which a creation is a part, and so how long stops are remembered.
const maxAsked = time.Hour

// stopMarks remember the stops of jobs and labels, so that each also ends what was asked for before it and had not reached the
// edge: the rest of a batch, for one. A sandbox that is asked for later is not concerned, whatever its job.
type stopMarks struct {
	mu  sync.Mutex
	all map[string]stopMark
}

type stopMark struct {
	job    string
	labels map[string]string
	at     time.Time
}

// add notes a stop, before the sandboxes that it ends are listed.
func (m *stopMarks) add(s *harenav1.Selector, now time.Time) {
	if s.GetJob() == "" && len(s.GetLabels()) == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		m.all = map[string]stopMark{}
	}
	maps.DeleteFunc(m.all, func(_ string, old stopMark) bool { return now.Sub(old.at) > maxAsked })
	var key strings.Builder
	key.WriteString(s.GetJob())
	for _, k := range slices.Sorted(maps.Keys(s.GetLabels())) {
		key.WriteString("\x00" + k + "\x00" + s.GetLabels()[k])
	}
	m.all[key.String()] = stopMark{s.GetJob(), maps.Clone(s.GetLabels()), now}
}

// overtook says whether a sandbox that was asked for at a time has been stopped since. Without a time it was asked for now.
func (m *stopMarks) overtook(spec *harenav1.SandboxSpec, asked, now time.Time) error {
	if asked.IsZero() {
		return nil
	}
	if now.Sub(asked) > maxAsked {
		return errs.OverLimit(errs.Capacity, "age of a creation", maxAsked, now.Sub(asked)).WithHint("ask again")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.all {
		// A stop to come is one from before the machine's clock was set back.
		if s.at.After(now) || asked.After(s.at) || s.job != "" && s.job != spec.GetJob() {
			continue
		}
		match := true
		for k, v := range s.labels {
			if got, there := spec.GetLabels()[k]; !there || got != v {
				match = false
			}
		}
		if match {
			return errs.E(errs.Precondition, "the sandbox's job or labels were stopped while it was on its way").
				WithHint("what is asked for from now on is not concerned")
		}
	}
	return nil
}
