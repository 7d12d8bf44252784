package erofs

import (
	"bytes"
	"fmt"
	"io"

	"github.com/harena-dev/harena/internal/errs"
)

// walker keeps what a walk needs to end on any image.
type walker struct {
	img     *Image
	visit   func(string, *Entry) error
	dirs    map[uint64]struct{}
	entries int64
	limit   int64
}

// root returns the root directory.
func (m *Image) root() (*Entry, error) {
	root, err := m.entry(uint64(m.super.rootNID))
	if err == nil && root.Mode&modeFmt != modeDir {
		err = damaged("the root is not a directory")
	}
	return root, err
}

// maxNames returns how many names the image can have: they lie in blocks of one
// directory only.
func (m *Image) maxNames() int64 { return int64(m.super.blocks) * (blockSize / (direntSize + 1)) }

// Walk calls fn for every name of the image, directories before what is in them
// and names in byte order; the root comes first as ".". It stops at the first
// error and returns it.
func (m *Image) Walk(fn func(path string, e *Entry) error) error {
	root, err := m.root()
	if err != nil {
		return err
	}
	if err := fn(".", root); err != nil {
		return err
	}
	w := &walker{img: m, visit: fn, dirs: map[uint64]struct{}{root.NID: {}}, limit: m.maxNames()}
	return w.walk(root, root, "")
}

func (w *walker) walk(dir, parent *Entry, path string) error {
	return w.img.readDir(dir, path, func(n rawDirent) error {
		if w.entries++; w.entries > w.limit {
			return damaged("directories share blocks")
		}
		return w.name(n, dir, parent, path)
	})
}

// readDir calls fn for every name of a directory, "." and ".." included.
func (m *Image) readDir(dir *Entry, path string, fn func(rawDirent) error) error {
	block := make([]byte, blockSize)
	last := ""
	for off := int64(0); off < dir.Size; off += blockSize {
		p := block[:min(blockSize, dir.Size-off)]
		if err := m.readFlat(dir, p, off); err != nil {
			return err
		}
		names, err := parseDirents(p)
		if err != nil {
			return err
		}
		for _, n := range names {
			if n.name <= last {
				return damaged("the names of directory %q are not sorted", path)
			}
			last = n.name
			if err := fn(n); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *walker) name(n rawDirent, dir, parent *Entry, path string) error {
	switch n.name {
	case ".":
		if n.nid != dir.NID {
			return damaged("%q of directory %q is another one", ".", path)
		}
		return nil
	case "..":
		if n.nid != parent.NID {
			return damaged("%q of directory %q is another one", "..", path)
		}
		return nil
	}
	sub := n.name
	if path != "" {
		sub = path + "/" + n.name
	}
	if len(sub) > maxPathLen {
		return damaged("a path has %d bytes", len(sub))
	}
	e, err := w.img.entry(n.nid)
	if err != nil {
		return err
	}
	if fileType(e.Mode) != n.kind {
		return damaged("directory and inode disagree about the type of %q", sub)
	}
	isDir := n.kind == ftDirectory
	if isDir {
		if _, ok := w.dirs[n.nid]; ok {
			return damaged("directory %q has two names", sub)
		}
		w.dirs[n.nid] = struct{}{}
	}
	if err := w.visit(sub, e); err != nil || !isDir {
		return err
	}
	return w.walk(e, dir, sub)
}

type rawDirent struct {
	nid  uint64
	kind byte
	name string
}

// parseDirents decodes one block of a directory. The offset of the first name
// tells how many there are; the last name ends at a NUL or the end of the block.
func parseDirents(p []byte) ([]rawDirent, error) {
	if len(p) < direntSize {
		return nil, damaged("a directory has a block of %d bytes", len(p))
	}
	first := int(le.Uint16(p[8:]))
	if first < direntSize || first%direntSize != 0 || first > len(p) {
		return nil, damaged("a directory's first name is at %d", first)
	}
	out := make([]rawDirent, first/direntSize)
	for k := range out {
		d := p[k*direntSize:]
		start, end := int(le.Uint16(d[8:])), len(p)
		if k < len(out)-1 {
			end = int(le.Uint16(d[direntSize+8:]))
		}
		if start < first || end < start || end > len(p) {
			return nil, damaged("a directory's name is outside its block")
		}
		name := p[start:end]
		if k == len(out)-1 {
			name, _, _ = bytes.Cut(name, []byte{0})
		}
		if len(name) == 0 || len(name) > maxNameLen || bytes.ContainsAny(name, "/\x00") {
			return nil, damaged("a directory has a name that is not valid")
		}
		out[k] = rawDirent{nid: le.Uint64(d), kind: d[10], name: string(name)}
	}
	return out, nil
}

// Content returns the content of a regular file.
func (e *Entry) Content() (*io.SectionReader, error) {
	if e.Mode&modeFmt != modeReg {
		return nil, errs.E(errs.Invalid, "only regular files have content")
	}
	return io.NewSectionReader(content{e}, 0, e.Size), nil
}

// content reads a regular file chunk by chunk.
type content struct{ e *Entry }

// ReadAt implements io.ReaderAt.
func (c content) ReadAt(p []byte, off int64) (int, error) {
	e, done := c.e, 0
	if off < 0 {
		return 0, errs.E(errs.Invalid, "negative offset")
	}
	for done < len(p) {
		if off >= e.Size {
			return done, io.EOF
		}
		n, err := e.readChunk(p[done:], off)
		if err != nil {
			return done, err
		}
		done += n
		off += int64(n)
	}
	return done, nil
}

// readChunk reads from the chunk at off, which is within the file.
func (e *Entry) readChunk(p []byte, off int64) (int, error) {
	bits := blockBits + e.i.union&chunkBitsMask
	var b [chunkIndexSize]byte
	at := alignUp(e.body, chunkIndexSize) + off>>bits*chunkIndexSize
	if err := e.img.readMeta(b[:], at); err != nil {
		return 0, err
	}
	start := off >> bits << bits
	end := min(start+int64(1)<<bits, e.Size)
	p = p[:min(int64(len(p)), end-off)]
	device, block := le.Uint16(b[2:]), le.Uint32(b[4:])
	if block == nullBlock {
		clear(p)
		return len(p), nil
	}
	blocks := alignUp(end-start, blockSize) / blockSize
	if err := e.img.checkRun(e, device, block, blocks); err != nil {
		return 0, err
	}
	if len(e.img.blobs) == 0 {
		return 0, errs.E(errs.Precondition, "the image was opened without its data blobs")
	}
	return len(p), readAt(e.img.blobs[device-1], p, int64(block)*blockSize+off-start, fmt.Sprintf("data blob %d", device))
}

// checkRun refuses blocks that no device of the image has.
func (m *Image) checkRun(e *Entry, device uint16, block uint32, blocks int64) error {
	if device < 1 || int(device) > len(m.super.devices) || int64(block)+blocks > int64(m.super.devices[device-1].Blocks) {
		return damaged("content of inode %d lies outside the data blobs", e.NID)
	}
	return nil
}

// extents returns where the content of a regular file lies, as whole blocks; the
// devices are those of the device table, from 1 on. budget bounds the chunks read,
// and is reduced by them.
func (e *Entry) extents(budget *int64) (extents, error) {
	if e.Size == 0 {
		return nil, nil
	}
	bits := blockBits + e.i.union&chunkBitsMask
	left := alignUp(e.Size, blockSize) / blockSize
	step := int64(1) << (bits - blockBits)
	chunks := (left + step - 1) / step
	if *budget -= chunks; *budget < 0 {
		return nil, damaged("the content of inode %d has more chunks than the image has room for", e.NID)
	}
	var out extents
	at := alignUp(e.body, chunkIndexSize)
	buf := make([]byte, min(chunks*chunkIndexSize, blockSize))
	for chunks > 0 {
		p := buf[:min(chunks*chunkIndexSize, int64(len(buf)))]
		if err := e.img.readMeta(p, at); err != nil {
			return nil, err
		}
		at += int64(len(p))
		for ; len(p) > 0; p = p[chunkIndexSize:] {
			n := min(step, left)
			to := place{le.Uint16(p[2:]), le.Uint32(p[4:])}
			if to.at == nullBlock {
				to.device = 0
			} else if err := e.img.checkRun(e, to.device, to.at, n); err != nil {
				return nil, err
			}
			out = out.add(to, uint32(n))
			left -= n
			chunks--
		}
	}
	return out, nil
}
