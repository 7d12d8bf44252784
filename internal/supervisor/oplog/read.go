package oplog

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// Read sends the entries from a number on, with the content that they name before the first that does. With follow it goes on
// until ctx or the log ends.
func (l *Log) Read(ctx context.Context, req *harenav1.LogRequest, send func(*harenav1.LogEntry) error) error {
	if req.GetFrom() < 0 {
		return errs.E(errs.Invalid, "from of %d is negative", req.GetFrom())
	}
	if l == nil {
		return errs.E(errs.Unsupported, "this sandbox keeps no operation log")
	}
	l.begin()
	l.flush()
	r := &reader{l: l, req: req, send: send, sent: map[string]bool{}}
	defer r.close()
	for {
		l.mu.Lock()
		written, stopped, next := l.written, l.stopped, l.next
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		if err := r.upTo(ctx, written); err != nil {
			return err
		}
		if stopped != "" || !req.GetFollow() {
			return r.end(stopped, next)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// begin makes the header, so that even a log without an operation is one.
func (l *Log) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next == 0 {
		h := l.cfg.Header
		if h == nil {
			h = &harenav1.LogHeader{}
		}
		h.Version = version
		l.add(&harenav1.LogEntry{Event: &harenav1.LogEntry_Header{Header: h}})
	}
}

// reader is one call of Read.
type reader struct {
	l      *Log
	req    *harenav1.LogRequest
	send   func(*harenav1.LogEntry) error
	file   *os.File
	buf    *bufio.Reader
	offset int64
	number int64
	ended  bool // the log's own last entry was sent
	sent   map[string]bool
}

func (r *reader) close() {
	if r.file != nil {
		r.file.Close()
	}
}

// upTo sends the whole lines in the first size bytes.
func (r *reader) upTo(ctx context.Context, size int64) error {
	if r.file == nil {
		f, err := os.Open(r.l.path())
		if errors.Is(err, fs.ErrNotExist) && size == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the operation log: %w", err)
		}
		r.file = f
	}
	r.buf = bufio.NewReaderSize(io.NewSectionReader(r.file, r.offset, size-r.offset), 64<<10)
	defer func() { r.buf = nil }()
	for r.offset < size {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		line, err := readLine(r.buf)
		if err != nil {
			return fmt.Errorf("read the operation log: %w", err)
		}
		r.offset += int64(len(line))
		r.number++
		if r.number <= r.req.GetFrom() {
			continue
		}
		e := &harenav1.LogEntry{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(line, e); err != nil {
			return fmt.Errorf("read the operation log: line %d: %w", r.number, err)
		}
		r.ended = e.GetStop() != nil
		if err := r.one(e); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) one(e *harenav1.LogEntry) error {
	for _, b := range []*harenav1.LogBytes{e.GetStart().GetInput(), e.GetInput().GetData(), e.GetFile().GetContent()} {
		if b.GetSha256() == "" || b.GetDropped() || r.req.GetNoContent() || r.sent[b.GetSha256()] {
			continue
		}
		f := r.whole(b)
		if f == nil {
			b.Dropped = true // it was lost since; what else the log tells is not
			continue
		}
		r.sent[b.GetSha256()] = true
		err := r.content(e, f, b.GetSha256())
		f.Close()
		if err != nil {
			return err
		}
	}
	return r.send(e)
}

// whole opens content that is what its digest says; nil: it is not there, or something else.
func (r *reader) whole(b *harenav1.LogBytes) *os.File {
	f, err := os.Open(r.l.contentFile(b.GetSha256()))
	if err == nil {
		sum := sha256.New()
		if _, err = io.Copy(sum, f); err == nil && hex.EncodeToString(sum.Sum(nil)) != b.GetSha256() {
			err = errors.New("it is not what its digest says")
		}
		if err == nil {
			_, err = f.Seek(0, io.SeekStart)
		}
		if err == nil {
			return f
		}
		f.Close()
	}
	r.l.cfg.Log.Error("content of the operation log is lost", "sha256", b.GetSha256(), "error", err)
	return nil
}

func (r *reader) content(e *harenav1.LogEntry, f io.Reader, sum string) error {
	for {
		buf := make([]byte, chunkSize)
		n, err := io.ReadFull(f, buf)
		if n > 0 {
			part := &harenav1.LogEntry{Number: e.GetNumber(), Time: e.GetTime(), Event: &harenav1.LogEntry_Content{
				Content: &harenav1.LogContent{Sha256: sum, Data: buf[:n]},
			}}
			if err := r.send(part); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the operation log: %w", err)
		}
	}
}

// end says why a log that did not say so itself has stopped.
func (r *reader) end(stopped string, next int64) error {
	if stopped == "" || r.ended || stopped == sandboxEnded {
		return nil
	}
	return r.send(&harenav1.LogEntry{
		Number: next, Time: timestamppb.New(r.l.cfg.Now()), Event: &harenav1.LogEntry_Stop{Stop: &harenav1.LogStop{Reason: stopped}},
	})
}
