package erofs

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Hold says what may be kept of a tree while it is read, so that reading is all that its processes have to wait for: hashing,
// comparing and writing come afterwards.
type Hold struct {
	// Memory is how many bytes of content may be held.
	Memory int64
	// Clones, if set, is an empty file that gets what memory has no room for, as long as its file system can share the
	// blocks of the tree (FICLONERANGE, which waits until what is cloned is on disk). What neither takes is stored while the tree is read.
	Clones *os.File
}

const heldSlab = 1 << 20

// held is content that was read or cloned, and is not stored yet.
type held struct {
	Hold
	left  int64 // of Memory
	slab  []byte
	queue []heldRun
	end   int64 // of Clones
}

// heldRun continues the content of a file.
type heldRun struct {
	ino     *inode
	granule int
	hole    uint32 // blocks; or
	data    []byte // with room up to the end of the last block; or
	at, n   int64  // bytes of Clones
}

func newHeld(h Hold) *held { return &held{Hold: h, left: h.Memory} }

// room returns n bytes of memory that stay as they are until drain, with room for a whole block; nil when there are none.
func (h *held) room(n int) []byte {
	if h == nil {
		return nil
	}
	need := int(alignUp(int64(n), blockSize))
	if int64(need) > h.left {
		return nil
	}
	h.left -= int64(need)
	if len(h.slab) < need {
		h.slab = make([]byte, max(heldSlab, need))
	}
	p := h.slab[:n:need]
	h.slab = h.slab[need:]
	return p
}

// clone takes n bytes of a file at off: its blocks, not their content.
func (h *held) clone(in int, off, n int64) bool {
	if h == nil || h.Clones == nil || h.left >= n+blockSize {
		return false
	}
	err := unix.IoctlFileCloneRange(int(h.Clones.Fd()), &unix.FileCloneRange{
		Src_fd: int64(in), Src_offset: uint64(off), Src_length: uint64(n), Dest_offset: uint64(h.end),
	})
	return err == nil
}

// drain stores all that is held, in the order in which it was read.
func (d *dirBuilder) drain() error {
	h := d.hold
	if h == nil {
		return nil
	}
	var buf []byte
	for _, r := range h.queue {
		var err error
		switch {
		case r.hole > 0:
			r.ino.data = r.ino.data.add(place{at: nullBlock}, r.hole)
		case r.n > 0:
			if n := max(1<<18, r.granule); len(buf) < n {
				buf = make([]byte, n)
			}
			whole := int64(len(buf) / r.granule * r.granule)
			for done := int64(0); err == nil && done < r.n; {
				p := buf[:min(whole, r.n-done)]
				if _, err = io.ReadFull(io.NewSectionReader(h.Clones, r.at+done, int64(len(p))), p); err == nil {
					r.ino.data, err = d.blob.store(r.ino.data, p, r.granule)
				}
				done += int64(len(p))
			}
		default:
			r.ino.data, err = d.blob.store(r.ino.data, r.data, r.granule)
		}
		if err == nil {
			err = d.ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	h.queue, h.slab, h.left = nil, nil, h.Memory
	if h.end > 0 {
		h.end = 0
		return h.Clones.Truncate(0)
	}
	return nil
}
