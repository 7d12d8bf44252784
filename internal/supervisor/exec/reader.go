package exec

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// reader is one client that follows a command. Its methods are called by one
// goroutine; what command.mu guards is also touched by the pumps.
type reader struct {
	c *command
	// Guarded by command.mu.
	pos     [2]int64
	limit   [2]int64 // where it stops; -1 while the command runs
	took    time.Time
	dropped bool

	noFollow bool
	finished bool
	turn     int // the stream that is served first, so that none starves
	files    [2]*os.File
	buf      *chunk
}

const live = -1

// attach registers a reader that starts at the given offsets.
func (c *command) attach(pos [2]int64, noFollow bool) (*reader, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &reader{c: c, pos: pos, limit: [2]int64{live, live}, noFollow: noFollow, took: time.Now()}
	for i, st := range c.streams {
		if pos[i] < 0 || pos[i] > st.total {
			return nil, errs.E(errs.Invalid, "%s_offset of %d is outside what %s has printed, %d bytes", st.name, pos[i], c.id, st.total)
		}
		if noFollow || c.published {
			r.limit[i] = st.total
		}
	}
	if !c.published && !noFollow {
		c.readers[r] = struct{}{}
	}
	c.s.streams.Add(1)
	return r, nil
}

// close ends the reader; the command goes on.
func (r *reader) close() {
	r.c.mu.Lock()
	r.c.detach(r)
	r.c.mu.Unlock()
	r.release()
	for _, f := range r.files {
		if f != nil {
			f.Close()
		}
	}
	r.c.s.streams.Add(-1)
}

func (r *reader) release() {
	if r.buf != nil {
		r.c.s.putChunk(r.buf)
		r.buf = nil
	}
}

// detach forgets a reader, and the windows when it was the last.
func (c *command) detach(r *reader) {
	if _, ok := c.readers[r]; !ok {
		return
	}
	delete(c.readers, r)
	for _, st := range c.streams {
		if len(c.readers) == 0 {
			st.win = window{start: st.win.end()}
		} else {
			c.trim(st)
		}
	}
	c.broadcast()
}

// trim drops from a window what every reader has.
func (c *command) trim(st *stream) {
	least := st.win.end()
	for r := range c.readers {
		least = min(least, r.pos[st.i])
	}
	st.win.forget(least)
}

// dropStalled drops the readers that st has waited for all the time.
func (c *command) dropStalled(st *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	since := time.Now().Add(-c.s.cfg.Limits.Stall)
	// The window moves with the first reader that is dropped; who has all of it waits for the command.
	start := st.win.start
	for r := range c.readers {
		if r.pos[st.i] <= start && r.took.Before(since) {
			r.dropped = true
			c.detach(r)
		}
	}
}

// next returns the next event, or io.EOF after the last. Its bytes are valid
// until the next call.
func (r *reader) next(ctx context.Context) (*harenav1.Output, error) {
	c := r.c
	var silence *time.Timer
	for {
		c.mu.Lock()
		ev, err := r.step()
		changed := c.changes()
		c.mu.Unlock()
		if errors.Is(err, errInFile) {
			if ev, err = r.fromFile(); ev == nil && err == nil {
				continue
			}
		}
		if ev != nil || err != nil {
			if silence != nil {
				silence.Stop()
			}
			return ev, err
		}
		r.release()
		if silence == nil {
			silence = time.NewTimer(c.s.cfg.Limits.Keepalive)
		}
		select {
		case <-changed:
		case <-silence.C:
			return &harenav1.Output{Event: &harenav1.Output_Keepalive{Keepalive: true}}, nil
		case <-ctx.Done():
			silence.Stop()
			return nil, ctx.Err()
		}
	}
}

// errInFile: the next bytes are in a file, which is read without the mutex.
var errInFile = errors.New("in file")

// step returns what there is now; neither event nor error: wait.
func (r *reader) step() (*harenav1.Output, error) {
	c := r.c
	if r.dropped {
		return nil, errs.E(errs.Timeout, "the reader took no output of command %s for %v while the command waited for it", c.id, c.s.cfg.Limits.Stall).
			WithHint("the command goes on; connect to it again from the last offset")
	}
	if r.finished {
		return nil, io.EOF
	}
	for range c.streams {
		st := c.streams[r.turn]
		r.turn = 1 - r.turn
		if ev, err := r.stepStream(st); ev != nil || err != nil {
			return ev, err
		}
	}
	switch {
	case c.published && c.broken != nil:
		return nil, c.broken
	case c.published:
		r.finished = true
		return &harenav1.Output{Event: &harenav1.Output_Result{Result: c.result}}, nil
	case r.noFollow:
		return nil, io.EOF
	}
	return nil, nil
}

func (r *reader) stepStream(st *stream) (*harenav1.Output, error) {
	pos := &r.pos[st.i]
	limit := r.limit[st.i]
	if limit == live {
		limit = st.total
	}
	if *pos >= limit {
		return nil, nil
	}
	r.took = time.Now()
	if r.buf == nil {
		r.buf = r.c.s.getChunk()
	}
	have, w := min(st.rec.have(), limit), &st.win
	switch {
	case *pos < have && st.rec.inFile:
		r.turn = st.i // fromFile reads this stream
		return nil, errInFile
	case *pos < have:
		n := copy(r.buf[:], st.rec.mem[*pos:have])
		return r.data(st, n), nil
	case w.n > 0 && *pos >= w.start && *pos < w.end():
		n := w.get(r.buf[:min(chunkSize, limit-*pos)], *pos)
		ev := r.data(st, n)
		r.c.trim(st)
		r.c.broadcast()
		return ev, nil
	}
	to := limit
	if w.n > 0 && *pos < w.start {
		to = min(limit, w.start)
	}
	gap := &harenav1.Gap{Stream: st.name, Bytes: to - *pos}
	*pos = to
	return &harenav1.Output{Event: &harenav1.Output_Gap{Gap: gap}}, nil
}

// data makes the event for n bytes of the buffer.
func (r *reader) data(st *stream, n int) *harenav1.Output {
	r.pos[st.i] += int64(n)
	if st.i == 0 {
		return &harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: r.buf[:n]}}
	}
	return &harenav1.Output{Event: &harenav1.Output_Stderr{Stderr: r.buf[:n]}}
}

// fromFile reads recorded bytes of the stream whose turn it is; neither event
// nor error: the record was dropped meanwhile.
func (r *reader) fromFile() (*harenav1.Output, error) {
	c, i := r.c, r.turn
	st := c.streams[i]
	r.turn = 1 - i
	c.mu.Lock()
	pos, have, path := r.pos[i], st.rec.have(), st.rec.path()
	if limit := r.limit[i]; limit != live {
		have = min(have, limit)
	}
	c.mu.Unlock()
	if pos >= have {
		return nil, nil
	}
	if r.files[i] == nil {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) && c.forgotten() {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read recorded output: %w", err)
		}
		r.files[i] = f
	}
	n, err := r.files[i].ReadAt(r.buf[:min(chunkSize, have-pos)], pos)
	if n == 0 {
		return nil, fmt.Errorf("read recorded output: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return r.data(st, n), nil
}

// forgotten reports whether the record was dropped to make room.
func (c *command) forgotten() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams[0].rec.gone
}
