package blob

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// Memory is a Store in memory, for tests and models.
type Memory struct {
	mu      sync.Mutex
	objects map[string]memoryObject
	version int64
}

type memoryObject struct {
	content  []byte // never changed
	modified time.Time
	version  string
}

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{objects: make(map[string]memoryObject)} }

// Put implements Store.
func (m *Memory) Put(ctx context.Context, name string, r io.Reader) error {
	if err := CheckName(name); err != nil {
		return err
	}
	b, err := io.ReadAll(&contextReader{ctx, r})
	if err != nil {
		return putError(name, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.version++
	m.objects[name] = memoryObject{b, time.Now(), strconv.FormatInt(m.version, 10)}
	return nil
}

// Get implements Store.
func (m *Memory) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	o, err := m.find(ctx, name)
	if err != nil {
		return nil, err
	}
	if err := checkRange(off, n); err != nil {
		return nil, err
	}
	from, length := span(int64(len(o.content)), off, n)
	r := &contextReader{ctx, bytes.NewReader(o.content[from : from+length])}
	return &body{r, func() error { return nil }, o.version}, nil
}

// Stat implements Store.
func (m *Memory) Stat(ctx context.Context, name string) (Info, error) {
	o, err := m.find(ctx, name)
	if err != nil {
		return Info{}, err
	}
	return Info{name, int64(len(o.content)), o.modified}, nil
}

func (m *Memory) find(ctx context.Context, name string) (memoryObject, error) {
	if err := errors.Join(CheckName(name), contextError(ctx)); err != nil {
		return memoryObject{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	o, ok := m.objects[name]
	if !ok {
		return memoryObject{}, notFound(name)
	}
	return o, nil
}

// List implements Store.
func (m *Memory) List(ctx context.Context, prefix, after string, limit int) ([]Info, error) {
	if err := errors.Join(checkList(prefix, after, limit), contextError(ctx)); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Info
	for name, o := range m.objects {
		if strings.HasPrefix(name, prefix) && name > after {
			all = append(all, Info{name, int64(len(o.content)), o.modified})
		}
	}
	slices.SortFunc(all, func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
	return all[:min(limit, len(all))], nil
}

// Delete implements Store.
func (m *Memory) Delete(ctx context.Context, names ...string) error {
	if err := errors.Join(checkNames(names), contextError(ctx)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range names {
		delete(m.objects, name)
	}
	return nil
}

func checkNames(names []string) error {
	for _, name := range names {
		if err := CheckName(name); err != nil {
			return err
		}
	}
	return nil
}

// body is what Get returns.
type body struct {
	io.Reader
	close   func() error
	version string
}

func (b *body) Close() error    { return b.close() }
func (b *body) Version() string { return b.version }

// versionOf returns the version of a body of any store, or "".
func versionOf(r io.Reader) string {
	if v, ok := r.(Versioned); ok {
		return v.Version()
	}
	return ""
}

// contextReader is a reader that fails when a context has ended.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := contextError(c.ctx); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// contextError is the error of a context that has ended, with a kind.
func contextError(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	return errs.E(errs.KindOf(err), "the call was given up: %w", err)
}

// putError keeps the kind of what went wrong while a Put read its source.
func putError(name string, err error) error {
	return errs.E(errs.KindOf(err), "store object %s: %w", name, err).On("object %s", name)
}
