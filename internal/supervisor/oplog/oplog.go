// Package oplog keeps a sandbox's operation log: what callers had it do, in order, and how that ended. It is what `harena log`
// prints and `harena replay` runs again.
//
// The log is a file of JSON Lines, each a harena.v1.LogEntry whose number is the line's. Content that is larger than 4 KiB
// lies beside it, in files named by their SHA-256. Entries are written within moments by a goroutine that lives only while there is something to
// write, so that an operation does not wait for its line; Sync does, for those who asked for durability.
//
// A log is bounded: what exceeds a bound is not logged, and the log says so. It never fails an operation.
package oplog

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Limits bound a log. The zero value of each field is its default.
type Limits struct {
	Bytes   int64 // of the lines; 128 MiB
	Content int64 // of what lies beside, all together; 512 MiB
	One     int64 // of one content; 64 MiB
}

const (
	version = 1
	// Inline is up to where content is in the line itself.
	Inline = 4 << 10
	// maxQueue bounds what waits to be written; then those who log wait.
	maxQueue  = 1024
	logFile   = "log.jsonl"
	contents  = "content"
	maxStop   = 1 << 10
	chunkSize = 256 << 10
)

// Config of Open.
type Config struct {
	// Dir is on the node, for this package alone; it is made when needed.
	Dir string
	// Header is the first entry, of a log that is new.
	Header *harenav1.LogHeader
	Log    *slog.Logger
	Now    func() time.Time
	Limits Limits
}

// Log is one sandbox's log. All methods may be called on nil, which logs nothing, and concurrently.
type Log struct {
	cfg Config

	mu      sync.Mutex
	room    sync.Cond // the queue has room again, or all of it is written
	changed chan struct{}
	queue   []*harenav1.LogEntry
	writing bool
	next    int64 // number of the next entry
	written int64 // bytes of whole lines in the file
	content int64 // bytes beside
	file    *os.File
	// unsynced are files and directories beside the file of lines that may not be on disk.
	unsynced map[string]bool
	// stopped says why nothing is logged any more.
	stopped string
}

// Open opens the log in a directory. An earlier supervisor's is continued.
func Open(cfg Config) (*Log, error) {
	def(&cfg.Limits.Bytes, 128<<20)
	def(&cfg.Limits.Content, 512<<20)
	def(&cfg.Limits.One, 64<<20)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Log{cfg: cfg}
	l.room.L = &l.mu
	f, err := os.Open(l.path())
	if errors.Is(err, fs.ErrNotExist) {
		return l, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the operation log: %w", err)
	}
	defer f.Close() //nolint:errcheck // read only
	if l.next, l.written, err = count(f); err != nil {
		return nil, fmt.Errorf("read the operation log: %w", err)
	}
	if l.stopped, err = lastWord(f, l.written); err != nil {
		return nil, fmt.Errorf("read the operation log: %w", err)
	}
	l.content, err = l.measure()
	return l, err
}

// lastWord is why an earlier supervisor stopped the log, which stays so.
func lastWord(f io.ReaderAt, size int64) (string, error) {
	tail := make([]byte, min(size, maxStop))
	if _, err := f.ReadAt(tail, size-int64(len(tail))); err != nil {
		return "", err
	}
	tail = bytes.TrimSuffix(tail, []byte("\n"))
	e := &harenav1.LogEntry{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(tail[bytes.LastIndexByte(tail, '\n')+1:], e); err != nil {
		return "", nil //nolint:nilerr // the end of a line that is longer than the one that is looked for
	}
	return e.GetStop().GetReason(), nil
}

func def(field *int64, value int64) {
	if *field == 0 {
		*field = value
	}
}

func (l *Log) path() string { return filepath.Join(l.cfg.Dir, logFile) }

// count counts whole lines and their bytes.
func count(r io.Reader) (lines, size int64, err error) {
	buf := make([]byte, chunkSize)
	var read int64
	for {
		n, err := r.Read(buf)
		lines += int64(bytes.Count(buf[:n], []byte("\n")))
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			size = read + int64(i) + 1
		}
		read += int64(n)
		if errors.Is(err, io.EOF) {
			return lines, size, nil
		}
		if err != nil {
			return 0, 0, err
		}
	}
}

// measure adds up the content beside the log, and removes what was never finished.
func (l *Log) measure() (int64, error) {
	dir := filepath.Join(l.cfg.Dir, contents)
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the operation log: %w", err)
	}
	var sum int64
	for _, n := range names {
		if filepath.Ext(n.Name()) == spoolExt {
			if err := os.Remove(filepath.Join(dir, n.Name())); err != nil {
				return 0, err
			}
			continue
		}
		info, err := n.Info()
		if err != nil {
			return 0, err
		}
		sum += info.Size()
	}
	return sum, nil
}

// Append logs an entry, whose number and time are set here. The caller does not change it afterwards.
func (l *Log) Append(e *harenav1.LogEntry) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) >= maxQueue && l.stopped == "" {
		l.room.Wait()
	}
	l.add(e)
}

func (l *Log) add(e *harenav1.LogEntry) {
	if l.stopped != "" {
		return
	}
	if l.next == 0 && e.GetHeader() == nil {
		h := l.cfg.Header
		if h == nil {
			h = &harenav1.LogHeader{}
		}
		h.Version = version
		l.add(&harenav1.LogEntry{Event: &harenav1.LogEntry_Header{Header: h}})
	}
	e.Number, e.Time = l.next, timestamppb.New(l.cfg.Now())
	l.next++
	l.queue = append(l.queue, e)
	if !l.writing {
		l.writing = true
		go l.write()
	}
}

// write empties the queue and ends.
func (l *Log) write() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) > 0 && l.stopped == "" {
		batch := l.queue
		l.queue = nil
		l.room.Broadcast()
		l.mu.Unlock()
		lines, err := encode(batch)
		l.mu.Lock()
		if err == nil {
			err = l.put(lines)
		}
		if err != nil {
			l.stop("the node could not write it")
			l.cfg.Log.Error("the operation log ends here", "error", err)
		}
		l.notify()
	}
	l.queue = nil
	l.writing = false
	l.room.Broadcast()
}

func encode(batch []*harenav1.LogEntry) ([][]byte, error) {
	lines := make([][]byte, 0, len(batch))
	for _, e := range batch {
		b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(e)
		if err != nil {
			return nil, err
		}
		lines = append(lines, append(b, '\n'))
	}
	return lines, nil
}

// put writes lines, as far as they fit; mu is held.
func (l *Log) put(lines [][]byte) error {
	if l.file == nil {
		if err := l.create(); err != nil {
			return err
		}
	}
	all := lines[0]
	for _, b := range lines[1:] {
		all = append(all, b...)
	}
	if l.written+int64(len(all)) > l.cfg.Limits.Bytes-maxStop {
		return l.full(lines)
	}
	return l.writeAll(all)
}

func (l *Log) writeAll(b []byte) error {
	if _, err := l.file.WriteAt(b, l.written); err != nil {
		return err
	}
	l.written += int64(len(b))
	return nil
}

// full writes the lines that fit, and the last of all.
func (l *Log) full(lines [][]byte) error {
	last := l.next - int64(len(lines)+len(l.queue))
	for _, b := range lines {
		if l.written+int64(len(b)) > l.cfg.Limits.Bytes-maxStop {
			break
		}
		if err := l.writeAll(b); err != nil {
			return err
		}
		last++
	}
	reason := fmt.Sprintf("its limit of %d bytes is reached", l.cfg.Limits.Bytes)
	stop, err := encode([]*harenav1.LogEntry{{
		Number: last, Time: timestamppb.New(l.cfg.Now()), Event: &harenav1.LogEntry_Stop{Stop: &harenav1.LogStop{Reason: reason}},
	}})
	if err == nil {
		err = l.writeAll(stop[0])
	}
	l.stop(reason)
	return err
}

func (l *Log) stop(reason string) {
	if l.stopped == "" {
		l.stopped = reason
	}
	l.queue = nil
	l.room.Broadcast()
}

func (l *Log) create() error {
	if err := os.MkdirAll(l.cfg.Dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	// What the death of an earlier supervisor cut off.
	if err := f.Truncate(l.written); err != nil {
		return errors.Join(err, f.Close())
	}
	l.file = f
	l.owe(l.cfg.Dir, filepath.Dir(l.cfg.Dir))
	return nil
}

// owes remembers what Sync is to put on disk.
func (l *Log) owes(names ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owe(names...)
}

// maxUnsynced bounds what is remembered; beyond it the whole directory's file system is synced.
const maxUnsynced = 256

func (l *Log) owe(names ...string) {
	if l.unsynced == nil {
		l.unsynced = map[string]bool{}
	}
	for _, n := range names {
		if len(l.unsynced) <= maxUnsynced {
			l.unsynced[n] = true
		}
	}
}

func (l *Log) notify() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// Sync returns when all that was appended is on disk. An error is logged, not returned: the log serves the operations.
func (l *Log) Sync() {
	if l == nil {
		return
	}
	l.flush()
	l.mu.Lock()
	f, owed := l.file, l.unsynced
	l.unsynced = nil
	l.mu.Unlock()
	if f == nil {
		return
	}
	// Content first: a line that is there names what is there.
	err := l.syncAll(owed)
	if serr := f.Sync(); !errors.Is(serr, os.ErrClosed) {
		err = errors.Join(err, serr)
	}
	if err != nil {
		l.cfg.Log.Error("the operation log is not on disk", "error", err)
	}
}

func (l *Log) syncAll(names map[string]bool) (failed error) {
	if len(names) > maxUnsynced {
		d, err := os.Open(l.cfg.Dir)
		if err != nil {
			return err
		}
		return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
	}
	for n := range names {
		f, err := os.Open(n)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// flush returns when all that was appended is written.
func (l *Log) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.writing {
		l.room.Wait()
	}
}

// Close writes what there is and releases the file.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	l.flush()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stop(sandboxEnded)
	l.notify()
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}

// maxLine bounds a line that is read: a command with its arguments and environment, and inline content, in JSON.
const maxLine = 16 << 20

// readLine returns the next line without allocating more than it holds.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxLine {
			return nil, errors.New("a line is too long")
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}
