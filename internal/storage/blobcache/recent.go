package blobcache

import (
	"container/list"
	"sync"
)

// recent keeps verified frames in memory, least recently used first to go.
type recent struct {
	limit int64

	mu    sync.Mutex
	bytes int64
	order *list.List // of *kept, most recently used first
	kept  map[key]*list.Element
}

type key struct {
	e *entry
	i int
}

type kept struct {
	key key
	raw []byte
}

func newRecent(limit int64) *recent {
	return &recent{limit: limit, order: list.New(), kept: map[key]*list.Element{}}
}

func (r *recent) get(e *entry, i int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	el := r.kept[key{e, i}]
	if el == nil {
		return nil
	}
	r.order.MoveToFront(el)
	return el.Value.(*kept).raw
}

func (r *recent) has(e *entry, i int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kept[key{e, i}] != nil
}

// put keeps raw, which nobody changes any more.
func (r *recent) put(e *entry, i int, raw []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := key{e, i}
	if r.kept[k] != nil {
		return
	}
	r.kept[k] = r.order.PushFront(&kept{k, raw})
	r.bytes += int64(len(raw))
	for r.bytes > r.limit && r.order.Len() > 1 {
		r.remove(r.order.Back())
	}
}

func (r *recent) remove(el *list.Element) {
	k := el.Value.(*kept)
	r.order.Remove(el)
	delete(r.kept, k.key)
	r.bytes -= int64(len(k.raw))
}

// forget drops the frames of a blob.
func (r *recent) forget(e *entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for el := r.order.Front(); el != nil; {
		next := el.Next()
		if el.Value.(*kept).key.e == e {
			r.remove(el)
		}
		el = next
	}
}
