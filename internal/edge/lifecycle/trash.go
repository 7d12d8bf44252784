package lifecycle

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/disk"
	"github.com/harena-dev/harena/internal/sandbox"
)

// trash removes big trees in the background: they are renamed away at once, and whatever a crash leaves is removed after
// the next start.
type trash struct {
	dir     string
	records records
	log     *slog.Logger
	serial  atomic.Int64

	mu      sync.Mutex
	waiting []string
	running int
	idle    chan struct{} // closed while nothing waits or runs
	closed  bool
}

// trashWorkers bounds how much removing competes with sandboxes for the disk.
const trashWorkers = 2

func newTrash(s records, log *slog.Logger) (*trash, error) {
	t := &trash{dir: filepath.Join(s.root, "trash"), records: s, log: log, idle: make(chan struct{})}
	close(t.idle)
	names, err := os.ReadDir(t.dir)
	if err != nil {
		return nil, s.fault("read the trash", err)
	}
	for _, n := range names {
		t.remove(n.Name())
	}
	// Names do not meet those of before.
	t.serial.Store(int64(len(names)))
	return t, nil
}

// take moves the whole directory of a sandbox, or of what has such a name, into the trash.
func (t *trash) take(id string) error {
	name, err := t.name(id)
	if err != nil {
		return err
	}
	err = os.Rename(filepath.Join(t.dir, "..", "sandboxes", id), filepath.Join(t.dir, name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return t.records.fault("remove the sandbox's directory", err)
	}
	t.remove(name)
	return nil
}

// takeFiles takes everything but the record.
func (t *trash) takeFiles(id sandbox.ID) error {
	dir := t.records.dir(id)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return t.records.fault("remove the sandbox's files", err)
	}
	for _, e := range entries {
		if e.Name() == recordName {
			continue
		}
		if !e.IsDir() {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				return t.records.fault("remove the sandbox's files", err)
			}
			continue
		}
		name, err := t.name(string(id))
		if err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(dir, e.Name()), filepath.Join(t.dir, name)); err != nil {
			return t.records.fault("remove the sandbox's files", err)
		}
		t.remove(name)
	}
	return nil
}

// name makes a name that nothing in the trash has.
func (t *trash) name(id string) (string, error) {
	for {
		name := id + "." + strconv.FormatInt(t.serial.Add(1), 10)
		switch _, err := os.Lstat(filepath.Join(t.dir, name)); {
		case errors.Is(err, os.ErrNotExist):
			return name, nil
		case err != nil:
			return "", t.records.fault("look into the trash", err)
		}
	}
}

func (t *trash) remove(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return // the next start finds it
	}
	if t.running == 0 {
		t.idle = make(chan struct{})
	}
	t.waiting = append(t.waiting, name)
	if t.running < trashWorkers {
		t.running++
		go t.work()
	}
}

func (t *trash) work() {
	for {
		t.mu.Lock()
		if len(t.waiting) == 0 || t.closed {
			t.running--
			if t.running == 0 {
				close(t.idle)
			}
			t.mu.Unlock()
			return
		}
		name := t.waiting[0]
		t.waiting = t.waiting[1:]
		t.mu.Unlock()
		if err := t.erase(name); err != nil {
			t.log.Error("a removed sandbox's files could not be erased", "name", name, "err", err)
		}
	}
}

// wait returns a channel that is closed when the trash is empty, or removing has stopped.
func (t *trash) wait() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.idle
}

// close stops removing after what is being removed now.
func (t *trash) close() {
	t.mu.Lock()
	t.closed = true
	idle := t.idle
	t.mu.Unlock()
	<-idle
}

// maxDepth is how deep erase descends with a descriptor a level; what is deeper is moved up first. Inside, directories can
// be nested without a bound.
const maxDepth = 32

// erase removes dir/name. The tree was made by somebody hostile, but nobody is at work in it any more.
func (t *trash) erase(name string) error {
	top, err := unix.Open(t.dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the trash: %w", err)
	}
	defer unix.Close(top)
	pending := []string{name}
	moved := func(parent int, child string) error {
		up, err := t.name(name)
		if err != nil {
			return err
		}
		if err := unix.Renameat(parent, child, top, up); err != nil {
			return fmt.Errorf("move a deep directory: %w", err)
		}
		pending = append(pending, up)
		return nil
	}
	for len(pending) > 0 {
		next := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		err := eraser{stop: t.stopping, tooDeep: moved}.at(top, next, 0)
		if errors.Is(err, errEraseStopped) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errEraseStopped = errors.New("the server shuts down")

func (t *trash) stopping() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closed
}

type eraser struct {
	stop    func() bool
	tooDeep func(parent int, name string) error
}

func (e eraser) at(parent int, name string, depth int) error {
	err := unix.Unlinkat(parent, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("remove a file: %w", err)
	}
	// Writable layers are the trash's entries, or right below them.
	if depth <= 1 && disk.Erase(parent, name) {
		return nil
	}
	if err = unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("remove a directory: %w", err)
	}
	if depth >= maxDepth {
		return e.tooDeep(parent, name)
	}
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a directory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "trash")
	defer f.Close()
	for {
		// Removing while reading is allowed, but may skip entries: read again until a pass finds none.
		if _, err := f.Seek(0, 0); err != nil {
			return fmt.Errorf("read a directory: %w", err)
		}
		found := false
		for {
			if e.stop() {
				return errEraseStopped
			}
			names, err := f.Readdirnames(512)
			for _, n := range names {
				found = true
				if err := e.at(fd, n, depth+1); err != nil {
					return err
				}
			}
			if err != nil || len(names) == 0 {
				break
			}
		}
		if !found {
			break
		}
	}
	if err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove a directory: %w", err)
	}
	return nil
}
