package blobcache

import (
	"cmp"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// usage is what eviction knows of a blob.
type usage struct {
	e        *entry
	complete bool
	attached bool
	pinned   bool // attached by path
	bytes    int64
	lastUse  uint64
}

// planEviction returns which blobs to evict whole, in order, and which to take frames from, so that need bytes become free. It is pure.
func planEviction(all []usage, need int64) (whole, frames []usage) {
	slices.SortFunc(all, func(a, b usage) int { return cmp.Compare(a.lastUse, b.lastUse) })
	for _, u := range all {
		if need <= 0 {
			return whole, nil
		}
		if !u.attached && u.bytes > 0 {
			whole = append(whole, u)
			need -= u.bytes
		}
	}
	// What is attached and read through the daemon: complete files go whole (never by holes), others frame by frame.
	for _, u := range all {
		if need > 0 && u.attached && !u.pinned && u.bytes > 0 {
			frames = append(frames, u)
			need -= u.bytes
		}
	}
	return whole, frames
}

// makeRoom evicts when the cache is over its bound, or the disk is full. It does not wait.
func (c *Cache) makeRoom(full bool) {
	if !full && c.n.used.Load() <= c.cfg.Limit {
		return
	}
	if !c.evicting.CompareAndSwap(false, true) {
		return
	}
	started := c.spawn(func() {
		defer c.evicting.Store(false)
		// A tenth more than needed, so that this is not done for each frame.
		need := c.n.used.Load() - c.cfg.Limit + c.cfg.Limit/10
		if full {
			need = max(need, c.n.used.Load()/10)
		}
		c.evict(need)
	})
	if !started {
		c.evicting.Store(false)
	}
}

func (c *Cache) usages() []usage {
	var all []usage
	for _, e := range c.all() {
		e.mu.Lock()
		u := usage{e: e, complete: e.state == complete, attached: len(e.users) > 0, pinned: e.pinned(), bytes: e.bytes, lastUse: e.lastUse}
		e.mu.Unlock()
		all = append(all, u)
	}
	return all
}

func (c *Cache) evict(need int64) {
	whole, frames := planEviction(c.usages(), need)
	for _, u := range whole {
		need -= u.e.evictWhole(false)
	}
	var candidates []victim
	for _, u := range frames {
		if u.complete {
			if need > 0 {
				need -= u.e.evictWhole(true)
			}
			continue
		}
		candidates = append(candidates, u.e.victims()...)
	}
	slices.SortFunc(candidates, func(a, b victim) int { return cmp.Compare(a.used, b.used) })
	for _, v := range candidates {
		if need <= 0 {
			return
		}
		need -= v.e.punch(v.frame)
	}
}

// evictWhole removes a blob's files, unless it was attached meanwhile: by path, or at all when attached is not set.
func (e *entry) evictWhole(attached bool) int64 {
	e.file.Lock() // waits for readers
	defer e.file.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, direct := range e.users {
		if direct || !attached {
			return 0
		}
	}
	if e.sealing || e.state == bad {
		return 0
	}
	path := e.partial()
	if e.state == complete {
		path = e.c.completePath(e.obj.Digest)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		e.c.cfg.Log.Warn("a cached blob cannot be removed", "blob", e.name(), "err", err)
		return 0
	}
	_ = os.Remove(e.indexFile())
	freed := e.bytes
	e.c.n.evicted.Add(freed)
	if e.f != nil {
		e.f.Close()
		e.f = nil
	}
	e.state, e.index, e.have, e.used, e.missing = absent, nil, nil, nil, 0
	e.c.account(e, 0)
	e.c.recent.forget(e)
	// Frames on their way find no state that takes them; their readers get them.
	return freed
}

type victim struct {
	e     *entry
	frame int
	used  uint64
}

func (e *entry) victims() []victim {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []victim
	for i, h := range e.have {
		if h {
			out = append(out, victim{e, i, e.used[i]})
		}
	}
	return out
}

// punch gives a frame's room back. Readers of the file are waited for; what they read later is checked, as always.
func (e *entry) punch(i int) int64 {
	e.file.Lock()
	defer e.file.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state != partial || e.sealing || e.f == nil || !e.have[i] {
		return 0
	}
	fr := e.index.Frame(i)
	if err := unix.Fallocate(int(e.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, fr.RawOff, int64(fr.RawLen)); err != nil {
		e.c.cfg.Log.Warn("no hole can be punched into a cached blob", "blob", e.name(), "err", err)
		return 0
	}
	e.have[i] = false
	e.missing++
	e.c.account(e, e.bytes-int64(fr.RawLen))
	e.c.n.evicted.Add(int64(fr.RawLen))
	return int64(fr.RawLen)
}

// affords tells whether a blob may become complete, which makes it evictable as a whole only, or not at all: what is attached by path
// must leave room for others. e.mu is held.
func (c *Cache) affords(e *entry) bool { return e.obj.Size <= c.cfg.Limit/2 }
