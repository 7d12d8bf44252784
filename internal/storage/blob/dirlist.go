package blob

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
)

// List implements Store.
func (d *Dir) List(ctx context.Context, prefix, after string, limit int) ([]Info, error) {
	if err := checkList(prefix, after, limit); err != nil {
		return nil, err
	}
	return inRoot(ctx, d, func(root *os.Root) ([]Info, error) {
		l := listing{ctx: ctx, fs: root.FS(), prefix: prefix, after: after, limit: limit}
		if err := l.walk(""); err != nil {
			return nil, dirError(prefix, err)
		}
		if len(l.found) == 0 {
			return nil, d.look(root)
		}
		return l.found, nil
	}, nil)
}

type listing struct {
	ctx           context.Context
	fs            fs.FS
	prefix, after string
	limit         int
	found         []Info
}

// walk visits the directory dir, which is "" or ends in a slash, in the order of the bytes of
// whole names: "a-b" is before "a/c".
func (l *listing) walk(dir string) error {
	if err := contextError(l.ctx); err != nil {
		return err
	}
	path := "."
	if dir != "" {
		path = strings.TrimSuffix(dir, "/")
	}
	entries, err := fs.ReadDir(l.fs, path)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	type entry struct {
		name string // ends in a slash when it is a directory
		fs.DirEntry
	}
	var inside []entry
	for _, e := range entries {
		name := dir + e.Name()
		if e.IsDir() {
			name += "/"
		}
		if CheckName(strings.TrimSuffix(name, "/")) == nil && l.wants(name, e.IsDir()) {
			inside = append(inside, entry{name, e})
		}
	}
	slices.SortFunc(inside, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	for _, e := range inside {
		if len(l.found) == l.limit {
			return nil
		}
		if e.IsDir() {
			if err := l.walk(e.name); err != nil {
				return err
			}
			continue
		}
		info, err := e.Info()
		if gone(err) || err == nil && !info.Mode().IsRegular() {
			continue
		}
		if err != nil {
			return err
		}
		l.found = append(l.found, Info{e.name, info.Size(), info.ModTime()})
	}
	return nil
}

// wants tells whether an object of that name, or one below that directory, may belong to the listing.
func (l *listing) wants(name string, dir bool) bool {
	if !dir {
		return strings.HasPrefix(name, l.prefix) && name > l.after
	}
	return (strings.HasPrefix(name, l.prefix) || strings.HasPrefix(l.prefix, name)) &&
		(name > l.after || strings.HasPrefix(l.after, name))
}

// gone says that something was removed while it was being visited.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}
