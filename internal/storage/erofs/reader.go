package erofs

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// Image is an open image as FromTar, FromDir and Merge write them; other EROFS
// images are refused. The bytes are not trusted: every offset is checked before
// it is used, and nothing is allocated by what a field claims. Methods may be
// used concurrently if the readers may.
type Image struct {
	meta  io.ReaderAt
	blobs []io.ReaderAt // in the order of the device slots; none: metadata only
	super superblock
}

// Devices returns the device table: the image's own blob first.
func (m *Image) Devices() []Device { return slices.Clone(m.super.devices) }

// Entry is one name of an image.
type Entry struct {
	NID     uint64 // the same for all hard links of a file
	Mode    uint32 // st_mode
	UID     uint32
	GID     uint32
	Nlink   uint32
	Size    int64
	ModTime time.Time // UTC
	Major   uint32    // of devices
	Minor   uint32
	Link    string // target of a symbolic link
	Xattrs  map[string]string

	img  *Image
	body int64 // offset behind the attributes: inline tail or chunk index
	i    rawInode
}

// rawInode holds the fields that only reading content needs.
type rawInode struct {
	layout uint16
	union  uint32
}

func damaged(format string, args ...any) error {
	return errs.E(errs.Invalid, "layer image is damaged: "+format, args...).WithHint("fetch or import the layer again")
}

// readAt reads all of p or fails.
func readAt(r io.ReaderAt, p []byte, off int64, what string) error {
	n, err := r.ReadAt(p, off)
	switch {
	case n == len(p):
		return nil
	case err == io.EOF || err == nil:
		return damaged("%s ends at %d, %d bytes from %d on were expected", what, off+int64(n), len(p), off)
	}
	return errs.E(errs.Internal, "read %s: %w", what, err)
}

// Open checks the superblock and that all files are as long as it says. blobs are
// those of the device table, in its order; without any, only the metadata can be read.
func Open(meta io.ReaderAt, blobs ...io.ReaderAt) (*Image, error) {
	block := make([]byte, blockSize)
	if err := readAt(meta, block, 0, "metadata image"); err != nil {
		return nil, err
	}
	super, err := decodeSuper(block)
	if err != nil {
		return nil, err
	}
	if err := checkLength(meta, super.blocks, "metadata image"); err != nil {
		return nil, err
	}
	if n := len(super.devices); len(blobs) > 0 && len(blobs) != n {
		return nil, errs.E(errs.Invalid, "the layer image has %d data blobs, %d were given", n, len(blobs))
	}
	for i, r := range blobs {
		if err := checkLength(r, super.devices[i].Blocks, fmt.Sprintf("data blob %d", i+1)); err != nil {
			return nil, err
		}
	}
	return &Image{meta: meta, blobs: blobs, super: super}, nil
}

func checkLength(r io.ReaderAt, blocks uint32, what string) error {
	if blocks == 0 {
		return nil
	}
	return readAt(r, make([]byte, 1), int64(blocks)*blockSize-1, what)
}

// decodeSuper decodes block 0.
func decodeSuper(block []byte) (superblock, error) {
	var s superblock
	b := block[superOffset:]
	if le.Uint32(b) != superMagic {
		return s, errs.E(errs.Invalid, "not a layer image: the EROFS magic number is missing")
	}
	if le.Uint32(b[4:]) != superChecksum(block) {
		return s, damaged("the checksum of the superblock is wrong")
	}
	devices := int(le.Uint16(b[86:]))
	if b[12] != blockBits || b[13] != 0 || b[90] != 0 || le.Uint32(b[40:]) != 0 ||
		le.Uint32(b[80:]) != incompatChunkedFile|incompatDeviceTable ||
		devices < 1 || devices > 1+MaxDevices || le.Uint16(b[88:]) != deviceSlotOffset/deviceSlotSize {
		return s, errs.E(errs.Unsupported, "the EROFS image uses features that Harena's layers do not").
			WithHint("import its content as a directory or tar archive")
	}
	s = superblock{rootNID: le.Uint16(b[14:]), inodes: le.Uint64(b[16:]), blocks: le.Uint32(b[36:])}
	for i := range devices {
		slot := block[deviceSlotOffset+i*deviceSlotSize:]
		if le.Uint32(slot[68:]) != 0 {
			return s, errs.E(errs.Unsupported, "the EROFS image addresses its devices as one")
		}
		tag, _, _ := bytes.Cut(slot[:maxTagLen], []byte{0})
		s.devices = append(s.devices, Device{Tag: string(tag), Blocks: le.Uint32(slot[64:])})
	}
	return s, nil
}

// readMeta reads from the metadata image, within its declared size.
func (m *Image) readMeta(p []byte, off int64) error {
	if off < 0 || off > int64(m.super.blocks)*blockSize-int64(len(p)) {
		return damaged("something lies outside the metadata image")
	}
	return readAt(m.meta, p, off, "metadata image")
}

// entry reads an inode with its attributes and, of a symbolic link, the target.
func (m *Image) entry(nid uint64) (*Entry, error) {
	if nid >= uint64(m.super.blocks)*blockSize/slotSize {
		return nil, damaged("inode %d lies outside the metadata image", nid)
	}
	off := int64(nid) * slotSize
	var b [inodeSize]byte
	if err := m.readMeta(b[:], off); err != nil {
		return nil, err
	}
	format := le.Uint16(b[0:])
	e := &Entry{
		NID:   nid,
		Mode:  uint32(le.Uint16(b[4:])),
		Size:  int64(le.Uint64(b[8:])),
		UID:   le.Uint32(b[24:]),
		GID:   le.Uint32(b[28:]),
		Nlink: le.Uint32(b[44:]),
		img:   m,
		i:     rawInode{layout: format >> 1, union: le.Uint32(b[16:])},
	}
	nsec := le.Uint32(b[40:])
	if format&inodeExtended == 0 || e.Size < 0 || e.Size > maxFileSize || nsec >= 1e9 || fileType(e.Mode) == 0 {
		return nil, damaged("inode %d is not valid", nid)
	}
	e.ModTime = time.Unix(int64(le.Uint64(b[32:])), int64(nsec)).UTC()
	e.body = off + inodeSize
	if n := le.Uint16(b[2:]); n > 0 {
		size := xattrHeaderSize + xattrEntrySize*(int(n)-1)
		if err := m.readXattrs(e, size); err != nil {
			return nil, err
		}
		e.body += int64(size)
	}
	return e, m.checkKind(e)
}

// checkKind checks what depends on the type of file.
func (m *Image) checkKind(e *Entry) error {
	layout, ok := e.i.layout, false
	switch e.Mode & modeFmt {
	case modeDir:
		ok = e.Size > 0 && (layout == layoutPlain || layout == layoutInline)
	case modeLnk:
		if e.Size < 1 || e.Size > maxPathLen {
			break
		}
		ok = layout == layoutPlain || layout == layoutInline
		p := make([]byte, e.Size)
		if err := m.readFlat(e, p, 0); err != nil {
			return err
		}
		e.Link = string(p)
	case modeReg:
		ok = e.Size == 0 || layout == layoutChunked && e.i.union&^chunkBitsMask == chunkIndexes
	case modeChr, modeBlk:
		ok = e.Size == 0
		e.Major, e.Minor = decodeDevice(e.i.union)
	default:
		ok = e.Size == 0
	}
	if !ok {
		return damaged("inode %d has size %d and layout %d, which do not fit its type", e.NID, e.Size, layout)
	}
	return nil
}

func (m *Image) readXattrs(e *Entry, size int) error {
	p := make([]byte, size) // at most 256 KiB
	if err := m.readMeta(p, e.body); err != nil {
		return err
	}
	if p[4] != 0 {
		return damaged("inode %d refers to shared attributes", e.NID)
	}
	e.Xattrs = make(map[string]string)
	for rest := string(p[xattrHeaderSize:]); rest != ""; {
		name, value, next, ok := nextAttr(rest)
		if !ok {
			return damaged("the extended attributes of inode %d are not valid", e.NID)
		}
		e.Xattrs[name] = value
		rest = next
	}
	return nil
}

// readFlat reads p from offset off of a directory or symbolic link; p does not
// cross a block. Blocks lie at i_u; an inline tail lies behind the inode.
func (m *Image) readFlat(e *Entry, p []byte, off int64) error {
	if e.i.layout == layoutInline && off >= e.Size/blockSize*blockSize {
		at := e.body + off%blockSize
		if at/blockSize != (at+int64(len(p))-1)/blockSize {
			return damaged("the tail of inode %d crosses a block", e.NID)
		}
		return m.readMeta(p, at)
	}
	return m.readMeta(p, int64(e.i.union)*blockSize+off)
}
