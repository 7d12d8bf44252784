package erofs

import (
	"cmp"
	"slices"

	"github.com/harena-dev/harena/internal/errs"
)

// layout is a tree with every inode's place in the metadata image decided.
//
//	block 0: superblock, device slots, the root's inode …
//	         inodes, each with attributes and an inline tail or a chunk index
//	then     blocks of directories and of long symbolic links
type layout struct {
	super   superblock
	order   []*inode // by place
	names   int64
	logical int64
	end     int64 // of the inodes
}

// collectLayout orders the inodes of a tree. Children of a directory are placed
// together, in the order of their names, so that listing it reads few blocks.
func collectLayout(root *inode) (*layout, error) {
	l := &layout{order: []*inode{root}}
	root.nlink = 2
	return l, l.collect(root, root)
}

// placeAll decides where everything goes; the devices are known by now.
func (l *layout) placeAll() error {
	l.end = firstInode(len(l.super.devices))
	var outside uint64 // blocks behind the inodes
	for k, i := range l.order {
		i.number = uint32(k + 1)
		i.block = uint32(outside)
		outside += l.place(i)
	}
	first := uint64(alignUp(l.end, blockSize) / blockSize)
	if first+outside > maxBlocks {
		return errs.OverLimit(errs.Invalid, "metadata of a layer, in blocks of 4 KiB", maxBlocks, first+outside)
	}
	for _, i := range l.order {
		i.block += uint32(first)
	}
	l.super.blocks = uint32(first + outside)
	l.super.inodes = uint64(len(l.order))
	l.super.rootNID = uint16(l.order[0].nid())
	return nil
}

// collect settles the names of a directory and everything below it.
func (l *layout) collect(i, parent *inode) error {
	d := i.dir
	d.applyWhiteouts()
	if d.opaque {
		var err error
		if i.attrs, err = makeOpaque(i.attrs); err != nil {
			return err
		}
	}
	l.names += int64(len(d.names))
	d.entries = append(make([]dirent, 0, len(d.names)+2), dirent{".", i}, dirent{"..", parent})
	for name, child := range d.names {
		d.entries = append(d.entries, dirent{name, child})
	}
	d.names = nil
	slices.SortFunc(d.entries, func(a, b dirent) int { return cmp.Compare(a.name, b.name) })

	for _, e := range d.entries {
		switch {
		case e.name == "." || e.name == "..":
			continue
		case e.ino.dir != nil:
			e.ino.nlink = 2
			i.nlink++
		default:
			if e.ino.nlink++; e.ino.nlink > 1 {
				continue // placed at its first name
			}
			if e.ino.is(modeReg) {
				l.logical += e.ino.size
			}
		}
		l.order = append(l.order, e.ino)
	}
	for _, e := range d.entries {
		if e.ino.dir == nil || e.name == "." || e.name == ".." {
			continue
		}
		if err := l.collect(e.ino, i); err != nil {
			return err
		}
	}
	return nil
}

// applyWhiteouts turns removed names into overlay whiteouts. A whiteout never
// applies to its own layer: a directory of the same name hides the one below,
// anything else does so by being there (OCI image-spec, layer.md, "Whiteouts").
func (d *directory) applyWhiteouts() {
	for name := range d.hides {
		switch same := d.names[name]; {
		case same == nil:
			if d.names == nil {
				d.names = make(map[string]*inode)
			}
			d.names[name] = &inode{mode: modeChr}
		case same.dir != nil:
			same.dir.opaque = true
		}
	}
	d.hides = nil
}

// place decides an inode's offset and layout and returns the blocks it needs
// outside the inodes.
func (l *layout) place(i *inode) (outside uint64) {
	head := int64(inodeSize + i.attrSize())
	var tail int64 // bytes that may go behind the inode
	switch {
	case i.dir != nil:
		blocks, last := splitDirents(i.dir.entries)
		i.size = int64(len(blocks)-1)*blockSize + int64(last)
		outside, tail = uint64(len(blocks)), int64(last)
	case i.is(modeLnk):
		i.size = int64(len(i.link))
		outside, tail = 1, i.size
	}
	off := alignUp(l.end, slotSize)
	if off%blockSize > blockSize-inodeSize {
		off = alignUp(off, blockSize) // the inode itself stays in one block
	}
	if tail > 0 {
		if at, ok := placeInline(off, head, tail); ok {
			i.layout = layoutInline
			off, head = at, head+tail
			outside--
		}
	}
	i.off = off
	l.end = off + head
	if len(i.data) > 0 {
		i.layout = layoutChunked
		l.end = alignUp(l.end, chunkIndexSize) + chunkIndexSize*i.chunkCount()
	}
	return outside
}

// placeInline returns where an inode must start for its tail to stay within one
// block, as the format demands, if padding costs less than a block of its own.
func placeInline(off, head, tail int64) (int64, bool) {
	used := (off + head) % blockSize
	if used+tail <= blockSize {
		return off, true
	}
	pad := alignUp(blockSize-used, slotSize)
	off += pad
	if pad+tail > blockSize || (off+head)%blockSize+tail > blockSize || off%blockSize > blockSize-inodeSize {
		return 0, false
	}
	return off, true
}

// attrSize returns the size of the attributes with their header.
func (i *inode) attrSize() int {
	if i.attrs == "" {
		return 0
	}
	return xattrHeaderSize + len(i.attrs)
}

// chunkCount returns the entries of the inode's chunk index.
func (i *inode) chunkCount() int64 {
	chunk := int64(blockSize) << i.data.chunkBits()
	return (i.size + chunk - 1) / chunk
}

// splitDirents packs sorted names into blocks and returns the bytes used of the
// last one.
func splitDirents(entries []dirent) (blocks [][]dirent, last int) {
	start, used := 0, 0
	for k, e := range entries {
		n := direntSize + len(e.name)
		if used+n > blockSize {
			blocks = append(blocks, entries[start:k])
			start, used = k, 0
		}
		used += n
	}
	return append(blocks, entries[start:]), used
}
