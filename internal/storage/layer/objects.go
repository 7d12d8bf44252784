package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// objects keeps immutable bytes under their SHA-256.
//
// put is idempotent and durable when it returns; an object is visible whole or
// not at all. Methods may be called concurrently.
type objects interface {
	// put takes over a complete local file whose digest is d. It may leave the file to the caller.
	put(ctx context.Context, d Digest, file string) error
	// open returns an object for reading; fs.ErrNotExist when there is none.
	open(d Digest) (object, error)
}

// object is an open object.
type object interface {
	io.ReaderAt
	io.Closer
	size() int64
}

// localObjects keeps objects as files, <aa>/<sha256>.
type localObjects struct {
	dir string // objects
	tmp string // same file system
}

// path returns where an object lies; the file need not exist.
func (l *localObjects) path(d Digest) string {
	h := d.Hex()
	return filepath.Join(l.dir, h[:2], h)
}

func (l *localObjects) put(_ context.Context, d Digest, file string) error {
	to := l.path(d)
	if _, err := os.Lstat(to); err == nil {
		return nil
	}
	if err := os.Chmod(file, 0o400); err != nil {
		return err
	}
	return publish(file, to)
}

// has tells whether there is an object of that size.
func (l *localObjects) has(o Object) bool {
	fi, err := os.Lstat(l.path(o.Digest))
	return err == nil && fi.Size() == o.Size
}

type localObject struct {
	*os.File
	bytes int64
}

func (o *localObject) size() int64 { return o.bytes }

func (l *localObjects) open(d Digest) (object, error) {
	f, err := os.Open(l.path(d))
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &localObject{f, info.Size()}, nil
}

// list calls f for every object but those that skip leaves out.
func (l *localObjects) list(ctx context.Context, skip func(Digest) bool, f func(Digest, int64, time.Time) error) error {
	return walkFanOut(ctx, l.dir, "", func(d Digest, e fs.DirEntry) error {
		if skip(d) {
			return nil
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return f(d, info.Size(), info.ModTime())
	})
}

// remove renames the files into tmp, which is quick whatever their size and needs
// no space; finish, to be called even after an error, unlinks them. After a crash in between, the next start empties tmp.
func (l *localObjects) remove(_ context.Context, ds []Digest) (func() error, error) {
	var doomed []string
	finish := func() error {
		var failures []error
		for _, d := range doomed {
			if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
				failures = append(failures, err)
			}
		}
		return errors.Join(failures...)
	}
	for _, d := range ds {
		to := filepath.Join(l.tmp, "doomed-"+d.Hex())
		err := os.Rename(l.path(d), to)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return finish, err
		}
		doomed = append(doomed, to)
	}
	return finish, nil
}

// walkFanOut visits dir/<aa>/<sha256><ext>, in order, leaving out names that are not ours.
func walkFanOut(ctx context.Context, dir, ext string, f func(Digest, fs.DirEntry) error) error {
	fans, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, fan := range fans {
		if !fan.IsDir() {
			continue
		}
		entries, err := os.ReadDir(filepath.Join(dir, fan.Name()))
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := ctx.Err(); err != nil {
				return err
			}
			name := e.Name()
			if len(name) != 64+len(ext) || name[64:] != ext || !hexPattern.MatchString(name[:64]) {
				continue
			}
			if err := f(Digest(digestPrefix+name[:64]), e); err != nil {
				return err
			}
		}
	}
	return nil
}

// hashFile returns a file's digest and size, in constant memory.
func hashFile(ctx context.Context, f io.ReadSeeker, progress func(n int64)) (Object, error) {
	h := sha256.New()
	n, err := readThrough(ctx, h, f, progress)
	if err != nil {
		return Object{}, err
	}
	return Object{Digest: sumDigest(h.Sum(nil)), Size: n}, nil
}

// hashBlob is hashFile for a data blob: with the root.
func hashBlob(ctx context.Context, f io.ReadSeeker, progress func(n int64)) (Object, error) {
	h, root := sha256.New(), blob.NewRootHash()
	n, err := readThrough(ctx, writeFunc(func(p []byte) (int, error) {
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = root.Write(p) })
		n, err := h.Write(p)
		wg.Wait()
		return n, err
	}), f, progress)
	if err != nil || n == 0 {
		return Object{Digest: sumDigest(h.Sum(nil))}, err
	}
	return Object{Digest: sumDigest(h.Sum(nil)), Size: n, Root: root.Root().String()}, nil
}

// writeFunc is a writer made of a function.
type writeFunc func(p []byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

func readThrough(ctx context.Context, h io.Writer, f io.ReadSeeker, progress func(n int64)) (int64, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	n, err := io.CopyBuffer(h, readFunc(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		n, err := f.Read(p)
		if progress != nil {
			progress(int64(n))
		}
		return n, err
	}), make([]byte, 1<<20))
	if err != nil {
		return 0, fmt.Errorf("hash: %w", err)
	}
	return n, nil
}

// readFunc is a reader made of a function.
type readFunc func(p []byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// emptyObject makes the object of no bytes.
func (s *Store) emptyObject(ctx context.Context, o Object) error {
	f, err := os.CreateTemp(s.tmp(), "empty-*")
	if err != nil {
		return s.diskError(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	return s.diskError(s.local.put(ctx, o.Digest, f.Name()))
}
