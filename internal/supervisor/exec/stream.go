package exec

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/journal"
)

// stream is one output of a command.
type stream struct {
	c    *command
	i    int // index in command.streams
	name string
	file *os.File // our end, non-blocking; nil when the command has no such stream

	// appending is held while the record grows or moves.
	appending sync.Mutex
	// Guarded by command.mu from here on.
	rec   record
	total int64 // bytes delivered: recorded, in the window, or dropped
	win   window
	eof   bool
	cut   int64 // after the grace: the result waits for no more than this

	// hand says whether the pump holds bytes that it has not delivered; its
	// mutex makes that consistent with what the pipe holds.
	hand struct {
		sync.Mutex
		full bool
	}
}

// window holds the bytes [start, start+n) of a stream, past its record, that
// some reader still needs. Offset o is at o modulo its size.
type window struct {
	buf   []byte
	start int64
	n     int
}

func (w *window) end() int64 { return w.start + int64(w.n) }

// put appends what fits of p and returns how much that was.
func (w *window) put(p []byte) int {
	if w.buf == nil {
		w.buf = make([]byte, windowSize)
	}
	taken := 0
	for len(p) > 0 && w.n < len(w.buf) {
		at := int(w.end() % int64(len(w.buf)))
		n := copy(w.buf[at:min(len(w.buf), at+len(w.buf)-w.n)], p)
		w.n += n
		taken += n
		p = p[n:]
	}
	return taken
}

// get copies bytes from offset off, which is in the window.
func (w *window) get(p []byte, off int64) int {
	p = p[:min(int64(len(p)), w.end()-off)]
	at := int(off % int64(len(w.buf)))
	n := copy(p, w.buf[at:])
	return n + copy(p[n:], w.buf)
}

// forget drops what lies before off.
func (w *window) forget(off int64) {
	if n := min(off, w.end()) - w.start; n > 0 {
		w.start += n
		w.n -= int(n)
	}
}

// pump reads the stream to its end, or until its deadline is set.
func (st *stream) pump() {
	defer st.c.pumpEnded(st)
	raw, err := st.file.SyscallConn()
	if err != nil {
		st.c.s.cfg.Log.Error("read output", "command", st.c.id, "stream", st.name, "error", err)
		return
	}
	for {
		buf, n, err := st.read(raw)
		if n > 0 {
			st.deliver(buf[:n])
			st.emptyHand()
		}
		if buf != nil {
			st.c.s.putChunk(buf)
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			st.readRest(raw)
			return
		case err != nil || n == 0:
			// EIO is how a terminal says that nobody holds its other side.
			if err != nil && !errors.Is(err, unix.EIO) && !errors.Is(err, os.ErrClosed) {
				st.c.s.cfg.Log.Error("read output", "command", st.c.id, "stream", st.name, "error", err)
			}
			return
		}
	}
}

// read waits for bytes and takes them. A pump that waits holds no buffer.
func (st *stream) read(raw syscall.RawConn) (buf *chunk, n int, err error) {
	rerr := raw.Read(func(fd uintptr) bool {
		if buf == nil {
			buf = st.c.s.getChunk()
		}
		n, err = st.take(int(fd), buf[:])
		if !errors.Is(err, unix.EAGAIN) {
			return true
		}
		st.c.s.putChunk(buf)
		buf = nil
		return false
	})
	if rerr != nil {
		return buf, 0, rerr
	}
	return buf, max(n, 0), err
}

// take is one read(2), never splice(2): pages of the pipe are not ours to keep.
func (st *stream) take(fd int, p []byte) (int, error) {
	st.hand.Lock()
	defer st.hand.Unlock()
	for {
		n, err := unix.Read(fd, p)
		if err == unix.EINTR {
			continue
		}
		st.hand.full = n > 0
		return n, err
	}
}

func (st *stream) emptyHand() {
	st.hand.Lock()
	st.hand.full = false
	st.hand.Unlock()
	st.c.mu.Lock()
	if st.cut > 0 {
		st.c.broadcast()
	}
	st.c.mu.Unlock()
}

// readRest takes what is in the pipe when nobody of the command is left. The bound
// is for a stranger that holds the pipe and goes on writing.
func (st *stream) readRest(raw syscall.RawConn) {
	buf := st.c.s.getChunk()
	defer st.c.s.putChunk(buf)
	for left := maxPipe; left > 0; {
		n := 0
		err := raw.Control(func(fd uintptr) { n, _ = st.take(int(fd), buf[:]) })
		if err != nil || n <= 0 {
			return
		}
		st.deliver(buf[:n])
		left -= n
	}
}

// maxPipe is the most that a pipe holds (fs.pipe-max-size's default).
const maxPipe = 1 << 20

// settled reports whether the pump has delivered all that was written so far.
func (st *stream) settled() bool {
	if st.eof || st.cut > 0 && st.total >= st.cut {
		return true
	}
	st.hand.Lock()
	defer st.hand.Unlock()
	return !st.hand.full && !readable(st.file)
}

// readable is also the truth for a terminal: its poll looks at what the line
// discipline has not seen yet.
func readable(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	found := false
	err = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, perr := unix.Poll(fds, 0)
		found = perr == nil && n > 0 && fds[0].Revents&unix.POLLIN != 0
	})
	return err == nil && found
}

// deliver records p, or hands it to the readers, or drops it.
func (st *stream) deliver(p []byte) {
	for len(p) > 0 {
		n := st.keep(p)
		if n == 0 {
			break
		}
		p = p[n:]
	}
	var stalled *time.Timer
	for len(p) > 0 {
		c := st.c
		c.mu.Lock()
		n := len(p)
		live := !c.published && len(c.readers) > 0
		if live {
			n = st.win.put(p)
		}
		st.total += int64(n)
		if !live && !c.published {
			st.win.start = st.total
		}
		c.firstOutput()
		if n > 0 {
			c.broadcast()
		}
		if p = p[n:]; len(p) == 0 {
			c.mu.Unlock()
			break
		}
		changed := c.changes()
		c.mu.Unlock()
		if n > 0 || stalled == nil {
			stalled = restart(stalled, c.s.cfg.Limits.Stall)
		}
		select {
		case <-changed:
		case <-stalled.C:
			c.dropStalled(st)
			stalled = restart(stalled, c.s.cfg.Limits.Stall)
		case <-c.s.ctx.Done():
		}
		if c.s.ctx.Err() != nil {
			break
		}
	}
	if stalled != nil {
		stalled.Stop()
	}
}

func restart(t *time.Timer, d time.Duration) *time.Timer {
	if t == nil {
		return time.NewTimer(d)
	}
	t.Reset(d)
	return t
}

// keep records the beginning of p, as much as may be recorded.
func (st *stream) keep(p []byte) int {
	st.appending.Lock()
	defer st.appending.Unlock()
	c, r := st.c, &st.rec
	n := r.room(len(p))
	if n == 0 {
		return 0
	}
	p = p[:n]
	toFile := r.inFile || r.size+int64(n) > memoryRecord
	if toFile {
		if err := st.write(p); err != nil {
			c.s.cfg.Log.Warn("output is not recorded any more", "command", c.id, "stream", st.name, "bytes", r.size, "error", err)
			c.mu.Lock()
			r.full = true
			c.mu.Unlock()
			return 0
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !toFile {
		r.mem = append(r.mem, p...)
	}
	if c.s.opLog != nil {
		r.sum.Write(p)
	}
	r.size += int64(n)
	st.total += int64(n)
	st.win.start = st.total
	c.firstOutput()
	c.broadcast()
	return n
}

// write appends p to the record's file.
func (st *stream) write(p []byte) error {
	if err := st.toFile(); err != nil {
		return err
	}
	if !st.rec.reserve(int64(len(p))) {
		return errNoRoom
	}
	if _, err := st.rec.file.Write(p); err != nil {
		st.rec.reserve(-int64(len(p)))
		return err
	}
	return nil
}

// toFile moves the record to its file, if it is not there; appending is held.
func (st *stream) toFile() error {
	if st.rec.inFile {
		return nil
	}
	f, err := st.rec.spill()
	if err != nil {
		return err
	}
	st.c.mu.Lock()
	st.rec.inFile, st.rec.file, st.rec.mem = true, f, nil
	st.c.mu.Unlock()
	return nil
}

// persist makes the record survive the supervisor: on disk, or returned to be kept elsewhere, if that is wanted and it is small.
func (st *stream) persist(small bool) []byte {
	st.appending.Lock()
	defer st.appending.Unlock()
	if st.rec.size == 0 || small && !st.rec.inFile && st.rec.size <= journal.InlineOutput {
		return st.rec.mem
	}
	err := st.toFile()
	if err == nil {
		err = st.rec.file.Sync()
	}
	if err == nil {
		err = syncDir(st.rec.dir)
	}
	if err == nil {
		err = syncDir(filepath.Dir(st.rec.dir))
	}
	if err != nil {
		st.c.s.cfg.Log.Warn("output of an operation is not on disk", "command", st.c.id, "stream", st.name, "error", err)
	}
	return nil
}

// close releases what the pump used; it has ended.
func (st *stream) close() {
	if st.file != nil {
		st.file.Close()
	}
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	if st.rec.file != nil {
		st.rec.file.Close()
		st.rec.file = nil
	}
	// An ended record costs what it holds.
	if len(st.rec.mem) < cap(st.rec.mem) {
		st.rec.mem = append([]byte(nil), st.rec.mem...)
	}
}
