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
	if n := readBuffer(st.Size); len(d.buf) < n {
		d.buf = make([]byte, n)
	}
	granule := int64(blockSize) << granuleBits(st.Size)
	whole := int64(len(d.buf)) / granule * granule
	size, pos := st.Size, int64(0)
	sparse := st.Blocks*512 < st.Size
	dataEnd := size
	for pos < size {
		if sparse && (pos == 0 || pos >= dataEnd) {
			var skip int64
			skip, dataEnd, sparse = nextData(in, pos, size, granule)
			if skip > 0 {
				ino.data = ino.data.add(place{at: nullBlock}, uint32(alignUp(skip, blockSize)/blockSize))
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
		want := min(whole, size-pos)
		if sparse {
			want = min(want, alignUp(dataEnd-pos, granule))
		}
		n, err := preadFull(in, d.buf[:want], pos)
		if err != nil {
			return readDirError(err, path)
		}
		if ino.data, err = d.blob.store(ino.data, d.buf[:n], int(granule)); err != nil {
			return err
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
