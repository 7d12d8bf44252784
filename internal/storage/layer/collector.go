package layer

import (
	"context"
	"sync"
)

// collector keeps what is in use from being collected while nothing has to wait
// for a collection, which may take long.
//
// A collection first raises a barrier: from then on everything that is looked at
// or stored is noted, and counts as in use until the collection has ended. Then it waits for
// those who held something before the barrier, as they may have looked at what they are about to
// put on record. Only then it reads names and manifests, and finds every trace of
// what happened before the barrier on disk, in the set of digests in use, or
// noted. What it removes, it removes in small steps that exclude looking.
type collector struct {
	// step is held for writing while something is removed, for reading while something is looked at.
	step sync.RWMutex

	mu      sync.Mutex
	holders *generation // those who hold now
	barrier *barrier    // nil: no collection is under way
	running sync.Mutex  // one collection at a time
}

// generation is those who came between two barriers.
type generation struct {
	n      int
	closed bool
	empty  chan struct{}
}

// barrier notes what was looked at and stored since it was raised.
type barrier struct {
	layers  map[Digest]bool
	objects map[Digest]bool
}

func (c *collector) hold() (release func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.generation()
	g.n++
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		g.n--
		g.check()
	})
}

// generation returns the present one; mu is held.
func (c *collector) generation() *generation {
	if c.holders == nil {
		c.holders = &generation{empty: make(chan struct{})}
	}
	return c.holders
}

func (g *generation) check() {
	if g.closed && g.n == 0 {
		close(g.empty)
	}
}

// look is called around looking at a layer, or storing one with its objects. It does not nest.
func (c *collector) look(d Digest, objects ...Object) (done func()) {
	c.step.RLock()
	c.keep(d, objects...)
	return c.step.RUnlock
}

// keep notes a layer, and objects, that something is about to refer to.
func (c *collector) keep(d Digest, objects ...Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.barrier == nil {
		return
	}
	c.barrier.layers[d] = true
	for _, o := range objects {
		c.barrier.objects[o.Digest] = true
	}
}

// raise raises the barrier and waits for those who hold since before.
func (c *collector) raise(ctx context.Context) (lower func(), err error) {
	c.running.Lock()
	c.mu.Lock()
	c.barrier = &barrier{layers: make(map[Digest]bool), objects: make(map[Digest]bool)}
	before := c.generation()
	c.holders = nil
	before.closed = true
	before.check()
	c.mu.Unlock()
	lower = func() {
		c.mu.Lock()
		c.barrier = nil
		c.mu.Unlock()
		c.running.Unlock()
	}
	select {
	case <-before.empty:
		return lower, nil
	case <-ctx.Done():
		lower()
		return nil, context.Cause(ctx)
	}
}

// noted returns the layers that were noted since the last call, and whether an object was.
func (c *collector) noted() (layers []Digest, objects map[Digest]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for d := range c.barrier.layers {
		layers = append(layers, d)
	}
	clear(c.barrier.layers) // the caller keeps them for as long as the collection lasts
	objects = make(map[Digest]bool, len(c.barrier.objects))
	for d := range c.barrier.objects {
		objects[d] = true
	}
	return layers, objects
}
