package blob

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// partsDir has objects that are being written. No object's name begins with a dot.
	partsDir = ".parts"
	// dirBuffer is what is read and written at a time: network file systems like large requests.
	dirBuffer = 1 << 20
	// maxDirCalls bounds calls on the file system at a time, and so the threads that a hanging one holds.
	maxDirCalls = 64
)

// Dir is a Store in a directory, one file an object. Several nodes may share it through a
// network file system: it needs rename that replaces, nothing else (no locks,
// links, or fsync of directories). The directory is looked up for each call, so a file system
// that is mounted anew is found; a call on one that hangs ends with its context.
type Dir struct {
	path  string
	calls chan struct{}
	// known: there is something in it, so one that is empty is the mount point of a file system that is away.
	known atomic.Bool
}

// NewDir returns the store in a directory, which must exist.
func NewDir(dir string) (*Dir, error) {
	if !filepath.IsAbs(dir) {
		return nil, errs.E(errs.Invalid, "the store's directory %q is not absolute", dir)
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errs.E(errs.NotFound, "the store's directory %s does not exist", dir).
			WithHint("create it, or mount the file system that it is on")
	case err != nil:
		return nil, errs.E(errs.Precondition, "the store's directory %s cannot be used: %w", dir, err)
	case !info.IsDir():
		return nil, errs.E(errs.Invalid, "the store's directory %s is not a directory", dir)
	}
	return newDir(dir), nil
}

// KnownDir is NewDir for a directory that was in use before: while it is not there, or empty, it is away, and every call
// fails with a transient error.
func KnownDir(dir string) (*Dir, error) {
	if !filepath.IsAbs(dir) {
		return nil, errs.E(errs.Invalid, "the store's directory %q is not absolute", dir)
	}
	d := newDir(dir)
	d.known.Store(true)
	return d, nil
}

func newDir(dir string) *Dir { return &Dir{path: dir, calls: make(chan struct{}, maxDirCalls)} }

// away says that the directory is not there. That is no statement about objects, so it must not look like fs.ErrNotExist.
func (d *Dir) away(why string) error {
	return errs.E(errs.Internal, "the store's directory %s is away: %s", d.path, why).WithHint("is the file system that it is on mounted?")
}

// look fails when a known directory has become an empty mount point.
func (d *Dir) look(root *os.Root) error {
	if !d.known.Load() {
		return nil
	}
	f, err := root.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	names, err := f.Readdirnames(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	for _, n := range names {
		if n != "lost+found" {
			return nil
		}
	}
	return d.away("it is empty")
}

// await runs a call that may hang, and gives it up when ctx ends.
// What the call made is then released by drop, once it returns.
func await[T any](ctx context.Context, d *Dir, call func() (T, error), drop func(T)) (T, error) {
	var none T
	select {
	case d.calls <- struct{}{}:
	case <-ctx.Done():
		return none, contextError(ctx)
	}
	if ctx.Done() == nil {
		defer func() { <-d.calls }()
		return call()
	}
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-d.calls }()
		v, err := call()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil && drop != nil {
				drop(r.v)
			}
		}()
		return none, contextError(ctx)
	}
}

// inRoot is await for a call that needs the directory.
func inRoot[T any](ctx context.Context, d *Dir, call func(*os.Root) (T, error), drop func(T)) (T, error) {
	if err := contextError(ctx); err != nil {
		var none T
		return none, err
	}
	return await(ctx, d, func() (T, error) {
		root, err := os.OpenRoot(d.path)
		if gone(err) {
			var none T
			return none, d.away(err.Error())
		}
		if err != nil {
			var none T
			return none, errs.E(errs.Internal, "open the store's directory: %w", err)
		}
		defer root.Close()
		v, err := call(root)
		if gone(err) {
			if e := d.look(root); e != nil {
				err = e
			}
		}
		return v, err
	}, drop)
}

// dirError gives an error of the file system a kind.
func dirError(name string, err error) error {
	kind := errs.KindOf(err)
	switch {
	case kind != errs.Internal:
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return notFound(name)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		kind = errs.Capacity
	case errors.Is(err, syscall.EROFS):
		kind = errs.Precondition
	case errors.Is(err, fs.ErrPermission):
		kind = errs.Denied
	}
	return errs.E(kind, "object %s: %w", name, err).On("object %s", name)
}

// Get implements Store.
func (d *Dir) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	if err := errors.Join(CheckName(name), checkRange(off, n)); err != nil {
		return nil, err
	}
	b, err := inRoot(ctx, d, func(root *os.Root) (*dirBody, error) {
		// Without O_NONBLOCK a pipe in the place of an object would hang.
		f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err == nil && !info.Mode().IsRegular() {
			err = fs.ErrNotExist
		}
		if err != nil {
			f.Close()
			return nil, err
		}
		from, length := span(info.Size(), off, n)
		return &dirBody{ctx: ctx, d: d, name: name, f: f, off: from, left: length, version: fileVersion(info)}, nil
	}, func(b *dirBody) { b.f.Close() })
	if err != nil {
		return nil, dirError(name, err)
	}
	return b, nil
}

// fileVersion tells files that had one name from each other: a replacement is another inode.
func fileVersion(info fs.FileInfo) string {
	var inode uint64
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		inode = s.Ino
	}
	return fmt.Sprintf("%d-%d-%d", inode, info.Size(), info.ModTime().UnixNano())
}

// dirBody reads a file. The file system is given a buffer of ours, as a call that was given up
// may still write to it.
type dirBody struct {
	ctx       context.Context
	d         *Dir
	name      string
	f         *os.File
	off, left int64
	version   string
	buf       []byte
	got       []byte // part of buf
	abandoned bool
}

func (b *dirBody) Version() string { return b.version }

func (b *dirBody) Read(p []byte) (int, error) {
	if len(b.got) == 0 {
		if b.left == 0 {
			return 0, io.EOF
		}
		if err := b.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.got)
	b.got = b.got[n:]
	return n, nil
}

func (b *dirBody) fill() error {
	if b.abandoned {
		return contextError(b.ctx)
	}
	if b.buf == nil {
		b.buf = make([]byte, min(b.left, dirBuffer))
	}
	buf := b.buf[:min(b.left, int64(len(b.buf)))]
	f, off := b.f, b.off
	n, err := await(b.ctx, b.d, func() (int, error) { return f.ReadAt(buf, off) }, nil)
	if n == 0 {
		switch {
		case errors.Is(err, io.EOF):
			return errs.E(errs.Internal, "object %s ends early", b.name).On("object %s", b.name)
		case b.ctx.Err() != nil:
			b.abandoned = true
			return contextError(b.ctx)
		}
		return dirError(b.name, err)
	}
	b.off += int64(n)
	b.left -= int64(n)
	b.got = buf[:n]
	return nil
}

func (b *dirBody) Close() error {
	if b.abandoned {
		go b.f.Close() // may hang as the read did
		return nil
	}
	return b.f.Close()
}

// Stat implements Store.
func (d *Dir) Stat(ctx context.Context, name string) (Info, error) {
	if err := CheckName(name); err != nil {
		return Info{}, err
	}
	info, err := inRoot(ctx, d, func(root *os.Root) (fs.FileInfo, error) { return root.Stat(name) }, nil)
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Info{}, dirError(name, err)
	}
	return Info{name, info.Size(), info.ModTime()}, nil
}

// Delete implements Store. Directories that become empty go too.
func (d *Dir) Delete(ctx context.Context, names ...string) error {
	if err := checkNames(names); err != nil {
		return err
	}
	for _, name := range names {
		_, err := inRoot(ctx, d, func(root *os.Root) (struct{}, error) {
			return struct{}{}, remove(root, name)
		}, nil)
		if err = dirError(name, err); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}
	return nil
}

func remove(root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if err != nil || info.IsDir() {
		return err
	}
	if err := root.Remove(name); err != nil {
		return err
	}
	dir := path.Dir(name)
	for dir != "." && root.Remove(dir) == nil { // until one has others
		dir = path.Dir(dir)
	}
	return nil
}

// Put implements Store.
func (d *Dir) Put(ctx context.Context, name string, r io.Reader) error {
	if err := CheckName(name); err != nil {
		return err
	}
	part := partsDir + "/" + rand.Text()
	f, err := inRoot(ctx, d, func(root *os.Root) (*os.File, error) {
		if err := d.look(root); err != nil {
			return nil, err
		}
		if err := root.Mkdir(partsDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		return root.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	}, func(f *os.File) { f.Close(); os.Remove(f.Name()) })
	if err != nil {
		return putDirError(name, err)
	}
	if err := d.write(ctx, f, r); err != nil {
		d.discard(f, part)
		return putDirError(name, err)
	}
	_, err = inRoot(ctx, d, func(root *os.Root) (struct{}, error) {
		return struct{}{}, publish(root, f, part, name)
	}, nil)
	if err != nil {
		d.discard(f, part)
		return putDirError(name, err)
	}
	d.known.Store(true)
	return nil
}

// write copies r to the file. r is never read after write returned.
func (d *Dir) write(ctx context.Context, f *os.File, r io.Reader) error {
	buf := make([]byte, dirBuffer)
	for {
		n, err := io.ReadFull(&contextReader{ctx, r}, buf)
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		if n > 0 {
			if _, werr := await(ctx, d, func() (int, error) { return f.Write(buf[:n]) }, nil); werr != nil {
				return werr
			}
		}
		if last {
			return nil
		}
	}
}

// discard removes a part without waiting for a file system that may hang. What stays, Sweep removes.
func (d *Dir) discard(f *os.File, part string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	// The caller has an error to report already.
	_, _ = inRoot(ctx, d, func(root *os.Root) (struct{}, error) {
		f.Close()
		return struct{}{}, root.Remove(part)
	}, nil)
}

func putDirError(name string, err error) error {
	if err = dirError(name, err); errs.Is(err, errs.NotFound) {
		return errs.E(errs.Internal, "object %s: the store's directory changed while it was written", name).On("object %s", name)
	}
	return err
}

// publish makes a complete part the object.
func publish(root *os.Root, f *os.File, part, name string) error {
	if err := f.Sync(); err != nil {
		return err
	}
	written, err := f.Stat()
	if err != nil {
		return err
	}
	// Network file systems report failed writes here at the latest.
	if err := f.Close(); err != nil {
		return err
	}
	dir := path.Dir(name)
	for attempt := 0; ; attempt++ {
		if err := root.MkdirAll(dir, 0o700); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		err := root.Rename(part, name)
		if err == nil {
			break
		}
		// NFS repeats a rename whose answer was lost, which then finds nothing to rename.
		if now, e := root.Stat(name); e == nil && os.SameFile(now, written) {
			break
		}
		// A Delete may have removed the directory in between.
		if !errors.Is(err, fs.ErrNotExist) || attempt == 10 {
			return err
		}
	}
	// Any of the directories may be new.
	for {
		if err := syncDir(root, dir); err != nil {
			return err
		}
		if dir == "." {
			return nil
		}
		dir = path.Dir(dir)
	}
}

func syncDir(root *os.Root, dir string) error {
	f, err := root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // deleted meanwhile, with the object
	}
	if err != nil {
		return err
	}
	defer f.Close()
	err = f.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.ENOSYS) {
		return nil // the file system does not do it for directories
	}
	return err
}

// Sweep implements Sweeper.
func (d *Dir) Sweep(ctx context.Context, before time.Time) (int, error) {
	return inRoot(ctx, d, func(root *os.Root) (int, error) {
		parts, err := fs.ReadDir(root.FS(), partsDir)
		if errors.Is(err, fs.ErrNotExist) {
			return 0, d.look(root)
		}
		if err != nil {
			return 0, dirError(partsDir, err)
		}
		n := 0
		for _, p := range parts {
			info, err := p.Info()
			if err != nil || !info.ModTime().Before(before) {
				continue
			}
			if err := root.Remove(partsDir + "/" + p.Name()); err == nil {
				n++
			} else if !errors.Is(err, fs.ErrNotExist) {
				return n, dirError(partsDir, err)
			}
		}
		return n, nil
	}, nil)
}
