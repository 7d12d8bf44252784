package harena

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// maxWaiting is how much of a stream waits for a reader before the sender is held up.
const maxWaiting = 1 << 20

// output is one stream of a command on its way to a writer or a reader.
type output struct {
	writer io.Writer
	offset int64 // bytes received; of the receiving goroutine alone

	mu      sync.Mutex
	change  chan struct{} // closed and replaced whenever something below changes
	waiting []byte
	claimed bool
	discard bool
	ended   bool
}

func newOutput(w io.Writer) *output {
	return &output{writer: w, change: make(chan struct{})}
}

// writeError is an error of the writer that Cmd named.
type writeError struct{ error }

func (e *writeError) Unwrap() error { return e.error }

func (o *output) write(ctx context.Context, b []byte) error {
	o.offset += int64(len(b))
	if o.writer != nil {
		if _, err := o.writer.Write(b); err != nil {
			return &writeError{err}
		}
		return nil
	}
	for {
		o.mu.Lock()
		if o.discard {
			o.mu.Unlock()
			return nil
		}
		if len(o.waiting) == 0 || len(o.waiting)+len(b) <= maxWaiting {
			o.waiting = append(o.waiting, b...)
			o.changed()
			o.mu.Unlock()
			return nil
		}
		change := o.change
		o.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// changed wakes everybody who waits; the caller holds mu.
func (o *output) changed() {
	close(o.change)
	o.change = make(chan struct{})
}

func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.changed()
}

func (o *output) claim() io.Reader {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.claimed = true
	return outputReader{o}
}

func (o *output) discardUnclaimed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.claimed && o.writer == nil {
		o.discard, o.waiting = true, nil
		o.changed()
	}
}

type outputReader struct{ o *output }

// Read implements io.Reader.
func (r outputReader) Read(b []byte) (int, error) {
	o := r.o
	for {
		o.mu.Lock()
		if len(o.waiting) > 0 {
			n := copy(b, o.waiting)
			o.waiting = o.waiting[n:]
			o.changed()
			o.mu.Unlock()
			return n, nil
		}
		ended, change := o.ended, o.change
		o.mu.Unlock()
		if ended {
			return 0, io.EOF
		}
		<-change
	}
}

// stdinPipe writes to a command's standard input. Every call carries the
// position of its data, so that a repeated one adds nothing.
type stdinPipe struct {
	c  *Command
	mu sync.Mutex
	// known: offset is valid. An attached command's input begins wherever the server says.
	known  bool
	offset int64
}

const (
	stdinChunk  = 512 << 10
	answerGrace = time.Second
)

// Stdin returns the command's standard input, if Cmd kept it open or the
// command was attached to; nil otherwise. Writes return when the command has, or will have, the data.
func (c *Command) Stdin() io.WriteCloser {
	if c.stdin == nil {
		return nil
	}
	return c.stdin
}

// Write implements io.Writer.
func (p *stdinPipe) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	written := 0
	for len(b) > 0 {
		n := min(len(b), stdinChunk)
		if err := p.send(b[:n], false); err != nil {
			return written, err
		}
		written += n
		b = b[n:]
	}
	return written, nil
}

// Close ends the input. That of a command which ended is ended, too.
func (p *stdinPipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.send(nil, true); !errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	return nil
}

func (p *stdinPipe) send(b []byte, eof bool) error {
	if !p.known {
		offset, err := p.call(&harenav1.SendInputRequest{})
		if err != nil {
			return err
		}
		p.known, p.offset = true, offset
	}
	_, err := p.call(&harenav1.SendInputRequest{Data: b, Eof: eof, Offset: proto.Int64(p.offset)})
	if err == nil {
		p.offset += int64(len(b))
	}
	return err
}

// call repeats a call while connections break, as the receiving side does.
func (p *stdinPipe) call(req *harenav1.SendInputRequest) (int64, error) {
	req.SandboxId, req.CommandId = p.c.sb.id, p.c.id
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	// The command's end ends a call that waits for it to read. The answer to what
	// made it end, if any, is still on its way then.
	go func() {
		select {
		case <-p.c.done:
			if sleep(ctx, answerGrace) == nil {
				cancel()
			}
		case <-ctx.Done():
		}
	}()
	deadline := time.Now().Add(p.c.sb.c.patience)
	for delay := 100 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		res, err := p.c.sb.c.exec.SendInput(ctx, connect.NewRequest(req))
		if err == nil {
			return res.Msg.GetOffset(), nil
		}
		select {
		case <-p.c.done:
			return 0, io.ErrClosedPipe
		default:
		}
		if !errors.Is(err, ErrUnreachable) && !IsKind(err, KindCapacity) || time.Now().After(deadline) {
			return 0, err
		}
		if sleep(ctx, delay) != nil {
			return 0, io.ErrClosedPipe
		}
	}
}

// copyStdin sends all of r and then the end of input. What r gives while a call
// is under way goes along with the next one. When the command does not want more,
// or ended, the rest is nobody's business.
func (c *Command) copyStdin(r io.Reader) {
	chunks := make(chan []byte)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		defer close(chunks)
		var waiting []byte
		read := make(chan []byte)
		go readInto(read, stop, r)
		for read != nil || len(waiting) > 0 {
			in, out := read, chunks
			if len(waiting) >= stdinChunk {
				in = nil
			}
			if len(waiting) == 0 {
				out = nil
			}
			select {
			case b, ok := <-in:
				if !ok {
					read = nil
				}
				waiting = append(waiting, b...)
			case out <- waiting:
				waiting = nil
			case <-stop:
				return
			}
		}
	}()
	for b := range chunks {
		if _, err := c.stdin.Write(b); err != nil {
			return
		}
	}
	_ = c.stdin.Close()
}

// readInto reads r until it ends. A read that never returns outlives the command, as with os/exec.
func readInto(out chan<- []byte, stop <-chan struct{}, r io.Reader) {
	defer close(out)
	for {
		b := make([]byte, 64<<10)
		n, err := r.Read(b)
		if n > 0 {
			select {
			case out <- b[:n]:
			case <-stop:
				return
			}
		}
		if err != nil {
			return
		}
	}
}
