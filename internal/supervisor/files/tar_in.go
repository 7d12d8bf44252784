package files

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// replaceTries bounds how often a name is freed that somebody else takes again.
const replaceTries = 4

// serveTarIn unpacks an archive below a directory, which is made when missing.
func (w *worker) serveTarIn(m *harenav1.StatRequest) error {
	p := string(m.GetPathBytes())
	u := &upload{w: w}
	info, err := w.unpack(p, u)
	return u.finish(info, err)
}

func (w *worker) unpack(p string, content *upload) (*harenav1.FileInfo, error) {
	root, err := w.ensureDir(p)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	if err := w.send(frameReady, 0); err != nil {
		content.broken = err
		return nil, err
	}
	in := &tarIn{w: w, root: root, keepOwners: w.uid == 0}
	if err := in.unpack(content); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return nil, err
	}
	return fileInfo(p, &st, ""), nil
}

// tarIn unpacks an archive below root. Names are resolved with RESOLVE_BENEATH:
// links inside may be followed as long as they stay below root.
type tarIn struct {
	w    *worker
	root int
	// keepOwners is for root: owners, set-ID bits and capabilities of the archive.
	keepOwners bool
	// dirs get their attributes last: a mode without write permission would keep
	// their contents out, and those change the time.
	dirs []dirAttrs
	// parent is the directory used last, since the next entry is often there too.
	parent     int
	parentName string
	buf        []byte
}

type dirAttrs struct {
	name string
	h    *tar.Header
}

// unpack reads r to its end. What was unpacked before an error stays.
func (t *tarIn) unpack(r io.Reader) error {
	t.parent = -1
	t.buf = make([]byte, maxPayload)
	defer t.forget()
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return tarError(err, "")
		}
		if err := t.w.alive(); err != nil {
			return err
		}
		if err := t.entry(h, tr); err != nil {
			return tarError(err, h.Name)
		}
	}
	for i := len(t.dirs) - 1; i >= 0; i-- {
		if err := t.finishDir(t.dirs[i]); err != nil {
			return fail(err, t.dirs[i].name)
		}
	}
	// Padding after the end of the archive.
	_, err := io.CopyBuffer(io.Discard, r, t.buf)
	return err
}

// tarError gives an error of reading the archive or of an entry its form.
func tarError(err error, name string) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{code: failBadTar, text: "it ends in the middle of an entry"}
	case errors.Is(err, tar.ErrHeader), errors.Is(err, tar.ErrFieldTooLong), errors.Is(err, tar.ErrWriteTooLong):
		return &failure{code: failBadTar, text: "it has a header that is not one of a tar archive"}
	}
	return fail(err, name)
}

// forget closes the directory used last.
func (t *tarIn) forget() {
	if t.parent >= 0 {
		unix.Close(t.parent)
	}
	t.parent = -1
}

// entry unpacks one entry.
func (t *tarIn) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, bad := tarName(h.Name)
	if bad != nil {
		return bad
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return &failure{code: failBadTar, text: "the directory itself is not an entry of type directory"}
		}
		t.dirs = append(t.dirs, dirAttrs{name, h})
		return nil
	}
	text, base := path.Split(name)
	dir, err := t.dirOf(text)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return t.regular(dir, base, h, content)
	case tar.TypeDir:
		return t.directory(dir, base, name, h)
	case tar.TypeSymlink:
		if h.Linkname == "" || strings.IndexByte(h.Linkname, 0) >= 0 {
			return &failure{code: failBadTar, text: "a symbolic link has no valid target"}
		}
		return t.special(dir, base, h, func() error { return unix.Symlinkat(h.Linkname, dir, base) })
	case tar.TypeLink:
		return t.hardLink(dir, base, name, h)
	case tar.TypeFifo:
		return t.special(dir, base, h, func() error { return unix.Mknodat(dir, base, unix.S_IFIFO|t.mode(h), 0) })
	case tar.TypeChar, tar.TypeBlock:
		kind := uint32(unix.S_IFCHR)
		if h.Typeflag == tar.TypeBlock {
			kind = unix.S_IFBLK
		}
		dev := unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))
		return t.special(dir, base, h, func() error { return unix.Mknodat(dir, base, kind|t.mode(h), int(dev)) })
	}
	return &failure{code: failBadTar, text: "entry " + show(name) + " is of an unknown type"}
}

// dirOf opens a directory below root, as O_PATH, and makes it when missing. It
// stays open until the next call or forget.
func (t *tarIn) dirOf(name string) (int, error) {
	name = path.Clean(name)
	if t.parent >= 0 && t.parentName == name {
		return t.parent, nil
	}
	t.forget()
	dir, err := t.ensure(name)
	if err != nil {
		return -1, err
	}
	t.parent, t.parentName = dir, name
	return dir, nil
}

func (t *tarIn) ensure(name string) (int, error) {
	dir, err := t.below(name, unix.O_PATH)
	if !isMissing(err) || name == "." {
		return dir, err
	}
	up, err := t.ensure(path.Dir(name))
	if err != nil {
		return -1, err
	}
	defer unix.Close(up)
	if err := unix.Mkdirat(up, path.Base(name), defaultDirMode); err != nil && !is(err, unix.EEXIST) {
		return -1, err
	}
	return t.below(name, unix.O_PATH)
}

// below opens an existing directory below root.
func (t *tarIn) below(name string, flags int) (int, error) {
	dir, err := openIn(t.root, name, flags|unix.O_DIRECTORY, 0, unix.RESOLVE_BENEATH)
	if is(err, unix.EXDEV) {
		err = &failure{code: failOutside, text: name}
	}
	if err != nil {
		return -1, err
	}
	if err := allowed(dir); err != nil {
		unix.Close(dir)
		return -1, err
	}
	return dir, nil
}

// making runs create, which makes base in dir, and frees the name first where
// something else than a directory has it.
func (t *tarIn) making(dir int, base string, create func() error) error {
	err := create()
	for range replaceTries {
		if !is(err, unix.EEXIST) {
			break
		}
		if err := unix.Unlinkat(dir, base, 0); err != nil && !is(err, unix.ENOENT) {
			return err
		}
		err = create()
	}
	return err
}

func (t *tarIn) regular(dir int, base string, h *tar.Header, content io.Reader) error {
	out := -1
	err := t.making(dir, base, func() (err error) {
		out, err = unix.Openat(dir, base, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(out)
	if err := t.copy(out, content); err != nil {
		return err
	}
	if err := t.attributes(out, h); err != nil {
		return err
	}
	return setTime(dir, base, h.ModTime)
}

// copy says that it lives as it goes: a sparse entry writes more than it reads.
func (t *tarIn) copy(out int, content io.Reader) error {
	for {
		n, err := content.Read(t.buf)
		if _, werr := fd(out).Write(t.buf[:n]); werr != nil {
			return werr
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := t.w.alive(); err != nil {
			return err
		}
	}
}

func (t *tarIn) directory(dir int, base, name string, h *tar.Header) error {
	err := unix.Mkdirat(dir, base, 0o700)
	if is(err, unix.EEXIST) {
		existing, openErr := t.below(name, unix.O_PATH)
		if openErr == nil {
			// A directory, or a link to one below: what tar calls keeping directory links.
			unix.Close(existing)
			err = nil
		} else {
			err = t.making(dir, base, func() error { return unix.Mkdirat(dir, base, 0o700) })
		}
	}
	if err != nil {
		return err
	}
	t.dirs = append(t.dirs, dirAttrs{name, h})
	return nil
}

func (t *tarIn) hardLink(dir int, base, name string, h *tar.Header) error {
	old, bad := tarName(h.Linkname)
	if bad != nil {
		return bad
	}
	if old == name {
		return nil
	}
	text, oldBase := path.Split(old)
	from, err := t.below(path.Clean(text), unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	return t.making(dir, base, func() error { return unix.Linkat(from, oldBase, dir, base, 0) })
}

// special makes a file without content.
func (t *tarIn) special(dir int, base string, h *tar.Header, create func() error) error {
	if err := t.making(dir, base, create); err != nil {
		return err
	}
	if t.keepOwners {
		if err := unix.Fchownat(dir, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return ownerError(err, h)
		}
	}
	return setTime(dir, base, h.ModTime)
}

// finishDir gives a directory its attributes.
func (t *tarIn) finishDir(d dirAttrs) error {
	dir, err := t.below(d.name, unix.O_RDONLY)
	if isMissing(err) || is(err, unix.ENOTDIR) {
		return nil // a later entry has replaced it
	}
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	// Before the mode, which may take away the right to look up the dot.
	if err := setTime(dir, ".", d.h.ModTime); err != nil {
		return err
	}
	return t.attributes(dir, d.h)
}

// attributes sets owner, extended attributes and mode, in this order, because a
// change of the owner takes capabilities and set-ID bits away.
func (t *tarIn) attributes(fd int, h *tar.Header) error {
	if t.keepOwners {
		if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
			return ownerError(err, h)
		}
	}
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok || !kept(name) || name == capability && !t.keepOwners {
			continue
		}
		if err := unix.Fsetxattr(fd, name, []byte(value), 0); err != nil && !is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return unix.Fchmod(fd, t.mode(h))
}

// ownerError explains why an owner could not be set: a sandbox has 65,536 IDs.
func ownerError(err error, h *tar.Header) error {
	if !is(err, unix.EINVAL) {
		return err
	}
	return &failure{code: failBadTar, text: fmt.Sprintf("the owner %d:%d of %s is not in the sandbox's range of IDs", h.Uid, h.Gid, show(h.Name))}
}

func (t *tarIn) mode(h *tar.Header) uint32 {
	mode := uint32(h.Mode) & permissions
	if !t.keepOwners {
		mode &^= setIDs
	}
	return mode
}

func setTime(dir int, base string, at time.Time) error {
	ts := unix.Timespec{Sec: at.Unix(), Nsec: int64(at.Nanosecond())}
	return unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}
