package container

import (
	"testing"
	"time"
)

// TestPoolKeepsAppointments grows a pool that is to shrink, while starts fail in between.
func TestPoolKeepsAppointments(t *testing.T) {
	p := &pool{target: 8, emptied: time.Now().Add(-2 * shrinkAfter)}
	now := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.target
	}
	p.mu.Lock()
	p.again(20 * time.Millisecond)
	p.again(time.Hour) // must not put off what is due
	p.mu.Unlock()
	until(t, "the pool shrank", func() bool { return now() == 0 })

	p.mu.Lock()
	p.target, p.emptied = 8, time.Now()
	p.starting = 8 // so that nothing is started here
	p.mu.Unlock()
	p.refill()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.later.Stop()
	if left := time.Until(p.due); left < shrinkAfter/2 || left > 2*shrinkAfter {
		t.Errorf("a grown pool is looked at again after %v", left)
	}
}
