package erofs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// FromDir writes the tree below dir to meta and blob, which are truncated first;
// neither is synced.
//
// The tree may change under the read, and what is in it is not trusted: names
// are opened one by one below their directory without following links, nothing
// but regular files and directories is opened for reading, and what is recorded
// of a file is what was read of it; a file that changed meanwhile gives a
// warning. Other file systems mounted below dir (such as a forgotten /proc) are
// left out with a warning: their mount points become empty directories.
func FromDir(ctx context.Context, dir string, meta, blob *os.File, o Options) (*Result, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, readDirError(err, dir)
	}
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close()
	return FromDirFile(ctx, f, meta, blob, o)
}

// FromDirFile is FromDir of an open directory, whose position is at its start.
func FromDirFile(ctx context.Context, dir *os.File, meta, blob *os.File, o Options) (*Result, error) {
	t, err := ReadTree(ctx, dir, meta, blob, o)
	if err != nil {
		return nil, err
	}
	return t.Write(ctx)
}

// Tree is a directory that was read, on its way to become an image: it is at hand, in memory and in the files of the image,
// and the directory is not needed any more. It is written once.
type Tree struct {
	d    *dirBuilder
	root *inode
}

// ReadTree reads the tree below dir for an image in meta and blob; see FromDir. Options.Hold makes it quick.
func ReadTree(ctx context.Context, dir, meta, blob *os.File, o Options) (*Tree, error) {
	b, err := newBuilder(ctx, meta, blob, o)
	if err != nil {
		return nil, err
	}
	t := &Tree{d: newDirBuilder(b), root: &inode{mode: modeDir | 0o755, dir: &directory{}}}
	return t, t.d.readTree(dir, t.root)
}

// Write writes the image.
func (t *Tree) Write(ctx context.Context) (*Result, error) {
	t.d.ctx = ctx
	if err := t.d.drain(); err != nil {
		return nil, err
	}
	t.d.root = t.root
	return t.d.finish()
}

func newDirBuilder(b *builder) *dirBuilder {
	d := &dirBuilder{
		builder: b,
		links:   make(map[fileID]*inode),
		list:    make([]byte, 1<<16), // XATTR_LIST_MAX
		value:   make([]byte, 1<<16), // XATTR_SIZE_MAX
	}
	if b.o.Hold.Memory > 0 {
		d.hold = newHeld(b.o.Hold)
	}
	return d
}

// readTree makes root of the directory dir with all in it.
func (d *dirBuilder) readTree(dir *os.File, root *inode) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return readDirError(err, dir.Name())
	}
	if err := d.fill(root, &st, int(dir.Fd()), "."); err != nil {
		return err
	}
	return d.walk(dir, root, "")
}

// maxDepth bounds the directories on the way to a file, of which each is open while those below are read: the descriptors of the
// server are for many trees at once.
const maxDepth = 1000

type fileID struct{ dev, ino uint64 }

type dirBuilder struct {
	*builder
	links       map[fileID]*inode // files with more than one link
	list, value []byte
	buf         []byte
	hold        *held // nil: content is stored as it is read
}

// walk adds what is in the directory f, which is ino.
func (d *dirBuilder) walk(f *os.File, ino *inode, path string) error {
	names, err := f.Readdirnames(-1)
	if err != nil {
		return readDirError(err, path)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := d.ctx.Err(); err != nil {
			return err
		}
		sub := name
		if path != "" {
			sub = path + "/" + name
		}
		if len(sub) > maxPathLen {
			return fmt.Errorf("%s: %w", quote(sub), errs.OverLimit(errs.Invalid, "length of a path", maxPathLen, len(sub)).
				WithHint("remove what lies so deep, or move it up"))
		}
		if err := d.add(f, ino, name, sub); err != nil {
			return err
		}
	}
	return nil
}

// add adds one name of the directory f.
func (d *dirBuilder) add(f *os.File, parent *inode, name, path string) error {
	// A descriptor that names the file but opens nothing: what kind it is must be
	// known first, opening a FIFO or a device has effects.
	fd, err := unix.Openat(int(f.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		d.warn("%s: left out, it was removed while the directory was read", quote(path))
		return nil
	}
	if err != nil {
		return readDirError(err, path)
	}
	closeFD := sync.OnceFunc(func() { unix.Close(fd) })
	defer closeFD()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return readDirError(err, path)
	}
	choice := Take
	if d.o.Choose != nil {
		if choice = d.o.Choose(path, &st); choice == Drop {
			return nil
		}
	}
	id := fileID{st.Dev, st.Ino}
	isDir := st.Mode&modeFmt == modeDir
	if !isDir && st.Nlink > 1 {
		if first := d.links[id]; first != nil {
			return d.put(parent, name, first)
		}
	}
	ino := &inode{}
	switch st.Mode & modeFmt {
	case modeDir:
		closeFD() // one descriptor a level is enough
		err = d.addDir(f, ino, &st, name, path)
	case modeReg:
		err = d.addRegular(fd, ino, &st, path)
	default:
		err = d.addOther(fd, ino, &st, path)
	}
	if err != nil {
		return err
	}
	if choice == TakeIfNotEmpty && isDir && len(ino.dir.names) == 0 && !isOpaque(ino.attrs) {
		return nil
	}
	if !isDir && st.Nlink > 1 {
		d.links[id] = ino
	}
	return d.put(parent, name, ino)
}

func (d *dirBuilder) addDir(parent *os.File, ino *inode, st *unix.Stat_t, name, path string) error {
	ino.dir = &directory{}
	if depth := strings.Count(path, "/") + 1; depth > maxDepth {
		return fmt.Errorf("%s: %w", quote(path), errs.OverLimit(errs.Invalid, "depth of directories", maxDepth, depth).
			WithHint("remove what lies so deep, or move it up"))
	}
	fd, err := unix.Openat2(int(parent.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV,
	})
	if errors.Is(err, unix.EXDEV) {
		d.warn("%s: a mount point; what is mounted there was left out", quote(path))
		ino.mode, ino.uid, ino.gid = st.Mode, st.Uid, st.Gid
		ino.sec, ino.nsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
		return nil
	}
	if err != nil {
		return readDirError(err, path)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	// Between the two opens the name may have come to mean another directory.
	if err := unix.Fstat(fd, st); err != nil {
		return readDirError(err, path)
	}
	if err := d.fill(ino, st, fd, path); err != nil {
		return err
	}
	return d.walk(f, ino, path)
}

func (d *dirBuilder) addOther(fd int, ino *inode, st *unix.Stat_t, path string) error {
	switch st.Mode & modeFmt {
	case modeLnk:
		n, err := unix.Readlinkat(fd, "", d.value)
		if err != nil {
			return readDirError(err, path)
		}
		if n == 0 || n > maxPathLen {
			return errs.E(errs.Invalid, "the target of symbolic link %s has %d bytes, 1 to %d are possible", quote(path), n, maxPathLen)
		}
		ino.link = string(d.value[:n])
		if err := d.grow(n); err != nil {
			return err
		}
	case modeChr, modeBlk:
		ino.device = encodeDevice(unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case modeFifo, modeSock:
	default:
		return errs.E(errs.Invalid, "%s has unknown type %#o", quote(path), st.Mode&modeFmt)
	}
	return d.fill(ino, st, fd, path)
}

// fill sets what all kinds of files have. fd may be an O_PATH descriptor.
func (d *dirBuilder) fill(ino *inode, st *unix.Stat_t, fd int, path string) error {
	ino.mode, ino.uid, ino.gid = st.Mode, st.Uid, st.Gid
	ino.sec, ino.nsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
	attrs, err := d.readAttrs(fd, path)
	if err != nil {
		return err
	}
	if ino.attrs, err = d.encodeAttrs(path, attrs); err != nil {
		return fmt.Errorf("%s: %w", quote(path), err)
	}
	return nil
}

// readAttrs reads extended attributes. The system calls for descriptors refuse
// O_PATH ones; through /proc they work on those too, links included.
func (d *dirBuilder) readAttrs(fd int, path string) (map[string]string, error) {
	self := "/proc/self/fd/" + strconv.Itoa(fd)
	n, err := unix.Listxattr(self, d.list)
	if err == unix.EOPNOTSUPP || err == nil && n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list extended attributes of %s: %w", quote(path), err)
	}
	attrs := make(map[string]string)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(d.list[:n]), "\x00"), "\x00") {
		if v := judge(name, d.o.KeepTrusted); v == attrDrop || v == attrWarn {
			attrs[name] = "" // encodeAttrs drops it
			continue
		}
		n, err := unix.Getxattr(self, name, d.value)
		if err == unix.ENODATA {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("read extended attribute %q of %s: %w", name, quote(path), err)
		}
		attrs[name] = string(d.value[:n])
	}
	return attrs, nil
}

func readDirError(err error, path string) error {
	what := quote(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errs.E(errs.NotFound, "read %s for a layer: %w", what, err)
	case errors.Is(err, unix.ENOTDIR):
		return errs.E(errs.Invalid, "read %s for a layer: %w", what, err)
	case errors.Is(err, fs.ErrPermission):
		return errs.E(errs.Denied, "read %s for a layer: %w", what, err).WithHint("the server must be able to read the whole tree")
	}
	return fmt.Errorf("read %s for a layer: %w", what, err)
}
