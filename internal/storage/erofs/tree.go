package erofs

import (
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// inode is a file of the tree that is being built. Hard links share one.
type inode struct {
	mode     uint32 // st_mode
	uid, gid uint32
	sec      int64
	nsec     uint32
	device   uint32 // encoded; character and block devices
	size     int64
	attrs    string // encoded extended attributes, without the header
	link     string // target of a symbolic link
	data     extents
	dir      *directory // set for directories only

	// Set by collectLayout and placeAll.
	number uint32
	nlink  uint32
	layout uint16
	off    int64  // in the metadata image
	block  uint32 // of data outside the inode: directories and long links
}

// directory holds the names of a directory inode.
type directory struct {
	names map[string]*inode

	opaque bool                // overlay: hides what is below
	spare  bool                // left out if nothing is in it
	hides  map[string]struct{} // names that an archive removes from the layers below

	entries []dirent // set by collectLayout, which drops names
}

// dirent is a name of a directory, "." and ".." included.
type dirent struct {
	name string
	ino  *inode
}

func (i *inode) is(format uint32) bool { return i.mode&modeFmt == format }

// nid returns the number by which the format addresses a placed inode.
func (i *inode) nid() uint64 { return uint64(i.off) / slotSize }

// count accounts for one more name.
func (b *builder) count(name string) error {
	if b.entries++; b.entries > b.o.MaxEntries {
		return errs.OverLimit(errs.Invalid, "entries of a layer", b.o.MaxEntries, b.entries)
	}
	return b.grow(len(name))
}

// put enters child as name, in the place of what has the name already.
func (b *builder) put(parent *inode, name string, child *inode) error {
	if err := b.count(name); err != nil {
		return err
	}
	d := parent.dir
	if d.names == nil {
		d.names = make(map[string]*inode)
	}
	// The name may be a part of a whole archive header: keep only itself.
	d.names[strings.Clone(name)] = child
	return nil
}

// cleanPath turns the name of an archive entry into the components below the
// root: leading and doubled slashes and "." go, as with tar; ".." is refused.
func cleanPath(name string) ([]string, error) {
	if len(name) > maxPathLen {
		return nil, errs.OverLimit(errs.Invalid, "length of a path", maxPathLen, len(name))
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, errs.E(errs.Invalid, "a name contains a NUL byte")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, errs.E(errs.Invalid, "a path with %q leaves the archive", "..").
				WithHint("make the archive from inside the directory, without ..")
		case len(part) > maxNameLen:
			return nil, errs.OverLimit(errs.Invalid, "length of a file name", maxNameLen, len(part))
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// lookup walks parts from the root without following links. It returns nil
// where a directory on the way or the last name does not exist.
func (b *builder) lookup(parts []string) (*inode, error) {
	at := b.root
	for k, name := range parts {
		next := at.dir.names[name]
		if next == nil {
			return nil, nil
		}
		if next.dir == nil && k < len(parts)-1 {
			return nil, notDirectory(parts[:k+1], next)
		}
		at = next
	}
	return at, nil
}

// makeParents walks parts from the root and makes missing directories.
func (b *builder) makeParents(parts []string) (*inode, error) {
	at := b.root
	for k, name := range parts {
		next := at.dir.names[name]
		if next == nil {
			next = &inode{mode: modeDir | 0o755, dir: &directory{}}
			if err := b.put(at, name, next); err != nil {
				return nil, err
			}
		}
		if next.dir == nil {
			return nil, notDirectory(parts[:k+1], next)
		}
		at = next
	}
	return at, nil
}

func notDirectory(parts []string, i *inode) error {
	path := strings.Join(parts, "/")
	if i.is(modeLnk) {
		return errs.E(errs.Invalid, "its parent %q is a symbolic link, which is never followed", path).
			WithHint("archive it under the path that the link points to")
	}
	return errs.E(errs.Invalid, "its parent %q is not a directory", path)
}
