package blobcache

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// seal checks a blob whose frames are all there against its digest, and makes it complete. Once at a time for each.
func (e *entry) seal() {
	e.mu.Lock()
	if e.sealing || e.state != partial || e.missing > 0 || !e.c.affords(e) {
		e.mu.Unlock()
		return
	}
	e.sealing = true
	x := e.index
	e.mu.Unlock()
	e.c.spawn(func() {
		err := e.sealNow(x)
		e.mu.Lock()
		e.sealing = false
		e.mu.Unlock()
		switch {
		case err == nil:
			e.c.cfg.Event(Event{Kind: Complete, Layers: e.layers(), Blob: e.name(), Message: "the blob is there whole"})
		case errors.Is(err, errBad):
			e.c.cfg.Event(Event{Kind: Corrupt, Layers: e.layers(), Blob: e.name(), Message: err.Error()})
		default:
			e.c.cfg.Log.Warn("a blob was not completed", "blob", e.name(), "err", err)
		}
	})
}

var errBad = errors.New("the store's blob is not what its name says")

// isWhole tells whether a file's content is what its name says. If not, or if it cannot be read, which frame is to blame is another question.
func (e *entry) isWhole(f *os.File, x *blob.Index) bool {
	whole := sha256.New()
	buf := make([]byte, x.FrameSize())
	for off := int64(0); off < e.obj.Size && e.c.ctx.Err() == nil; off += int64(len(buf)) {
		raw := buf[:min(int64(len(buf)), e.obj.Size-off)]
		if readFull(f, raw, off) != nil {
			return false
		}
		whole.Write(raw)
	}
	return blob.Sum(whole.Sum(nil)) == e.obj.Digest
}

// sealNow reads the file as it will be read later: what is hashed is what is on the disk, or soon will be.
func (e *entry) sealNow(x *blob.Index) error {
	f, err := os.Open(e.partial())
	if err != nil {
		return err
	}
	defer f.Close()
	if !e.isWhole(f, x) {
		if err := e.blame(f, x); err != nil {
			return err
		}
	}
	return e.complete(f)
}

// blame finds frames that are not as they came, which are fetched again, in a blob that is not as its name says. It is
// condemned when they all are as its index says. No error: now it is whole.
func (e *entry) blame(f *os.File, x *blob.Index) error {
	whole := sha256.New()
	buf := make([]byte, x.FrameSize())
	for i := range x.Frames() {
		if e.c.ctx.Err() != nil {
			return e.c.ctx.Err()
		}
		fr := x.Frame(i)
		raw := buf[:fr.RawLen]
		if err := readFull(f, raw, fr.RawOff); err != nil || blob.Sum(sha256.Sum256(raw)) != fr.Sum {
			if e.readBack(x, i) == nil {
				return fmt.Errorf("frame %d was evicted, or the disk lost it: %w", i, io.ErrUnexpectedEOF)
			}
			// It was fetched again since.
			if err := readFull(f, raw, fr.RawOff); err != nil || blob.Sum(sha256.Sum256(raw)) != fr.Sum {
				return fmt.Errorf("frame %d: %w", i, io.ErrUnexpectedEOF)
			}
		}
		whole.Write(raw)
	}
	if blob.Sum(whole.Sum(nil)) != e.obj.Digest {
		return e.condemn()
	}
	return nil
}

// complete makes a file that was checked the complete one.
func (e *entry) complete(f *os.File) error {
	if err := f.Sync(); err != nil {
		// The kernel says so once, and may take for written what it has only in memory: nothing of the file is to be believed, now or
		// by the next daemon. https://www.usenix.org/conference/atc20/presentation/rebello
		e.discard()
		return fmt.Errorf("sync: %w", err)
	}
	// From here to the end nobody evicts or writes.
	e.file.Lock()
	defer e.file.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state != partial || e.missing > 0 {
		return errors.New("it was evicted meanwhile")
	}
	to := e.c.completePath(e.obj.Digest)
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	if err := unix.Fchmod(int(f.Fd()), 0o400); err != nil {
		return err
	}
	when := stamp(e.obj.Digest)
	if err := os.Chtimes(e.partial(), when, when); err != nil {
		return err
	}
	if err := os.Rename(e.partial(), to); err != nil {
		return err
	}
	if err := syncDir(filepath.Dir(to)); err != nil {
		return err
	}
	_ = os.Remove(e.indexFile())
	if e.f != nil {
		e.f.Close()
		e.f = nil // it is opened for reading again
	}
	e.state, e.index, e.have, e.used = complete, nil, nil, nil
	e.c.account(e, e.obj.Size)
	e.c.recent.forget(e)
	return nil
}

// discard gives up what is cached of a partial blob. It is fetched again.
func (e *entry) discard() {
	e.file.Lock()
	defer e.file.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state != partial {
		return
	}
	if err := os.Remove(e.partial()); err != nil {
		e.c.cfg.Log.Warn("a cached blob cannot be removed", "blob", e.name(), "err", err)
	}
	if e.f != nil {
		e.f.Close()
		e.f = nil
	}
	e.state, e.index, e.have, e.used, e.missing = absent, nil, nil, nil, 0
	e.c.account(e, 0)
	e.c.recent.forget(e)
}

// condemn ends that a blob is read whose frames are those of its index, and whose whole is not that of its name.
func (e *entry) condemn() error {
	err := fmt.Errorf("%w: %s: %w", errBad, e.name(), blob.ErrDamaged)
	e.file.Lock()
	defer e.file.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state, e.err = bad, err
	e.index, e.have, e.used = nil, nil, nil
	e.c.account(e, 0)
	e.c.recent.forget(e)
	if e.f != nil {
		e.f.Close()
		e.f = nil
	}
	return errors.Join(err, os.Remove(e.partial()), os.Remove(e.indexFile()))
}
