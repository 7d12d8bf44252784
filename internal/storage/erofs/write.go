package erofs

import (
	"bufio"
	"context"
	"io"
	"os"
)

// imageWriter writes the metadata image from front to back; block 0 is kept
// back until everything that the superblock says is known to be written.
type imageWriter struct {
	out  *bufio.Writer
	head []byte // block 0
	at   int64
	err  error
}

func (w *imageWriter) write(p []byte) {
	if w.err != nil {
		return
	}
	if w.at < blockSize {
		n := copy(w.head[w.at:], p)
		w.at += int64(n)
		p = p[n:]
	}
	w.at += int64(len(p))
	_, w.err = w.out.Write(p)
}

// padTo writes zeros up to off.
func (w *imageWriter) padTo(off int64) {
	var zeros [blockSize]byte
	for w.at < off && w.err == nil {
		w.write(zeros[:min(off-w.at, blockSize)])
	}
}

func (l *layout) write(ctx context.Context, f *os.File) error {
	if _, err := f.Seek(blockSize, io.SeekStart); err != nil {
		return writeOutput(err)
	}
	w := &imageWriter{out: bufio.NewWriterSize(f, 1<<20), head: make([]byte, blockSize)}
	var buf []byte
	for k, i := range l.order {
		if k%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		w.padTo(i.off)
		buf = i.encode(buf[:0])
		w.write(buf)
		if i.layout == layoutChunked {
			w.padTo(alignUp(w.at, chunkIndexSize))
			w.writeChunkIndex(i)
		}
	}
	w.padTo(alignUp(l.end, blockSize))
	for _, i := range l.order {
		w.writeOutside(i)
	}
	if w.err == nil {
		w.err = w.out.Flush()
	}
	if w.err != nil {
		return writeOutput(w.err)
	}
	l.super.encode(w.head)
	_, err := f.WriteAt(w.head, 0)
	return writeOutput(err)
}

// encode appends the inode, its attributes and its inline tail.
func (i *inode) encode(b []byte) []byte {
	b = le.AppendUint16(b, inodeExtended|i.layout<<1)
	var attrCount uint16
	if n := i.attrSize(); n > 0 {
		attrCount = uint16((n-xattrHeaderSize)/xattrEntrySize + 1)
	}
	b = le.AppendUint16(b, attrCount)
	b = le.AppendUint16(b, uint16(i.mode))
	b = le.AppendUint16(b, 0)
	b = le.AppendUint64(b, uint64(i.size))
	b = le.AppendUint32(b, i.union())
	b = le.AppendUint32(b, i.number)
	b = le.AppendUint32(b, i.uid)
	b = le.AppendUint32(b, i.gid)
	b = le.AppendUint64(b, uint64(i.sec))
	b = le.AppendUint32(b, i.nsec)
	b = le.AppendUint32(b, i.nlink)
	b = append(b, make([]byte, 16)...)
	if i.attrs != "" {
		b = append(b, make([]byte, xattrHeaderSize)...)
		b = append(b, i.attrs...)
	}
	if i.layout != layoutInline {
		return b
	}
	if i.dir != nil {
		blocks, _ := splitDirents(i.dir.entries)
		return appendDirents(b, blocks[len(blocks)-1])
	}
	return append(b, i.link...)
}

// union returns i_u: chunk format, block address or device number.
func (i *inode) union() uint32 {
	switch {
	case i.layout == layoutChunked:
		return chunkIndexes | uint32(i.data.chunkBits())
	case i.dir != nil || i.is(modeLnk):
		return i.block
	case i.is(modeReg):
		return nullBlock
	}
	return i.device
}

func (w *imageWriter) writeChunkIndex(i *inode) {
	step := uint32(1) << i.data.chunkBits()
	buf := make([]byte, 0, blockSize)
	for _, e := range i.data {
		for done := uint64(0); done < uint64(e.n); done += uint64(step) {
			at, device := uint32(nullBlock), uint16(0)
			if e.at != nullBlock {
				at, device = e.at+uint32(done), e.device
			}
			buf = le.AppendUint16(buf, 0)
			buf = le.AppendUint16(buf, device)
			buf = le.AppendUint32(buf, at)
			if len(buf) == blockSize {
				w.write(buf)
				buf = buf[:0]
			}
		}
	}
	w.write(buf)
}

// writeOutside writes what place put behind the inodes, in the same order.
func (w *imageWriter) writeOutside(i *inode) {
	switch {
	case i.dir != nil:
		blocks, _ := splitDirents(i.dir.entries)
		if i.layout == layoutInline {
			blocks = blocks[:len(blocks)-1]
		}
		for _, block := range blocks {
			w.write(appendDirents(make([]byte, 0, blockSize), block))
			w.padTo(alignUp(w.at, blockSize))
		}
	case i.is(modeLnk) && i.layout == layoutPlain:
		w.write([]byte(i.link))
		w.padTo(alignUp(w.at, blockSize))
	}
}

// appendDirents encodes the names of one block.
func appendDirents(b []byte, entries []dirent) []byte {
	nameAt := direntSize * len(entries)
	for _, e := range entries {
		b = le.AppendUint64(b, e.ino.nid())
		b = le.AppendUint16(b, uint16(nameAt))
		b = append(b, fileType(e.ino.mode), 0)
		nameAt += len(e.name)
	}
	for _, e := range entries {
		b = append(b, e.name...)
	}
	return b
}
