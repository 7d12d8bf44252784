package swap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// system is where the kernel shows swap.
type system struct{ sys, dev, swaps string }

// area is one active swap area.
type area struct {
	path       string
	size, used int64
}

// list reads /proc/swaps (proc_swaps(5)); sizes are in KiB.
func (s system) list() ([]area, error) {
	b, err := os.ReadFile(s.swaps)
	if err != nil {
		return nil, err
	}
	return parseSwaps(string(b)), nil
}

func parseSwaps(text string) []area {
	var all []area
	for i, line := range strings.Split(text, "\n") {
		f := strings.Fields(line)
		if i == 0 || len(f) < 4 {
			continue
		}
		size, serr := strconv.ParseInt(f[len(f)-3], 10, 64)
		used, uerr := strconv.ParseInt(f[len(f)-2], 10, 64)
		if serr != nil || uerr != nil {
			continue
		}
		path := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(f[0])
		all = append(all, area{path, size << 10, used << 10})
	}
	return all
}

// The swap header, version 1 (include/linux/swap.h, union swap_header): it fills the first page.
const (
	headerVersion  = 1024
	headerLastPage = 1028
	headerUUID     = 1036
	headerLabel    = 1052
	labelSize      = 16
	magic          = "SWAPSPACE2"
)

// makeHeader is the first page of a swap area of so many bytes.
func makeHeader(size int64, uuid [16]byte, label string) ([]byte, error) {
	page := os.Getpagesize()
	pages := size / int64(page)
	if pages < 10 || pages > 1<<32-1 || len(label) > labelSize {
		return nil, errs.E(errs.Invalid, "swap of %d bytes cannot be made", size).WithHint("use at least 1m and less than 16t")
	}
	b := make([]byte, page)
	binary.NativeEndian.PutUint32(b[headerVersion:], 1)
	binary.NativeEndian.PutUint32(b[headerLastPage:], uint32(pages-1)) //nolint:gosec // checked
	copy(b[headerUUID:], uuid[:])
	copy(b[headerLabel:headerLabel+labelSize], label)
	copy(b[page-len(magic):], magic)
	return b, nil
}

// labelOf returns the label of a swap area, "" for what is none.
func labelOf(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return ""
	}
	defer f.Close() //nolint:errcheck // read only
	b := make([]byte, os.Getpagesize())
	if _, err := io.ReadFull(f, b); err != nil || !bytes.HasSuffix(b, []byte(magic)) {
		return ""
	}
	label, _, _ := bytes.Cut(b[headerLabel:headerLabel+labelSize], []byte{0})
	return string(label)
}

// preferred is SWAP_FLAG_PREFER (include/linux/swap.h); the priority is in the low 15 bits.
const preferred = 0x8000

func swapOn(path string, priority int) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(p)), uintptr(preferred|priority), 0); errno != 0 { //nolint:gosec // a system call
		e := fmt.Errorf("swapon %s: %w", path, errno)
		switch errno {
		case unix.EPERM:
			return errs.E(errs.Unsupported, "this machine does not let swap be added: %w", e).WithHint("give it swap from outside the container")
		case unix.EINVAL:
			return errs.E(errs.Unsupported, "the file system cannot hold a swap file: %w", e).WithHint("use --zram, or another data directory")
		}
		return e
	}
	return nil
}

func swapOff(path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	for {
		_, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0) //nolint:gosec // a system call
		switch errno {
		case unix.EINTR:
			continue
		case 0, unix.EINVAL, unix.ENOENT: // it is not swap
			return nil
		case unix.ENOMEM:
			return errs.E(errs.Capacity, "the node has too little memory to take back what is in swap %s", path).WithHint("stop sandboxes or other programs, then try again")
		}
		return fmt.Errorf("swapoff %s: %w", path, errno)
	}
}

func (s system) device(name string) string { return filepath.Join(s.dev, name) }

func (s system) attribute(name, file string) string { return filepath.Join(s.sys, "block", name, file) }

// write writes an attribute with one write, without creating it.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func readNumber(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}
