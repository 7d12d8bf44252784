package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// readTag returns the digest that a name of the node's own points at.
func (s *Store) readTag(r Ref) (Digest, error) { return s.readTagFile(ownTree, r) }

// readTagFile returns what a name points at in a tree.
func (s *Store) readTagFile(t tree, r Ref) (Digest, error) {
	s.reads.Add(1)
	b, err := os.ReadFile(s.tagPath(t, r))
	if errors.Is(err, fs.ErrNotExist) {
		return "", s.noSuchName(r)
	}
	if err != nil {
		return "", s.diskError(err)
	}
	d, err := ParseDigest(strings.TrimSpace(string(b)))
	if err != nil {
		return "", errs.E(errs.Precondition, "the name %s is damaged: its file does not hold a digest", r).
			On("layer %s", r).WithHint("point it at a layer again: `harena layer tag` or `harena layer import`")
	}
	return d, nil
}

// noSuchName says what there is instead.
func (s *Store) noSuchName(r Ref) error {
	e := errs.E(errs.NotFound, "there is no layer %s", r).On("layer %s", r)
	if s.remote == nil {
		if b, err := os.ReadFile(s.tagPath(sharedTree, r)); err == nil {
			return e.WithHint("the name is one of a shared store: start the node with --store, or use the digest %s", strings.TrimSpace(string(b)))
		}
	}
	const most = 10
	tags := s.tagsOf(r, most+1)
	if len(tags) == 0 {
		return e.WithHint("`harena layer ls` lists layers, `harena layer import --name %s SOURCE` makes one", r)
	}
	if len(tags) > most {
		tags = append(tags[:most], "…")
	}
	return e.WithHint("%s has the tags %s", r.Name, strings.Join(tags, ", "))
}

// tagsOf returns some tags of a name, at most n.
func (s *Store) tagsOf(r Ref, n int) []string {
	var tags []string
	trees := []tree{ownTree}
	if s.remote != nil {
		trees = append(trees, sharedTree)
	}
	for _, t := range trees {
		d, err := os.Open(filepath.Dir(s.tagPath(t, r)))
		if err != nil {
			continue
		}
		names, err := d.Readdirnames(n)
		d.Close()
		if err != nil && !errors.Is(err, io.EOF) {
			continue
		}
		tags = append(tags, names...)
	}
	slices.Sort(tags)
	return tags[:min(n, len(tags))]
}

// writeTag points a name at a digest; the caller holds the layer.
func (s *Store) writeTag(t tree, r Ref, d Digest) error {
	s.collector.keep(d)
	return s.diskError(s.setTag(t, r, d, func() error {
		before, err := s.readTagFile(t, r)
		if err := writeFile(s.tmp(), s.tagPath(t, r), []byte(d+"\n")); err != nil {
			return err
		}
		if err == nil {
			s.moved(r, before, d)
		}
		return nil
	}))
}

// removeTag removes a name from a tree; fs.ErrNotExist when another call was first.
func (s *Store) removeTag(t tree, r Ref) error {
	return s.setTag(t, r, "", func() error {
		path := s.tagPath(t, r)
		if err := os.Remove(path); err != nil {
			return err
		}
		// The directory of a name goes with its last tag. Tags are written under the lock that is held here.
		dir := filepath.Dir(path)
		if os.Remove(dir) == nil {
			dir = filepath.Dir(dir)
		}
		return syncDir(dir)
	})
}

// Tag points name at the layer that source (a name or digest) means now,
// replacing what it pointed at, atomically. With a shared store the name and the layer are published there.
func (s *Store) Tag(ctx context.Context, project, source, name string) (Layer, error) {
	from, err := ParseRef(project, source)
	if err != nil {
		return Layer{}, err
	}
	to, err := parseName(project, name)
	if err != nil {
		return Layer{}, err
	}
	defer s.Hold()()
	l, err := s.resolve(ctx, from)
	if err != nil {
		return Layer{}, err
	}
	return l, s.point(ctx, to, l, nil)
}

// point makes a name mean a layer that this node has: in the shared store when
// there is one, which gets the layer first, else here.
func (s *Store) point(ctx context.Context, r Ref, l Layer, report *reporter) error {
	if s.remote == nil {
		return s.writeTag(ownTree, r, l.Digest)
	}
	if err := s.remote.publish(ctx, s, l, report); err != nil {
		return err
	}
	if err := s.remote.writeTag(ctx, r, l.Digest); err != nil {
		return err
	}
	if err := s.writeTag(sharedTree, r, l.Digest); err != nil {
		return err
	}
	// A name of the node's own would hide the shared one.
	if err := s.removeTag(ownTree, r); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.diskError(err)
	}
	return nil
}

// Remove removes a name and returns what it pointed at. The content stays until
// garbage is collected.
func (s *Store) Remove(ctx context.Context, project, name string) (Digest, error) {
	r, err := parseName(project, name)
	if err != nil {
		return "", err
	}
	d, err := s.readTag(r)
	damaged := errs.Is(err, errs.Precondition)
	switch {
	case err == nil, damaged:
		err := s.removeTag(ownTree, r)
		if errors.Is(err, fs.ErrNotExist) { // another call was first
			return "", s.noSuchName(r)
		}
		return d, s.diskError(err)
	case s.remote == nil || !errs.Is(err, errs.NotFound):
		return "", err
	}
	if d, err = s.remote.readTag(ctx, s, r); err != nil {
		return "", err
	}
	if err := s.remote.removeTag(ctx, r); err != nil {
		return "", err
	}
	if err := s.removeTag(sharedTree, r); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", s.diskError(err)
	}
	return d, nil
}

// eachTag reads every name of a tree. f gets an error of kind precondition for one that is damaged.
func (s *Store) eachTag(ctx context.Context, t tree, f func(Ref, Digest, error) error) error {
	root := s.tagRoot(t)
	projects, err := readDirIfAny(root)
	if err != nil {
		return err
	}
	for _, p := range projects {
		nameDirs, err := readDirIfAny(filepath.Join(root, p.Name()))
		if err != nil {
			return err
		}
		for _, n := range nameDirs {
			tags, err := readDirIfAny(filepath.Join(root, p.Name(), n.Name()))
			if err != nil {
				return err
			}
			for _, e := range tags {
				if err := ctx.Err(); err != nil {
					return err
				}
				r := Ref{Project: pathName(p.Name()), Name: pathName(n.Name()), Tag: e.Name()}
				if !tagPattern.MatchString(r.Tag) || !pathPattern.MatchString(r.Name) || !pathPattern.MatchString(r.Project) {
					continue // not ours
				}
				d, err := s.readTagFile(t, r)
				if errs.Is(err, errs.NotFound) {
					continue // removed meanwhile
				}
				if err != nil && !errs.Is(err, errs.Precondition) {
					return fmt.Errorf("read the name %s: %w", r, err)
				}
				if err := f(r, d, err); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// readDirIfAny is os.ReadDir, without entries for what is not there or no directory.
func readDirIfAny(dir string) ([]os.DirEntry, error) {
	fi, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.IsDir() {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}
