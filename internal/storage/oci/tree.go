package oci

import (
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// entryID is a place in the image: an entry of the tar of a layer.
type entryID struct{ layer, entry int32 }

// source is what a name stands for: the entry with its attributes and content.
// Names of one file share one source.
type source struct {
	entryID
	size int64
}

// node is a name of a tree.
type node struct {
	src   *source // nil: a directory that no entry describes
	isDir bool
	names map[string]*node
	// What an upper group says of the groups below it.
	opaque bool
	hides  map[string]bool
}

// tree is what a group of layers amounts to, laid over the groups below it.
type tree struct {
	root  *node
	lower *tree  // nil for the lowest group
	made  *int64 // directories that were made on the way to something, of all groups
}

func newTree(lower *tree) *tree {
	t := &tree{root: &node{isDir: true}, lower: lower, made: new(int64)}
	if lower != nil {
		t.made = lower.made
		// The root's attributes are those of the topmost directory of an overlay.
		t.root.src = lower.root.src
	}
	return t
}

// below returns what the groups under this one have at a path, or nil.
func (t *tree) below(parts []string) *node {
	if t.lower == nil {
		return nil
	}
	return t.lower.find(parts)
}

// find returns the node at a path in this group and those below, links not followed; nil when there is none.
func (t *tree) find(parts []string) *node {
	at, through := t.root, t.lower != nil
	for _, name := range parts {
		if !at.isDir {
			return nil
		}
		through = through && !at.opaque
		next := at.names[name]
		if next == nil {
			if through && !at.hides[name] {
				return t.lower.find(parts)
			}
			return nil
		}
		at = next
	}
	return at
}

// step is a directory of this group on the way to an entry, and whether the groups below show through it.
type step struct {
	dir     *node
	through bool
}

func (t *tree) top() step { return step{t.root, t.lower != nil && !t.root.opaque} }

func (s step) into(n *node) step { return step{n, s.through && !n.opaque} }

// makeDir makes the name parts[k] a directory of this group. A directory of the
// groups below lends it its attributes.
func (t *tree) makeDir(s step, parts []string, k int) *node {
	name := parts[k]
	*t.made++
	n := &node{isDir: true}
	old := s.dir.names[name]
	if s.through {
		hidden := s.dir.hides[name] || old != nil
		var low *node
		if !hidden {
			low = t.below(parts[:k+1])
		}
		if low != nil && low.isDir {
			n.src = low.src
		}
		n.opaque = hidden || low != nil && !low.isDir
	}
	s.dir.set(name, n)
	return n
}

func (n *node) set(name string, child *node) {
	if n.names == nil {
		n.names = make(map[string]*node)
	}
	n.names[strings.Clone(name)] = child // name may be a part of a long path
	delete(n.hides, name)
}

// parent walks to the directory of an entry of a layer, making what is missing.
// Something else in the way gives place to a directory unless this very layer put it there.
func (t *tree) parent(parts []string, layer int32) (step, error) {
	at := t.top()
	for k, name := range parts[:len(parts)-1] {
		next := at.dir.names[name]
		if next != nil && !next.isDir && next.src.layer == layer {
			return at, errs.E(errs.Invalid, "its parent %q is not a directory", strings.Join(parts[:k+1], "/"))
		}
		if next == nil || !next.isDir {
			next = t.makeDir(at, parts, k)
		}
		at = at.into(next)
	}
	return at, nil
}

// dir enters a directory with its attributes.
func (t *tree) dir(parts []string, src *source) error {
	if len(parts) == 0 {
		t.root.src = src
		return nil
	}
	s, err := t.parent(parts, src.layer)
	if err != nil {
		return err
	}
	n := s.dir.names[parts[len(parts)-1]]
	if n == nil || !n.isDir {
		n = t.makeDir(s, parts, len(parts)-1)
	}
	n.src = src
	return nil
}

// file enters anything that is not a directory.
func (t *tree) file(parts []string, layer int32, src *source) error {
	if len(parts) == 0 {
		return errs.E(errs.Invalid, "only a directory can be the root of a layer")
	}
	s, err := t.parent(parts, layer)
	if err != nil {
		return err
	}
	s.dir.set(parts[len(parts)-1], &node{src: src})
	return nil
}

// link enters another name of a file that is there.
func (t *tree) link(parts, target []string, layer int32) error {
	n := t.find(target)
	switch {
	case n == nil:
		return errs.E(errs.Invalid, "the target %.200q of the hard link is neither earlier in its layer nor in a layer below", strings.Join(target, "/"))
	case n.isDir:
		return errs.E(errs.Invalid, "the target %.200q of the hard link is a directory", strings.Join(target, "/"))
	}
	return t.file(parts, layer, n.src)
}

// hide applies .wh.NAME of a layer, before anything else of that layer.
func (t *tree) hide(parts []string) {
	d := t.existing(parts[:len(parts)-1])
	if d == nil {
		return
	}
	name := parts[len(parts)-1]
	delete(d.names, name)
	if t.below(parts) != nil {
		if d.hides == nil {
			d.hides = make(map[string]bool)
		}
		d.hides[name] = true
	}
}

// clear applies .wh..wh..opq in a directory, likewise.
func (t *tree) clear(parts []string) {
	d := t.existing(parts)
	if d == nil {
		return
	}
	d.names, d.hides = nil, nil
	switch {
	case t.lower == nil:
	case len(parts) > 0:
		d.opaque = true
	default:
		// overlayfs merges the roots of its layers whatever they say.
		d.hides = make(map[string]bool)
		t.lower.eachTop(func(name string) { d.hides[name] = true })
	}
}

// eachTop calls f for the names that the root has, those of lower groups included.
func (t *tree) eachTop(f func(name string)) {
	for name := range t.root.names {
		f(name)
	}
	if t.lower != nil {
		t.lower.eachTop(func(name string) {
			if t.root.names[name] == nil && !t.root.hides[name] {
				f(name)
			}
		})
	}
}

// existing returns a directory as one of this group if this group or those below have it.
func (t *tree) existing(parts []string) *node {
	if n := t.find(parts); n == nil || !n.isDir {
		return nil
	}
	at := t.top()
	for k, name := range parts {
		next := at.dir.names[name]
		if next == nil {
			next = t.makeDir(at, parts, k)
		}
		at = at.into(next)
	}
	return at.dir
}
