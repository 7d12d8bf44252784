package datadir

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Info is what can be known of a data directory without taking it.
type Info struct {
	Path     string
	Edge     sandbox.EdgeID
	Slot     int
	Boot     string
	Format   int
	Draining bool
	// ServerPid is the process ID of the server that has the directory, "" when none has.
	ServerPid string
	// Bound tells whether the directory is mounted on itself with nosuid and nodev.
	Bound bool
}

// Inspect looks at a data directory and changes nothing. not-found: no node was ever started there.
func Inspect(path string) (Info, error) {
	path, err := clean(path)
	if err != nil {
		return Info{}, err
	}
	info := Info{Path: path}
	var v versionFile
	var n nodeFile
	if err := readJSON(filepath.Join(path, "version.json"), &v); err != nil {
		if _, verr := os.Lstat(filepath.Join(path, volumeName)); verr == nil && errors.Is(err, os.ErrNotExist) {
			return info, errs.E(errs.NotFound, "the volume of %s is not mounted", path).WithHint("`harena up --data %s` mounts it; nothing of a node runs meanwhile", path)
		}
		if errors.Is(err, os.ErrNotExist) {
			return info, errs.E(errs.NotFound, "%s is not a data directory of harena", path).WithHint("`harena up --data %s` makes one", path)
		}
		return info, Fault("read version.json", path, err)
	}
	if err := readJSON(filepath.Join(path, "node.json"), &n); err != nil && !errors.Is(err, os.ErrNotExist) {
		return info, Fault("read node.json", path, err)
	}
	info.Format, info.Edge, info.Slot, info.Draining = v.Format, n.Edge, n.Slot, n.Draining
	if info.Boot, err = BootID(); err != nil {
		return info, err
	}
	info.ServerPid = lockHolder(filepath.Join(path, "lock"))
	mounts, err := Mounts()
	if err != nil {
		return info, err
	}
	for _, m := range mounts {
		if m.Point == path {
			info.Bound = m.has("nosuid") && m.has("nodev")
		}
	}
	return info, nil
}

func lockHolder(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK) {
		return readPid(f)
	}
	return ""
}
