package exec

import (
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
)

// record is the recorded prefix of one stream: bytes [0, size). Only the pump
// appends; the fields are written under the command's mutex, so that readers
// see a consistent prefix.
type record struct {
	name string // file name, within the command's directory
	dir  string // the command's directory, made with the first file
	max  int64
	// reserve asks for n more bytes of files; false: the sandbox has none left.
	reserve func(n int64) bool

	size int64
	sum  hash.Hash // of all that is recorded; nil when nobody wants it
	mem  []byte    // the whole record, while inFile is false; append-only
	// inFile: the record is in the file. file is open while the pump lives.
	inFile bool
	file   *os.File
	full   bool // nothing more is recorded
	gone   bool // dropped to make room; size is kept for the result
}

func (r *record) path() string { return filepath.Join(r.dir, r.name) }

// room is how many of n bytes may be recorded.
func (r *record) room(n int) int {
	if r.full {
		return 0
	}
	return int(min(int64(n), r.max-r.size))
}

// spill moves the record from memory to its file. It returns the open file;
// the caller publishes it under the command's mutex.
func (r *record) spill() (*os.File, error) {
	if !r.reserve(r.size) {
		return nil, errNoRoom
	}
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return nil, fmt.Errorf("record output: %w", err)
	}
	f, err := os.OpenFile(r.path(), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("record output: %w", err)
	}
	if _, err := f.Write(r.mem); err != nil {
		f.Close()
		return nil, errors.Join(fmt.Errorf("record output: %w", err), os.Remove(r.path()))
	}
	return f, nil
}

var errNoRoom = errors.New("no room for records")

// fileBytes is what the record holds on disk.
func (r *record) fileBytes() int64 {
	if r.inFile && !r.gone {
		return r.size
	}
	return 0
}

// memBytes is what the record holds in memory.
func (r *record) memBytes() int64 {
	if r.inFile || r.gone {
		return 0
	}
	return r.size
}

// have is how many bytes a reader can get.
func (r *record) have() int64 {
	if r.gone {
		return 0
	}
	return r.size
}
