package files

import (
	"io"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// stat describes a file.
func (w *worker) stat(m *harenav1.StatRequest) (*harenav1.FileInfo, error) {
	path := string(m.GetPathBytes())
	flags := unix.O_PATH
	if !m.GetFollow() {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := w.open(path, flags)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := allowed(fd); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	link := ""
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		if link, err = readLink(fd, ""); err != nil {
			return nil, err
		}
	}
	return fileInfo(path, &st, link), nil
}

// statAt describes one name in a directory.
func statAt(dir int, base, path string) (*harenav1.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	link := ""
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		var err error
		if link, err = readLink(dir, base); err != nil {
			return nil, err
		}
	}
	return fileInfo(path, &st, link), nil
}

// makeDir makes a directory.
func (w *worker) makeDir(m *harenav1.MakeDirRequest) (*harenav1.FileInfo, error) {
	path := string(m.GetPathBytes())
	mode := m.GetMode() & permissions
	if mode == 0 {
		mode = defaultDirMode
	}
	text, base, _ := split(path)
	open := w.openDir
	if m.GetParents() {
		open = w.ensureDir
	}
	if !ordinary(base) {
		// The root, or a name that can only be there already.
		return w.existingDir(path, m.GetParents())
	}
	dir, err := open(text)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	err = unix.Mkdirat(dir, base, mode)
	if is(err, unix.EEXIST) && m.GetParents() {
		return w.existingDir(path, true)
	}
	if err != nil {
		return nil, err
	}
	if mode&setIDs != 0 {
		// mkdir(2) ignores these bits.
		fd, err := openIn(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
		if err != nil {
			return nil, err
		}
		defer unix.Close(fd)
		if err := unix.Fchmod(fd, mode); err != nil {
			return nil, err
		}
	}
	return statAt(dir, base, path)
}

func (w *worker) existingDir(path string, fine bool) (*harenav1.FileInfo, error) {
	fd, err := w.openDir(path)
	if is(err, unix.ENOTDIR) {
		err = unix.EEXIST
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if !fine {
		return nil, unix.EEXIST
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	return fileInfo(path, &st, ""), nil
}

// move renames, and copies where a rename is not possible: from one file system
// to another, and on an overlay for directories of its lower layers.
func (w *worker) move(m *harenav1.MoveRequest) (*harenav1.FileInfo, error) {
	from, to := string(m.GetFromBytes()), string(m.GetToBytes())
	fromDir, fromBase, err := w.parent(from)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fromDir)
	toDir, toBase, err := w.parent(to)
	if err != nil {
		return nil, tell(err, to)
	}
	defer unix.Close(toDir)
	if !ordinary(fromBase) || !ordinary(toBase) {
		return nil, unix.EBUSY
	}
	var flags uint
	if m.GetNoReplace() {
		flags = unix.RENAME_NOREPLACE
	}
	err = unix.Renameat2(fromDir, fromBase, toDir, toBase, flags)
	if is(err, unix.EXDEV) {
		err = w.moveByCopy(fromDir, fromBase, toDir, toBase, flags)
	}
	switch {
	case is(err, unix.EEXIST, unix.ENOTEMPTY):
		return nil, tell(err, to)
	case err != nil:
		return nil, err
	}
	return statAt(toDir, toBase, to)
}

// tell says that a failure is about the second of two paths.
func tell(err error, path string) error {
	f := fail(err, path)
	if f.text == "" {
		f.text = path
	}
	return f
}

// moveByCopy copies a tree to a temporary name beside the destination, renames
// it there, and removes the original: an archive is written and unpacked at once.
func (w *worker) moveByCopy(fromDir int, fromBase string, toDir int, toBase string, flags uint) error {
	temp := tempName()
	if err := unix.Mkdirat(toDir, temp, 0o700); err != nil {
		return err
	}
	stage, err := openIn(toDir, temp, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if err == nil {
		err = w.copyInto(fromDir, fromBase, stage)
		if err == nil {
			err = unix.Renameat2(stage, fromBase, toDir, toBase, flags)
		}
		unix.Close(stage)
	}
	// Also after success: then it is empty.
	if clean := w.removeTree(toDir, temp); err == nil {
		err = clean
	}
	if err != nil {
		return err
	}
	return w.removeTree(fromDir, fromBase)
}

func (w *worker) copyInto(dir int, base string, stage int) error {
	r, pipe := io.Pipe()
	done := make(chan error, 1)
	go func() {
		out := newTarOut(pipe)
		out.strict = true
		err := out.tree(dir, base, base)
		pipe.CloseWithError(err)
		done <- err
	}()
	in := &tarIn{w: w, root: stage, keepOwners: w.uid == 0}
	err := in.unpack(r)
	// Wakes the writer when unpacking failed.
	r.CloseWithError(io.ErrClosedPipe)
	if packErr := <-done; packErr != nil && (err == nil || fail(err, "").code == failInternal) {
		err = packErr
	}
	return err
}
