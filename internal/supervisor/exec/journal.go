package exec

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// journal keeps what is known of commands with an op_id, one file each:
// written before the command is started, replaced when its result is known,
// before anybody is told. Both are on disk (fsync) before what follows.
type journal struct {
	dir   string
	limit int
	count int // files; guarded by Service.opMu, or before the service is used
}

// entry is the content of a file.
type entry struct {
	OpID    string          `json:"op_id"`
	Request string          `json:"request"` // digest
	Command string          `json:"command"`
	Number  uint64          `json:"number"`
	Line    string          `json:"line"`
	User    string          `json:"user"`
	Tag     string          `json:"tag,omitempty"`
	Pty     bool            `json:"pty,omitempty"`
	Pid     int64           `json:"pid,omitempty"`
	Begun   time.Time       `json:"begun"`
	Result  json.RawMessage `json:"result,omitempty"` // absent: not known to have ended
}

func (j *journal) file(opID string) string {
	sum := sha256.Sum256([]byte(opID))
	return filepath.Join(j.dir, hex.EncodeToString(sum[:])+".json")
}

func entryOf(c *command) entry {
	return entry{
		OpID: c.opID, Request: hex.EncodeToString(c.hash[:]), Command: c.id, Number: c.number,
		Line: c.line, User: c.user, Tag: c.tag, Pty: c.tty, Pid: c.pid, Begun: c.begun,
	}
}

// start records that a command is about to be started.
func (j *journal) start(c *command) error {
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return journalError(err)
	}
	return j.write(entryOf(c))
}

// finish records a result.
func (j *journal) finish(c *command, r *harenav1.Result) error {
	e := entryOf(c)
	var err error
	if e.Result, err = protojson.Marshal(r); err != nil {
		return err
	}
	return j.write(e)
}

// cancel forgets an operation that was not started after all.
func (j *journal) cancel(c *command) {
	err := os.Remove(j.file(c.opID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		c.s.cfg.Log.Error("forget an operation that was not started", "command", c.id, "error", err)
	}
}

func (j *journal) write(e entry) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	name := j.file(e.OpID)
	if err := writeFile(name+".tmp", b, true); err != nil {
		return journalError(err)
	}
	if err := os.Rename(name+".tmp", name); err != nil {
		return journalError(err)
	}
	return journalError(syncDir(j.dir))
}

func journalError(err error) error {
	if err == nil {
		return nil
	}
	for _, errno := range []error{unix.ENOSPC, unix.EDQUOT, unix.EROFS} {
		if errors.Is(err, errno) {
			return errs.E(errs.Capacity, "the node cannot record the operation: %w", errno).
				WithHint("free space on the node, or leave op_id out")
		}
	}
	return fmt.Errorf("journal an operation: %w", err)
}

// load reads an operation; nil when there is none.
func (j *journal) load(opID string) (*entry, error) {
	return readEntry(j.file(opID))
}

func readEntry(name string) (*entry, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	e := &entry{}
	if err := json.Unmarshal(b, e); err != nil {
		return nil, fmt.Errorf("read the journal: %s: %w", name, err)
	}
	return e, nil
}

// all reads every operation; at the start of a supervisor that is not the sandbox's first.
func (j *journal) all() ([]*entry, error) {
	names, err := os.ReadDir(j.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []*entry
	for _, n := range names {
		if filepath.Ext(n.Name()) != ".json" {
			continue
		}
		e, err := readEntry(filepath.Join(j.dir, n.Name()))
		if err != nil {
			return nil, err
		}
		if e != nil {
			out = append(out, e)
		}
	}
	return out, err
}

func writeFile(name string, b []byte, sync bool) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil && sync {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
