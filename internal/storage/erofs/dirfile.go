package erofs

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// addRegular reads the file behind the O_PATH descriptor fd.
func (d *dirBuilder) addRegular(fd int, ino *inode, st *unix.Stat_t, path string) error {
	in, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return readDirError(err, path)
	}
	defer unix.Close(in)
	if err := d.fill(ino, st, in, path); err != nil {
		return err
	}
	if err := d.admit(st.Size); err != nil {
		return fmt.Errorf("%s: %w", quote(path), err)
	}
	if st.Size == 0 {
		return nil
	}
	if err := d.content(in, ino, st, path); err != nil {
		return err
	}
	var after unix.Stat_t
	if err := unix.Fstat(in, &after); err != nil {
		return readDirError(err, path)
	}
	if ino.size != st.Size || after.Size != st.Size || after.Mtim != st.Mtim {
		d.warn("%s: it changed while it was read", quote(path))
	}
	return nil
}

// content reads at most what the file's size was when it was looked at. A file
// that shrank meanwhile ends where reading it ended.
func (d *dirBuilder) content(in int, ino *inode, st *unix.Stat_t, path string) error {
	granule := int64(blockSize) << granuleBits(st.Size)
	whole := int64(readBuffer(st.Size)) / granule * granule
	size, pos := st.Size, int64(0)
	sparse := st.Blocks*512 < st.Size
	dataEnd := size
	for pos < size {
		if sparse && (pos == 0 || pos >= dataEnd) {
			var skip int64
			skip, dataEnd, sparse = nextData(in, pos, size, granule)
			if skip > 0 {
				d.hole(ino, uint32(alignUp(skip, blockSize)/blockSize))
				pos += skip
				if err := d.advance(skip); err != nil {
					return err
				}
				if pos%granule != 0 {
					break // the end, possibly an earlier one than expected
				}
				continue
			}
		}
		want := size - pos
		if sparse {
			want = min(want, alignUp(dataEnd-pos, granule))
		}
		if h := d.hold; h.clone(in, pos, want) {
			h.queue = append(h.queue, heldRun{ino: ino, granule: int(granule), at: h.end, n: want})
			h.end += alignUp(want, blockSize)
			pos += want
			if err := d.advance(want); err != nil {
				return err
			}
			continue
		}
		want = min(whole, want)
		n, err := d.piece(in, ino, pos, int(want), int(granule))
		if err != nil {
			return fmt.Errorf("%s: %w", quote(path), err)
		}
		pos += int64(n)
		if err := d.advance(int64(n)); err != nil {
			return err
		}
		if int64(n) < want {
			break
		}
	}
	ino.size = pos
	return nil
}

func (d *dirBuilder) hole(ino *inode, blocks uint32) {
	if h := d.hold; h != nil {
		h.queue = append(h.queue, heldRun{ino: ino, hole: blocks})
		return
	}
	ino.data = ino.data.add(place{at: nullBlock}, blocks)
}

// piece reads want bytes at pos, or less at the end of the file, and holds or stores them.
func (d *dirBuilder) piece(in int, ino *inode, pos int64, want, granule int) (int, error) {
	h := d.hold
	p := h.room(want)
	if h != nil && p == nil {
		if err := d.drain(); err != nil {
			return 0, err
		}
		p = h.room(want)
	}
	if p != nil {
		n, err := preadFull(in, p, pos)
		if err == nil {
			h.queue = append(h.queue, heldRun{ino: ino, granule: granule, data: p[:n]})
		}
		return n, err
	}
	if h != nil { // more than may be held at all
		if err := d.drain(); err != nil {
			return 0, err
		}
	}
	if room := int(alignUp(int64(want), blockSize)); len(d.buf) < room {
		d.buf = make([]byte, room)
	}
	n, err := preadFull(in, d.buf[:want], pos)
	if err != nil {
		return n, err
	}
	if ino.data, err = d.blob.store(ino.data, d.buf[:n], granule); err != nil {
		return n, err
	}
	return n, nil
}

// nextData looks for data from pos on, a multiple of the granule: it returns the
// length of the hole before it, whole granules or up to the file's end, and where
// the data ends. ok is false where the file system cannot tell.
func nextData(in int, pos, size, granule int64) (skip, end int64, ok bool) {
	data, err := unix.Seek(in, pos, unix.SEEK_DATA)
	if err == unix.ENXIO { // no data up to the end, or the file became shorter
		var st unix.Stat_t
		if err := unix.Fstat(in, &st); err != nil {
			return 0, size, false
		}
		return max(0, min(size, st.Size)-pos), size, false
	}
	if err != nil {
		return 0, size, false
	}
	if data >= size {
		return size - pos, size, true
	}
	end, err = unix.Seek(in, data, unix.SEEK_HOLE)
	if err != nil {
		return 0, size, false
	}
	return data/granule*granule - pos, end, true
}

func preadFull(fd int, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(fd, p[done:], off+int64(done))
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return done, err
		}
		done += n
	}
	return done, nil
}
