// Package blobcache keeps the content of remote data blobs on the local disk, frame by frame, as far as it has been read.
//
// # Trust
//
// Frames come from a store that may fail, be cut off or lie. What ReadAt returns has been checked: each frame against the SHA-256 in
// the blob's index; the index against the root that the caller knows, if it does; and when all frames are there, the whole
// against the digest that is the blob's name. A blob that fails the last check is never read again. Until then, without a root,
// frames are as good as the store's index.
//
// The local disk is not trusted with parts of a blob either: a frame that is read back is checked again, each time it comes
// from the file. So it does not matter what a crash, a full disk, a failed write-back or the loss of power has left in a file; holes tell
// which frames may be there, and a wrong one is fetched again. A complete blob is checked once, synced, marked by its time of
// change (see stamp), and renamed to its final name. It is trusted from then on, as local layers are, until it is found written to or cut
// off when somebody attaches it or a process begins: then it is removed.
//
// # Files
//
//	DIR/partial/<sha256>         sparse, as long as the blob
//	DIR/partial/<sha256>.index   its index, as at the end of the stored object
//	DIR/<aa>/<sha256>            complete and synced, never changed
//
// # Eviction
//
// The cache has a bound. What nobody has attached goes first, least recently used first; then frames of attached blobs, by
// punching holes. Complete files are only ever unlinked, and not while they are attached by path.
package blobcache

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// Object is a blob to be read.
type Object struct {
	Digest blob.Sum
	Size   int64
	Root   *blob.Sum // of its index; nil: not known
}

// Place is where a blob that was attached can be read.
type Place struct {
	// Path is its complete file, or empty: then it is read with ReadAt.
	Path string
}

// Config of a cache.
type Config struct {
	Dir   string
	Store blob.Store
	Limit int64 // bytes on disk
	// ReadTime is how long a read waits for the store; retries included.
	ReadTime time.Duration
	// Memory bounds the frames kept in memory; 0: 64 MiB. They serve readers when the disk is full.
	Memory int64
	// RecordTime is how long the access profile of a layer without one is recorded; 0: a minute.
	RecordTime time.Duration
	Log        *slog.Logger
	// Event, if set, is told what an operator wants to know. It does not block.
	Event func(Event)
}

// Event is about a store or blob.
type Event struct {
	Kind    EventKind
	Layers  []string
	Blob    string
	Message string
}

// EventKind is what has happened.
type EventKind string

// The kinds.
const (
	Out       EventKind = "out"       // the store does not answer
	Failed    EventKind = "failed"    // a read failed for good
	Recovered EventKind = "recovered" // the store answers again
	Corrupt   EventKind = "corrupt"   // the store has not what the name says
	Complete  EventKind = "complete"  // a blob is there whole
)

// Outage tells whether the store answers.
type Outage struct {
	Out   bool      `json:"out"`
	Since time.Time `json:"since,omitzero"`
	Error string    `json:"error,omitempty"`
}

// Stats count since Open, in bytes of content where not said otherwise.
type Stats struct {
	Used       int64 `json:"used"`
	Limit      int64 `json:"limit"`
	Complete   int64 `json:"complete"` // blobs that are there whole
	Partial    int64 `json:"partial"`
	Read       int64 `json:"read"`       // asked for
	Fetched    int64 `json:"fetched"`    // got from the store, decompressed
	Moved      int64 `json:"moved"`      // got from the store, as stored
	Prefetched int64 `json:"prefetched"` // of Fetched: by access profile, or ahead of a sequential reader
	Requests   int64 `json:"requests"`   // for frames, to the store
	Hits       int64 `json:"hits"`       // reads that waited for nothing
	Misses     int64 `json:"misses"`
	Evicted    int64 `json:"evicted"`
	NotCached  int64 `json:"not_cached"` // the disk had no room
	Corrupt    int64 `json:"corrupt"`    // frames that were not what the index says, locally or in the store
	FailedRead int64 `json:"failed_reads"`
}

type counters struct {
	used, read, fetched, moved, prefetched, requests, hits, misses, evicted, notCached, corrupt, failed atomic.Int64
}

const (
	defaultMemory     = 64 << 20
	defaultRecordTime = time.Minute
	// demandSlots bounds requests to the store that a reader waits for, or will soon; idleSlots those for nobody in particular.
	demandSlots = 32
	idleSlots   = 4
	// fullPause is how long nothing is written after the disk was full.
	fullPause = 2 * time.Second
)

// Cache keeps blobs. Methods may be called concurrently.
type Cache struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	life   sync.Mutex // so that nothing starts while Close waits
	wg     sync.WaitGroup
	dec    *blob.Decoder
	recent *recent
	slots  chan struct{}
	idle   chan struct{}
	n      counters
	clock  atomic.Uint64 // counts reads, so that frames have an order

	opened    time.Time    // what fullUntil counts from: the clock of the machine may be set
	fullUntil atomic.Int64 // nanoseconds
	evicting  atomic.Bool

	mu    sync.Mutex
	blobs map[blob.Sum]*entry
	out   outage
}

// Open opens a cache, whose directory no other process uses.
func Open(cfg Config) (*Cache, error) {
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	if cfg.RecordTime == 0 {
		cfg.RecordTime = defaultRecordTime
	}
	if cfg.Event == nil {
		cfg.Event = func(Event) {}
	}
	dec, err := blob.NewDecoder(4)
	if err != nil {
		return nil, err
	}
	c := &Cache{cfg: cfg, opened: time.Now(), dec: dec, recent: newRecent(cfg.Memory), blobs: map[blob.Sum]*entry{},
		slots: make(chan struct{}, demandSlots), idle: make(chan struct{}, idleSlots)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if err := os.MkdirAll(c.partialDir(), 0o700); err != nil {
		return nil, errs.E(errs.Precondition, "cannot make the cache: %w", err)
	}
	if err := c.scan(); err != nil {
		return nil, errs.E(errs.Precondition, "cannot read the cache: %w", err).WithHint("it may be removed as a whole: %s", cfg.Dir)
	}
	return c, nil
}

// Close ends what goes on. Reads fail from then on.
func (c *Cache) Close() {
	c.life.Lock()
	c.cancel()
	c.life.Unlock()
	c.wg.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.blobs {
		e.drop()
	}
	c.dec.Close()
}

func (c *Cache) partialDir() string { return filepath.Join(c.cfg.Dir, "partial") }

// CompletePath is where a blob lies when it is complete.
func (c *Cache) completePath(d blob.Sum) string {
	name := d.String()
	return filepath.Join(c.cfg.Dir, name[:2], name)
}

// scan finds what an earlier process left.
func (c *Cache) scan() error {
	names, err := os.ReadDir(c.cfg.Dir)
	if err != nil {
		return err
	}
	for _, d := range names {
		files, err := os.ReadDir(filepath.Join(c.cfg.Dir, d.Name()))
		if err != nil {
			continue // not a directory: not ours
		}
		for _, f := range files {
			sum, ok := parseSum(f.Name())
			fi, err := f.Info()
			if !ok || err != nil || !fi.Mode().IsRegular() {
				continue
			}
			if d.Name() != "partial" && d.Name() != f.Name()[:2] {
				continue
			}
			if d.Name() != "partial" && !intact(fi, sum) {
				c.distrust(sum)
				continue
			}
			e := c.entry(Object{Digest: sum, Size: fi.Size()})
			e.lastUse = c.tick()
			if d.Name() == "partial" {
				if e.state == absent {
					c.account(e, onDisk(fi))
				}
				continue
			}
			e.state = complete
			c.account(e, fi.Size())
		}
	}
	return nil
}

func onDisk(fi os.FileInfo) int64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return fi.Size()
}

func parseSum(name string) (blob.Sum, bool) {
	var s blob.Sum
	if len(name) != 2*len(s) {
		return s, false
	}
	for i := range s {
		hi, lo := digit(name[2*i]), digit(name[2*i+1])
		if hi < 0 || lo < 0 {
			return s, false
		}
		s[i] = byte(hi<<4 | lo)
	}
	return s, true
}

func digit(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	}
	return -1
}

func (c *Cache) tick() uint64 { return c.clock.Add(1) }

// entry returns the entry of a blob, made if need be.
func (c *Cache) entry(o Object) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.blobs[o.Digest]
	if e == nil {
		e = &entry{c: c, obj: o, users: map[string]bool{}, inflight: map[int]*flight{}}
		c.blobs[o.Digest] = e
	}
	return e
}

func (c *Cache) find(d blob.Sum) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.blobs[d]
}

// Attach makes blobs readable, and protects those that are complete from eviction, until Detach. It does not use the store.
func (c *Cache) Attach(layer string, objects []Object) ([]Place, error) {
	entries := make([]*entry, len(objects))
	for i, o := range objects {
		e := c.entry(o)
		if err := e.check(o); err != nil {
			return nil, err
		}
		entries[i] = e
	}
	places := make([]Place, len(objects))
	for i, e := range entries {
		places[i].Path = e.attach(layer, c.cfg.Limit*maxPinned/100-c.pinnedBytes())
	}
	return places, nil
}

// maxPinned is the share of the limit, in percent, that complete files in use may have: what cannot be evicted must leave room
// for what is read through the cache. More of them are served through it, too.
const maxPinned = 80

func (c *Cache) pinnedBytes() int64 {
	var n int64
	for _, e := range c.all() {
		e.mu.Lock()
		if e.pinned() {
			n += e.bytes
		}
		e.mu.Unlock()
	}
	return n
}

// spawn runs f until Close; false: it is closed.
func (c *Cache) spawn(f func()) bool {
	c.life.Lock()
	defer c.life.Unlock()
	if c.ctx.Err() != nil {
		return false
	}
	c.wg.Go(f)
	return true
}

// Detach ends what Attach began.
func (c *Cache) Detach(layer string) {
	for _, e := range c.all() {
		e.mu.Lock()
		delete(e.users, layer)
		e.mu.Unlock()
	}
}

func (c *Cache) all() []*entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*entry, 0, len(c.blobs))
	for _, e := range c.blobs {
		out = append(out, e)
	}
	return out
}

// ReadAt fills p from offset off of a blob that was attached once. It waits for the store until Config.ReadTime has passed or ctx ends.
func (c *Cache) ReadAt(ctx context.Context, d blob.Sum, p []byte, off int64) error {
	e := c.find(d)
	if e == nil {
		return errs.E(errs.NotFound, "blob %s is not attached", d)
	}
	if off < 0 || off > e.obj.Size || int64(len(p)) > e.obj.Size-off {
		return errs.E(errs.Invalid, "read past the end of blob %s", d)
	}
	if len(p) == 0 {
		return nil
	}
	c.n.read.Add(int64(len(p)))
	ctx, cancel := context.WithTimeout(ctx, c.cfg.ReadTime)
	defer cancel()
	err := e.readAt(ctx, p, off)
	if err != nil && !errors.Is(err, context.Canceled) {
		c.n.failed.Add(1)
		e.readFailed(err)
	}
	return err
}

// Ready reports whether ReadAt would wait for the local disk only.
func (c *Cache) Ready(d blob.Sum, n int, off int64) bool {
	e := c.find(d)
	return e != nil && e.ready(n, off)
}

// Stats returns the counters.
func (c *Cache) Stats() Stats {
	s := Stats{
		Used: c.n.used.Load(), Limit: c.cfg.Limit, Read: c.n.read.Load(), Fetched: c.n.fetched.Load(), Moved: c.n.moved.Load(),
		Prefetched: c.n.prefetched.Load(), Requests: c.n.requests.Load(), Hits: c.n.hits.Load(), Misses: c.n.misses.Load(),
		Evicted: c.n.evicted.Load(), NotCached: c.n.notCached.Load(), Corrupt: c.n.corrupt.Load(), FailedRead: c.n.failed.Load(),
	}
	for _, e := range c.all() {
		e.mu.Lock()
		switch {
		case e.state == complete:
			s.Complete++
		case e.bytes > 0:
			s.Partial++
		}
		e.mu.Unlock()
	}
	return s
}

// account records how much of a blob is on disk; e.mu is held, or nobody knows e yet.
func (c *Cache) account(e *entry, bytes int64) {
	c.n.used.Add(bytes - e.bytes)
	e.bytes = bytes
}

// blobName is the name of a blob's object in the store.
func blobName(d blob.Sum) string {
	name := d.String()
	return "blobs/" + name[:2] + "/" + name
}

// syncDir makes renames into dir durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// readFull is ReadAt of a file that must have it all.
func readFull(f *os.File, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}
