package container

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	guestDir  = "guest"
	guestName = "harena-guest"
	// guestMode lets anybody inside a sandbox's file worker execute and nobody read it: a process that execs it is never
	// dumpable for them.
	guestMode = 0o111
)

// installGuest copies the guest binary to DIR/guest/<digest>/harena-guest and returns that path. All supervisors and file
// workers run from this one inode, so they share its pages, and an upgrade does not touch those that run.
func installGuest(dir, source string) (string, error) {
	in, err := os.Open(source)
	if err != nil {
		return "", errs.E(errs.Invalid, "the guest binary cannot be read: %w", err).
			WithHint("install harena-guest beside harena")
	}
	defer in.Close()
	h := sha256.New()
	if _, err := io.Copy(h, in); err != nil {
		return "", fmt.Errorf("read guest binary %s: %w", source, err)
	}
	version := filepath.Join(dir, guestDir, hex.EncodeToString(h.Sum(nil))[:16])
	target := filepath.Join(version, guestName)
	// Only a rename of a complete file makes the name, so what is there is whole.
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	if err := os.MkdirAll(version, 0o711); err != nil {
		return "", fmt.Errorf("install guest binary: %w", err)
	}
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	if err := writeGuest(in, target); err != nil {
		return "", fmt.Errorf("install guest binary: %w", err)
	}
	return target, nil
}

func writeGuest(in io.Reader, target string) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(target), ".new-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	defer tmp.Close()
	if _, err := io.Copy(tmp, in); err != nil {
		return err
	}
	if err := tmp.Chmod(guestMode); err != nil {
		return err
	}
	if err := tmp.Sync(); err != nil {
		return err
	}
	// Closed before it can be executed (ETXTBSY).
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), target)
}

// oldGuests lists installed versions that are neither this edge's nor run by anybody.
func (b *Backend) oldGuests() ([]string, error) {
	root := filepath.Join(b.cfg.Dir, guestDir)
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	used, err := b.usedInodes()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		dir := filepath.Join(root, e.Name())
		if dir == filepath.Dir(b.guest) {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, guestName), &st); err == nil && used[inode{st.Dev, st.Ino}] {
			continue
		}
		out = append(out, dir)
	}
	return out, nil
}

type inode struct {
	dev uint64
	ino uint64
}

// usedInodes are the executables of supervisors; file workers run what their supervisor does.
func (b *Backend) usedInodes() (map[inode]bool, error) {
	pids, err := b.controlDir().Procs()
	used := map[inode]bool{}
	for _, pid := range pids {
		var st unix.Stat_t
		if serr := unix.Stat("/proc/"+strconv.Itoa(pid)+"/exe", &st); serr == nil {
			used[inode{st.Dev, st.Ino}] = true
		}
	}
	return used, err
}

func (b *Backend) removeOldGuests() error {
	old, err := b.oldGuests()
	for _, dir := range old {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}
