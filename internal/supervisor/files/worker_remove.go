package files

import (
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const (
	// removeBatch is how many names of a directory are read before they are removed.
	removeBatch = 4096
	// removeLevels bounds how deeply nested a tree may be that is removed.
	removeLevels = 100_000
)

// remove removes a file, or a directory.
func (w *worker) remove(m *harenav1.RemoveRequest) (*harenav1.FileInfo, error) {
	path := string(m.GetPathBytes())
	dir, base, err := w.parent(path)
	if isMissing(err) && m.GetMissingOk() {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	if !ordinary(base) {
		return nil, unix.EBUSY
	}
	if m.GetRecursive() {
		err = w.removeTree(dir, base)
	} else {
		err = removeOne(dir, base)
	}
	if isMissing(err) && m.GetMissingOk() {
		return nil, nil
	}
	return nil, err
}

// removeOne removes a file or an empty directory.
func removeOne(dir int, base string) error {
	err := unix.Unlinkat(dir, base, 0)
	if is(err, unix.EISDIR) {
		return unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
	}
	return err
}

// place identifies a directory.
type place struct {
	dev, ino, mount uint64
}

func placeOf(fd int) (place, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_MNT_ID, &st); err != nil {
		return place{}, err
	}
	return place{dev: unix.Mkdev(st.Dev_major, st.Dev_minor), ino: st.Ino, mount: st.Mnt_id}, nil
}

// level is a directory on the way down.
type level struct {
	at      place
	name    string   // in the directory above
	pending []string // names still to be removed
}

// removeTree removes base with all below it, following no link and entering no
// mount. It holds two descriptors whatever the depth: it goes up by "..", and
// checks that this leads where it came from, for the tree may be moved meanwhile.
func (w *worker) removeTree(dir int, base string) error {
	err := removeOne(dir, base)
	if !is(err, unix.ENOTEMPTY, unix.EEXIST) {
		return err
	}
	above, err := placeOf(dir)
	if err != nil {
		return err
	}
	r := &remover{w: w, stack: []level{{at: above}}, cur: -1}
	defer func() { unix.Close(r.cur) }()
	if err := r.down(dir, base); err != nil {
		return err
	}
	for len(r.stack) > 1 {
		if err := r.step(); err != nil {
			return err
		}
	}
	return removeOne(dir, base)
}

type remover struct {
	w *worker
	// stack ends with the current directory; its first is where the tree is.
	stack []level
	cur   int // descriptor of the current directory
}

func (r *remover) path() string {
	p := ""
	for _, l := range r.stack[1:] {
		p = join(p, l.name)
		if len(p) > maxFailText {
			break
		}
	}
	return p
}

// down enters a directory.
func (r *remover) down(dir int, name string) error {
	if len(r.stack) > removeLevels {
		return &failure{code: failDeep}
	}
	fd, err := openIn(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0, 0)
	if err != nil {
		return err
	}
	at, err := placeOf(fd)
	if err == nil && at.mount != r.stack[len(r.stack)-1].at.mount {
		err = &failure{code: failMount}
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	if r.cur >= 0 {
		unix.Close(r.cur)
	}
	r.cur = fd
	r.stack = append(r.stack, level{at: at, name: name})
	return r.fill()
}

// fill reads the next names of the current directory, from its beginning, since
// what was there before is gone.
func (r *remover) fill() error {
	if _, err := unix.Seek(r.cur, 0, unix.SEEK_SET); err != nil {
		return err
	}
	top := &r.stack[len(r.stack)-1]
	return readNames(r.cur, func(name string) bool {
		top.pending = append(top.pending, name)
		return len(top.pending) < removeBatch
	})
}

// step removes one name of the current directory, enters it, or goes up.
func (r *remover) step() error {
	if err := r.w.alive(); err != nil {
		return err
	}
	top := &r.stack[len(r.stack)-1]
	if len(top.pending) == 0 {
		return r.up()
	}
	last := len(top.pending) - 1
	name := top.pending[last]
	err := removeOne(r.cur, name)
	switch {
	case is(err, unix.ENOTEMPTY), is(err, unix.EEXIST):
		if err := r.down(r.cur, name); err != nil {
			return fail(err, join(r.path(), name))
		}
		return nil
	case err == nil, isMissing(err):
		top.pending = top.pending[:last]
		if last == 0 {
			// Perhaps there were more than one batch, or new ones have come.
			return r.fill()
		}
		return nil
	}
	return fail(err, join(r.path(), name))
}

// up leaves a directory that is empty; the next step removes it.
func (r *remover) up() error {
	if len(r.stack) == 2 {
		r.stack = r.stack[:1]
		return nil
	}
	fd, err := openIn(r.cur, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return err
	}
	at, err := placeOf(fd)
	if err == nil && at != r.stack[len(r.stack)-2].at {
		err = &failure{code: failChanged}
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	unix.Close(r.cur)
	r.cur = fd
	r.stack = r.stack[:len(r.stack)-1]
	return nil
}
