package files

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const (
	// tarLevels bounds how deeply directories are entered: each holds a descriptor.
	tarLevels = 512
	// tarLinks bounds how many files with several names are remembered; further
	// ones are stored whole, once for each name.
	tarLinks = 100_000
	// xattrPrefix is how extended attributes are named in PAX headers; see
	// star(1) and GNU tar's manual.
	xattrPrefix   = "SCHILY.xattr."
	capability    = "security.capability"
	userXattrs    = "user."
	maxXattrNames = 64 << 10 // XATTR_LIST_MAX
	maxXattrValue = 64 << 10 // XATTR_SIZE_MAX
)

// serveTarOut sends a file, or a directory with all below it, as an archive.
func (w *worker) serveTarOut(m *harenav1.StatRequest) error {
	path := string(m.GetPathBytes())
	fd, err := w.open(path, unix.O_PATH)
	if err != nil {
		return w.fail(err)
	}
	defer unix.Close(fd)
	if err := allowed(fd); err != nil {
		return w.fail(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return w.fail(err)
	}
	stream := &download{w: w}
	out := newTarOut(stream)
	out.alive = w.alive
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return w.sendTar(stream, func() error { return w.tarFile(out, path) })
	}
	dir, err := openIn(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return w.fail(err)
	}
	defer unix.Close(dir)
	return w.sendTar(stream, func() error {
		if err := out.dirHeader(dir, &st, "./"); err != nil {
			return err
		}
		return out.contents(dir, "", 0)
	})
}

// sendTar sends what write makes. An error of the pipe is returned, one of the
// operation is answered.
func (w *worker) sendTar(stream *download, write func() error) error {
	if err := w.send(frameReady, 0); err != nil {
		return err
	}
	err := write()
	switch {
	case stream.broken != nil:
		return stream.broken
	case err != nil:
		return w.fail(err)
	}
	if err := stream.flush(); err != nil {
		return err
	}
	return w.send(frameEnd, 0)
}

// tarFile archives one file under its own name.
func (w *worker) tarFile(out *tarOut, path string) error {
	dir, base, err := w.parent(path)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	out.strict = true
	if err := out.entry(dir, base, base, 0); err != nil {
		return err
	}
	return out.tw.Close()
}

// download collects what is sent to the service into full frames.
type download struct {
	w      *worker
	n      int
	broken error
}

// Write implements io.Writer.
func (d *download) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n := copy(d.w.body()[d.n:], p[done:])
		d.n += n
		done += n
		if d.n == maxPayload {
			if err := d.flush(); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

func (d *download) flush() error {
	if d.n == 0 {
		return nil
	}
	n := d.n
	d.n = 0
	d.broken = d.w.send(frameData, n)
	return d.broken
}

// tarOut writes an archive.
type tarOut struct {
	tw    *tar.Writer
	buf   []byte
	links map[inode]string
	alive func() error
	// strict makes an error of what is else left out: an entry that vanished, a
	// socket, a kernel file system.
	strict bool
}

type inode struct{ dev, ino uint64 }

func newTarOut(to io.Writer) *tarOut {
	return &tarOut{
		tw:    tar.NewWriter(to),
		buf:   make([]byte, maxPayload),
		links: make(map[inode]string),
		alive: func() error { return nil },
	}
}

// tree archives base in dir, with all below it, under name, and ends the archive.
func (t *tarOut) tree(dir int, base, name string) error {
	if err := t.entry(dir, base, name, 0); err != nil {
		return err
	}
	return t.tw.Close()
}

// contents archives what is in a directory. The outermost call ends the archive.
func (t *tarOut) contents(dir int, prefix string, depth int) error {
	if depth > tarLevels {
		return &failure{code: failDeep, text: prefix}
	}
	var failed error
	err := readNames(dir, func(name string) bool {
		failed = t.entry(dir, name, prefix+name, depth)
		return failed == nil
	})
	switch {
	case failed != nil:
		return failed
	case err != nil:
		return fail(err, prefix)
	case depth == 0:
		return t.tw.Close()
	}
	return nil
}

// entry archives one name in a directory.
func (t *tarOut) entry(dir int, base, name string, depth int) error {
	if err := t.alive(); err != nil {
		return err
	}
	var st unix.Stat_t
	err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			err = t.regular(dir, base, name, &st)
		case unix.S_IFDIR:
			err = t.directory(dir, base, name, depth)
		case unix.S_IFLNK:
			err = t.symlink(dir, base, name, &st)
		case unix.S_IFSOCK:
			err = t.leaveOut(&failure{code: failNotRegular})
		default:
			err = t.tw.WriteHeader(header(&st, name))
		}
	}
	if isMissing(err) {
		err = t.leaveOut(err)
	}
	if err != nil {
		return fail(err, name)
	}
	return nil
}

// leaveOut is where an entry is not archived, because of err.
func (t *tarOut) leaveOut(err error) error {
	if t.strict {
		return err
	}
	return nil
}

func (t *tarOut) symlink(dir int, base, name string, st *unix.Stat_t) error {
	link, err := readLink(dir, base)
	if is(err, unix.EINVAL) {
		return t.leaveOut(&failure{code: failChanged})
	}
	if err != nil {
		return err
	}
	h := header(st, name)
	h.Linkname = link
	return t.tw.WriteHeader(h)
}

func (t *tarOut) directory(dir int, base, name string, depth int) error {
	fd, err := openIn(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0, 0)
	if is(err, unix.ENOTDIR, unix.ELOOP) {
		return t.leaveOut(&failure{code: failChanged})
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if err := allowed(fd); err != nil {
		if t.strict {
			return err
		}
		// What is mounted here is not archived, the place for it is.
		return t.tw.WriteHeader(header(&st, name+"/"))
	}
	if err := t.dirHeader(fd, &st, name+"/"); err != nil {
		return err
	}
	return t.contents(fd, name+"/", depth+1)
}

func (t *tarOut) dirHeader(fd int, st *unix.Stat_t, name string) error {
	h := header(st, name)
	var err error
	if h.PAXRecords, err = xattrs(fd); err != nil {
		return err
	}
	return t.tw.WriteHeader(h)
}

// regular archives a file as it is when it is read: one that grows is cut at the
// size it had, a small one that shrinks is stored as it is now, a large one that
// shrinks fails, since its size has been said already.
func (t *tarOut) regular(dir int, base, name string, seen *unix.Stat_t) error {
	fd, err := openIn(dir, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0, 0)
	if is(err, unix.ELOOP, unix.ENXIO) {
		return t.leaveOut(&failure{code: failChanged})
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return t.leaveOut(&failure{code: failChanged})
	}
	if err := allowed(fd); err != nil {
		return t.leaveOut(err)
	}
	h := header(&st, name)
	key := inode{st.Dev, st.Ino}
	if first, ok := t.links[key]; ok && st.Nlink > 1 && seen.Ino == st.Ino {
		h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		return t.tw.WriteHeader(h)
	}
	if h.PAXRecords, err = xattrs(fd); err != nil {
		return err
	}
	if err := t.content(fd, h); err != nil {
		return err
	}
	if st.Nlink > 1 && len(t.links) < tarLinks {
		t.links[key] = name
	}
	return nil
}

func (t *tarOut) content(fd int, h *tar.Header) error {
	n, err := pread(fd, t.buf[:min(h.Size, int64(len(t.buf)))], 0)
	if err != nil {
		return err
	}
	if n < len(t.buf) {
		h.Size = int64(n)
	}
	if err := t.tw.WriteHeader(h); err != nil {
		return err
	}
	for offset := int64(0); offset < h.Size; {
		if _, err := t.tw.Write(t.buf[:n]); err != nil {
			return err
		}
		offset += int64(n)
		if offset == h.Size {
			break
		}
		n, err = pread(fd, t.buf[:min(h.Size-offset, int64(len(t.buf)))], offset)
		if err != nil {
			return err
		}
		if n == 0 {
			return &failure{code: failShrunk}
		}
	}
	return nil
}

func header(st *unix.Stat_t, name string) *tar.Header {
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & permissions), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Format: tar.FormatPAX,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
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

// kept reports whether an extended attribute belongs into an archive. Others are
// the kernel's or the node's.
func kept(name string) bool {
	return name == capability || strings.HasPrefix(name, userXattrs)
}

// xattrs reads the extended attributes of an open file as PAX records; nil for none.
func xattrs(fd int) (map[string]string, error) {
	n, err := unix.Flistxattr(fd, nil)
	if is(err, unix.EOPNOTSUPP, unix.ENOSYS) || err == nil && n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list extended attributes: %w", err)
	}
	names := make([]byte, maxXattrNames)
	if n, err = unix.Flistxattr(fd, names); err != nil {
		return nil, fmt.Errorf("list extended attributes: %w", err)
	}
	var records map[string]string
	var value []byte
	for raw := range bytes.SplitSeq(names[:n], []byte{0}) {
		name := string(raw)
		// A PAX key ends at the first =.
		if !kept(name) || strings.ContainsRune(name, '=') {
			continue
		}
		if value == nil {
			value = make([]byte, maxXattrValue)
		}
		n, err := unix.Fgetxattr(fd, name, value)
		if is(err, unix.ENODATA, unix.EACCES, unix.EPERM) {
			continue // gone, or not this user's to read
		}
		if err != nil {
			return nil, fmt.Errorf("read extended attribute: %w", err)
		}
		if records == nil {
			records = make(map[string]string)
		}
		records[xattrPrefix+name] = string(value[:n])
	}
	return records, nil
}
