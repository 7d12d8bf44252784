// Package events is a node's record of what happened: an ordered, size-bounded log that survives restarts.
//
// Append never waits for the disk nor for a reader. One goroutine numbers, writes and then publishes events in the order
// in which they were appended, so a number that anybody has seen is on disk (a kill of the process loses only what
// nobody saw). Readers keep a position and fetch at their own speed, from memory or from the files.
package events

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Options of Open.
type Options struct {
	Edge string
	Now  func() time.Time
	Log  *slog.Logger
	// FileBytes is the size at which a new file is begun; 0: 8 MiB.
	FileBytes int64
	// Files is how many are kept; 0: 8.
	Files int
	// Memory is how many of the newest events are kept in memory; 0: 4,096.
	Memory int
}

// maxQueue bounds what waits for the disk. An event is a few hundred bytes, so this is some megabytes.
const maxQueue = 1 << 16

// Log is the event log of a node. It is safe for concurrent use.
type Log struct {
	dir  string
	opts Options

	mu     sync.Mutex
	queue  []*harenav1.Event // appended, not written yet
	lost   int64             // appended while the queue was full
	recent []*harenav1.Event // the newest written ones, by seq
	files  []int64           // first seq of each file, ascending
	last   int64             // newest written seq
	wake   chan struct{}     // closed when last grows, then replaced
	closed bool

	work chan struct{} // tells the writer that the queue is not empty
	done chan struct{}
	f    *os.File
	size int64
}

// Open opens the log in dir, which exists.
func Open(dir string, o Options) (*Log, error) {
	setDefault(&o.FileBytes, 8<<20)
	setDefault(&o.Files, 8)
	setDefault(&o.Memory, 4096)
	l := &Log{dir: dir, opts: o, wake: make(chan struct{}), work: make(chan struct{}, 1), done: make(chan struct{})}
	if err := l.load(); err != nil {
		return nil, err
	}
	go l.write()
	return l, nil
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// load finds the files and the number of the last event. A last line that was cut off by a crash is cut away.
func (l *Log) load() error {
	names, err := os.ReadDir(l.dir)
	if err != nil {
		return fmt.Errorf("open the event log: %w", err)
	}
	for _, n := range names {
		base, found := strings.CutSuffix(n.Name(), ".jsonl")
		if first, err := strconv.ParseInt(base, 10, 64); found && err == nil && first > 0 {
			l.files = append(l.files, first)
		}
	}
	slices.Sort(l.files)
	if len(l.files) == 0 {
		return nil
	}
	newest := l.files[len(l.files)-1]
	// If the newest file has no whole event, the ones before it were the last.
	l.last = newest - 1
	f, err := os.OpenFile(l.name(newest), os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("open the event log: %w", err)
	}
	good := int64(0)
	err = scan(f, 0, func(e *harenav1.Event, end int64) bool {
		l.last, good = e.GetSeq(), end
		l.remember(e)
		return true
	})
	if err == nil {
		err = f.Truncate(good)
	}
	if err == nil {
		_, err = f.Seek(good, io.SeekStart)
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("read the event log: %w", err)
	}
	l.f, l.size = f, good
	return nil
}

func (l *Log) name(first int64) string {
	return filepath.Join(l.dir, strconv.FormatInt(first, 10)+".jsonl")
}

// Append records an event; its seq, edge and (if it has none) time are set here. The event must not be changed any more.
func (l *Log) Append(e *harenav1.Event) {
	e.Edge = l.opts.Edge
	if e.Time == nil {
		e.Time = timestamppb.New(l.opts.Now())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return
	case len(l.queue) >= maxQueue:
		l.lost++
		return
	}
	l.queue = append(l.queue, e)
	select {
	case l.work <- struct{}{}:
	default:
	}
}

// Close writes what was appended and closes the log. Followers end.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	close(l.work)
	l.mu.Unlock()
	<-l.done
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.wake)
	if l.f == nil {
		return nil
	}
	return errors.Join(l.f.Sync(), l.f.Close())
}

// Flush waits until everything that was appended before is written.
func (l *Log) Flush(ctx context.Context) error {
	for {
		l.mu.Lock()
		idle, wake := len(l.queue) == 0, l.wake
		l.mu.Unlock()
		if idle {
			return nil
		}
		select {
		case <-wake:
		case <-l.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// write is the writer. The queue is emptied only after its events are written, so Flush can tell.
func (l *Log) write() {
	defer close(l.done)
	for range l.work {
		l.drain()
	}
	l.drain()
}

func (l *Log) drain() {
	for {
		l.mu.Lock()
		n := min(len(l.queue), 1024)
		batch := slices.Clone(l.queue[:n])
		lost, next := l.lost, l.last+1
		l.lost = 0
		l.mu.Unlock()
		if n == 0 {
			return
		}
		if lost > 0 {
			batch = append(batch, &harenav1.Event{
				Kind: "edge.events-lost", Edge: l.opts.Edge, Time: timestamppb.New(l.opts.Now()),
				Message: fmt.Sprintf("%d events were lost because the log could not be written fast enough", lost),
			})
		}
		for i, e := range batch {
			e.Seq = next + int64(i)
		}
		if err := l.store(batch); err != nil {
			// They are still published: an operator who follows sees what happens on a full disk.
			l.opts.Log.Error("events could not be written", "err", err, "events", len(batch))
		}
		l.mu.Lock()
		l.queue = l.queue[n:]
		l.last = batch[len(batch)-1].GetSeq()
		for _, e := range batch {
			l.remember(e)
		}
		close(l.wake)
		l.wake = make(chan struct{})
		l.mu.Unlock()
	}
}

func (l *Log) remember(e *harenav1.Event) {
	if len(l.recent) >= 2*l.opts.Memory {
		l.recent = slices.Clone(l.recent[len(l.recent)-l.opts.Memory:])
	}
	l.recent = append(l.recent, e)
}

// store appends a batch to the current file with one write.
func (l *Log) store(batch []*harenav1.Event) error {
	var b []byte
	for _, e := range batch {
		line, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode event: %w", err)
		}
		b = append(append(b, line...), '\n')
	}
	if l.f == nil || l.size >= l.opts.FileBytes {
		if err := l.rotate(batch[0].GetSeq()); err != nil {
			return err
		}
	}
	if _, err := l.f.WriteAt(b, l.size); err != nil {
		// Half a line would join with the next one.
		_ = l.f.Truncate(l.size)
		return err
	}
	l.size += int64(len(b))
	return nil
}

// rotate begins a file whose name is its first event's number, and removes the oldest ones.
func (l *Log) rotate(first int64) error {
	f, err := os.OpenFile(l.name(first), os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	if l.f != nil {
		_ = l.f.Close()
	}
	l.f, l.size = f, 0
	l.mu.Lock()
	if n := len(l.files); n == 0 || l.files[n-1] != first {
		l.files = append(l.files, first)
	}
	var old []int64
	if n := len(l.files) - l.opts.Files; n > 0 {
		old = slices.Clone(l.files[:n])
		l.files = slices.Clone(l.files[n:])
	}
	l.mu.Unlock()
	for _, first := range old {
		if err := os.Remove(l.name(first)); err != nil && !errors.Is(err, os.ErrNotExist) {
			l.opts.Log.Warn("an old event file could not be removed", "err", err)
		}
	}
	return nil
}
