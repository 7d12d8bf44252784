package files

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// aliveEvery is how often a worker that makes progress says so, at most.
const aliveEvery = time.Second

// worker is the state of a worker process: it serves one operation at a time.
type worker struct {
	frames
	// input is the descriptor that r reads.
	input int32
	root  int // O_PATH descriptor of the sandbox's root
	uid   int
	// linkable remembers per device whether files without a name can be made and
	// later linked.
	linkable  map[uint64]bool
	lastAlive time.Time
}

// WorkerMain serves operations that arrive on in, answers on out, and returns
// the process's exit status when in ends. It expects to be in the namespaces and
// to have the credentials that the operations are to use; root is an O_PATH
// descriptor of the sandbox's root directory.
func WorkerMain(in, out, root *os.File) int {
	// Nobody inside may look at this process, whatever started it.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 1
	}
	runtime.GOMAXPROCS(1)
	unix.Umask(0)
	r, w := fd(in.Fd()), fd(out.Fd())
	for _, end := range []fd{r, w} {
		if err := unix.SetNonblock(int(end), false); err != nil {
			return 1
		}
	}
	wk := newWorker(r, w, int(root.Fd()))
	wk.input = int32(r)
	end := wk.serve()
	runtime.KeepAlive(in)
	runtime.KeepAlive(out)
	runtime.KeepAlive(root)
	if !errors.Is(end, io.EOF) {
		return 1
	}
	return 0
}

func newWorker(r io.Reader, w io.Writer, root int) *worker {
	return &worker{
		frames:   frames{r: r, w: w, in: newBuffer(), out: newBuffer()},
		root:     root,
		uid:      os.Geteuid(),
		linkable: make(map[uint64]bool),
	}
}

// serve handles requests until the pipe ends, which is io.EOF. Another error means
// that the pipe failed or the service broke the protocol.
func (w *worker) serve() error {
	for {
		t, payload, err := w.read()
		if err != nil {
			return err
		}
		if t != frameRequest || len(payload) == 0 {
			return fmt.Errorf("expected a request, got a frame %q", byte(t))
		}
		w.lastAlive = time.Now()
		if err := w.handle(op(payload[0]), payload[1:]); err != nil {
			return err
		}
	}
}

// handle runs one operation. Failures of the operation are answered; the error
// is one of the pipe.
func (w *worker) handle(o op, body []byte) error {
	switch o {
	case opRead:
		return on(body, w.serveRead)
	case opWrite:
		return on(body, w.serveWrite)
	case opTarOut:
		return on(body, w.serveTarOut)
	case opTarIn:
		return on(body, w.serveTarIn)
	case opStat:
		return on(body, simple(w, w.stat))
	case opList:
		return on(body, simple(w, w.list))
	case opMove:
		return on(body, simple(w, w.move))
	case opRemove:
		return on(body, simple(w, w.remove))
	case opWatch:
		return on(body, w.serveWatch)
	case opMakeDir:
		return on(body, simple(w, w.makeDir))
	}
	return fmt.Errorf("unknown operation %q", byte(o))
}

// on decodes a request for a handler.
func on[T any, M interface {
	*T
	proto.Message
}](body []byte, handler func(M) error) error {
	m := M(new(T))
	if err := proto.Unmarshal(body, m); err != nil {
		return fmt.Errorf("decode request: %w", err)
	}
	return handler(m)
}

// simple makes a handler of an operation that answers with at most one info.
func simple[M proto.Message](w *worker, run func(M) (*harenav1.FileInfo, error)) func(M) error {
	return func(m M) error {
		info, err := run(m)
		if err != nil {
			return w.fail(err)
		}
		if info != nil {
			if err := w.message(frameInfo, info); err != nil {
				return err
			}
		}
		return w.send(frameEnd, 0)
	}
}

// message sends a protobuf message as one frame.
func (w *worker) message(t frameType, m proto.Message) error {
	b, err := proto.MarshalOptions{}.MarshalAppend(w.body()[:0], m)
	if err != nil {
		return err
	}
	return w.write(t, b)
}

// fail reports that the operation failed.
func (w *worker) fail(err error) error {
	return w.write(frameFail, fail(err, "").encode())
}

// alive tells the service that a long operation makes progress.
func (w *worker) alive() error {
	now := time.Now()
	if now.Sub(w.lastAlive) < aliveEvery {
		return nil
	}
	w.lastAlive = now
	// Not through w.out: a payload may be under construction there.
	head := [headerSize]byte{byte(frameAlive)}
	_, err := w.w.Write(head[:])
	return err
}

// drain discards the rest of a transfer to the worker.
func (w *worker) drain() error {
	for {
		t, _, err := w.read()
		switch {
		case err != nil:
			return err
		case t == frameEnd || t == frameAbort:
			return nil
		case t != frameData:
			return fmt.Errorf("unexpected frame %q in a transfer", byte(t))
		}
	}
}

// upload is the content of a transfer to the worker: D frames up to E.
type upload struct {
	w    *worker
	rest []byte
	// done is set at the end or abort, after which nothing may be read from the pipe.
	done    bool
	aborted bool
	// broken is an error of the pipe.
	broken error
}

// Read implements io.Reader. An abort is a *failure.
func (u *upload) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		switch {
		case u.broken != nil:
			return 0, u.broken
		case u.aborted:
			return 0, &failure{code: failAborted}
		case u.done:
			return 0, io.EOF
		}
		t, payload, err := u.w.read()
		switch {
		case err != nil:
			u.broken = err
		case t == frameData:
			u.rest = payload
		case t == frameEnd:
			u.done = true
		case t == frameAbort:
			u.done, u.aborted = true, true
		default:
			u.broken = fmt.Errorf("unexpected frame %q in a transfer", byte(t))
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// finish answers for a transfer: with info, or with the failure and after that
// the rest of the transfer is discarded.
func (u *upload) finish(info *harenav1.FileInfo, err error) error {
	switch {
	case u.broken != nil:
		return u.broken
	case err == nil:
		return u.w.message(frameInfo, info)
	}
	if err := u.w.fail(err); err != nil || u.done {
		return err
	}
	return u.w.drain()
}

// fd is a descriptor in blocking mode as a reader and a writer.
type fd int

// Read implements io.Reader.
func (f fd) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(f), p)
		switch {
		case is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, err
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

// Write implements io.Writer.
func (f fd) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Write(int(f), p[done:])
		if is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}
