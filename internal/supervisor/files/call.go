package files

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// call is one operation on a worker, for one goroutine.
type call struct {
	s    *Service
	pr   *process
	ctx  context.Context
	path string // for messages
	frames
	inBuf, outBuf *[]byte
	slots         chan struct{}
	stop          func() bool

	mu sync.Mutex
	// latest is when the call has to be over, whatever its progress; zero: open.
	latest time.Time
	// spoilt means that the worker is not waiting for its next request.
	spoilt bool
	// failed means that the worker has said that the operation failed.
	failed bool
	// sent means that the worker has all that it needs to complete a change.
	sent bool
}

// class is what an operation may take.
type class struct {
	slots chan struct{}
	// whole bounds the operation as a whole; 0: it may go on while it makes progress.
	whole time.Duration
	// grace is what a cancelled operation gets to clean up.
	grace time.Duration
}

// begin sends a request to a worker of an identity. The call must be released.
func (s *Service) begin(ctx context.Context, id identity, cl class, o op, path string, m proto.Message) (*call, error) {
	if err := s.acquire(ctx, cl.slots); err != nil {
		return nil, err
	}
	pr, err := s.pool.take(ctx, id)
	if err != nil {
		<-cl.slots
		return nil, err
	}
	c := &call{s: s, pr: pr, ctx: ctx, path: path, slots: cl.slots, inBuf: s.buffers.get(), outBuf: s.buffers.get()}
	c.frames = frames{r: pr.resp, w: pr.req, in: *c.inBuf, out: *c.outBuf}
	if cl.whole > 0 {
		c.latest = time.Now().Add(cl.whole)
	}
	c.stop = context.AfterFunc(ctx, func() { c.endBy(time.Now().Add(cl.grace)) })
	// Until it answers, nobody knows what the worker does.
	c.spoilt = true
	if err := c.request(o, m); err != nil {
		c.release()
		return nil, err
	}
	return c, nil
}

// acquire waits for a slot, for as long as an operation may be without progress.
func (s *Service) acquire(ctx context.Context, slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	default:
	}
	wait := time.NewTimer(s.progress)
	defer wait.Stop()
	select {
	case slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-wait.C:
		return errs.OverLimit(errs.Capacity, "file operations at a time", cap(slots), cap(slots)+1).
			WithHint("wait for other transfers of this sandbox to end")
	}
}

func (c *call) request(o op, m proto.Message) error {
	b := append(c.body()[:0], byte(o))
	b, err := proto.MarshalOptions{}.MarshalAppend(b, m)
	if err != nil {
		return err
	}
	return c.put(frameRequest, b)
}

// endBy brings the end of the call forward and wakes it when it waits.
func (c *call) endBy(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.latest.IsZero() || t.Before(c.latest) {
		c.latest = t
	}
	// Errors mean that the pipes are closed: then nobody waits.
	_ = c.pr.resp.SetReadDeadline(c.latest)
	_ = c.pr.req.SetWriteDeadline(c.latest)
}

// arm gives the next step its deadline.
func (c *call) arm(set func(time.Time) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := time.Now().Add(c.s.progress)
	if !c.latest.IsZero() && c.latest.Before(t) {
		t = c.latest
	}
	return set(t)
}

// put sends a frame with a payload built elsewhere, or at the start of body.
func (c *call) put(t frameType, payload []byte) error {
	if err := c.arm(c.pr.req.SetWriteDeadline); err != nil {
		return c.broken(err)
	}
	if err := c.write(t, payload); err != nil {
		return c.broken(err)
	}
	return nil
}

// next receives one frame. A failure that the worker reports is an error.
func (c *call) next() (frameType, []byte, error) {
	if err := c.arm(c.pr.resp.SetReadDeadline); err != nil {
		return 0, nil, c.broken(err)
	}
	t, payload, err := c.read()
	if err != nil {
		return 0, nil, c.broken(err)
	}
	c.s.touch()
	if t == frameFail {
		f := decodeFailure(payload)
		if f == nil {
			return 0, nil, c.malformed()
		}
		c.failed = true
		return t, nil, f.toErr(c.path)
	}
	return t, payload, nil
}

// get receives the next frame that is not a sign of life.
func (c *call) get() (frameType, []byte, error) {
	for {
		if t, payload, err := c.next(); err != nil || t != frameAlive {
			return t, payload, err
		}
	}
}

// expect receives a frame of one type.
func (c *call) expect(want frameType) ([]byte, error) {
	t, payload, err := c.get()
	if err == nil && t != want {
		err = c.malformed()
	}
	return payload, err
}

// info receives a file's description.
func (c *call) info() (*harenav1.FileInfo, error) {
	payload, err := c.expect(frameInfo)
	if err != nil {
		return nil, err
	}
	info := &harenav1.FileInfo{}
	if err := proto.Unmarshal(payload, info); err != nil {
		return nil, c.malformed()
	}
	return info, nil
}

// broken says why the pipes failed. The worker is of no use after that.
func (c *call) broken(err error) error {
	err = c.whyBroken(err)
	if c.sent {
		return &unknownOutcome{err}
	}
	return err
}

func (c *call) whyBroken(err error) error {
	c.spoilt = true
	switch {
	case c.ctx.Err() != nil:
		return context.Cause(c.ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errs.E(errs.Timeout, "a file operation on %s took too long", show(c.path)).On("path %s", show(c.path)).
			WithHint("something inside may hang, such as a FUSE file system; other operations go on")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.EPIPE):
		return errs.E(errs.Capacity, "the file worker ended in the middle of an operation on %s", show(c.path)).On("path %s", show(c.path)).
			WithHint("file operations count against the sandbox's memory limit, which may be reached")
	}
	return errs.E(errs.Internal, "file worker: %w", err)
}

func (c *call) malformed() error {
	c.spoilt = true
	return errs.E(errs.Internal, "file worker broke the protocol on %s", show(c.path))
}

// idle says that the worker waits for its next request.
func (c *call) idle() { c.spoilt = false }

// release gives the worker back, or ends it when it may be in the middle of something.
func (c *call) release() {
	stopped := c.stop()
	if c.spoilt || !stopped {
		// When stop came too late, a deadline in the past may yet be set.
		c.s.pool.end(c.pr)
	} else {
		c.s.pool.give(c.pr)
	}
	c.s.buffers.put(c.inBuf)
	c.s.buffers.put(c.outBuf)
	<-c.slots
	c.s.touch()
}

// upload sends content and returns what the worker made of it. A failing source
// makes the worker drop what it has. The worker must have said that it is ready.
func (c *call) upload(source io.Reader) (*harenav1.FileInfo, error) {
	for {
		n, err := source.Read(c.body())
		if n > 0 {
			if perr := c.push(n); perr != nil {
				return nil, perr
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = context.Cause(c.ctx)
		}
		if err != nil {
			return nil, c.abort(err)
		}
	}
	c.sent = true
	if err := c.put(frameEnd, nil); err != nil {
		return nil, err
	}
	info, err := c.info()
	if err == nil || c.failed {
		c.idle()
	}
	return info, err
}

// push sends n bytes of body, unless the worker has failed meanwhile.
func (c *call) push(n int) error {
	for !c.pr.quiet() {
		t, _, err := c.next()
		if err != nil {
			if c.failed && c.put(frameAbort, nil) == nil {
				c.idle()
			}
			return err
		}
		if t != frameAlive {
			return c.malformed()
		}
	}
	return c.put(frameData, c.body()[:n])
}

// abort ends an upload early, for a reason that is returned.
func (c *call) abort(reason error) error {
	if err := c.put(frameAbort, nil); err != nil {
		return reason
	}
	if _, _, err := c.get(); err != nil && c.failed {
		c.idle()
	}
	return reason
}
