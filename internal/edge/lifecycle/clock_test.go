package lifecycle

import (
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// TestClockSetBack: what was noted before the machine's clock was set back must not refuse creations and resumes until it has come
// that far again.
func TestClockSetBack(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var stops stopMarks
	stops.add(&harenav1.Selector{Job: "j"}, now)
	spec := &harenav1.SandboxSpec{Job: "j"}
	if err := stops.overtook(spec, now.Add(-time.Second), now); !errs.Is(err, errs.Precondition) {
		t.Errorf("asked for before the stop: %v", err)
	}
	if err := stops.overtook(spec, now.Add(time.Second), now.Add(time.Second)); err != nil {
		t.Errorf("asked for after the stop: %v", err)
	}
	back := now.Add(-30 * time.Minute)
	if err := stops.overtook(spec, back, back); err != nil {
		t.Errorf("the clock was set back: %v", err)
	}
	var memory returning
	memory.add(now, 1)
	if got := memory.sum(now); got != 1 {
		t.Errorf("%d bytes are expected back", got)
	}
	if got := memory.sum(back); got != 0 {
		t.Errorf("%d bytes are expected back after the clock was set back", got)
	}
}
