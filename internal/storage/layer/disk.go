package layer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/harena-dev/harena/internal/errs"
)

// diskError gives an error of the file system the kind and hint that its cause
// deserves, whoever wrapped it before. Others, and nil, pass unchanged.
func diskError(err error, dir string) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return errs.E(errs.Capacity, "the disk of the data directory is full: %w", err).
			WithHint("free space below %s, or remove layers and run `harena layer gc`", dir)
	case errors.Is(err, syscall.EROFS):
		return errs.E(errs.Precondition, "the data directory is read-only: %w", err).
			WithHint("make %s writable (is its file system mounted read-only, or was it after an I/O error?)", dir)
	case errors.Is(err, syscall.EIO):
		return errs.E(errs.Internal, "the disk of the data directory fails: %w", err).
			WithHint("check the kernel log for errors of the disk under %s", dir)
	}
	return err
}

// syncDir makes renames into dir and removals from it durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

// makeDir makes dir and those of its parents that are missing, durably.
func makeDir(dir string) error {
	if _, err := os.Lstat(dir); err == nil {
		return nil
	}
	if err := makeDir(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil
		}
		return err
	}
	return syncDir(filepath.Dir(dir))
}

// publish moves a complete, synced file to its place, durably. Existing files are replaced.
func publish(from, to string) error {
	if err := makeDir(filepath.Dir(to)); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return syncDir(filepath.Dir(to))
}

// writeFile writes a small file so that it is either there whole or not at all.
func writeFile(tmpDir, to string, content []byte) error {
	f, err := os.CreateTemp(tmpDir, "file-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return publish(f.Name(), to)
}
