package events

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const (
	// maxLine bounds one event on disk. Attributes are ours and short.
	maxLine = 1 << 20
	// maxBatch bounds what a reader holds.
	maxBatch = 2048
)

// seqOf finds the number in a line without decoding the rest.
var seqOf = regexp.MustCompile(`"seq": ?"([0-9]+)"`)

// Matches reports whether an event passes a filter, apart from after_seq.
func Matches(f *harenav1.EventFilter, e *harenav1.Event) bool {
	return (f.GetSandboxId() == "" || f.GetSandboxId() == e.GetSandboxId()) &&
		(f.GetJob() == "" || f.GetJob() == e.GetJob()) &&
		(f.GetProject() == "" || f.GetProject() == e.GetProject() || strings.HasPrefix(e.GetProject(), f.GetProject()+"/")) &&
		strings.HasPrefix(e.GetKind(), f.GetKind())
}

// List returns up to limit matching events with a seq above after (and above the filter's after_seq), oldest first, and
// the seq to go on from, 0 at the end.
func (l *Log) List(f *harenav1.EventFilter, after int64, limit int) ([]*harenav1.Event, int64, error) {
	after = max(after, f.GetAfterSeq())
	var found []*harenav1.Event
	for {
		batch, err := l.after(after)
		if err != nil {
			return nil, 0, err
		}
		if len(batch) == 0 {
			return found, 0, nil
		}
		for _, e := range batch {
			if len(found) == limit {
				return found, after, nil
			}
			after = e.GetSeq()
			if Matches(f, e) {
				found = append(found, e)
			}
		}
	}
}

// Follow calls send for every matching event with a seq above the filter's after_seq, recorded ones first, until ctx
// ends, the log is closed or send fails. Without after_seq it begins with the oldest that is kept.
func (l *Log) Follow(ctx context.Context, f *harenav1.EventFilter, send func(*harenav1.Event) error) error {
	after := f.GetAfterSeq()
	for {
		l.mu.Lock()
		wake, closed := l.wake, l.closed
		l.mu.Unlock()
		batch, err := l.after(after)
		if err != nil {
			return err
		}
		for _, e := range batch {
			after = e.GetSeq()
			if !Matches(f, e) {
				continue
			}
			if err := send(e); err != nil {
				return err
			}
		}
		if len(batch) > 0 {
			continue
		}
		if closed {
			return nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Last returns the seq of the newest event.
func (l *Log) Last() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// after returns some of the events above seq, in order; none only when there are none.
func (l *Log) after(seq int64) ([]*harenav1.Event, error) {
	for {
		l.mu.Lock()
		if seq >= l.last {
			l.mu.Unlock()
			return nil, nil
		}
		i := sort.Search(len(l.recent), func(i int) bool { return l.recent[i].GetSeq() > seq })
		// In memory, unless older ones that are on disk only come first.
		if i > 0 || len(l.files) == 0 || len(l.recent) > 0 && (l.recent[0].GetSeq() == seq+1 || l.recent[0].GetSeq() <= l.files[0]) {
			batch := slices.Clone(l.recent[i:min(len(l.recent), i+maxBatch)])
			l.mu.Unlock()
			return batch, nil
		}
		first, oldest := l.fileOf(seq), int64(0)
		if len(l.recent) > 0 {
			oldest = l.recent[0].GetSeq()
		}
		l.mu.Unlock()
		batch, err := l.readFile(first, seq)
		if errors.Is(err, os.ErrNotExist) {
			continue // rotated away meanwhile
		}
		if err != nil || len(batch) > 0 {
			return batch, err
		}
		// Nothing more in this file, which a full disk can cause: go on with the next file, or with memory.
		if seq = l.nextFile(first, oldest) - 1; seq < 0 {
			return nil, nil
		}
	}
}

// fileOf returns the file that seq+1 is in, or the oldest. l.mu is held.
func (l *Log) fileOf(seq int64) int64 {
	i := sort.Search(len(l.files), func(i int) bool { return l.files[i] > seq+1 })
	return l.files[max(0, i-1)]
}

// nextFile returns where to go on after the file that begins with first: the next file or the oldest in memory.
func (l *Log) nextFile(first, oldest int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := sort.Search(len(l.files), func(i int) bool { return l.files[i] > first })
	if i == len(l.files) {
		return oldest
	}
	return l.files[i]
}

// readFile reads up to maxBatch events above seq from a file.
func (l *Log) readFile(first, seq int64) ([]*harenav1.Event, error) {
	f, err := os.Open(l.name(first))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var batch []*harenav1.Event
	err = scan(f, seq, func(e *harenav1.Event, _ int64) bool {
		batch = append(batch, e)
		return len(batch) < maxBatch
	})
	return batch, err
}

// scan calls visit with each whole event of a file above seq and the offset of its end, until one is damaged or visit says no.
func scan(r io.Reader, seq int64, visit func(e *harenav1.Event, end int64) bool) error {
	lines := bufio.NewReaderSize(r, 64<<10)
	var end int64
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) || len(line) > maxLine {
			return nil
		}
		if err != nil {
			return err
		}
		end += int64(len(line))
		if m := seqOf.FindSubmatch(line[:min(len(line), 40)]); m != nil && seq > 0 {
			if n, err := strconv.ParseInt(string(m[1]), 10, 64); err == nil && n <= seq {
				continue
			}
		}
		e := &harenav1.Event{}
		whole := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(bytes.TrimSpace(line), e) == nil
		if !whole || !visit(e, end) {
			return nil
		}
	}
}
