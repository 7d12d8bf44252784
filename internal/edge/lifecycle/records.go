package lifecycle

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/disk"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/sandbox"
)

const recordName = "record.json"

// records are the sandboxes' directories on disk.
//
// Records are not synced: what they describe does not outlive the machine's boot, so they need to survive a kill of the
// server (the page cache does) and not a loss of power. A record that a loss of power tore is set aside, with its files.
type records struct {
	root string // the data directory
	disk *disk.Disk
}

func (s records) dir(id sandbox.ID) string { return filepath.Join(s.root, "sandboxes", string(id)) }

// create makes the directory of a new sandbox, with its first record.
func (s records) create(r *Record) error {
	if err := os.Mkdir(s.dir(r.ID()), 0o700); err != nil {
		return s.fault("make the sandbox's directory", err)
	}
	return s.write(r, false)
}

const (
	// recordSpare is what a record can grow by at least when it is written over: an end, or a pause with its report.
	recordSpare = 512
	recordUnit  = 1024
	// maxOver is the most that is written over: the kernel copies it in one piece, whatever kills the writer.
	maxOver = 4096
)

// write replaces a record. With must, it is written over the old one when the disk has no room for a new file, so that a
// server that starts then does not take what was ended for what runs.
func (s records) write(r *Record, must bool) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	path := filepath.Join(s.dir(r.ID()), recordName)
	err = os.WriteFile(path+".tmp", padded(b, (len(b)+recordSpare+recordUnit-1)/recordUnit*recordUnit), 0o600)
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		_ = os.Remove(path + ".tmp")
		if full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT); must && full && writeOver(path, b) {
			return nil
		}
	}
	return s.fault("write the sandbox's record", err)
}

// padded adds what JSON ignores.
func padded(b []byte, size int) []byte {
	return append(b, bytes.Repeat([]byte(" "), max(0, size-len(b)))...)
}

// writeOver writes over a file that is as large, or larger, which needs no more room where files are not copied on write. It
// reports whether that was done.
func writeOver(path string, b []byte) bool {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // what matters is in the page cache
	st, err := f.Stat()
	if err != nil || st.Size() > maxOver || int64(len(b)) > st.Size() {
		return false
	}
	_, err = f.WriteAt(padded(b, int(st.Size())), 0)
	return err == nil
}

// makeUpper makes the directories of the writable layer, which may grow to limit bytes.
func (s records) makeUpper(id sandbox.ID, limit int64) error {
	if err := s.disk.Make(s.upper(id), limit); err != nil {
		return s.fault("make the sandbox's writable layer", err)
	}
	// The upper's root becomes the root directory inside.
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"upper/data", 0o755}, {"upper/work", 0o700}} {
		path := filepath.Join(s.dir(id), d.name)
		if err := os.Mkdir(path, d.mode); err != nil {
			return s.fault("make the sandbox's writable layer", err)
		}
	}
	// Whatever the umask took from it.
	return s.fault("make the sandbox's writable layer", os.Chmod(filepath.Join(s.dir(id), "upper", "data"), 0o755))
}

// load reads all records. Directories without one that can be used are named in odd; those whose record is there but
// cannot be read, in torn.
func (s records) load() (all []*Record, odd, torn []string, err error) {
	names, err := os.ReadDir(filepath.Join(s.root, "sandboxes"))
	if err != nil {
		return nil, nil, nil, s.fault("read the records", err)
	}
	for _, n := range names {
		b, err := os.ReadFile(filepath.Join(s.root, "sandboxes", n.Name(), recordName))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			odd = append(odd, n.Name())
			continue
		}
		if err != nil {
			return nil, nil, nil, s.fault("read the records", err)
		}
		r, err := decodeRecord(b)
		if err != nil || string(r.ID()) != n.Name() {
			torn = append(torn, n.Name())
			continue
		}
		// The data directory may have been moved while nothing ran.
		r.Config.Dir = s.dir(r.ID())
		all = append(all, r)
	}
	return all, odd, torn, nil
}

func (s records) fault(action string, err error) error {
	return datadir.Fault(action, s.root, err)
}
