package oci

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Cache keeps blobs of registries as files: HEX when whole and checked, HEX.partial
// while they arrive, so that a fetch goes on where one before it ended. It is
// bounded by Trim; a file that is open stays readable when it is trimmed.
type Cache struct {
	dir string
	max int64

	mu    sync.Mutex
	locks map[string]*blobLock
}

type blobLock struct {
	sync.Mutex
	users int
}

// DefaultCacheBytes bounds the cache.
const DefaultCacheBytes = 20 << 30

// NewCache uses a directory, which it makes when it is needed.
func NewCache(dir string, max int64) *Cache {
	return &Cache{dir: dir, max: max, locks: make(map[string]*blobLock)}
}

// lock makes one fetch of a blob wait for another.
func (c *Cache) lock(hex string) (unlock func()) {
	c.mu.Lock()
	l := c.locks[hex]
	if l == nil {
		l = &blobLock{}
		c.locks[hex] = l
	}
	l.users++
	c.mu.Unlock()
	l.Lock()
	return func() {
		l.Unlock()
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(c.locks, hex)
		}
	}
}

// open returns a whole blob, or fs.ErrNotExist. One of another size is none.
func (c *Cache) open(hex string, size int64) (*os.File, error) {
	f, err := os.Open(c.path(hex))
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && size >= 0 && info.Size() != size {
		err = fs.ErrNotExist
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	now := time.Now()
	_ = os.Chtimes(c.path(hex), now, now) // only the order of trimming suffers
	return f, nil
}

func (c *Cache) path(hex string) string { return filepath.Join(c.dir, hex) }

const partial = ".partial"

// part opens what there is of a blob for appending.
func (c *Cache) part(hex string) (*os.File, error) {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(c.path(hex)+partial, os.O_RDWR|os.O_CREATE, 0o600)
}

// keep makes a part, which is complete and checked, a blob.
func (c *Cache) keep(hex string) error { return os.Rename(c.path(hex)+partial, c.path(hex)) }

// forget removes a blob that turned out to be damaged.
func (c *Cache) forget(hex string) error {
	if err := os.Remove(c.path(hex)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Trim removes what was not used for longest until the rest is within the bound,
// but no part that may still be growing.
func (c *Cache) Trim() error {
	type file struct {
		path string
		size int64
		used time.Time
	}
	entries, err := os.ReadDir(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var files []file
	var total int64
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		total += info.Size()
		if c.locks[strings.TrimSuffix(e.Name(), partial)] == nil {
			files = append(files, file{filepath.Join(c.dir, e.Name()), info.Size(), info.ModTime()})
		}
	}
	slices.SortFunc(files, func(a, b file) int { return a.used.Compare(b.used) })
	for _, f := range files {
		if total <= c.max {
			break
		}
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		total -= f.size
	}
	return nil
}

// reopen gives a file that is open to several readers.
func reopen(f *os.File, size int64) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) { return io.NopCloser(io.NewSectionReader(f, 0, size)), nil }
}
