package erofs

import (
	"context"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Stacked is an image of a stack that is merged. Of the image only the metadata is
// read. Blobs are those of its device table, in its order: its own first.
type Stacked struct {
	Image *Image
	Blobs []*Blob
	// Choose, if set, is Options.Choose for the names of the image; of st, only Mode and Rdev are set. Directories are not
	// dropped.
	Choose func(path string, st *unix.Stat_t) Choice
}

// Merge writes one image in the place of a stack of images, lowest first, and of
// upper, the upper directory of an overlay on top of them, unless it is nil. An
// overlay of the image shows what one of the stack shows. Content of the stack is
// not copied, it stays where it is: the blobs become devices of the image. Content
// of upper is looked up in Options.Parents, like that of FromDir; what no blob has
// gets into the image's own. Options.Choose is asked about upper only.
//
// below are the images under the stack, lowest first: they are not merged, but
// decide which whiteouts are still needed. All of them must be given: in a
// directory that only the merged image has, overlayfs would list whiteouts.
//
//   - A whiteout hides what is below it, and stays if its directory exists below.
//   - A directory on a directory joins it, with the attributes of the upper one.
//     One that is opaque, or lies on a file or a whiteout, hides what is below: the
//     result is opaque, without whiteouts.
//   - Anything else takes the place of what is below. Hard links are kept.
//   - A redirect (a directory whose content is elsewhere) or a whiteout that is not
//     a device is refused; overlays mounted with redirect_dir=nofollow have none.
func Merge(ctx context.Context, below []*Image, stack []Stacked, upper, meta, blob *os.File, o Options) (*Result, error) {
	o.KeepTrusted = true // opaque directories are what merging is about
	if upper != nil {
		t, err := ReadTree(ctx, upper, meta, blob, o)
		if err != nil {
			return nil, err
		}
		return t.WriteMerged(ctx, below, stack)
	}
	b, err := newBuilder(ctx, meta, blob, o)
	if err != nil {
		return nil, err
	}
	return b.merge(below, stack, nil)
}

// WriteMerged writes one image in the place of a stack and of the tree on top of it; see Merge. The tree was read with
// Options.KeepTrusted.
func (t *Tree) WriteMerged(ctx context.Context, below []*Image, stack []Stacked) (*Result, error) {
	t.d.ctx = ctx
	if err := t.d.drain(); err != nil {
		return nil, err
	}
	if err := takeMarks(t.root, ""); err != nil {
		return nil, err
	}
	return t.d.merge(below, stack, t.root)
}

func (b *builder) merge(below []*Image, stack []Stacked, upper *inode) (*Result, error) {
	var top *inode
	for _, s := range stack {
		tree, err := b.loadTree(s)
		if err != nil {
			return nil, err
		}
		if top != nil {
			joinTrees(top, tree)
		}
		top = tree
	}
	if top != nil && upper != nil {
		joinTrees(top, upper)
	}
	if upper != nil {
		top = upper
	}
	if top == nil {
		return nil, errs.E(errs.Invalid, "there is nothing to merge")
	}
	under := make([]*belowDir, 0, len(below))
	for _, img := range slices.Backward(below) {
		root, err := img.root()
		if err != nil {
			return nil, err
		}
		under = append(under, &belowDir{img: img, dir: root})
	}
	if err := prune(top, under); err != nil {
		return nil, err
	}
	b.root = top
	return b.finish()
}

// loadTree reads an image into a tree whose content stays where it is.
func (b *builder) loadTree(s Stacked) (*inode, error) {
	if got, want := len(s.Blobs), len(s.Image.super.devices); got != want {
		return nil, errs.E(errs.Invalid, "the layer image has %d data blobs, %d were given", want, got)
	}
	devices := []uint16{0}
	for i, o := range s.Blobs {
		if d := s.Image.super.devices[i]; i > 0 && d.Tag != o.Name || int64(d.Blocks) != o.Size/blockSize {
			return nil, damaged("device %d is %q with %d blocks, the blob given for it is %s with %d bytes", i+1, d.Tag, d.Blocks, o.Name, o.Size)
		}
		n, err := b.blob.device(o)
		if err != nil {
			return nil, err
		}
		devices = append(devices, n)
	}
	t := &treeLoader{
		builder: b, devices: devices, choose: s.Choose, dirs: make(map[string]*inode), links: make(map[uint64]*inode),
		budget: int64(s.Image.super.blocks) * (blockSize / chunkIndexSize),
	}
	if err := s.Image.Walk(t.add); err != nil {
		return nil, err
	}
	return t.root, takeMarks(t.root, "")
}

type treeLoader struct {
	*builder
	devices []uint16 // by slot
	choose  func(path string, st *unix.Stat_t) Choice
	root    *inode
	dirs    map[string]*inode
	links   map[uint64]*inode
	budget  int64
}

// add enters a name of the image; directories come before what is in them.
func (t *treeLoader) add(path string, e *Entry) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	choice := Take
	if t.choose != nil && path != "." {
		choice = t.choose(path, &unix.Stat_t{Mode: e.Mode, Rdev: unix.Mkdev(e.Major, e.Minor)})
		if choice == Drop && e.Mode&modeFmt != modeDir {
			return nil
		}
	}
	ino := t.links[e.NID]
	if ino == nil {
		var err error
		if ino, err = t.inode(path, e); err != nil {
			return err
		}
	}
	if path == "." {
		t.root, t.dirs[""] = ino, ino
		return nil
	}
	dir, name := "", path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		dir, name = path[:i], path[i+1:]
	}
	if ino.dir != nil {
		t.dirs[path] = ino
		ino.dir.spare = choice != Take
	} else {
		t.links[e.NID] = ino
	}
	return t.put(t.dirs[dir], name, ino)
}

func (t *treeLoader) inode(path string, e *Entry) (*inode, error) {
	ino := &inode{
		mode: e.Mode, uid: e.UID, gid: e.GID, sec: e.ModTime.Unix(), nsec: uint32(e.ModTime.Nanosecond()),
		link: e.Link, device: encodeDevice(e.Major, e.Minor),
	}
	if err := t.grow(len(e.Link)); err != nil {
		return nil, err
	}
	switch e.Mode & modeFmt {
	case modeDir:
		ino.dir = &directory{}
	case modeReg:
		var err error
		if ino.data, err = e.extents(&t.budget); err != nil {
			return nil, err
		}
		ino.size = e.Size
		for k := range ino.data {
			ino.data[k].device = t.devices[ino.data[k].device]
		}
	}
	var err error
	ino.attrs, err = t.encodeAttrs(path, e.Xattrs)
	return ino, err
}

// takeMarks turns the attributes by which overlayfs marks directories into what
// the tree says of them.
func takeMarks(ino *inode, path string) error {
	var kept []byte
	for rest := ino.attrs; rest != ""; {
		name, value, next, ok := nextAttr(rest)
		switch {
		case !ok:
			return damaged("the extended attributes of %s are not valid", quote(path))
		case name == nameOpaque && value == "y" && ino.dir != nil:
			ino.dir.opaque = true
		case strings.HasPrefix(name, overlayPrefix):
			return errs.E(errs.Unsupported, "%s has the extended attribute %s = %s, which cannot be merged", quote(path), quote(name), quote(value)).
				WithHint("snapshot the sandbox without merging, or make its layers anew")
		default:
			kept = append(kept, rest[:len(rest)-len(next)]...)
		}
		rest = next
	}
	if len(kept) < len(ino.attrs) {
		ino.attrs = string(kept)
	}
	if ino.dir == nil {
		return nil
	}
	for name, child := range ino.dir.names {
		if err := takeMarks(child, path+"/"+name); err != nil {
			return err
		}
	}
	return nil
}

func (i *inode) isWhiteout() bool { return i.is(modeChr) && i.device == 0 }

// joinTrees puts the directory upper on lower, whose content it takes over.
func joinTrees(lower, upper *inode) {
	if upper.dir.opaque {
		return
	}
	upper.dir.opaque = lower.dir.opaque
	if upper.dir.names == nil {
		upper.dir.names = lower.dir.names
		return
	}
	for name, l := range lower.dir.names {
		switch u := upper.dir.names[name]; {
		case u == nil:
			upper.dir.names[name] = l
		case u.dir == nil:
		case l.dir == nil:
			u.dir.opaque = true // what l hides stays hidden
		default:
			joinTrees(l, u)
		}
	}
}

// belowDir is a directory of an image under the stack.
type belowDir struct {
	img   *Image
	dir   *Entry
	names map[string]rawDirent
}

func (d *belowDir) lookup(name string) (rawDirent, bool, error) {
	if d.names == nil {
		d.names = make(map[string]rawDirent)
		var n int64
		err := d.img.readDir(d.dir, "", func(e rawDirent) error {
			d.names[e.name] = e
			if n++; n > d.img.maxNames() {
				return damaged("directories share blocks")
			}
			return nil
		})
		if err != nil {
			return rawDirent{}, false, err
		}
	}
	e, ok := d.names[name]
	return e, ok, nil
}

// descend returns which of the directories that overlayfs would join as name lie
// below, the uppermost first.
func descend(under []*belowDir, name string) ([]*belowDir, error) {
	var out []*belowDir
	for _, d := range under {
		n, ok, err := d.lookup(name)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if n.kind != ftDirectory {
			break
		}
		e, err := d.img.entry(n.nid)
		if err != nil {
			return nil, err
		}
		if e.Mode&modeFmt != modeDir {
			return nil, damaged("directory and inode disagree about the type of %s", quote(name))
		}
		out = append(out, &belowDir{img: d.img, dir: e})
		if e.Xattrs[nameOpaque] == "y" {
			break
		}
	}
	return out, nil
}

// prune removes the whiteouts that hide nothing and that overlayfs, which takes
// a directory of one layer as it is, would list. under is what the directory joins.
func prune(ino *inode, under []*belowDir) error {
	if ino.dir.opaque {
		under = nil
	}
	for _, name := range slices.Sorted(maps.Keys(ino.dir.names)) {
		child := ino.dir.names[name]
		switch {
		case child.isWhiteout() && len(under) == 0:
			delete(ino.dir.names, name)
		case child.dir != nil:
			sub, err := descend(under, name)
			if err != nil {
				return err
			}
			if err := prune(child, sub); err != nil {
				return err
			}
			if child.dir.spare && len(child.dir.names) == 0 && !child.dir.opaque {
				delete(ino.dir.names, name)
			}
		}
	}
	return nil
}
