package fuseblob

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// requestBuffer is at least FUSE_MIN_READ_BUFFER (8 KiB); no request that is answered with more than ENOSYS is longer.
	requestBuffer = 64 << 10
	// buffered is how many answers' buffers are kept.
	buffered = 16
)

// Server answers the requests of one connection.
type Server struct {
	conn  *Conn
	files Files
	log   *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc

	served  atomic.Int64 // requests answered
	buffers chan []byte

	mu      sync.Mutex
	pending map[uint64]context.CancelFunc // READs that wait, by unique
	oldest  map[uint64]time.Time
	wg      sync.WaitGroup
}

// NewServer makes a server; Serve starts it.
func NewServer(c *Conn, files Files, log *slog.Logger) *Server {
	s := &Server{conn: c, files: files, log: log, buffers: make(chan []byte, buffered),
		pending: map[uint64]context.CancelFunc{}, oldest: map[uint64]time.Time{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Serve answers until the file system is unmounted everywhere or the connection aborted, and returns nil then. It uses
// readers threads, which wait in the kernel.
func (s *Server) Serve(readers int) error {
	failed := make(chan error, readers)
	for range readers {
		go func() { failed <- s.loop() }()
	}
	var err error
	for range readers {
		err = errors.Join(err, <-failed)
	}
	s.cancel()
	s.wg.Wait()
	return err
}

// Served counts requests answered since the start.
func (s *Server) Served() int64 { return s.served.Load() }

// Waiting is how many reads are being waited for, and since when the oldest.
func (s *Server) Waiting() (n int, since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.oldest {
		if since.IsZero() || t.Before(since) {
			since = t
		}
	}
	return len(s.oldest), since
}

// readRequest reads one message. ENODEV: unmounted; ECONNABORTED (or ENODEV): aborted.
func readRequest(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOENT): // ENOENT: interrupted before it was read
			continue
		case errors.Is(err, unix.EAGAIN):
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil && !errors.Is(err, unix.EINTR) {
				return 0, err
			}
			continue
		}
		return n, err
	}
}

func (s *Server) loop() error {
	runtime.LockOSThread() // one thread each, so that a burst of reads does not make the runtime start and park threads
	defer runtime.UnlockOSThread()
	buf := lockedBuffer(requestBuffer)
	defer func() { _ = unix.Munmap(buf) }()
	for {
		n, err := readRequest(s.conn.fd, buf)
		switch {
		case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ECONNABORTED):
			return nil
		case err != nil:
			return fmt.Errorf("read from /dev/fuse: %w", err)
		}
		r, err := parse(buf[:n])
		if err != nil {
			s.log.Warn("the kernel sent what is not understood", "op", r.op, "err", err)
			if r.unique != 0 && answered(r.op) {
				s.fail(r.unique, unix.EINVAL)
			}
			continue
		}
		s.handle(r)
	}
}

// lockedBuffer returns memory that is there: a request that the kernel cannot copy because its reader was killed in a page fault is
// lost to its caller with an error, and must not be.
func lockedBuffer(n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return make([]byte, n)
	}
	_ = unix.Mlock(b) // it need not be allowed
	return b
}

// answered tells which operations have an answer.
func answered(op uint32) bool { return op != opForget && op != opBatchForget && op != opInterrupt }

func (s *Server) handle(r request) {
	switch r.op {
	case opForget, opBatchForget: // nothing is kept per lookup
	case opInterrupt:
		s.interrupt(r.interrupted)
	case opLookup:
		f, ok := s.files.Lookup(r.name)
		if r.name == probeName {
			f, ok = probe(), true
		}
		if r.node != rootID || !ok {
			s.fail(r.unique, unix.ENOENT)
			return
		}
		s.answer(r.unique, appendEntry(make([]byte, outHeaderLen, outHeaderLen+40+attrLen), f))
	case opGetattr:
		f, ok := s.node(r.node)
		if !ok {
			s.fail(r.unique, unix.ESTALE)
			return
		}
		s.answer(r.unique, appendAttrOut(make([]byte, outHeaderLen, outHeaderLen+16+attrLen), f))
	case opRead:
		s.read(r)
	case opReaddir:
		if r.node != rootID {
			s.fail(r.unique, unix.ENOTDIR)
			return
		}
		s.answer(r.unique, appendDirents(make([]byte, outHeaderLen), int(min(r.size, maxRead)), r.offset, s.files.List()))
	case opStatfs:
		out := make([]byte, outHeaderLen+80)
		order.PutUint32(out[outHeaderLen+40:], blockSize)
		order.PutUint32(out[outHeaderLen+44:], 255)
		order.PutUint32(out[outHeaderLen+48:], blockSize)
		s.answer(r.unique, out)
	case opRelease, opReleasedir, opAccess, opDestroy:
		s.answer(r.unique, make([]byte, outHeaderLen))
	case opInit:
		// A second one: the connection would be broken.
		s.fail(r.unique, unix.EPROTO)
	default:
		// Also OPEN and FLUSH: there are no handles (FUSE_NO_OPEN_SUPPORT). The kernel asks once; see Prime.
		s.fail(r.unique, unix.ENOSYS)
	}
}

func (s *Server) node(id uint64) (File, bool) {
	switch id {
	case rootID:
		return File{Node: rootID}, true
	case probeID:
		return probe(), true
	}
	return s.files.Node(id)
}

func (s *Server) read(r request) {
	f, ok := s.files.Node(r.node)
	switch {
	case !ok:
		s.fail(r.unique, unix.EIO)
		return
	case r.size > maxRead || r.offset > 1<<62:
		s.fail(r.unique, unix.EINVAL)
		return
	}
	off := int64(r.offset)
	n := int(max(0, min(int64(r.size), f.Size-off)))
	if n == 0 {
		s.answer(r.unique, make([]byte, outHeaderLen))
		return
	}
	if s.files.Ready(f.Node, n, off) {
		s.readNow(s.ctx, r.unique, f, n, off)
		return
	}
	ctx, cancel := context.WithTimeout(s.ctx, answerTime)
	s.mu.Lock()
	s.pending[r.unique] = cancel
	s.oldest[r.unique] = time.Now()
	s.mu.Unlock()
	s.wg.Go(func() {
		s.readNow(ctx, r.unique, f, n, off)
		s.mu.Lock()
		delete(s.pending, r.unique)
		delete(s.oldest, r.unique)
		s.mu.Unlock()
		cancel()
	})
}

func (s *Server) readNow(ctx context.Context, unique uint64, f File, n int, off int64) {
	var buf []byte
	select {
	case buf = <-s.buffers:
	default:
		buf = make([]byte, outHeaderLen+maxRead)
	}
	out := buf[:outHeaderLen+n]
	err := s.files.ReadAt(ctx, f.Node, out[outHeaderLen:], off)
	switch {
	case err == nil:
		s.answer(unique, out)
	case errors.Is(err, context.Canceled) && s.ctx.Err() == nil:
		s.fail(unique, unix.EINTR)
	case s.ctx.Err() != nil: // the connection is gone, or about to be handed on
	default:
		s.fail(unique, unix.EIO)
	}
	select {
	case s.buffers <- buf:
	default:
	}
}

// interrupt ends a read whose caller was killed: until it is answered, the caller cannot die. It may have been answered already.
func (s *Server) interrupt(unique uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cancel := s.pending[unique]; cancel != nil {
		cancel()
	}
}

func (s *Server) fail(unique uint64, errno unix.Errno) {
	out := make([]byte, outHeaderLen)
	header(out, len(out), int32(errno), unique)
	s.send(out)
}

// answer sends out, whose first bytes are room for the header.
func (s *Server) answer(unique uint64, out []byte) {
	header(out, len(out), 0, unique)
	s.send(out)
}

func (s *Server) send(out []byte) {
	for {
		_, err := unix.Write(s.conn.fd, out)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EPERM), errors.Is(err, unix.ECONNABORTED):
			// Its caller is gone, or the connection.
		case err != nil:
			s.log.Warn("the kernel does not take an answer", "err", err, "bytes", len(out))
			// Without any answer the caller hangs.
			if len(out) > outHeaderLen {
				s.fail(order.Uint64(out[8:]), unix.EIO)
				return
			}
		}
		s.served.Add(1)
		return
	}
}
