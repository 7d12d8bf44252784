package disk

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// WatchEvery is how often the file system's free space is looked at. One statfs costs a microsecond.
	WatchEvery = 250 * time.Millisecond
	// WatchAll is how often every layer in use is measured, whatever the free space says: what one frees can hide what
	// another writes.
	WatchAll = time.Minute
	// restShare keeps measuring below a tenth of one core.
	restShare = 10
)

// Target is a layer to watch.
type Target struct {
	Key   string
	Path  string
	Limit int64
	// Pids lists the processes that may hold files of the layer open.
	Pids func() []int
	// Busy reports whether anything may have been written since the last call.
	Busy func() bool
}

// Watch bounds layers where the file system cannot. A layer is measured when as much was written to the file system, by
// anybody, as the layer was away from its limit when it was measured last; and at least once a minute when it is in use.
// So a layer that goes over its limit is noticed after WatchEvery and the time that measuring takes: the margin is what
// can be written meanwhile. (Two that work together, one freeing in the same quarter of a second what the other writes, have a
// minute.) Files without a name count as long as a process has them open.
type Watch struct {
	root string
	over func(key string, used int64)

	mu      sync.Mutex
	targets map[string]*watched
	written int64 // to the file system, growth added up
	used    int64 // of the file system, at the last look
}

type watched struct {
	Target
	size    int64     // when measured last
	written int64     // Watch.written at that time
	at      time.Time // of that
	rest    time.Duration
	told    bool
}

// NewWatch makes a watch over layers on the file system of root. over is called, from Run, once for each layer that
// exceeds its limit.
func NewWatch(root string, over func(key string, used int64)) *Watch {
	return &Watch{root: root, over: over, targets: make(map[string]*watched)}
}

// Add begins to watch a layer, which is taken for empty.
func (w *Watch) Add(t Target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.targets[t.Key] = &watched{Target: t, written: w.written, at: time.Now()}
}

// Adopt begins to watch a layer of unknown size: it is measured soon.
func (w *Watch) Adopt(t Target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.targets[t.Key] = &watched{Target: t, size: t.Limit}
}

// Remove ends it. Unknown keys are no error.
func (w *Watch) Remove(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.targets, key)
}

// Run watches until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	tick := time.NewTicker(WatchEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.round(ctx, time.Now())
		case <-ctx.Done():
			return
		}
	}
}

func (w *Watch) round(ctx context.Context, now time.Time) {
	var st unix.Statfs_t
	if err := unix.Statfs(w.root, &st); err != nil {
		return // and again soon
	}
	// Files, too, so that what has no content does not go unnoticed. What has counts twice, and is measured the sooner.
	for _, t := range w.due(int64(st.Blocks-st.Bfree)*st.Bsize+int64(st.Files-st.Ffree)*fileCost, now) {
		w.measure(ctx, t)
	}
}

// due notes how much of the file system is used and returns the layers to be measured, the one nearest to its limit first.
func (w *Watch) due(used int64, now time.Time) []*watched {
	w.mu.Lock()
	defer w.mu.Unlock()
	if used > w.used && w.used > 0 {
		w.written += used - w.used
	}
	w.used = used
	var due []*watched
	for _, t := range w.targets {
		if t.told || now.Sub(t.at) < t.rest {
			continue
		}
		written := w.written - t.written
		if written > 0 && written >= t.Limit-t.size || t.at.IsZero() || now.Sub(t.at) >= WatchAll && t.Busy() {
			due = append(due, t)
		}
	}
	slices.SortFunc(due, func(a, b *watched) int { return int(min(max(a.Limit-a.size-b.Limit+b.size, -1), 1)) })
	return due
}

func (w *Watch) measure(ctx context.Context, t *watched) {
	w.mu.Lock()
	written := w.written
	w.mu.Unlock()
	start := time.Now()
	size, err := Measure(ctx, t.Path)
	switch {
	case ctx.Err() != nil:
		return
	case errors.Is(err, ErrTooDeep):
		size = t.Limit + 1
	case err != nil:
		return // it is being removed
	default:
		size += Unlinked(t.Pids())
	}
	w.mu.Lock()
	now := time.Now()
	t.size, t.written, t.at, t.rest = size, written, now, restShare*now.Sub(start)
	over := size > t.Limit && w.targets[t.Key] == t
	t.told = t.told || over
	w.mu.Unlock()
	if over {
		w.over(t.Key, size)
	}
}
