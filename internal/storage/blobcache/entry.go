package blobcache

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

type state int

const (
	absent   state = iota // nothing is open; a partial file may be there
	partial               // index known, file open (or the disk refuses one: file is nil)
	complete              // the whole file is there and verified
	bad                   // the store's content is not what its name says
)

// entry is one blob.
type entry struct {
	c *Cache

	// file guards the use of f against its being closed or punched: readers hold it for reading.
	file sync.RWMutex
	f    *os.File

	loading sync.Mutex // held while the index is loaded; taken before mu
	sealing bool       // guarded by mu: being completed

	mu       sync.Mutex
	obj      Object
	state    state
	index    *blob.Index
	have     []bool   // frames that may be in the file
	missing  int      // frames not in have
	used     []uint64 // per frame: c.clock when it was last read
	inflight map[int]*flight
	streams  [8]stream
	users    map[string]bool // layer → by path
	lastUse  uint64
	bytes    int64
	records  []*recorder
	err      error     // why it is bad
	failed   time.Time // when a failed read was last reported
}

func (e *entry) name() string      { return e.obj.Digest.String() }
func (e *entry) partial() string   { return filepath.Join(e.c.partialDir(), e.name()) }
func (e *entry) indexFile() string { return e.partial() + ".index" }

// check refuses an object that contradicts what is known of its digest.
func (e *entry) check(o Object) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o.Size != e.obj.Size {
		if e.state == complete && len(e.users) == 0 { // what an earlier process left was cut off
			e.c.distrust(e.obj.Digest)
			e.reset()
		}
		if e.state != absent || len(e.users) > 0 {
			return errs.E(errs.Invalid, "blob %s has %d bytes, not %d", o.Digest, e.obj.Size, o.Size)
		}
		e.obj.Size = o.Size // the size of a file that an earlier process left is not to be trusted
	}
	if o.Root != nil {
		if e.obj.Root != nil && *e.obj.Root != *o.Root {
			return errs.E(errs.Invalid, "blob %s is said to have different indexes", o.Digest)
		}
		e.obj.Root = o.Root
	}
	return nil
}

// pinned tells whether somebody has the complete file's path; mu is held.
func (e *entry) pinned() bool {
	for _, direct := range e.users {
		if direct {
			return true
		}
	}
	return false
}

// attach notes a user and returns the path of the complete file, if there is one and room bytes more may be made unevictable.
func (e *entry) attach(layer string, room int64) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lastUse = e.c.tick()
	path := ""
	if e.state == complete {
		path = e.c.completePath(e.obj.Digest)
		if fi, err := os.Stat(path); err != nil || fi.Size() != e.obj.Size || !intact(fi, e.obj.Digest) {
			e.c.distrust(e.obj.Digest)
			e.reset()
			path = ""
		}
	}
	if e.state == partial && e.missing == 0 {
		e.c.spawn(e.seal) // an earlier attempt may have found no room on the disk
	}
	if path != "" && e.obj.Size > room && !e.pinned() {
		path = ""
	}
	// Blobs once attached by path stay so: their mount has the file.
	e.users[layer] = e.users[layer] || path != ""
	return path
}

// stamp is the time of change that a blob's complete file has: a date that no write makes, and which every write ends.
func stamp(d blob.Sum) time.Time { return time.Unix(int64(binary.BigEndian.Uint32(d[:4])>>4), 0) }

// intact tells whether a complete file has not been written to since it was checked.
func intact(fi os.FileInfo, d blob.Sum) bool { return fi.ModTime().Equal(stamp(d)) }

// distrust removes a complete file that is not as it was left. It is not used for a partial one: mounts may have it open, which
// must not see the holes of eviction.
func (c *Cache) distrust(d blob.Sum) {
	err := os.Remove(c.completePath(d))
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	c.n.corrupt.Add(1)
	c.cfg.Log.Warn("a cached blob was changed by something else: it is fetched again", "blob", d, "err", err)
}

// reset forgets what is on disk; mu is held.
func (e *entry) reset() {
	e.state, e.index, e.have, e.used, e.missing = absent, nil, nil, nil, 0
	e.c.account(e, 0)
	e.c.recent.forget(e)
	go e.closeFile() // takes file, which is taken before mu elsewhere
}

func (e *entry) closeFile() {
	e.file.Lock()
	defer e.file.Unlock()
	if e.f != nil && !e.opened() {
		e.f.Close()
		e.f = nil
	}
}

// opened tells whether the open file is the one that the state means.
func (e *entry) opened() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state != absent && e.state != bad
}

// drop closes the file at the end of the cache.
func (e *entry) drop() {
	e.file.Lock()
	defer e.file.Unlock()
	if e.f != nil {
		e.f.Close()
		e.f = nil
	}
}

func (e *entry) ready(n int, off int64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state == complete {
		return true
	}
	if e.state != partial || off < 0 || n <= 0 || off+int64(n) > e.obj.Size {
		return false
	}
	for i := e.index.At(off); i <= e.index.At(off+int64(n)-1); i++ {
		if !e.have[i] && !e.c.recent.has(e, i) {
			return false
		}
	}
	return true
}

// errStale: the blob was evicted or completed, or its index replaced, while it was read. The read begins again.
var errStale = errors.New("stale")

func (e *entry) readAt(ctx context.Context, p []byte, off int64) error {
	for {
		if err := e.readOnce(ctx, p, off); !errors.Is(err, errStale) || ctx.Err() != nil {
			return err
		}
	}
}

func (e *entry) readOnce(ctx context.Context, p []byte, off int64) error {
	if done, err := e.readComplete(p, off); done {
		return err
	}
	x, err := e.load(ctx)
	if err != nil {
		return err
	}
	if x == nil { // it was completed meanwhile
		return errStale
	}
	first, last := x.At(off), x.At(off+int64(len(p))-1)
	hit := e.touch(ctx, x, first, last)
	if hit {
		e.c.n.hits.Add(1)
	} else {
		e.c.n.misses.Add(1)
	}
	for i := first; i <= last; i++ {
		raw, err := e.frame(ctx, x, i)
		if err != nil {
			return err
		}
		begin := x.Frame(i).RawOff
		from := max(0, off-begin)
		copy(p[begin+from-off:], raw[from:])
	}
	return nil
}

// readComplete reads from the complete file, if there is one.
func (e *entry) readComplete(p []byte, off int64) (bool, error) {
	e.mu.Lock()
	if e.state != complete {
		err := e.err
		e.mu.Unlock()
		return err != nil, err
	}
	e.lastUse = e.c.tick()
	e.mu.Unlock()
	e.file.RLock()
	f := e.f
	if f != nil {
		defer e.file.RUnlock()
		e.c.n.hits.Add(1)
		return true, readFull(f, p, off)
	}
	e.file.RUnlock()
	e.file.Lock()
	if e.f == nil {
		f, err := os.Open(e.c.completePath(e.obj.Digest))
		if err != nil {
			e.file.Unlock()
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.state == complete && errors.Is(err, os.ErrNotExist) {
				e.reset()
				return false, nil
			}
			return true, err
		}
		e.f = f
	}
	e.file.Unlock()
	return e.readComplete(p, off)
}

// load makes the index known and the partial file open. It returns nil when the blob is complete.
func (e *entry) load(ctx context.Context) (*blob.Index, error) {
	e.mu.Lock()
	x, st, bad := e.index, e.state, e.err
	e.mu.Unlock()
	switch {
	case bad != nil:
		return nil, bad
	case st == partial:
		return x, nil
	case st == complete:
		return nil, nil
	}
	e.loading.Lock()
	defer e.loading.Unlock()
	e.mu.Lock()
	x, st = e.index, e.state
	e.mu.Unlock()
	if st != absent {
		return x, nil
	}
	x, err := e.findIndex(ctx)
	if err != nil {
		return nil, err
	}
	f, have := e.openPartial(x)
	e.file.Lock()
	if e.f != nil {
		e.f.Close()
	}
	e.f = f
	e.mu.Lock()
	e.index, e.have, e.used, e.state = x, have, make([]uint64, x.Frames()), partial
	e.missing = 0
	var bytes int64
	for i, h := range have {
		if h {
			bytes += int64(x.Frame(i).RawLen)
		} else {
			e.missing++
		}
	}
	e.c.account(e, bytes)
	whole := e.missing == 0
	e.mu.Unlock()
	e.file.Unlock()
	if whole {
		e.seal()
	}
	return x, nil
}

// findIndex reads the index from the disk, else from the store.
func (e *entry) findIndex(ctx context.Context) (*blob.Index, error) {
	const most = 1 << 30
	if f, err := os.Open(e.indexFile()); err == nil {
		b, err := io.ReadAll(io.LimitReader(f, most))
		f.Close()
		if err == nil {
			if x, err := blob.ParseIndex(b); err == nil && e.accept(x) == nil {
				return x, nil
			}
		}
		_ = os.Remove(e.indexFile())
	}
	x, err := e.askIndex(ctx)
	if err != nil {
		return nil, err
	}
	// Best effort: without it, the store is asked again after a restart.
	if err := writeFile(e.indexFile(), x.Bytes()); err != nil {
		e.c.cfg.Log.Debug("index not kept", "blob", e.name(), "err", err)
	}
	return x, nil
}

// accept checks an index against what is known of the blob.
func (e *entry) accept(x *blob.Index) error {
	switch {
	case x.RawSize() != e.obj.Size:
		return fmt.Errorf("its index is of %d bytes, not %d: %w", x.RawSize(), e.obj.Size, blob.ErrDamaged)
	case x.Digest() != e.obj.Digest:
		return fmt.Errorf("its index is of %s: %w", x.Digest(), blob.ErrDamaged)
	case e.obj.Root != nil && x.Root() != *e.obj.Root:
		return fmt.Errorf("its index is not the one that the layer names: %w", blob.ErrDamaged)
	}
	return nil
}

func writeFile(path string, b []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return os.Rename(tmp, path)
}

// openPartial opens the sparse file and finds which frames may be in it. A file that cannot be made is no error: nothing is cached then.
func (e *entry) openPartial(x *blob.Index) (*os.File, []bool) {
	have := make([]bool, x.Frames())
	f, err := os.OpenFile(e.partial(), os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = f.Truncate(x.RawSize())
	}
	if err != nil {
		e.c.cfg.Log.Warn("a blob is not cached", "blob", e.name(), "err", err)
		if f != nil {
			f.Close()
		}
		return nil, have
	}
	for off := int64(0); off < x.RawSize(); {
		begin, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err != nil {
			break // ENXIO: holes to the end
		}
		end, err := unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		if err != nil || end <= begin {
			break
		}
		for i := x.At(begin); i < x.Frames() && x.Frame(i).RawOff < end; i++ {
			fr := x.Frame(i)
			have[i] = have[i] || begin <= fr.RawOff && fr.RawOff+int64(fr.RawLen) <= end
		}
		off = end
	}
	return f, have
}

// frame returns the bytes of a frame, verified.
func (e *entry) frame(ctx context.Context, x *blob.Index, i int) ([]byte, error) {
	for {
		if raw := e.c.recent.get(e, i); raw != nil {
			return raw, nil
		}
		e.mu.Lock()
		current := e.state == partial && e.index == x
		fl, have, err := e.inflight[i], current && e.have[i], e.err
		e.mu.Unlock()
		switch {
		case err != nil:
			return nil, err
		case !current:
			return nil, errStale
		case fl != nil:
			select {
			case <-fl.done:
			case <-ctx.Done():
				return nil, fmt.Errorf("wait for the store: %w", ctx.Err())
			case <-e.c.ctx.Done():
				return nil, e.c.ctx.Err()
			}
			if fl.err == nil {
				return fl.raw, nil
			}
			if !temporary(fl.err) || ctx.Err() != nil || e.c.ctx.Err() != nil {
				return nil, fl.err
			}
			e.want(x, i, i, demand) // its deadline was another reader's
		case have:
			if raw := e.readBack(x, i); raw != nil {
				return raw, nil
			}
		default:
			// Nothing is fetched any more after the end of the cache.
			if err := errors.Join(ctx.Err(), e.c.ctx.Err()); err != nil {
				return nil, err
			}
			e.want(x, i, i, demand)
		}
	}
}

// readBack reads a frame from the partial file and checks it. What is wrong is no longer taken to be there.
func (e *entry) readBack(x *blob.Index, i int) []byte {
	fr := x.Frame(i)
	raw := make([]byte, fr.RawLen)
	e.file.RLock()
	f := e.f
	err := os.ErrClosed
	if f != nil {
		err = readFull(f, raw, fr.RawOff)
	}
	e.file.RUnlock()
	if err == nil && blob.Sum(sha256.Sum256(raw)) == fr.Sum {
		e.c.recent.put(e, i, raw)
		return raw
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state == partial && e.index == x && e.have[i] {
		e.have[i] = false
		e.missing++
		e.c.account(e, e.bytes-int64(fr.RawLen))
		e.c.n.corrupt.Add(1)
	}
	return nil
}

// layers returns who has attached the blob, sorted.
func (e *entry) layers() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]string, 0, len(e.users))
	for l := range e.users {
		out = append(out, l)
	}
	slices.Sort(out)
	return out
}
