package layer

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// readTag returns the digest that a name points at.
func (s *Store) readTag(r Ref) (Digest, error) {
	b, err := os.ReadFile(s.tagPath(r))
	if errors.Is(err, fs.ErrNotExist) {
		return "", s.noSuchName(r)
	}
	if err != nil {
		return "", s.diskError(err)
	}
	return ParseDigest(strings.TrimSpace(string(b)))
}

// noSuchName says what there is instead.
func (s *Store) noSuchName(r Ref) error {
	e := errs.E(errs.NotFound, "there is no layer %s", r).On("layer %s", r)
	tags := s.tagsOf(r)
	if len(tags) == 0 {
		return e.WithHint("`harena layer ls` lists layers, `harena layer import --name %s SOURCE` makes one", r)
	}
	const most = 10
	if len(tags) > most {
		tags = append(tags[:most], "…")
	}
	return e.WithHint("%s has the tags %s", r.Name, strings.Join(tags, ", "))
}

func (s *Store) tagsOf(r Ref) []string {
	entries, err := os.ReadDir(filepath.Dir(s.tagPath(r)))
	if err != nil {
		return nil
	}
	var tags []string
	for _, e := range entries {
		tags = append(tags, e.Name())
	}
	return tags
}

// writeTag points a name at a digest; the caller holds collect.
func (s *Store) writeTag(r Ref, d Digest) error {
	return s.diskError(s.index.setTag(r, d, func() error {
		return writeFile(s.tmp(), s.tagPath(r), []byte(d+"\n"))
	}))
}

// Tag points name at the layer that source (a name or digest) means now,
// replacing what it pointed at, atomically.
func (s *Store) Tag(project, source, name string) (Layer, error) {
	from, err := ParseRef(project, source)
	if err != nil {
		return Layer{}, err
	}
	to, err := parseName(project, name)
	if err != nil {
		return Layer{}, err
	}
	defer s.Hold()()
	l, err := s.resolve(from)
	if err != nil {
		return Layer{}, err
	}
	return l, s.writeTag(to, l.Digest)
}

// Remove removes a name and returns what it pointed at. The content stays until
// garbage is collected.
func (s *Store) Remove(project, name string) (Digest, error) {
	r, err := parseName(project, name)
	if err != nil {
		return "", err
	}
	d, err := s.readTag(r)
	if err != nil {
		return "", err
	}
	err = s.index.setTag(r, "", func() error {
		path := s.tagPath(r)
		if err := os.Remove(path); err != nil {
			return err
		}
		return syncDir(filepath.Dir(path))
	})
	switch {
	case errors.Is(err, fs.ErrNotExist): // another call was first
		return "", s.noSuchName(r)
	case err != nil:
		return "", s.diskError(err)
	}
	return d, nil
}

// ListOptions selects part of a listing.
type ListOptions struct {
	Project string
	Kind    Kind // empty: all
	// After is the Cursor of the last layer of the previous page.
	After string
	Limit int
}

// Listed is a layer with the names that point at it in the project.
type Listed struct {
	Layer
	Names []string // sorted, at least one
}

// Cursor identifies a place in the order of a listing.
func (l Listed) Cursor() string { return l.Names[0] }

// List returns the named layers of a project in the order of their first names,
// and whether there are more.
func (s *Store) List(ctx context.Context, o ListOptions) (page []Listed, more bool, err error) {
	names, err := s.names(ctx, o.Project)
	if err != nil {
		return nil, false, err
	}
	first := make([]Listed, 0, len(names))
	for d, n := range names {
		first = append(first, Listed{Layer: Layer{Digest: d}, Names: n})
	}
	slices.SortFunc(first, func(a, b Listed) int { return strings.Compare(a.Names[0], b.Names[0]) })
	start := sort.Search(len(first), func(i int) bool { return first[i].Names[0] > o.After })
	for _, l := range first[start:] {
		if l.Layer, err = s.Load(l.Digest); err != nil {
			if errs.Is(err, errs.NotFound) {
				continue // removed and collected since names was read
			}
			return nil, false, err
		}
		if o.Kind != "" && l.Kind != o.Kind {
			continue
		}
		if len(page) == o.Limit {
			return page, true, nil
		}
		page = append(page, l)
	}
	return page, false, nil
}

// NamesOf returns the names in a project that point at a digest, sorted.
func (s *Store) NamesOf(ctx context.Context, project string, d Digest) ([]string, error) {
	names, err := s.names(ctx, project)
	return names[d], err
}

// eachTag reads every name of a project.
func (s *Store) eachTag(ctx context.Context, project string, f func(Ref, Digest)) error {
	dir := filepath.Join(s.dir, "tags", dirName(project))
	nameDirs, err := readDirIfAny(dir)
	if err != nil {
		return err
	}
	for _, n := range nameDirs {
		tags, err := readDirIfAny(filepath.Join(dir, n.Name()))
		if err != nil {
			return err
		}
		for _, t := range tags {
			if err := ctx.Err(); err != nil {
				return err
			}
			r := Ref{Project: project, Name: pathName(n.Name()), Tag: t.Name()}
			d, err := s.readTag(r)
			if errs.Is(err, errs.NotFound) {
				continue // removed meanwhile
			}
			if err != nil {
				return err
			}
			f(r, d)
		}
	}
	return nil
}

// readDirIfAny is os.ReadDir, without entries for a directory that is not there.
func readDirIfAny(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}
