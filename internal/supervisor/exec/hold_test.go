package exec

import (
	"testing"
	"time"
)

// TestHeldClocksRest: a time-out does not strike while the sandbox is held, and does afterwards; also one that began meanwhile.
func TestHeldClocksRest(t *testing.T) {
	s := &Service{alive: map[string]*command{}}
	struck := make(chan string, 4)
	add := func(name string, d time.Duration) *command {
		c := &command{s: s, id: name}
		s.alive[name] = c
		c.limit(d, func() { struck <- name })
		return c
	}
	add("before", 50*time.Millisecond)
	s.Hold(true)
	s.Hold(true)
	add("meanwhile", 20*time.Millisecond)
	add("none", 0)
	add("ended", 20*time.Millisecond).exited = true
	time.Sleep(150 * time.Millisecond)
	select {
	case name := <-struck:
		t.Fatalf("%s struck while it was held", name)
	default:
	}
	s.Hold(false)
	s.Hold(false)
	got := map[string]bool{}
	for range 2 {
		select {
		case name := <-struck:
			got[name] = true
		case <-time.After(20 * time.Second):
			t.Fatalf("only %v struck", got)
		}
	}
	if !got["before"] || !got["meanwhile"] {
		t.Errorf("%v struck", got)
	}
	time.Sleep(50 * time.Millisecond)
	if len(struck) != 0 {
		t.Errorf("%s struck", <-struck)
	}
}
