package layer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// DefaultIdleMounts is how many mounts that nobody uses are kept for the next
// sandbox.
const DefaultIdleMounts = 64

// Mounts keeps each layer mounted once on this node, at DIR/mounts/<sha256>, so
// that every overlay on it shares one page cache.
//
// A mount has owners, which are names that the caller chooses (sandbox IDs).
// Owners are known in memory only: after a restart mounts are found again in
// /proc/self/mountinfo and belong to nobody until Adopt. Mounts without an owner
// stay, up to a number; beyond it the one unused for longest goes. Methods may
// be called concurrently.
type Mounts struct {
	store *Store
	dir   string
	mode  MountMode
	idle  int
	blobs Blobs

	mu      sync.Mutex
	entries map[Digest]*mountEntry
	clock   uint64 // counts releases, so that idle mounts have an order
}

type mountEntry struct {
	// busy is held while mounting or unmounting; taken before Mounts.mu, never inside it.
	busy sync.Mutex
	// The rest is guarded by Mounts.mu; mounted changes under both.
	mounted bool
	lazy    bool // blobs are attached
	dead    bool // what is mounted gives EIO, also after its blobs are served again
	stale   bool // there are better files to mount it from
	owners  map[string]bool
	lost    map[string]bool // owners whose overlay has a dead mount
	waiting int             // calls that hold or wait for busy; they keep the entry in the map
	idledAt uint64
}

// OpenMounts prepares DIR/mounts, probes how this kernel mounts images, and
// finds mounts that an earlier process made. maxIdle bounds mounts without an
// owner. blobs may be nil. unsupported: the kernel cannot mount EROFS.
func OpenMounts(ctx context.Context, store *Store, maxIdle int, blobs Blobs) (*Mounts, error) {
	m := &Mounts{store: store, dir: store.mounts, idle: maxIdle, blobs: blobs, entries: make(map[Digest]*mountEntry)}
	if err := makeDir(m.dir); err != nil {
		return nil, store.diskError(fmt.Errorf("open mounts: %w", err))
	}
	if err := makePrivate(m.dir); err != nil {
		return nil, err
	}
	var err error
	if m.mode, err = m.probe(ctx); err != nil {
		return nil, err
	}
	found, err := m.scan()
	if err != nil {
		return nil, err
	}
	for d := range found.layers {
		// Lazy as far as is known: to detach what is not attached does nothing.
		m.entries[d] = &mountEntry{mounted: true, lazy: blobs != nil, owners: make(map[string]bool)}
	}
	return m, nil
}

// Mode reports how images are mounted.
func (m *Mounts) Mode() MountMode { return m.mode }

// probe makes an image of one small file and has it mounted and read back.
func (m *Mounts) probe(ctx context.Context) (MountMode, error) {
	dir, err := os.MkdirTemp(m.store.tmp(), "probe-*")
	if err != nil {
		return "", m.store.diskError(err)
	}
	defer os.RemoveAll(dir)
	content := []byte(strings.Repeat("probe ", 1000)) // more than a block, not a multiple of one
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return "", m.store.diskError(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "probe"), content, 0o600); err != nil {
		return "", m.store.diskError(err)
	}
	img := image{filepath.Join(dir, "meta"), []string{filepath.Join(dir, "blob")}}
	meta, err := os.Create(img.meta)
	if err != nil {
		return "", m.store.diskError(err)
	}
	defer meta.Close()
	blob, err := os.Create(img.blobs[0])
	if err != nil {
		return "", m.store.diskError(err)
	}
	defer blob.Close()
	if _, err := erofs.FromDir(ctx, tree, meta, blob, erofs.Options{}); err != nil {
		return "", m.store.diskError(err)
	}
	return probeMounts(img, content)
}

func (m *Mounts) path(d Digest) string { return filepath.Join(m.dir, d.Hex()) }

// Acquire mounts a layer unless it is mounted, makes owner one of its owners and
// returns its directory. The same owner may acquire it again without effect, but
// not at the same time, nor while it is released. not-found: the store has no such layer.
func (m *Mounts) Acquire(ctx context.Context, d Digest, owner string) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	m.mu.Lock()
	e := m.entry(d)
	had := e.owners[owner]
	e.owners[owner] = true // from here on it is not unmounted
	e.waiting++
	mounted := e.mounted && !e.dead && !e.stale
	m.mu.Unlock()

	var err error
	if !mounted || !isMounted(m.path(d)) {
		err = m.ensure(ctx, d, e)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e.waiting--
	if err != nil {
		if !had {
			m.disown(d, e, owner)
		}
		return "", err
	}
	return m.path(d), nil
}

// entry returns the entry of a layer, made if need be; mu is held.
func (m *Mounts) entry(d Digest) *mountEntry {
	e := m.entries[d]
	if e == nil {
		e = &mountEntry{owners: make(map[string]bool)}
		m.entries[d] = e
	}
	return e
}

// disown removes an owner; mu is held.
func (m *Mounts) disown(d Digest, e *mountEntry, owner string) {
	delete(e.owners, owner)
	delete(e.lost, owner)
	m.clock++
	e.idledAt = m.clock
	m.forget(d, e)
}

// forget drops an entry that means nothing any more; mu is held.
func (m *Mounts) forget(d Digest, e *mountEntry) {
	if !e.mounted && len(e.owners) == 0 && e.waiting == 0 {
		delete(m.entries, d)
	}
}

// ensure mounts the layer of an entry, once however many wait for it.
func (m *Mounts) ensure(ctx context.Context, d Digest, e *mountEntry) error {
	e.busy.Lock()
	defer e.busy.Unlock()
	m.mu.Lock()
	mounted, dead, stale := e.mounted && isMounted(m.path(d)), e.dead, e.stale
	e.stale = false // what becomes better from here on is for the next one
	m.mu.Unlock()
	switch {
	case mounted && !dead && !stale:
		return nil
	case mounted && !dead:
		m.renew(ctx, d, e)
		return nil
	}
	if dead { // overlays upon it keep it
		if err := detach(m.path(d)); err != nil {
			return err
		}
	}
	// A mount that somebody took away would leave an empty directory in the place of the layer.
	lazy, err := m.mount(ctx, d, false)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		e.mounted = e.mounted && !dead
		return err
	}
	e.mounted, e.lazy, e.dead = true, lazy, false
	return nil
}

// isMounted tells whether a file system is mounted on dir; statx(2).
func isMounted(dir string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	return err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// mount mounts a layer whose mount point is free or, with over, in the place of its mount; lazy says that blobs were attached for it.
func (m *Mounts) mount(ctx context.Context, d Digest, over bool) (lazy bool, err error) {
	l, err := m.store.Load(d)
	if err != nil {
		return false, err
	}
	defer func() {
		// What is mounted already needs its blobs.
		if err != nil && lazy && !over {
			err = errors.Join(err, m.blobs.Detach(context.WithoutCancel(ctx), d))
		}
	}()
	img, lazy, err := m.images(ctx, l)
	if err != nil {
		return lazy, err
	}
	fd, err := mountImage(img, m.mode)
	if err != nil {
		return lazy, mountFault(d, err)
	}
	defer unix.Close(fd)
	dir := m.path(d)
	if over {
		return lazy, replaceMount(fd, dir)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return lazy, m.store.diskError(err)
	}
	if err := attach(fd, dir); err != nil {
		err = errors.Join(err, os.Remove(dir))
		if errors.Is(err, unix.ENOSPC) {
			return lazy, errs.E(errs.Capacity, "the node has no room for more mounts: %w", err).
				WithHint("raise the sysctl fs.mount-max")
		}
		return lazy, err
	}
	return lazy, nil
}

// mountFault says what the kernel made of an image: the node is short of something, or the image is not what was written.
func mountFault(d Digest, err error) error {
	for _, short := range []syscall.Errno{unix.ENOMEM, unix.ENOSPC, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, short) {
			return errs.E(errs.Capacity, "layer %s cannot be mounted: %w", d, short).On("layer %s", d).WithHint("try again later")
		}
	}
	e := errs.E(errs.Precondition, "layer %s cannot be mounted: its image is damaged or missing", d).On("layer %s", d).
		WithHint("`harena layer verify %s` says what is wrong; import it again", d)
	e.Err = err
	return e
}

// Release ends everything that owner has. Unknown owners are no error.
func (m *Mounts) Release(owner string) error {
	m.mu.Lock()
	for d, e := range m.entries {
		if e.owners[owner] {
			m.disown(d, e, owner)
		}
	}
	excess := m.excess()
	m.mu.Unlock()
	return m.unmountIdle(excess)
}

// Adopt makes owner an owner of a layer that a sandbox found alive after a
// restart has in its overlay. The layer need not be mounted: the overlay holds
// its own reference, and the next Acquire mounts it for others.
func (m *Mounts) Adopt(d Digest, owner string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.entry(d)
	e.owners[owner] = true
	if e.dead {
		e.lose(owner)
	}
}

// InUse returns the layers that have an owner.
func (m *Mounts) InUse() map[Digest]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[Digest]bool)
	for d, e := range m.entries {
		if len(e.owners) > 0 {
			out[d] = true
		}
	}
	return out
}

// Idle returns the mounted layers that nobody owns, the longest unused first.
func (m *Mounts) Idle() []Digest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.idleLocked()
}

func (m *Mounts) idleLocked() []Digest {
	var out []Digest
	for d, e := range m.entries {
		if e.mounted && len(e.owners) == 0 {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b Digest) int {
		return cmp.Compare(m.entries[a].idledAt, m.entries[b].idledAt)
	})
	return out
}

// excess returns the idle mounts beyond the bound.
func (m *Mounts) excess() []Digest {
	idle := m.idleLocked()
	return idle[:max(0, len(idle)-m.idle)]
}

// Drop unmounts those of the layers that nobody owns, because their content is
// gone or space is wanted.
func (m *Mounts) Drop(ds []Digest) error { return m.unmountIdle(ds) }

// Sweep unmounts every mount that nobody owns.
func (m *Mounts) Sweep() error { return m.unmountIdle(m.Idle()) }

func (m *Mounts) unmountIdle(ds []Digest) error {
	var failures []error
	for _, d := range ds {
		if err := m.unmountOne(d); err != nil {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

func (m *Mounts) unmountOne(d Digest) error {
	m.mu.Lock()
	e := m.entries[d]
	if e == nil {
		m.mu.Unlock()
		return nil
	}
	e.waiting++
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		e.waiting--
		m.forget(d, e)
	}()

	e.busy.Lock()
	defer e.busy.Unlock()
	m.mu.Lock()
	if !e.mounted || len(e.owners) > 0 {
		m.mu.Unlock()
		return nil
	}
	lazy := e.lazy
	e.mounted = false // an Acquire from here on waits for busy and mounts anew
	m.mu.Unlock()
	if err := detach(m.path(d)); err != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		e.mounted = true
		return err
	}
	if lazy && m.blobs != nil {
		return m.blobs.Detach(context.Background(), d)
	}
	return nil
}

// Close unmounts everything when nobody owns anything: the end of a node's
// work. With owners left it is an error of kind precondition and nothing is done.
func (m *Mounts) Close() error {
	if n := len(m.InUse()); n > 0 {
		return errs.E(errs.Precondition, "%d layers are in use", n)
	}
	if err := m.Sweep(); err != nil {
		return err
	}
	if err := unix.Unmount(m.dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", m.dir, err)
	}
	return nil
}
