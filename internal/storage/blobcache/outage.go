package blobcache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// outage is what is known of a store that does not answer.
type outage struct {
	mu    sync.Mutex
	since time.Time // zero: it answers
	err   error
	told  map[string]bool // layers that an event has named
}

// Outage reports whether the store answers.
func (c *Cache) Outage() Outage {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	o := Outage{Out: !c.out.since.IsZero(), Since: c.out.since}
	if o.Out {
		o.Error = c.out.err.Error()
	}
	return o
}

// storeFails notes that a request failed for which layers wait. Each layer is named once in an outage.
func (c *Cache) storeFails(err error, layers []string) {
	c.out.mu.Lock()
	first := c.out.since.IsZero()
	if first {
		c.out.since, c.out.told = time.Now(), map[string]bool{}
	}
	c.out.err = err
	var fresh []string
	for _, l := range layers {
		if !c.out.told[l] {
			c.out.told[l] = true
			fresh = append(fresh, l)
		}
	}
	c.out.mu.Unlock()
	if first || len(fresh) > 0 {
		c.cfg.Log.Warn("the store does not answer", "err", err, "layers", fresh)
		c.cfg.Event(Event{Kind: Out, Layers: fresh, Message: fmt.Sprintf("the store does not answer, reads wait: %v", err)})
	}
}

func (c *Cache) storeAnswers() {
	c.out.mu.Lock()
	if c.out.since.IsZero() {
		c.out.mu.Unlock()
		return
	}
	took := time.Since(c.out.since).Round(time.Millisecond)
	var layers []string
	for l := range c.out.told {
		layers = append(layers, l)
	}
	c.out.since, c.out.err, c.out.told = time.Time{}, nil, nil
	c.out.mu.Unlock()
	c.cfg.Log.Info("the store answers again", "after", took)
	c.cfg.Event(Event{Kind: Recovered, Layers: layers, Message: fmt.Sprintf("the store answers again after %v", took)})
}

// failQuiet is how long a failure of the same blob is not reported again.
const failQuiet = 10 * time.Second

// readFailed reports that a reader gets EIO.
func (e *entry) readFailed(err error) {
	if e.c.ctx.Err() != nil {
		return
	}
	e.mu.Lock()
	quiet := time.Since(e.failed) < failQuiet
	if !quiet {
		e.failed = time.Now()
	}
	e.mu.Unlock()
	if quiet {
		return
	}
	kind := Failed
	if errors.Is(err, blob.ErrDamaged) {
		kind = Corrupt
	}
	if errors.Is(err, context.DeadlineExceeded) {
		if o := e.c.Outage(); o.Out {
			err = fmt.Errorf("the store has not answered since %s: %s", o.Since.Format(time.RFC3339), o.Error)
		}
	}
	e.c.cfg.Log.Error("a read failed", "blob", e.name(), "err", err)
	e.c.cfg.Event(Event{Kind: kind, Layers: e.layers(), Blob: e.name(), Message: fmt.Sprintf("reads fail: %v", err)})
}
