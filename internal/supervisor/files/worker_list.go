package files

import (
	"sort"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// maxListing bounds the answer of a listing, however long its names are.
const maxListing = 32 << 20

// list sends the entries of a directory in parts.
func (w *worker) list(m *harenav1.ListFilesRequest) (*harenav1.FileInfo, error) {
	path := string(m.GetPathBytes())
	fd, err := w.open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	if err := allowed(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	l := &lister{w: w, depth: int(m.GetDepth()), room: int(m.GetLimit())}
	err = l.walk(fd, path)
	unix.Close(fd)
	if err != nil {
		return nil, err
	}
	return nil, l.flush()
}

// lister walks depth first and keeps no more names than entries may still be sent.
type lister struct {
	w     *worker
	depth int
	room  int // entries that may still be sent
	// levels are the names yet to be visited, outermost first.
	levels [][]string
	part   harenav1.ListFilesResponse
	// size is that of part, total that of all parts.
	size, total int
	truncated   bool
}

// walk lists an open directory at path, one level below the levels so far.
func (l *lister) walk(dir int, path string) error {
	names, more, err := sortedNames(dir, l.room)
	if err != nil {
		return err
	}
	l.truncated = l.truncated || more
	level := len(l.levels)
	l.levels = append(l.levels, names)
	l.trim()
	for len(l.levels[level]) > 0 {
		if l.room == 0 {
			l.truncated = true
			break
		}
		name := l.levels[level][0]
		l.levels[level] = l.levels[level][1:]
		if err := l.entry(dir, join(path, name), name); err != nil {
			return err
		}
	}
	l.levels = l.levels[:level]
	return nil
}

// trim forgets names that cannot be reached any more: each of the inner ones
// comes before and takes one of the entries that may still be sent.
func (l *lister) trim() {
	room := l.room
	for i := len(l.levels) - 1; i >= 0; i-- {
		if len(l.levels[i]) > room {
			// Copied, so that the rest is freed.
			l.levels[i] = append([]string(nil), l.levels[i][:room]...)
			l.truncated = true
		}
		room -= len(l.levels[i])
	}
}

func (l *lister) entry(dir int, path, name string) error {
	info, err := statAt(dir, name, path)
	if isMissing(err) {
		return nil // it vanished
	}
	if err != nil {
		return tell(err, path)
	}
	if err := l.add(info); err != nil {
		return err
	}
	if info.GetType() != "directory" || len(l.levels) >= l.depth {
		return nil
	}
	fd, err := openIn(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0, 0)
	if err != nil {
		// It vanished, or is not this user's to read: it is listed, not entered.
		if isMissing(err) || is(err, unix.ENOTDIR, unix.ELOOP, unix.EACCES) {
			return nil
		}
		return tell(err, path)
	}
	defer unix.Close(fd)
	if fail := allowed(fd); fail != nil {
		return nil //nolint:nilerr // the kernel's file systems are listed, not entered
	}
	return l.walk(fd, path)
}

func (l *lister) add(info *harenav1.FileInfo) error {
	size := proto.Size(info) + 8
	if l.total+size > maxListing {
		l.room, l.truncated = 0, true
		return nil
	}
	if l.size+size > maxPayload {
		if err := l.flush(); err != nil {
			return err
		}
	}
	l.part.Entries = append(l.part.Entries, info)
	l.size += size
	l.total += size
	l.room--
	return nil
}

// flush sends the part that was collected.
func (l *lister) flush() error {
	l.part.Truncated = l.truncated
	if err := l.w.message(framePart, &l.part); err != nil {
		return err
	}
	l.part.Entries = l.part.Entries[:0]
	l.size = 0
	return nil
}

// sortedNames returns the first names of a directory by their bytes, at most
// most of them, and whether there are more. It holds about twice as many at a
// time, however many there are.
func sortedNames(dir, most int) (names []string, more bool, err error) {
	cut := func() {
		sort.Strings(names)
		if len(names) > most {
			clear(names[most:])
			names, more = names[:most], true
		}
	}
	err = readNames(dir, func(name string) bool {
		names = append(names, name)
		if len(names) >= 2*most+1024 {
			cut()
		}
		return true
	})
	cut()
	return names, more, err
}

// readNames calls f with each name in a directory until it returns false.
func readNames(dir int, f func(name string) bool) error {
	buf := make([]byte, 32<<10)
	var names []string
	for {
		var n int
		err := retry(func() (err error) {
			n, err = unix.Getdents(dir, buf)
			return err
		})
		if isMissing(err) {
			return nil // the directory itself was removed meanwhile
		}
		if err != nil || n == 0 {
			return err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			if !f(name) {
				return nil
			}
		}
	}
}
