package lifecycle

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// Clock is the time, so that tests can move it.
type Clock interface {
	Now() time.Time
	// At returns a channel that receives once at t or soon after, and a function that gives it up.
	At(t time.Time) (<-chan time.Time, func())
}

// SystemClock is the machine's wall clock: deadlines are kept over restarts.
type SystemClock struct{}

// Now implements Clock. Without the monotonic reading, so that it is the same before and after a restart.
func (SystemClock) Now() time.Time { return time.Now().Round(0) }

// At implements Clock.
func (SystemClock) At(t time.Time) (<-chan time.Time, func()) {
	timer := time.NewTimer(time.Until(t))
	return timer.C, func() { timer.Stop() }
}

// timers wakes sandboxes at their next deadline: one heap and one goroutine for all of them.
type timers struct {
	clock Clock
	fire  func(*box)

	mu   sync.Mutex
	heap timerHeap
	wake chan struct{}
}

func newTimers(clock Clock, fire func(*box)) *timers {
	return &timers{clock: clock, fire: fire, wake: make(chan struct{}, 1)}
}

// set makes b fire at the time, and no other; the zero time means never.
func (t *timers) set(b *box, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case at.IsZero() && b.slot > 0:
		heap.Remove(&t.heap, b.slot-1)
	case at.IsZero():
	case b.slot > 0:
		b.due = at
		heap.Fix(&t.heap, b.slot-1)
	default:
		b.due = at
		heap.Push(&t.heap, b)
	}
	t.poke()
}

// sooner is set, unless b fires earlier anyway.
func (t *timers) sooner(b *box, at time.Time) {
	t.mu.Lock()
	pending := b.slot > 0 && !at.Before(b.due)
	t.mu.Unlock()
	if !pending {
		t.set(b, at)
	}
}

func (t *timers) poke() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// run fires until ctx ends.
func (t *timers) run(ctx context.Context) {
	for {
		t.mu.Lock()
		now := t.clock.Now()
		var due []*box
		for len(t.heap) > 0 && !t.heap[0].due.After(now) {
			due = append(due, heap.Pop(&t.heap).(*box))
		}
		var next <-chan time.Time
		cancel := func() {}
		if len(t.heap) > 0 {
			next, cancel = t.clock.At(t.heap[0].due)
		}
		t.mu.Unlock()
		for _, b := range due {
			t.fire(b)
		}
		select {
		case <-next:
		case <-t.wake:
		case <-ctx.Done():
			cancel()
			return
		}
		cancel()
	}
}

// timerHeap is ordered by due; slot is a box's place plus one, 0 when it is not in the heap.
type timerHeap []*box

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].slot, h[j].slot = i+1, j+1
}

// Push implements heap.Interface.
func (h *timerHeap) Push(x any) {
	b := x.(*box)
	*h = append(*h, b)
	b.slot = len(*h)
}

// Pop implements heap.Interface.
func (h *timerHeap) Pop() any {
	old := *h
	b := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	b.slot = 0
	return b
}
