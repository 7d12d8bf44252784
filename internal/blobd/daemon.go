package blobd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/blobcache"
	"github.com/harena-dev/harena/internal/storage/fuseblob"
)

const (
	// readers are threads that read requests from the kernel. What is cached they answer themselves; what must be waited for
	// waits elsewhere.
	readers = 8
	// readahead is the kernel's own, of files below DIR/blobfs. EROFS has its own for what is mounted from them; blobcache
	// reads ahead of sequential readers, which a larger one here would also do for faults of mapped pages, around each.
	readahead = 1 << 20
	// stuck is how long a request of the kernel may be under way beyond its read's deadline before this daemon no longer
	// claims to serve: its holder then kills it.
	stuck = 30 * time.Second

	mountSource = "harena-blobs" // in mountinfo
)

// Serve describes the daemon's process.
type Serve struct {
	Config
	Version  string
	Settings string     // told to who asks whether this daemon is as wanted
	Store    blob.Store // decorated as the caller likes
	// Holder is the command that calls Hold.
	Holder []string
	Log    *slog.Logger
}

// daemon serves.
type daemon struct {
	s     Serve
	since time.Time
	cache *blobcache.Cache
	files *files
	hold  *holding
	log   *eventLog
	end   chan struct{} // closed to end the process without another word to the kernel

	mu       sync.Mutex
	state    *state
	server   *fuseblob.Server
	conn     *fuseblob.Conn
	takeover bool
	closing  bool
}

// Run serves until it is told to end, over the control socket or by ctx.
func Run(ctx context.Context, s Serve) (err error) {
	s.Config = s.WithDefaults()
	protect()
	for _, dir := range []string{s.own(), s.cache()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return errs.E(errs.Precondition, "cannot make %s: %w", dir, err)
		}
	}
	lock, err := takeLock(s.Config)
	if err != nil {
		return err
	}
	defer lock.Close()
	d := &daemon{s: s, since: time.Now(), log: newEventLog(), end: make(chan struct{}),
		hold: &holding{config: s.Config, command: s.Holder}, state: readState(s.stateFile(), bootID())}
	d.cache, err = blobcache.Open(blobcache.Config{
		Dir: s.cache(), Store: s.Store, Limit: s.CacheBytes, ReadTime: s.ReadTime, Log: s.Log, Event: d.cacheEvent,
	})
	if err != nil {
		return err
	}
	d.files = &files{cache: d.cache, byNode: map[uint64]blobcache.Object{}}
	if err := d.restore(); err != nil {
		return err
	}
	if err := d.connect(); err != nil {
		return err
	}
	l, err := listenAt("unix", s.socket())
	if err != nil {
		return err
	}
	defer l.Close()
	go d.serveControl(l)
	go d.beat()
	s.Log.Info("blobd serves", "pid", os.Getpid(), "version", s.Version, "takeover", d.takeover)
	select {
	case <-d.end:
	case <-ctx.Done():
	}
	// Nothing is closed: the process ends, and what it has not answered its successor, or the end of the connection, will.
	return nil
}

// protect asks the kernel to spare this process: reads of all sandboxes wait for it. Where it may not, it goes without.
func protect() {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0)
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// restore attaches what was attached to an earlier daemon. By-path users keep their files from eviction.
func (d *daemon) restore() error {
	for name, l := range d.state.Layers {
		if _, err := d.cache.Attach(name, objects(l.Blobs)); err != nil {
			d.s.Log.Error("a layer is not attached any more", "layer", name, "err", err)
			delete(d.state.Layers, name)
			continue
		}
		for _, o := range l.Blobs {
			if err := d.files.add(toObject(o)); err != nil {
				return err
			}
		}
	}
	for _, o := range d.state.Detached {
		if _, err := d.cache.Attach(detachedUser, []blobcache.Object{toObject(o)}); err == nil {
			_ = d.files.add(toObject(o))
		}
	}
	d.cache.Detach(detachedUser)
	return nil
}

// detachedUser makes blobs known to the cache that nobody is attached to.
const detachedUser = "-"

func objects(in []Object) []blobcache.Object {
	out := make([]blobcache.Object, len(in))
	for i, o := range in {
		out[i] = toObject(o)
	}
	return out
}

// connect takes the holder's connection over, or makes a new one, and serves it.
func (d *daemon) connect() error {
	fd, params, err := d.hold.take()
	if err != nil {
		d.s.Log.Warn("the holder of the connection does not answer", "err", err)
		_ = dismissHolder(d.s.Config)
	}
	if fd >= 0 {
		conn := fuseblob.Resume(fd, params)
		if err := conn.Resend(); err == nil {
			d.takeover = true
			d.serve(conn)
			d.hold.open() // the last daemon may have died before the kernel had its answer
			d.log.add(Event{Kind: EventTakeover, Message: "a new daemon serves; reads go on"})
			return nil
		} else if !errs.Is(err, errs.Unsupported) {
			d.s.Log.Warn("the connection to the kernel has ended", "err", err)
		} else {
			// Requests that the last daemon had read would hang for ever: better an error for all than that.
			d.s.Log.Warn("the connection cannot be taken over", "err", err)
			abort(d.s.mountPoint())
		}
		conn.Close()
	}
	return d.renew()
}

// abort ends a connection although descriptors of it are open; fuse.rst, "umount -f".
func abort(dir string) { _ = unix.Unmount(dir, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW) }

// renew makes a new connection. Layers with lazy blobs of an earlier one are degraded from here on.
func (d *daemon) renew() error {
	dir := d.s.mountPoint()
	if err := unmountAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return errs.E(errs.Precondition, "cannot make %s: %w", dir, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.Connection++
	if err := d.state.write(d.s.stateFile()); err != nil {
		return err
	}
	conn, err := fuseblob.Mount(dir, mountSource, readahead)
	if err != nil {
		return err
	}
	if err := d.hold.keep(conn.FD(), conn.Params()); err != nil {
		d.s.Log.Error("nobody holds the connection: if this daemon dies, mounts over it break", "err", err)
	}
	d.serveLocked(conn)
	d.hold.open()
	if broken := d.degraded(); len(broken) > 0 {
		d.log.add(Event{Kind: EventDegraded, Layers: broken,
			Message: "no daemon served for too long: what is mounted from the layers gives EIO until it is attached and mounted anew"})
	}
	return nil
}

func (d *daemon) serve(conn *fuseblob.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.serveLocked(conn)
}

func (d *daemon) serveLocked(conn *fuseblob.Conn) {
	server := fuseblob.NewServer(conn, d.files, d.s.Log)
	d.conn, d.server = conn, server
	go func() {
		err := server.Serve(readers)
		d.mu.Lock()
		closing := d.closing
		d.mu.Unlock()
		conn.Close()
		if closing {
			return
		}
		d.s.Log.Error("the connection to the kernel was ended by somebody; making another", "err", err)
		for d.renew() != nil {
			time.Sleep(time.Second)
		}
	}()
}

// degraded lists layers whose mounts are broken; mu is held.
func (d *daemon) degraded() []string {
	var out []string
	for name, l := range d.state.Layers {
		if l.degraded(d.state.Connection) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// beat tells the holder that this daemon serves, as long as it does, and replaces a holder that is gone.
func (d *daemon) beat() {
	for range time.Tick(beatInterval(d.s.Patience)) {
		d.mu.Lock()
		server, conn, closing := d.server, d.conn, d.closing
		d.mu.Unlock()
		if closing {
			return
		}
		if n, since := server.Waiting(); n > 0 && time.Since(since) > d.s.ReadTime+stuck {
			d.s.Log.Error("a read has not ended in time: this daemon is stuck", "since", since)
			continue
		}
		d.remount()
		if d.hold.beat() == nil {
			continue
		}
		d.s.Log.Warn("the holder is gone; starting another")
		if err := d.hold.keep(conn.FD(), conn.Params()); err != nil {
			d.s.Log.Error("nobody holds the connection: if this daemon dies, mounts over it break", "err", err)
		}
		d.hold.open()
	}
}

// remount mounts the connection again when somebody has unmounted it lazily: what uses it goes on, but nothing new finds it.
// When nothing used it, its end is noticed where it is served.
func (d *daemon) remount() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remountLocked()
}

func (d *daemon) remountLocked() {
	if d.closing || d.conn.MountedOn(d.s.mountPoint()) {
		return
	}
	if err := d.conn.MountAgain(d.s.mountPoint(), mountSource); err != nil {
		d.s.Log.Error("blobs are not mounted where they are looked for", "err", err)
		return
	}
	d.s.Log.Warn("somebody has unmounted the directory of blobs; mounted again", "dir", d.s.mountPoint())
}

func (d *daemon) attach(r attachRequest) (attachAnswer, error) {
	if err := checkAttach(r.Layer, r.Blobs); err != nil {
		return attachAnswer{}, err
	}
	if r.Layer == detachedUser {
		return attachAnswer{}, errs.E(errs.Invalid, "%q is not a layer", r.Layer)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remountLocked()
	old, had := d.state.Layers[r.Layer]
	places, err := d.cache.Attach(r.Layer, objects(r.Blobs))
	if err != nil {
		if !had {
			d.cache.Detach(r.Layer)
		}
		return attachAnswer{}, err
	}
	l := &attachedLayer{Blobs: r.Blobs, Lazy: make([]bool, len(places)), Connection: d.state.Connection}
	var a attachAnswer
	var lazy []blobcache.Object
	for i, p := range places {
		o := toObject(r.Blobs[i])
		if err := d.files.add(o); err != nil {
			return attachAnswer{}, err
		}
		path := Path{Path: p.Path}
		if p.Path == "" {
			path = Path{Path: d.s.mountPoint() + "/" + r.Blobs[i].Digest, Lazy: true}
			l.Lazy[i] = true
			lazy = append(lazy, o)
		}
		a.Paths = append(a.Paths, path)
	}
	d.state.Layers[r.Layer] = l
	d.state.Detached = slices.DeleteFunc(d.state.Detached, func(o Object) bool {
		return slices.ContainsFunc(r.Blobs, func(b Object) bool { return b.Digest == o.Digest })
	})
	if err := d.state.write(d.s.stateFile()); err != nil {
		if had {
			d.state.Layers[r.Layer] = old
		} else {
			delete(d.state.Layers, r.Layer)
			d.cache.Detach(r.Layer)
		}
		return attachAnswer{}, err
	}
	if !had && len(lazy) > 0 {
		d.cache.Warm(r.Layer, lazy)
	}
	return a, nil
}

func (d *daemon) detach(r detachRequest) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, ok := d.state.Layers[r.Layer]
	if !ok {
		return nil
	}
	delete(d.state.Layers, r.Layer)
	used := map[string]bool{}
	for _, other := range d.state.Layers {
		for _, o := range other.Blobs {
			used[o.Digest] = true
		}
	}
	for i, o := range l.Blobs {
		known := slices.ContainsFunc(d.state.Detached, func(x Object) bool { return x.Digest == o.Digest })
		if l.Lazy[i] && !used[o.Digest] && !known {
			d.state.Detached = append(d.state.Detached, o)
		}
	}
	if n := len(d.state.Detached) - maxDetached; n > 0 {
		for _, o := range d.state.Detached[:n] {
			d.files.remove(toSum(o.Digest))
		}
		d.state.Detached = slices.Clone(d.state.Detached[n:])
	}
	err := d.state.write(d.s.stateFile())
	d.cache.Detach(r.Layer)
	return err
}

func (d *daemon) status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	waiting, _ := d.server.Waiting()
	s := Status{
		Version: d.s.Version, Pid: os.Getpid(), HolderPid: d.hold.process(), Since: d.since, Takeover: d.takeover,
		Requests: d.server.Served(), Waiting: waiting, Cache: d.cache.Stats(), Store: d.cache.Outage(),
	}
	for name, l := range d.state.Layers {
		ls := LayerStatus{Layer: name, Blobs: len(l.Blobs), Degraded: l.degraded(d.state.Connection)}
		for _, lazy := range l.Lazy {
			if lazy {
				ls.Lazy++
			}
		}
		s.Layers = append(s.Layers, ls)
	}
	slices.SortFunc(s.Layers, func(a, b LayerStatus) int {
		switch {
		case a.Layer < b.Layer:
			return -1
		case a.Layer > b.Layer:
			return 1
		}
		return 0
	})
	return s
}

// leave ends the process and leaves the connection to the holder and a successor.
func (d *daemon) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closing {
		d.closing = true
		close(d.end)
	}
}

// shutdown ends everything.
func (d *daemon) shutdown() error {
	d.mu.Lock()
	d.closing = true
	conn := d.conn
	d.mu.Unlock()
	err := errors.Join(dismissHolder(d.s.Config), unmountAll(d.s.mountPoint()))
	conn.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-d.end:
	default:
		close(d.end)
	}
	return err
}

// cacheEvent translates.
func (d *daemon) cacheEvent(e blobcache.Event) {
	kinds := map[blobcache.EventKind]string{
		blobcache.Out: EventOutage, blobcache.Failed: EventFailed, blobcache.Recovered: EventRecovered,
		blobcache.Corrupt: EventCorrupt, blobcache.Complete: EventComplete,
	}
	d.log.add(Event{Kind: kinds[e.Kind], Message: e.Message, Layers: e.Layers, Blob: e.Blob})
}

// decode reads a request's body.
func decode(b []byte, into any) error {
	if err := json.Unmarshal(b, into); err != nil {
		return errs.E(errs.Invalid, "the request is not understood: %w", fmt.Errorf("decode: %w", err))
	}
	return nil
}
