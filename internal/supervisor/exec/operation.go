package exec

import (
	"encoding/hex"
	"errors"
	"os"

	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/supervisor/journal"
)

// String is the digest in hexadecimal.
func (d digest) String() string { return hex.EncodeToString(d[:]) }

// entryOf is what the journal has of a command with an op_id.
func entryOf(c *command) *journal.Entry {
	return &journal.Entry{
		OpID: c.opID, Request: c.hash.String(), Command: c.id, Number: c.number,
		Line: c.line, User: c.user, Tag: c.tag, Pty: c.tty, Pid: c.pid, Begun: c.begun,
	}
}

// finish journals a result.
func finish(j *journal.Journal, e *journal.Entry, r *harenav1.Result) (err error) {
	if e.Result, err = protojson.Marshal(r); err != nil {
		return err
	}
	return j.Finish(e)
}

func writeFile(name string, b []byte) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

func syncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	defer d.Close() //nolint:errcheck // read only
	return d.Sync()
}
