// Package datadir owns a node's data directory: its format, its lock, its identity, its mount, and its claim on a slot
// of host IDs. What is in the directory is described in docs/architecture.md.
package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Format is the version of the layout that this code writes.
const Format = 1

// DefaultSlots is where the nodes of one kernel agree on who owns which IDs.
const DefaultSlots = "/run/harena/slots"

// Options of Open. The zero value is what a node uses, but for Rand.
type Options struct {
	Rand io.Reader // for the edge ID
	// Slots is DefaultSlots when empty.
	Slots string
	// NoMount leaves the directory as it is. For tests without the rights to mount: without the mount's nosuid the
	// uppers are an escalation.
	NoMount bool
	// Size, if not 0, asks for a volume of that many bytes: the directory is then a btrfs of its own, in a file. One that
	// exists is used without being asked for, and grows to a larger Size.
	Size int64
	// LockWait is how long to wait for a server that is on its way out.
	LockWait time.Duration
}

// Dir is an open data directory. Close lets go of it.
type Dir struct {
	path   string
	boot   string
	opts   Options
	lock   *os.File
	claim  *claim
	mu     sync.Mutex
	node   nodeFile
	bound  bool
	closed bool
}

type versionFile struct {
	Format int `json:"format"`
}

type nodeFile struct {
	Edge     sandbox.EdgeID `json:"edge"`
	Slot     int            `json:"slot"`
	Draining bool           `json:"draining,omitempty"`
	// Bind is the mount of the directory on itself, if this node made it.
	Bind *bind `json:"bind,omitempty"`
}

type bind struct {
	Boot string `json:"boot"`
	// Below is the ID of the mount that it covers, if there was one on the very directory.
	Below int `json:"below,omitempty"`
}

// Open makes the directory if need be, and takes it. Errors of kind precondition: another server has it, a newer
// version wrote it, it cannot be written; capacity: the disk is full.
func Open(path string, o Options) (_ *Dir, err error) {
	if o.Slots == "" {
		o.Slots = DefaultSlots
	}
	if path, err = clean(path); err != nil {
		return nil, err
	}
	if err := ValidSize(o.Size); err != nil {
		return nil, err
	}
	d := &Dir{path: path, opts: o}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, d.fault("make the data directory", err)
	}
	// Only what exists can be freed from symbolic links; mounts are listed without them.
	if d.path, err = clean(path); err != nil {
		return nil, err
	}
	path = d.path
	if !o.NoMount {
		if err := d.openVolume(); err != nil {
			return nil, err
		}
	}
	if err := adoptable(path); err != nil {
		return nil, err
	}
	// It may have been made by hand, or by a package, with other rights.
	if err := os.Chmod(path, 0o700); err != nil {
		return nil, d.fault("protect the data directory", err)
	}
	if d.lock, err = takeLock(d.file("lock"), o.LockWait); err != nil {
		return nil, d.fault("lock the data directory", err)
	}
	defer func() {
		if err != nil {
			d.release()
		}
	}()
	if d.boot, err = BootID(); err != nil {
		return nil, err
	}
	if err = d.checkFormat(); err != nil {
		return nil, err
	}
	if err = d.loadNode(); err != nil {
		return nil, err
	}
	if err = d.claimSlot(); err != nil {
		return nil, err
	}
	if !o.NoMount {
		if err = d.bindMount(); err != nil {
			return nil, err
		}
	}
	for _, sub := range []string{"sandboxes", "trash", "events", "mounts", "layers"} {
		if err = os.MkdirAll(d.file(sub), 0o700); err != nil {
			return nil, d.fault("make the data directory", err)
		}
	}
	return d, nil
}

// adoptable refuses a directory that holds what is not ours: taking it would close it to all others, and mix our files with theirs.
func adoptable(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return Fault("read the data directory", path, err)
	}
	foreign := ""
	for _, e := range entries {
		switch e.Name() {
		case "version.json":
			return nil
		case "lock", "lost+found", volumeName, volumeName + ".new": // of a first start that was cut short; of a file system of its own
		default:
			if !strings.HasPrefix(e.Name(), "version.json.") {
				foreign = e.Name()
			}
		}
	}
	if foreign == "" {
		return nil
	}
	return errs.E(errs.Precondition, "%s is no data directory of harena, and not empty: it has %.80q", path, foreign).
		On("data directory %s", path).WithHint("name an empty or a new directory with --data")
}

func clean(path string) (string, error) {
	if path == "" {
		return "", errs.E(errs.Invalid, "no data directory was given").WithHint("--data DIR names it")
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", errs.E(errs.Invalid, "data directory %q: %w", path, err)
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		abs = real
	}
	if strings.ContainsAny(abs, ",:\\\n\t ") {
		return "", errs.E(errs.Invalid, "data directory %q has a character that overlay mounts cannot carry", path).
			WithHint("use a path without spaces, commas, colons and backslashes")
	}
	return abs, nil
}

// Path returns the directory's absolute path.
func (d *Dir) Path() string { return d.path }

// Edge returns the node's edge ID.
func (d *Dir) Edge() sandbox.EdgeID { return d.node.Edge }

// Slot returns the claimed slot of host IDs, 1 to idrange.Slots.
func (d *Dir) Slot() int { return d.node.Slot }

// Boot identifies this boot of the machine.
func (d *Dir) Boot() string { return d.boot }

// Draining reports whether the node refuses new sandboxes.
func (d *Dir) Draining() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.node.Draining
}

// SetDraining changes it, on disk first.
func (d *Dir) SetDraining(v bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	changed := d.node
	changed.Draining = v
	return d.saveNode(changed)
}

// Close lets go of the directory. The mount and the slot stay: sandboxes may live on.
func (d *Dir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	d.release()
	return nil
}

// Down is Close for a node with no sandboxes left: the mount goes, with whatever is mounted below it, and the slot is free again.
func (d *Dir) Down() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errs.E(errs.Precondition, "the data directory is closed")
	}
	d.closed = true
	var unmount error
	if d.bound {
		changed := d.node
		changed.Bind = nil
		// Lazily, because the lock may have been opened through this mount.
		if unmount = unix.Unmount(d.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); unmount == nil {
			unmount = d.saveNode(changed)
		}
	}
	d.claim.remove()
	d.release()
	if unmount != nil {
		return fmt.Errorf("unmount %s: %w", d.path, unmount)
	}
	return d.closeVolume()
}

// OwnVolume tells whether the directory is a file system of its own that harena made.
func (d *Dir) OwnVolume() bool {
	mounted, err := volumeMounted(d.path)
	return err == nil && mounted
}

func (d *Dir) release() {
	if d.claim != nil {
		d.claim.close()
		d.claim = nil
	}
	if d.lock != nil {
		_ = d.lock.Close()
		d.lock = nil
	}
}

func (d *Dir) file(name string) string { return filepath.Join(d.path, name) }

func (d *Dir) checkFormat() error {
	var v versionFile
	switch err := readJSON(d.file("version.json"), &v); {
	case errors.Is(err, os.ErrNotExist):
		return d.fault("write the format version", writeJSON(d.file("version.json"), versionFile{Format: Format}))
	case err != nil:
		return errs.E(errs.Precondition, "the data directory's version.json cannot be read: %w", err).On("data directory %s", d.path)
	}
	if v.Format > Format {
		return errs.E(errs.Precondition, "data directory %s has format %d, this version of harena reads up to %d", d.path, v.Format, Format).
			WithHint("use the newer harena that wrote it")
	}
	if v.Format < 1 {
		return errs.E(errs.Precondition, "data directory %s has format %d, which never was", d.path, v.Format)
	}
	return nil
}

func (d *Dir) loadNode() error {
	err := readJSON(d.file("node.json"), &d.node)
	if err == nil {
		if _, err = sandbox.ParseEdgeID(string(d.node.Edge)); err == nil {
			return nil
		}
	}
	if !errors.Is(err, os.ErrNotExist) {
		return errs.E(errs.Precondition, "the data directory's node.json cannot be used: %w", err).On("data directory %s", d.path).
			WithHint("restore it, or move the directory away and start anew")
	}
	edge, err := sandbox.NewEdgeID(d.opts.Rand)
	if err != nil {
		return err
	}
	return d.saveNode(nodeFile{Edge: edge})
}

func (d *Dir) saveNode(n nodeFile) error {
	if err := writeJSON(d.file("node.json"), n); err != nil {
		return d.fault("write node.json", err)
	}
	d.node = n
	return nil
}

func (d *Dir) claimSlot() error {
	c, err := claimSlot(d.opts.Slots, d.node.Slot, owner{Edge: d.node.Edge, Dir: d.path, Boot: d.boot, Pid: os.Getpid()})
	if err != nil {
		return err
	}
	d.claim = c
	if c.slot == d.node.Slot {
		return nil
	}
	changed := d.node
	changed.Slot = c.slot
	return d.saveNode(changed)
}

func (d *Dir) fault(action string, err error) error { return Fault(action, d.path, err) }

// Fault turns an error of a file operation below dir into one that tells people what to do.
func Fault(action, dir string, err error) error {
	var known *errs.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.E(errs.Capacity, "cannot %s: the disk of %s is full", action, dir).Exhausts("disk of the node").On("data directory %s", dir).
			WithHint("free space there: stop sandboxes, or run `harena layer gc`")
	case errors.Is(err, unix.EROFS):
		return errs.E(errs.Precondition, "cannot %s: %s is read-only", action, dir).On("data directory %s", dir).
			WithHint("remount it writable, or choose another --data")
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return errs.E(errs.Precondition, "cannot %s: no permission in %s", action, dir).On("data directory %s", dir).
			WithHint("run as root")
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return errs.E(errs.Capacity, "cannot %s: too many open files", action).Exhausts("open files of the server").WithHint("raise the limit of open files of harena")
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG):
		return errs.E(errs.Precondition, "cannot %s: %w", action, err).On("data directory %s", dir).
			WithHint("--data names a directory, which is made if its parent can have it")
	}
	return fmt.Errorf("%s: %w", action, err)
}

// takeLock opens and locks the server's lock file and writes the process ID into it.
func takeLock(path string, patience time.Duration) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(patience)
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		pid := readPid(f)
		_ = f.Close()
		return nil, errs.E(errs.Precondition, "data directory %s is in use by the server with pid %s", filepath.Dir(path), pid).
			WithHint("stop that server, or choose another --data")
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func readPid(f *os.File) string {
	b := make([]byte, 16)
	n, _ := f.ReadAt(b, 0)
	if pid := strings.TrimSpace(string(b[:n])); pid != "" {
		return pid
	}
	return "unknown"
}

// BootID identifies this boot of the machine.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	return nil
}

// writeJSON replaces a file durably; these files are few and small.
func writeJSON(path string, v any) (err error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
	}
	return err
}
