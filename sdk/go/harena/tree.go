package harena

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// TreeOptions says how WriteTree describes a directory.
type TreeOptions struct {
	// Name of the root in the archive; empty: ".".
	Name string
	// NoRoot leaves the entry of the root itself out.
	NoRoot bool
	// Anonymous leaves owners (they become 0:0) and extended attributes out.
	Anonymous bool
	// Warn is told what is left out; may be nil.
	Warn func(message string)
	// Progress is told the bytes of content written so far; may be nil.
	Progress func(bytes int64)
}

// WriteTree writes a directory as a PAX tar: all types of files but sockets,
// hard links, extended attributes, owners by number, times to the nanosecond. Symlinks are never
// followed, not even when one is put in the place of a file meanwhile.
func WriteTree(ctx context.Context, w io.Writer, dir string, o TreeOptions) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	if o.Name == "" {
		o.Name = "."
	}
	t := &treeWriter{ctx: ctx, o: o, tar: tar.NewWriter(w), seen: map[inode]string{}, buf: make([]byte, 256<<10)}
	if err := t.root(fd, dir); err != nil {
		return err
	}
	return t.tar.Close()
}

type inode struct{ dev, ino uint64 }

type treeWriter struct {
	ctx   context.Context //nolint:containedctx // lives as long as one call
	o     TreeOptions
	tar   *tar.Writer
	seen  map[inode]string // first name of files with several links
	buf   []byte
	bytes int64
}

// root takes over fd.
func (t *treeWriter) root(fd int, local string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return &os.PathError{Op: "stat", Path: local, Err: err}
	}
	if !t.o.NoRoot {
		if err := t.header(&st, t.o.Name, "", ofFile(fd)); err != nil {
			_ = unix.Close(fd)
			return err
		}
	}
	return t.directory(fd, local, t.o.Name)
}

// directory writes the entries of the directory fd, which it takes over.
func (t *treeWriter) directory(fd int, local, name string) error {
	d := os.NewFile(uintptr(fd), local)
	defer func() { _ = d.Close() }()
	entries, err := d.Readdirnames(-1)
	if err != nil {
		return err
	}
	sort.Strings(entries)
	for _, e := range entries {
		if err := t.ctx.Err(); err != nil {
			return err
		}
		if err := t.entry(fd, e, local+"/"+e, path.Join(name, e)); err != nil {
			return err
		}
	}
	return nil
}

func (t *treeWriter) entry(dirfd int, base, local, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dirfd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "stat", Path: local, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		t.warn("%s is a socket and was left out", local)
		return nil
	case unix.S_IFDIR:
		fd, err := unix.Openat(dirfd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: local, Err: err}
		}
		if err := t.header(&st, name, "", ofFile(fd)); err != nil {
			_ = unix.Close(fd)
			return err
		}
		return t.directory(fd, local, name)
	case unix.S_IFREG:
		return t.regular(dirfd, base, local, name)
	case unix.S_IFLNK:
		target, err := readlinkat(dirfd, base, int(st.Size))
		if err != nil {
			return &os.PathError{Op: "readlink", Path: local, Err: err}
		}
		if t.linked(&st, name) {
			return t.hardLink(&st, name)
		}
		return t.header(&st, name, target, ofEntry(dirfd, base))
	default:
		if t.linked(&st, name) {
			return t.hardLink(&st, name)
		}
		return t.header(&st, name, "", ofEntry(dirfd, base))
	}
}

func (t *treeWriter) regular(dirfd int, base, local, name string) error {
	// O_NONBLOCK: if a FIFO was put in its place, opening it must not hang.
	fd, err := unix.Openat(dirfd, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: local, Err: err}
	}
	f := os.NewFile(uintptr(fd), local)
	defer func() { _ = f.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: local, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%s changed its type while it was read", local)
	}
	if t.linked(&st, name) {
		return t.hardLink(&st, name)
	}
	if err := t.header(&st, name, "", ofFile(fd)); err != nil {
		return err
	}
	n, err := io.CopyBuffer(onlyWriter{t}, onlyReader{io.LimitReader(f, st.Size)}, t.buf)
	if err != nil {
		return fmt.Errorf("copy %s: %w", local, err)
	}
	if n != st.Size {
		return fmt.Errorf("%s shrank while it was read", local)
	}
	return nil
}

// Write counts content; CopyBuffer uses its buffer only when neither side has a way of its own.
func (t *treeWriter) Write(b []byte) (int, error) {
	if err := t.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := t.tar.Write(b)
	t.bytes += int64(n)
	if t.o.Progress != nil {
		t.o.Progress(t.bytes)
	}
	return n, err
}

type onlyWriter struct{ io.Writer }
type onlyReader struct{ io.Reader }

// linked reports whether the inode was written before under another name.
func (t *treeWriter) linked(st *unix.Stat_t, name string) bool {
	if st.Nlink < 2 {
		return false
	}
	key := inode{st.Dev, st.Ino}
	if _, ok := t.seen[key]; ok {
		return true
	}
	t.seen[key] = name
	return false
}

func (t *treeWriter) hardLink(st *unix.Stat_t, name string) error {
	h := t.describe(st, name)
	h.Typeflag, h.Size, h.Linkname = tar.TypeLink, 0, t.seen[inode{st.Dev, st.Ino}]
	return t.tar.WriteHeader(h)
}

func (t *treeWriter) header(st *unix.Stat_t, name, target string, a attributes) error {
	h := t.describe(st, name)
	h.Linkname = target
	if !t.o.Anonymous {
		if err := t.xattrs(h, a); err != nil {
			return fmt.Errorf("extended attributes of %s: %w", name, err)
		}
	}
	if err := t.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("describe %s: %w", name, err)
	}
	return nil
}

func (t *treeWriter) describe(st *unix.Stat_t, name string) *tar.Header {
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	if t.o.Anonymous {
		h.Uid, h.Gid = 0, 0
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR:
		h.Typeflag = tar.TypeChar
	case unix.S_IFBLK:
		h.Typeflag = tar.TypeBlock
	}
	if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	return h
}

// xattrPrefix is how PAX tars of star, GNU tar and Go carry extended attributes.
const xattrPrefix = "SCHILY.xattr."

func (t *treeWriter) xattrs(h *tar.Header, a attributes) error {
	list, err := readAll(a.list)
	if errors.Is(err, unix.ENOTSUP) || len(list) == 0 && err == nil {
		return nil
	}
	if err != nil {
		return err
	}
	for _, name := range strings.Split(strings.TrimSuffix(string(list), "\x00"), "\x00") {
		if strings.Contains(name, "=") {
			t.warn("attribute %q of %s has a name that a tar cannot hold and was left out", name, h.Name)
			continue
		}
		value, err := readAll(func(b []byte) (int, error) { return a.get(name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[xattrPrefix+name] = string(value)
	}
	return nil
}

// readAll calls a system call that reports the size it needs for an empty buffer.
func readAll(call func([]byte) (int, error)) ([]byte, error) {
	for {
		n, err := call(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		b := make([]byte, n)
		n, err = call(b)
		if errors.Is(err, unix.ERANGE) {
			continue // it grew
		}
		if err != nil {
			return nil, err
		}
		return b[:n], nil
	}
}

// attributes reads the extended attributes of one file.
type attributes struct {
	list func([]byte) (int, error)
	get  func(string, []byte) (int, error)
}

func ofFile(fd int) attributes {
	return attributes{
		func(b []byte) (int, error) { return unix.Flistxattr(fd, b) },
		func(name string, b []byte) (int, error) { return unix.Fgetxattr(fd, name, b) },
	}
}

// ofEntry names an entry through its directory's descriptor, which does not
// depend on what happens to the directory's path, and does not follow it.
func ofEntry(dirfd int, base string) attributes {
	p := fmt.Sprintf("/proc/self/fd/%d/%s", dirfd, base)
	return attributes{
		func(b []byte) (int, error) { return unix.Llistxattr(p, b) },
		func(name string, b []byte) (int, error) { return unix.Lgetxattr(p, name, b) },
	}
}

func readlinkat(dirfd int, base string, size int) (string, error) {
	for n := max(size, 64) + 1; ; n *= 2 {
		b := make([]byte, n)
		got, err := unix.Readlinkat(dirfd, base, b)
		if err != nil {
			return "", err
		}
		if got < n {
			return string(b[:got]), nil
		}
	}
}

func (t *treeWriter) warn(format string, args ...any) {
	if t.o.Warn != nil {
		t.o.Warn(fmt.Sprintf(format, args...))
	}
}
