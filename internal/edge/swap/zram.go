package swap

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// See Documentation/admin-guide/blockdev/zram.rst for the attributes.

// ensureZram makes the node's zram swap have a size; 0 removes it.
func (s *Swap) ensureZram(size int64) error {
	page := int64(os.Getpagesize())
	size = size / page * page
	active, err := s.sys.list()
	if err != nil {
		return err
	}
	for _, name := range s.zrams() {
		path := s.sys.device(name)
		if labelOf(path) != s.label("z") {
			continue
		}
		have, err := readNumber(s.sys.attribute(name, "disksize"))
		if err != nil {
			return err
		}
		if size > 0 && have == size {
			if slices.ContainsFunc(active, func(a area) bool { return filepath.Base(a.path) == name }) {
				return nil
			}
			return swapOn(path, zramPriority) // a server was killed just before
		}
		if err := s.removeZram(name); err != nil {
			return err
		}
	}
	if size == 0 {
		return s.removeAdded()
	}
	name, err := s.claimZram(size)
	if err != nil {
		return err
	}
	path := s.sys.device(name)
	if err = label(path, size, s.label("z")); err == nil {
		err = swapOn(path, zramPriority)
	}
	if err != nil {
		return errors.Join(err, s.removeZram(name))
	}
	return nil
}

func (s *Swap) zrams() []string {
	names, _ := filepath.Glob(filepath.Join(s.sys.sys, "block", "zram*"))
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	return names
}

// claimZram takes a device that nobody uses, or adds one, and gives it its size: only one can do that.
func (s *Swap) claimZram(size int64) (string, error) {
	for _, name := range s.zrams() {
		if n, err := readNumber(s.sys.attribute(name, "disksize")); err != nil || n != 0 {
			continue
		}
		err := s.initialise(name, size)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return name, err
		}
	}
	b, err := os.ReadFile(filepath.Join(s.sys.sys, "class/zram-control/hot_add"))
	if err != nil {
		return "", errs.E(errs.Unsupported, "this kernel has no zram: %w", err).WithHint("load the module (modprobe zram), or use --swap")
	}
	name := "zram" + strings.TrimSpace(string(b))
	s.file.Added = name
	if err := s.save(); err != nil {
		return "", err
	}
	return name, s.initialise(name, size)
}

func (s *Swap) initialise(name string, size int64) error {
	// The fastest to read back; kernels without it have a default.
	if b, err := os.ReadFile(s.sys.attribute(name, "comp_algorithm")); err == nil && slices.Contains(strings.Fields(string(b)), "lz4") {
		if err := write(s.sys.attribute(name, "comp_algorithm"), "lz4"); err != nil {
			return err
		}
	}
	if err := write(s.sys.attribute(name, "disksize"), strconv.FormatInt(size, 10)); err != nil {
		return fmt.Errorf("give %s its size: %w", name, err)
	}
	return s.node(name)
}

// node makes the device's node where no devtmpfs does.
func (s *Swap) node(name string) error {
	path := s.sys.device(name)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	b, err := os.ReadFile(s.sys.attribute(name, "dev"))
	if err != nil {
		return err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err != nil {
		return fmt.Errorf("device number of %s: %w", name, err)
	}
	return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor))) //nolint:gosec // device numbers are small
}

// removeZram empties a device of ours; one that we added goes.
func (s *Swap) removeZram(name string) error {
	if err := swapOff(s.sys.device(name)); err != nil {
		return err
	}
	if err := write(s.sys.attribute(name, "reset"), "1"); err != nil {
		return fmt.Errorf("reset %s: %w", name, err)
	}
	return s.removeAdded()
}

// removeAdded removes the device that we added, once nothing is in it.
func (s *Swap) removeAdded() error {
	name := s.file.Added
	if name == "" {
		return nil
	}
	if n, err := readNumber(s.sys.attribute(name, "disksize")); err == nil && n == 0 {
		if err := write(filepath.Join(s.sys.sys, "class/zram-control/hot_remove"), strings.TrimPrefix(name, "zram")); err != nil {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	s.file.Added = ""
	return s.save()
}

// label writes the swap header.
func label(path string, size int64, name string) error {
	var uuid [16]byte
	if _, err := rand.Read(uuid[:]); err != nil {
		return err
	}
	header, err := makeHeader(size, uuid, name)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(header, 0)
	return errors.Join(err, f.Sync(), f.Close())
}
