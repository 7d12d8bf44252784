package lifecycle

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/sandbox"
)

// leaseFiles are the leases on disk, one file each. Like the sandboxes' records they are not synced.
type leaseFiles struct{ dir string }

func (f leaseFiles) path(k jobKey) string {
	// A name may have slashes and be as long as a file's name.
	sum := sha256.Sum256([]byte(k.project + "\x00" + k.name))
	return filepath.Join(f.dir, hex.EncodeToString(sum[:16])+".json")
}

func (f leaseFiles) write(l lease) error {
	b, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("encode the lease of a job: %w", err)
	}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return datadir.Fault("write the lease of a job", f.dir, err)
	}
	path := f.path(l.key())
	err = os.WriteFile(path+".tmp", b, 0o600)
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		_ = os.Remove(path + ".tmp")
		return datadir.Fault("write the lease of a job", f.dir, err)
	}
	return nil
}

func (f leaseFiles) remove(k jobKey) error {
	if err := os.Remove(f.path(k)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return datadir.Fault("remove the lease of a job", f.dir, err)
	}
	return nil
}

// load reads all leases. Files that cannot be read are named in torn, and left for people to look at.
func (f leaseFiles) load() (all map[jobKey]lease, torn []string, err error) {
	all = map[jobKey]lease{}
	names, err := os.ReadDir(f.dir)
	if errors.Is(err, os.ErrNotExist) {
		return all, nil, nil
	}
	if err != nil {
		return nil, nil, datadir.Fault("read the leases of jobs", f.dir, err)
	}
	for _, n := range names {
		path := filepath.Join(f.dir, n.Name())
		if strings.HasSuffix(n.Name(), ".tmp") {
			_ = os.Remove(path) // of a write that was cut off
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, datadir.Fault("read the leases of jobs", f.dir, err)
		}
		l, err := decodeLease(b)
		if err != nil || f.path(l.key()) != path {
			torn = append(torn, path)
			continue
		}
		all[l.key()] = l
	}
	return all, torn, nil
}

func decodeLease(b []byte) (lease, error) {
	var l lease
	if err := json.Unmarshal(b, &l); err != nil {
		return l, fmt.Errorf("decode the lease of a job: %w", err)
	}
	known := l.State == leaseActive || l.State == leaseLapsed || l.State == leaseStopped
	if l.Format < 1 || l.Format > recordFormat || !known || l.Duration <= 0 || l.Duration > maxLease || l.StopAfter < 0 || l.StopAfter > maxLease {
		return l, fmt.Errorf("the lease of job %.80q makes no sense", l.Name)
	}
	return l, sandbox.ValidateJob(l.Name)
}
