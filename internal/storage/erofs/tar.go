package erofs

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// FromTar writes the tree of a tar archive (ustar, PAX, GNU, with their sparse
// files) to meta and blob, which are truncated first; neither is synced.
//
// An archive is hostile input. Names are taken below the root ("/a" and "./a"
// are "a"; ".." is refused); parents that are missing become directories 0755 of
// root with time 0; a parent that is not a directory is refused and links are
// never followed. The last entry of a name wins: a directory after a directory
// changes its attributes, anything else replaces what was there, with all below
// it. A hard link needs its target earlier in the archive. An archive without
// end marker is taken as cut off.
//
// Errors of the archive are Invalid and name the entry; errors of r are returned
// wrapped.
func FromTar(ctx context.Context, r io.Reader, meta, blob *os.File, o Options) (*Result, error) {
	b, err := newBuilder(ctx, meta, blob, o)
	if err != nil {
		return nil, err
	}
	src := &tarSource{ctx: ctx, r: bufio.NewReaderSize(r, 1<<16)}
	a := &tarBuilder{builder: b, src: src, r: tar.NewReader(src)}
	if err := a.run(); err != nil {
		return nil, err
	}
	return b.finish()
}

// tarSource remembers what an error of the archive cannot tell: whether reading
// itself failed, and how many zeros were read last.
type tarSource struct {
	ctx   context.Context
	r     io.Reader
	err   error
	zeros int // at the end of what was read since it was last reset
}

func (s *tarSource) Read(p []byte) (int, error) {
	if s.err = s.ctx.Err(); s.err != nil {
		return 0, s.err
	}
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		s.err = err
	}
	end := n
	for end > 0 && n-end < tarBlock && p[end-1] == 0 {
		end--
	}
	if end > 0 {
		s.zeros = 0
	}
	s.zeros += n - end
	return n, err
}

const (
	tarBlock    = 512
	maxTrailing = 64 << 20 // padding that is read behind the end marker
)

type tarBuilder struct {
	*builder
	src *tarSource
	r   *tar.Reader
	buf []byte
}

func (a *tarBuilder) run() error {
	where := "at its start"
	for {
		a.src.zeros = 0
		h, err := a.r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return a.readError(err, where)
		}
		where = "in or after entry " + quote(h.Name)
		if err := a.add(h); err != nil {
			return a.entryError(err, h.Name)
		}
		// So that the zeros counted above are those of the end marker.
		if _, err := io.Copy(io.Discard, a.r); err != nil {
			return a.readError(err, where)
		}
	}
	if a.src.zeros < tarBlock {
		return a.readError(io.ErrUnexpectedEOF, where)
	}
	// Decompressors check their sums at the end of their input only.
	if _, err := io.Copy(io.Discard, io.LimitReader(a.src, maxTrailing)); err != nil {
		return a.readError(err, "behind its end marker")
	}
	return nil
}

// readError makes an error of reading the archive.
func (a *tarBuilder) readError(err error, where string) error {
	switch {
	case a.src.err != nil:
		return fmt.Errorf("read archive: %w", a.src.err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errs.E(errs.Invalid, "the archive is cut off %s", where).WithHint("transfer it again")
	}
	return errs.E(errs.Invalid, "the archive is damaged %s: %w", where, err).
		WithHint("check that it is a tar archive, and transfer it again")
}

// entryError names the entry in an error of adding it.
func (a *tarBuilder) entryError(err error, name string) error {
	switch {
	case a.ctx.Err() != nil:
		return a.ctx.Err()
	case errors.Is(err, errContent):
		return a.readError(err, "in entry "+quote(name))
	}
	return fmt.Errorf("archive entry %s: %w", quote(name), err)
}

// quote makes a hostile name fit for a message.
func quote(name string) string {
	const longest = 256
	if len(name) > longest {
		return strconv.Quote(name[:longest]) + "…"
	}
	return strconv.Quote(name)
}

const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	whiteoutMeta   = ".wh..wh." // what aufs kept for itself
)

func (a *tarBuilder) add(h *tar.Header) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // comments, as of git archive; nothing that a tree holds
	}
	parts, err := cleanPath(h.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return a.addRoot(h)
	}
	parent, err := a.makeParents(parts[:len(parts)-1])
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	if a.o.OCIWhiteouts && strings.HasPrefix(name, whiteoutPrefix) {
		return a.addWhiteout(parent.dir, h.Name, name)
	}
	if h.Typeflag == tar.TypeLink {
		return a.addLink(h, parent, name, parts)
	}
	ino, err := a.newInode(h)
	if err != nil {
		return err
	}
	if old := parent.dir.names[name]; old != nil && old.dir != nil && ino.dir != nil {
		return update(old, ino)
	}
	if ino.is(modeReg) {
		if err := a.fromStream(ino, a.r, h.Size, &a.buf); err != nil {
			return err
		}
	}
	return a.put(parent, name, ino)
}

func (a *tarBuilder) addRoot(h *tar.Header) error {
	if h.Typeflag != tar.TypeDir {
		return errs.E(errs.Invalid, "only a directory can be the root of the archive")
	}
	ino, err := a.newInode(h)
	if err != nil {
		return err
	}
	return update(a.root, ino)
}

// update gives a directory that exists the attributes of a later entry.
func update(dir, from *inode) error {
	from.dir = dir.dir
	*dir = *from
	return nil
}

// addWhiteout handles .wh.NAME (AUFS whiteouts, OCI image-spec, layer.md).
func (a *tarBuilder) addWhiteout(d *directory, path, name string) error {
	hidden := name[len(whiteoutPrefix):]
	switch {
	case name == opaqueName:
		d.opaque = true
		return nil
	case strings.HasPrefix(name, whiteoutMeta):
		a.warn("%s: left out, it belongs to aufs", quote(path))
		return nil
	case hidden == "" || hidden == "." || hidden == "..":
		return errs.E(errs.Invalid, "a whiteout without a name")
	}
	if d.hides == nil {
		d.hides = make(map[string]struct{})
	}
	if _, ok := d.hides[hidden]; ok {
		return nil
	}
	d.hides[strings.Clone(hidden)] = struct{}{}
	return a.count(hidden)
}

func (a *tarBuilder) addLink(h *tar.Header, parent *inode, name string, parts []string) error {
	target, err := cleanPath(h.Linkname)
	if err != nil {
		return err
	}
	ino, err := a.lookup(target)
	switch {
	case err != nil:
		return err
	case ino == nil:
		return errs.E(errs.Invalid, "the target %s of the hard link is not earlier in the archive", quote(h.Linkname)).
			WithHint("archive the target before its links")
	case ino.dir != nil:
		return errs.E(errs.Invalid, "the target %s of the hard link is a directory", quote(h.Linkname))
	case slices.Equal(target, parts):
		return nil
	}
	return a.put(parent, name, ino)
}

// newInode turns a header into an inode without content.
func (a *tarBuilder) newInode(h *tar.Header) (*inode, error) {
	ino := &inode{mode: uint32(h.Mode) & modePerm, sec: h.ModTime.Unix(), nsec: uint32(h.ModTime.Nanosecond())}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		ino.mode |= modeReg
	case tar.TypeDir:
		ino.mode |= modeDir
		ino.dir = &directory{}
	case tar.TypeSymlink:
		ino.mode = modeLnk | 0o777 // as Linux has them; archives vary
		if h.Linkname == "" || len(h.Linkname) > maxPathLen || strings.IndexByte(h.Linkname, 0) >= 0 {
			return nil, errs.E(errs.Invalid, "the target of the symbolic link needs 1 to %d bytes without NUL", maxPathLen)
		}
		ino.link = strings.Clone(h.Linkname)
		if err := a.grow(len(ino.link)); err != nil {
			return nil, err
		}
	case tar.TypeChar, tar.TypeBlock:
		format := uint32(modeChr)
		if h.Typeflag == tar.TypeBlock {
			format = modeBlk
		}
		ino.mode |= format
		if h.Devmajor < 0 || h.Devmajor > maxMajor || h.Devminor < 0 || h.Devminor > maxMinor {
			return nil, errs.E(errs.Invalid, "device number %d:%d is beyond %d:%d", h.Devmajor, h.Devminor, maxMajor, maxMinor)
		}
		ino.device = encodeDevice(uint32(h.Devmajor), uint32(h.Devminor))
	case tar.TypeFifo:
		ino.mode |= modeFifo
	default:
		return nil, errs.E(errs.Invalid, "entries of type %q are not supported", h.Typeflag).
			WithHint("make the archive with GNU tar, bsdtar or Python in PAX format")
	}
	// The last ID means "none" to the kernel (INVALID_UID).
	if h.Uid < 0 || int64(h.Uid) >= math.MaxUint32 || h.Gid < 0 || int64(h.Gid) >= math.MaxUint32 {
		return nil, errs.E(errs.Invalid, "owner %d:%d is not within 0 to 4294967294", h.Uid, h.Gid)
	}
	ino.uid, ino.gid = uint32(h.Uid), uint32(h.Gid)
	attrs, err := a.paxAttrs(h)
	if err != nil {
		return nil, err
	}
	ino.attrs, err = a.encodeAttrs(h.Name, attrs)
	return ino, err
}

// paxAttrs collects extended attributes from PAX records: raw (star, GNU tar,
// Docker) or as libarchive writes them, in Base64 with an escaped name. Sorted,
// the raw form comes last and wins.
func (a *tarBuilder) paxAttrs(h *tar.Header) (map[string]string, error) {
	if len(h.PAXRecords) == 0 {
		return nil, nil
	}
	attrs := make(map[string]string)
	for _, key := range slices.Sorted(maps.Keys(h.PAXRecords)) {
		value := h.PAXRecords[key]
		if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
			attrs[name] = value
		} else if name, ok := strings.CutPrefix(key, "LIBARCHIVE.xattr."); ok {
			plain, err := url.PathUnescape(name)
			if err != nil {
				return nil, errs.E(errs.Invalid, "the name of PAX record %s is malformed", quote(key))
			}
			raw, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(value, "="))
			if err != nil {
				return nil, errs.E(errs.Invalid, "the value of PAX record %s is malformed", quote(key))
			}
			attrs[plain] = string(raw)
		} else if strings.HasPrefix(key, "SCHILY.acl.") {
			a.warn("%s: access control list %s in text form dropped", quote(h.Name), quote(key))
		}
	}
	return attrs, nil
}
