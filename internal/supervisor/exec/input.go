package exec

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// input is the standard input of a command: our end of a pipe, or the terminal.
type input struct {
	// turn is held by the one who writes; capacity 1.
	turn     chan struct{}
	accepted int64 // guarded by turn
	midLine  bool  // guarded by turn: the last byte for a terminal was not a newline

	// note is told what a caller sent, in order.
	note func(data []byte, eof bool)

	mu     sync.Mutex
	file   *os.File // nil when closed
	tty    bool     // the file belongs to the output stream
	closed inputState
	eof    bool // a client ended it, whatever closed it since
}

type inputState int

const (
	inputOpen   inputState = iota
	inputNone              // there never was one
	inputEOF               // a client ended it
	inputBroken            // the command closed its end
	inputEnded             // the command has ended
)

func newInput(f *os.File, tty bool) *input {
	in := &input{turn: make(chan struct{}, 1), file: f, tty: tty, note: func([]byte, bool) {}}
	if f == nil {
		in.closed = inputNone
	}
	return in
}

// close closes the input for a reason; the first reason stays, except that the end of the command is the last.
func (in *input) close(why inputState) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.eof = in.eof || why == inputEOF && in.closed == inputOpen
	if in.closed == inputOpen || why == inputEnded && in.closed != inputNone {
		in.closed = why
	}
	if in.file != nil && !in.tty {
		in.file.Close()
	}
	in.file = nil
}

// ended says whether a client ended it.
func (in *input) ended() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.eof
}

func (in *input) state() (*os.File, inputState) {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.file, in.closed
}

func (s inputState) err() error {
	switch s {
	case inputNone:
		return errs.E(errs.Precondition, "the command has no open standard input").WithHint("start it with stdin_open")
	case inputEOF:
		return errs.E(errs.Precondition, "the command's standard input was ended already")
	case inputBroken:
		return errs.E(errs.Precondition, "the command has closed its standard input")
	}
	return errs.E(errs.Precondition, "the command has ended, it takes no more input")
}

// send writes data at an offset (nil: at the end) and returns how many bytes
// were accepted in all. It waits while the command does not read.
func (in *input) send(ctx context.Context, data []byte, offset *int64, eof bool) (int64, error) {
	select {
	case in.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { <-in.turn }()
	if offset != nil {
		skip := in.accepted - *offset
		if skip < 0 || *offset < 0 {
			return in.accepted, errs.E(errs.Invalid, "input at offset %d leaves a gap, %d bytes were accepted", *offset, in.accepted).
				WithHint("send from offset %d on", in.accepted)
		}
		data = data[min(skip, int64(len(data))):]
	}
	if _, why := in.state(); why != inputOpen {
		if len(data) == 0 && (in.ended() || !eof) {
			return in.accepted, nil // a retry of what was done, perhaps after the command has ended of it
		}
		return in.accepted, why.err()
	}
	before := in.accepted
	err := in.write(ctx, data)
	if n := in.accepted - before; n > 0 || eof && err == nil {
		in.note(data[:n], eof && err == nil)
	}
	if err == nil && eof {
		err = in.end(ctx)
	}
	return in.accepted, err
}

// write writes all of data, or counts what was accepted before an error.
func (in *input) write(ctx context.Context, data []byte) error {
	f, why := in.state()
	if f == nil {
		return why.err()
	}
	if len(data) == 0 {
		return nil
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = f.SetWriteDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	n, err := f.Write(data)
	if !stop() {
		<-interrupted
		_ = f.SetWriteDeadline(time.Time{})
	}
	in.accepted += int64(n)
	if n > 0 {
		in.midLine = data[n-1] != '\n'
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%d bytes of input were accepted: %w", in.accepted, ctx.Err())
	case errors.Is(err, os.ErrClosed):
		_, why = in.state()
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO):
		in.close(inputBroken)
		why = inputBroken
	default:
		return fmt.Errorf("write input: %w", err)
	}
	return why.err()
}

// endOfFile is ^D, what VEOF is unless the command changed it.
const endOfFile = 4

// end ends the input. On a terminal that is ^D, twice after a started line: the first only completes it.
func (in *input) end(ctx context.Context) error {
	if in.tty {
		n := 1
		if in.midLine {
			n = 2
		}
		eof := []byte{endOfFile, endOfFile}
		before := in.accepted
		err := in.write(ctx, eof[:n])
		in.accepted = before
		if err != nil {
			return err
		}
	}
	in.close(inputEOF)
	return nil
}

// fill accepts what fits at once of the input that came with the command, and returns the rest.
func (in *input) fill(data []byte) []byte {
	f, _ := in.state()
	if f == nil || len(data) == 0 {
		return data
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return data
	}
	n := 0
	if err := raw.Control(func(fd uintptr) { n, _ = unix.Write(int(fd), data) }); err != nil || n <= 0 {
		return data
	}
	in.accepted += int64(n)
	in.midLine = data[n-1] != '\n'
	return data[n:]
}
