// Package journal keeps what is known of the operations of one sandbox that have an op_id, so that none happens twice.
//
// Each has a file: one line from before it began and, once it has ended, a second one with its result. Both are on disk
// (fsync) before what follows: the effect, and the answer. A file without the second line, whose operation does not run, tells
// of a supervisor that died in between: how the operation ended is not known, and it is never begun again.
//
// A journal is bounded by the number of IDs that a sandbox may use, and by what of outputs it keeps beside results.
package journal

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// Ops is how many op_ids a sandbox may use, ever.
	Ops = 65536
	// InlineOutput is what of one stream may be kept beside a result.
	InlineOutput = 16 << 10
	// inlineTotal bounds the bytes of all files beyond which no output is kept in them.
	inlineTotal = 256 << 20
	maxID       = 128
)

// Entry is what is known of an operation.
type Entry struct {
	OpID    string `json:"op_id"`
	Request string `json:"request"` // hexadecimal digest
	// Kind of a file operation; empty for commands.
	Kind  string    `json:"kind,omitempty"`
	Begun time.Time `json:"begun"`

	// Of commands.
	Command string `json:"command,omitempty"`
	Number  uint64 `json:"number,omitempty"`
	Line    string `json:"line,omitempty"`
	User    string `json:"user,omitempty"`
	Tag     string `json:"tag,omitempty"`
	Pty     bool   `json:"pty,omitempty"`
	Pid     int64  `json:"pid,omitempty"`
	// Stdout and Stderr are whole records, when they are small; else they are files of their own.
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`

	// Content is the digest of what was uploaded.
	Content string `json:"content,omitempty"`

	Result json.RawMessage `json:"result,omitempty"` // absent: not known to have ended
}

// Indeterminate is the error for an operation whose end nobody knows.
func (e *Entry) Indeterminate() error {
	what := "file operation " + e.Kind
	if e.Kind == "" {
		what = "command " + e.Command
	}
	return errs.E(errs.Precondition, "indeterminate: operation %q (%s) was begun, and its end was not recorded because the supervisor ended", e.OpID, what).
		WithHint("find out in the sandbox how far it came; it is never done again under this op_id")
}

// Journal of one sandbox. It is safe for concurrent use.
type Journal struct {
	dir   string
	limit int

	mu    sync.Mutex
	count int
	bytes int64
	held  map[string]bool // op_ids that are taken and have not ended
}

// Open opens the journal in dir, which is made when it is needed. limit is how many IDs may be used; 0: Ops.
func Open(dir string, limit int) (*Journal, error) {
	if limit == 0 {
		limit = Ops
	}
	j := &Journal{dir: dir, limit: limit, held: map[string]bool{}}
	names, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		// What cannot be read is found out by the first operation, which then does not begin.
		return j, nil //nolint:nilerr // see above
	}
	for _, n := range names {
		if filepath.Ext(n.Name()) != ".json" {
			continue
		}
		j.count++
		if info, err := n.Info(); err == nil {
			j.bytes += info.Size()
		}
	}
	return j, nil
}

// CheckID refuses what is not an op_id.
func CheckID(id string) error {
	for i := range len(id) {
		if id[i] < ' ' || id[i] > '~' {
			return errs.E(errs.Invalid, "op_id %.80q is not printable ASCII", id)
		}
	}
	if len(id) > maxID {
		return errs.OverLimit(errs.Invalid, "characters of op_id", maxID, len(id))
	}
	return nil
}

// Take returns what is known of an ID. When nothing is, the ID is the caller's, until Finish, Cancel or Leave. exists: it
// is somebody else's at this moment. The caller keeps track of the operations that it has begun itself.
func (j *Journal) Take(opID string) (*Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.held[opID] {
		return nil, Used(opID, "an operation that runs")
	}
	e, err := j.Load(opID)
	if e != nil || err != nil {
		return e, err
	}
	if j.count >= j.limit {
		return nil, errs.OverLimit(errs.Quota, "op_ids of a sandbox", j.limit, j.count+1).
			WithHint("leave op_id out, or use a new sandbox")
	}
	j.count++
	j.held[opID] = true
	return nil, nil
}

// Used is the error for an ID that names something else.
func Used(opID, what string) error {
	return errs.E(errs.Exists, "op_id %q was used for %s", opID, what).WithHint("use a new op_id for every new operation")
}

// Start records that an operation is about to begin.
func (j *Journal) Start(e *Entry) error {
	created := false
	if _, err := os.Stat(j.dir); errors.Is(err, fs.ErrNotExist) {
		created = true
	}
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return failed(err)
	}
	if created {
		if err := syncDir(filepath.Dir(j.dir)); err != nil {
			return failed(err)
		}
	}
	if err := j.append(e, os.O_CREATE|os.O_TRUNC); err != nil {
		return err
	}
	return failed(syncDir(j.dir))
}

// Finish records the end of an operation; e has the result.
func (j *Journal) Finish(e *Entry) error {
	j.mu.Lock()
	if j.bytes > inlineTotal {
		e.Stdout, e.Stderr = nil, nil
	}
	j.mu.Unlock()
	defer j.Leave(e.OpID)
	return j.append(e, os.O_APPEND)
}

// Room reports whether outputs may still be kept beside results.
func (j *Journal) Room() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.bytes <= inlineTotal
}

// Leave gives an ID back without an end: what is recorded stays as it is.
func (j *Journal) Leave(opID string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.held, opID)
}

// Cancel forgets an operation that did not begin, or had no effect.
func (j *Journal) Cancel(opID string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.held[opID] {
		return nil
	}
	delete(j.held, opID)
	j.count--
	err := os.Remove(j.file(opID))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return err
}

func (j *Journal) file(opID string) string {
	sum := sha256.Sum256([]byte(opID))
	return filepath.Join(j.dir, hex.EncodeToString(sum[:])+".json")
}

func (j *Journal) append(e *Entry, flags int) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(j.file(e.OpID), flags|os.O_WRONLY, 0o600)
	if err != nil {
		return failed(err)
	}
	_, err = f.Write(append(b, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return failed(err)
	}
	j.mu.Lock()
	j.bytes += int64(len(b)) + 1
	j.mu.Unlock()
	return nil
}

func failed(err error) error {
	if err == nil {
		return nil
	}
	for _, errno := range []error{unix.ENOSPC, unix.EDQUOT, unix.EROFS} {
		if errors.Is(err, errno) {
			return errs.E(errs.Capacity, "the node cannot record the operation: %w", errno).Exhausts("disk of the node").
				WithHint("free space on the node, or leave op_id out")
		}
	}
	return fmt.Errorf("journal an operation: %w", err)
}

// Load reads an operation; nil when there is none.
func (j *Journal) Load(opID string) (*Entry, error) { return read(j.file(opID)) }

// read returns the last whole line. One that the death of a supervisor cut off was acted upon by nobody.
func read(name string) (*Entry, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	var last *Entry
	for line := range bytes.Lines(b) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break
		}
		e := &Entry{}
		if err := json.Unmarshal(line, e); err != nil {
			return nil, fmt.Errorf("read the journal: %s: %w", name, err)
		}
		last = e
	}
	return last, nil
}

// All reads every operation; at the start of a supervisor that is not the sandbox's first.
func (j *Journal) All() ([]*Entry, error) {
	names, err := os.ReadDir(j.dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	var out []*Entry
	for _, n := range names {
		if filepath.Ext(n.Name()) != ".json" {
			continue
		}
		e, err := read(filepath.Join(j.dir, n.Name()))
		if err != nil {
			return nil, err
		}
		if e != nil {
			out = append(out, e)
		}
	}
	return out, err
}

func syncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	defer d.Close() //nolint:errcheck // read only
	return d.Sync()
}
