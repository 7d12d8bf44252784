package container

import (
	"context"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/edge/backend"
)

// TestReclaim takes the memory of a frozen sandbox back, at least what is cached, also when it is cut short, and the sandbox
// answers afterwards.
func TestReclaim(t *testing.T) {
	n := newNode(t)
	b := n.open(t)
	t.Cleanup(func() { _ = b.Close() })
	c := n.config(t)
	if _, err := b.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := b.Freeze(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	var last backend.Reclaimed
	for _, patience := range []time.Duration{0, time.Minute} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		r, err := b.Reclaim(ctx, c.ID)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if r.Before <= 0 || r.After < 0 || r.Swapped < 0 || r.CacheDropped < 0 {
			t.Errorf("%+v", r)
		}
		last = r
	}
	if last.After > last.Before && last.After > 4<<20 {
		t.Errorf("nothing came back: %+v", last)
	}
	if err := b.Thaw(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	conn, err := b.Dial(t.Context(), c.ID)
	if err != nil {
		t.Fatalf("it does not answer: %v", err)
	}
	_ = conn.Close()
	if err := b.Destroy(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Reclaim(t.Context(), c.ID); err == nil {
		t.Error("memory of nobody came back")
	}
}
