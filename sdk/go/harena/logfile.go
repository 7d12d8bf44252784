package harena

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// LogFile is a log that was read to its end, ready to be run again. Close releases its content.
type LogFile struct {
	Header  *harenav1.LogHeader
	Entries []*harenav1.LogEntry // without the header and content
	// CutOff: the last line was not whole, as when who wrote the log was killed, and is left out.
	CutOff bool

	dir    string
	last   int64                       // number of the last entry
	starts map[string]bool             // by command
	ends   map[string]*harenav1.LogEnd // by command
	// Of the content that comes: parts of one follow each other.
	content string
	sum     hash.Hash
}

// NewLogFile makes an empty log; entries are added in order, and Whole tells whether they are a log.
func NewLogFile() (*LogFile, error) {
	dir, err := os.MkdirTemp("", "harena-replay-")
	if err != nil {
		return nil, err
	}
	return &LogFile{dir: dir, last: -1, starts: map[string]bool{}, ends: map[string]*harenav1.LogEnd{}}, nil
}

// Close removes what the log holds on disk.
func (l *LogFile) Close() error { return os.RemoveAll(l.dir) }

// maxLogLine bounds a line of a log.
const maxLogLine = 32 << 20

// ReadLog reads a log in JSON Lines, as `harena log --json` prints it.
func ReadLog(r io.Reader) (*LogFile, error) {
	l, err := NewLogFile()
	if err != nil {
		return nil, err
	}
	if err := l.read(bufio.NewReaderSize(r, 64<<10)); err != nil {
		_ = l.Close()
		return nil, &Error{Kind: KindInvalid, Message: "the log cannot be read: " + err.Error(), Hint: "such a log is what `harena log --json SANDBOX` prints", cause: err}
	}
	return l, nil
}

func (l *LogFile) read(r *bufio.Reader) error {
	for n := 1; ; n++ {
		line, err := logLine(r)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("line %d: %w", n, err)
		}
		last := err != nil
		if len(bytes.TrimSpace(line)) > 0 {
			e := &harenav1.LogEntry{}
			if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(line, e); err == nil {
				if err := l.Add(e); err != nil {
					return fmt.Errorf("line %d: %w", n, err)
				}
			} else if l.CutOff = last; !last {
				return fmt.Errorf("line %d is not of an operation log: %w", n, err)
			}
		}
		if last {
			return l.Whole()
		}
	}
}

// logLine returns the next line; with io.EOF what there is of one.
func logLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxLogLine {
			return nil, fmt.Errorf("it is longer than %d bytes", maxLogLine)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// Whole reports why what was added is not a log; to be called after the last entry.
func (l *LogFile) Whole() error {
	if l.Header == nil {
		return errors.New("it has no header")
	}
	if l.CutOff && l.content != "" { // of which the rest is cut off
		return os.Remove(filepath.Join(l.dir, l.content))
	}
	return l.settle()
}

// Add adds the next entry.
func (l *LogFile) Add(e *harenav1.LogEntry) error {
	if c := e.GetContent(); c != nil {
		return l.keep(c)
	}
	if err := l.settle(); err != nil {
		return err
	}
	h := e.GetHeader()
	switch {
	case e.GetNumber() <= l.last:
		return fmt.Errorf("entry %d comes after entry %d", e.GetNumber(), l.last)
	case h != nil && l.Header != nil:
		return errors.New("it has two headers: is it more than one log?")
	case h == nil && l.Header == nil:
		return errors.New("it does not begin with a header")
	case h != nil && h.GetVersion() != 1:
		return fmt.Errorf("its version is %d, this program reads 1", h.GetVersion())
	}
	l.last = e.GetNumber()
	if h != nil {
		l.Header = h
		return nil
	}
	if err := l.check(e); err != nil {
		return fmt.Errorf("entry %d: %w", e.GetNumber(), err)
	}
	l.Entries = append(l.Entries, e)
	return nil
}

// check checks what an entry says by itself, and of a command that others speak of.
func (l *LogFile) check(e *harenav1.LogEntry) error {
	for _, b := range []*harenav1.LogBytes{e.GetStart().GetInput(), e.GetInput().GetData(), e.GetFile().GetContent()} {
		if b.GetSize() < 0 || len(b.GetInline()) > 0 && int64(len(b.GetInline())) != b.GetSize() {
			return fmt.Errorf("it has %d bytes of content and says %d", len(b.GetInline()), b.GetSize())
		}
	}
	switch ev := e.GetEvent().(type) {
	case *harenav1.LogEntry_Start:
		id := ev.Start.GetCommandId()
		if l.starts[id] {
			return fmt.Errorf("command %.40q starts a second time", id)
		}
		l.starts[id] = true
	case *harenav1.LogEntry_End:
		id := ev.End.GetCommandId()
		if !l.starts[id] || l.ends[id] != nil {
			return fmt.Errorf("command %.40q ends, and does not run", id)
		}
		for _, r := range []*harenav1.StreamRecord{ev.End.GetResult().GetStdout(), ev.End.GetResult().GetStderr()} {
			if r.GetRecorded() < 0 || r.GetRecorded() > r.GetTotal() {
				return fmt.Errorf("of %d bytes of output it has %d", r.GetTotal(), r.GetRecorded())
			}
		}
		l.ends[id] = ev.End
	}
	return nil
}

func (l *LogFile) contentFile(sum string) (string, error) {
	if b, err := hex.DecodeString(sum); err != nil || len(b) != sha256.Size || hex.EncodeToString(b) != sum {
		return "", fmt.Errorf("%.80q is not a digest", sum)
	}
	return filepath.Join(l.dir, sum), nil
}

// keep adds a part of a content.
func (l *LogFile) keep(c *harenav1.LogContent) error {
	name, err := l.contentFile(c.GetSha256())
	if err != nil {
		return err
	}
	flags := os.O_APPEND | os.O_WRONLY
	if c.GetSha256() != l.content {
		if err := l.settle(); err != nil {
			return err
		}
		l.content, l.sum = c.GetSha256(), sha256.New()
		flags = os.O_CREATE | os.O_TRUNC | os.O_WRONLY
	}
	l.sum.Write(c.GetData())
	f, err := os.OpenFile(name, flags, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(c.GetData())
	return errors.Join(err, f.Close())
}

// settle checks the content whose last part came.
func (l *LogFile) settle() error {
	if l.content == "" {
		return nil
	}
	was := l.content
	l.content = ""
	if hex.EncodeToString(l.sum.Sum(nil)) != was {
		return fmt.Errorf("content %.12s… is not what its digest says", was)
	}
	return nil
}

var errNotKept = errors.New("its content was not kept in the log")

// open returns the content that b stands for.
func (l *LogFile) open(b *harenav1.LogBytes) (io.ReadCloser, error) {
	switch {
	case b.GetSize() == 0:
		return io.NopCloser(bytes.NewReader(nil)), nil
	case b.GetDropped():
		return nil, errNotKept
	case int64(len(b.GetInline())) == b.GetSize():
		return io.NopCloser(bytes.NewReader(b.GetInline())), nil
	}
	name, err := l.contentFile(b.GetSha256())
	if err != nil {
		return nil, err
	}
	f, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errNotKept
	}
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || info.Size() != b.GetSize() {
		return nil, errors.Join(err, f.Close(), errNotKept)
	}
	return f, nil
}
