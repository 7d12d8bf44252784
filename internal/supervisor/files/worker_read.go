package files

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// openTries bounds how often opening a file is repeated that is swapped meanwhile.
const openTries = 8

// openRegular opens a regular file for reading.
//
// The usual way to open exactly what was examined, /proc/self/fd, is not there:
// the worker is not in the pid namespace of the /proc it sees. So the name is
// looked up twice: as O_PATH, which opens nothing, to refuse pipes, devices and
// kernel file systems untouched; then for reading, and what that gave is examined
// again and compared. A hostile swap in between can at most get a pipe or a device
// opened and closed at once: O_NONBLOCK keeps the open of a pipe from waiting,
// O_NOCTTY a terminal from becoming ours, and nothing is read before the check.
func (w *worker) openRegular(path string) (int, *unix.Stat_t, error) {
	for range openTries {
		seen, err := w.examine(path)
		if err != nil {
			return -1, nil, err
		}
		got, err := w.open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
		if is(err, unix.ENXIO, unix.ENOENT, unix.ENODEV) {
			continue // swapped; the next look tells by what
		}
		if err != nil {
			return -1, nil, err
		}
		var st unix.Stat_t
		err = unix.Fstat(got, &st)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Dev == seen.Dev && st.Ino == seen.Ino {
			if err = allowed(got); err == nil {
				return got, &st, nil
			}
		}
		unix.Close(got)
		if err != nil {
			return -1, nil, err
		}
	}
	return -1, nil, &failure{code: failChanged}
}

// examine describes a file that may be opened for its content.
func (w *worker) examine(path string) (*unix.Stat_t, error) {
	fd, err := w.open(path, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := allowed(fd); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return &st, nil
	case unix.S_IFDIR:
		return nil, unix.EISDIR
	}
	return nil, &failure{code: failNotRegular}
}

// serveRead answers with what the file is, then with the ranges that are asked for.
func (w *worker) serveRead(m *harenav1.StatRequest) error {
	path := string(m.GetPathBytes())
	fd, st, err := w.openRegular(path)
	if err != nil {
		return w.fail(err)
	}
	defer unix.Close(fd)
	if err := w.message(frameInfo, fileInfo(path, st, "")); err != nil {
		return err
	}
	// Identifies this state of the file: the kernel changes ctime with every write.
	tag := fmt.Sprintf("%x-%x-%x-%x.%x", st.Dev, st.Ino, st.Size, st.Ctim.Sec, st.Ctim.Nsec)
	if err := w.write(frameReady, []byte(tag)); err != nil {
		return err
	}
	for {
		t, payload, err := w.read()
		switch {
		case err != nil:
			return err
		case t == frameAbort:
			return w.send(frameEnd, 0)
		case t != frameGo || len(payload) != 16:
			return fmt.Errorf("unexpected frame %q while reading", byte(t))
		}
		offset, length := binary.BigEndian.Uint64(payload), binary.BigEndian.Uint64(payload[8:])
		if err := w.sendRange(fd, int64(offset), int64(length)); err != nil {
			return err
		}
	}
}

// sendRange sends at most length bytes of a file.
func (w *worker) sendRange(fd int, offset, length int64) error {
	for length > 0 {
		n, err := pread(fd, w.body()[:min(length, maxPayload)], offset)
		if err != nil {
			return w.fail(err)
		}
		if n == 0 {
			break
		}
		if err := w.send(frameData, n); err != nil {
			return err
		}
		offset, length = offset+int64(n), length-int64(n)
	}
	return w.send(frameEnd, 0)
}

// pread fills p as far as the file goes.
func pread(fd int, p []byte, offset int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(fd, p[done:], offset+int64(done))
		if is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return done, err
		}
		if n == 0 {
			break
		}
		done += n
	}
	return done, nil
}
