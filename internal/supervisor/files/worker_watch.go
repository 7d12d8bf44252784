package files

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const (
	// maxWatched bounds the directories of one watch, and what the worker remembers of them.
	maxWatched = 16384
	// pairWithin is how long the second half of a rename may take to be told. fsnotify_move of the kernel queues both at once.
	pairWithin = 20 * time.Millisecond
	// watchAlive is how often a quiet watch says that it lives, and looks whether its directory does: a removal of what this process has
	// open is no event.
	watchAlive = time.Second
	// watchBuffer holds many events; a name has 255 bytes at most.
	watchBuffer = 64 << 10

	watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_EXCL_UNLINK | unix.IN_DONT_FOLLOW
)

// Kinds of events.
const (
	watchReady      = "ready"
	watchCreated    = "created"
	watchModified   = "modified"
	watchRemoved    = "removed"
	watchMoved      = "moved"
	watchAttributes = "attributes"
	watchOverflow   = "overflow"
)

// watcher is one watch. Directories are watched by inotify(7), which takes paths only: each is entered by a descriptor that was looked up without
// following links, and watched as ".".
type watcher struct {
	w         *worker
	notify    int
	root      int // O_PATH descriptor of the directory
	path      string
	file      string // the watched name in root; "" for the directory itself
	recursive bool
	paths     map[int]string // by watch, relative to root; "" for root
	watches   map[string]int
	moves     map[uint32]move // first halves of renames
	out       []byte
	last      string // what was told last, so that it is not told twice in a row
	rescan    bool
	gone      bool
}

type move struct {
	path string
	dir  bool
}

// serveWatch tells of changes until the service asks for the end, or what is watched is removed.
func (w *worker) serveWatch(m *harenav1.WatchFilesRequest) error {
	v, err := w.newWatcher(string(m.GetPathBytes()), m.GetRecursive())
	if err != nil {
		return w.fail(err)
	}
	defer v.close()
	if err := v.begin(); err != nil {
		return w.fail(err)
	}
	v.tell(watchReady, "", "", false)
	if err := v.flush(); err != nil {
		return err
	}
	return v.serve()
}

func (w *worker) newWatcher(path string, recursive bool) (*watcher, error) {
	v := &watcher{w: w, path: path, recursive: recursive, notify: -1, paths: map[int]string{}, watches: map[string]int{}, moves: map[uint32]move{}}
	var err error
	v.root, err = w.openDir(path)
	if is(err, unix.ENOTDIR) {
		// A file is watched by way of its directory.
		dir, base, slash := split(path)
		if slash || !ordinary(base) {
			return nil, err
		}
		v.path, v.file, v.recursive = dir, base, false
		v.root, err = w.openDir(dir)
	}
	if err != nil {
		return nil, err
	}
	if v.notify, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK); err != nil {
		unix.Close(v.root)
		return nil, &failure{errno: unix.EMFILE, text: "watches of this user"}
	}
	return v, nil
}

func (v *watcher) close() {
	unix.Close(v.notify)
	unix.Close(v.root)
}

// begin watches all that is there.
func (v *watcher) begin() error {
	if err := v.add(v.root, ""); err != nil {
		return err
	}
	if v.recursive {
		return v.descend("", false)
	}
	return nil
}

// add watches an open directory.
func (v *watcher) add(dir int, rel string) error {
	if len(v.paths) >= maxWatched {
		return &failure{errno: unix.ENOSPC, text: fmt.Sprintf("more than %d directories to watch", maxWatched)}
	}
	if err := unix.Fchdir(dir); err != nil {
		return err
	}
	wd, err := unix.InotifyAddWatch(v.notify, ".", watchMask|unix.IN_ONLYDIR)
	// The directory is not to be held.
	if cerr := unix.Fchdir(v.w.root); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	// The same directory may have been known by another name, from which it was moved.
	if old, known := v.paths[wd]; known && v.watches[old] == wd {
		delete(v.watches, old)
	}
	v.paths[wd], v.watches[rel] = rel, wd
	return nil
}

// descend watches the directories below rel. With tell, what is found is told as created: it came before its directory was watched.
func (v *watcher) descend(rel string, tell bool) error {
	dir := v.root
	if rel != "" {
		var err error
		if dir, err = openIn(v.root, rel, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS); err != nil {
			return vanished(err)
		}
		defer unix.Close(dir)
		if allowed(dir) != nil {
			return nil //nolint:nilerr // the kernel's file systems are not entered
		}
		if err := v.add(dir, rel); err != nil {
			return vanished(err)
		}
	}
	fd, err := openIn(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0, unix.RESOLVE_BENEATH)
	if err != nil {
		return vanished(err)
	}
	var subdirs []string
	err = readNames(fd, func(name string) bool {
		var st unix.Stat_t
		if unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			return true
		}
		isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		if tell {
			v.tell(watchCreated, within(rel, name), "", isDir)
		}
		if isDir {
			subdirs = append(subdirs, name)
		}
		return len(subdirs) <= maxWatched
	})
	unix.Close(fd)
	if err != nil {
		return vanished(err)
	}
	for _, name := range subdirs {
		if len(rel)+len(name) >= maxPath-len(v.path) {
			continue // too deep to have a path
		}
		if err := v.w.alive(); err != nil {
			return err
		}
		if err := v.descend(within(rel, name), tell); err != nil {
			return err
		}
		if err := v.flushFull(); err != nil {
			return err
		}
	}
	return nil
}

// vanished forgives what comes of a tree that changes, or is not this user's to read.
func vanished(err error) error {
	if isMissing(err) || is(err, unix.ENOTDIR, unix.ELOOP, unix.EACCES, unix.EPERM, unix.EXDEV, unix.ESTALE) {
		return nil
	}
	var f *failure
	if errors.As(err, &f) && f.code == failChanged {
		return nil
	}
	return err
}

func within(rel, name string) string {
	if rel == "" {
		return name
	}
	return rel + "/" + name
}

// serve waits for events, and for the service.
func (v *watcher) serve() error {
	for !v.gone {
		wait := watchAlive
		if len(v.moves) > 0 {
			wait = pairWithin
		}
		fds := []unix.PollFd{{Fd: int32(v.notify), Events: unix.POLLIN}, {Fd: v.w.input, Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		switch {
		case is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case fds[1].Revents != 0:
			return v.asked()
		case n == 0:
			v.unpaired()
			if err := v.w.alive(); err != nil {
				return err
			}
		default:
			if err := v.read(); err != nil {
				return v.w.fail(err)
			}
		}
		v.look()
		if v.rescan {
			v.rescan = false
			// What was created meanwhile is watched from now on; that something was, overflow has told.
			if err := v.again(); err != nil {
				return v.w.fail(err)
			}
		}
		if err := v.flush(); err != nil {
			return err
		}
	}
	return v.w.send(frameEnd, 0)
}

// look notices that the watched directory was removed.
func (v *watcher) look() {
	var st unix.Stat_t
	if !v.gone && unix.Fstat(v.root, &st) == nil && st.Nlink == 0 {
		v.tell(watchRemoved, "", "", true)
		v.gone = true
	}
}

// asked handles the end of the watch by the service.
func (v *watcher) asked() error {
	t, _, err := v.w.read()
	switch {
	case err != nil:
		return err
	case t != frameAbort:
		return fmt.Errorf("unexpected frame %q while watching", byte(t))
	}
	return v.w.send(frameEnd, 0)
}

func (v *watcher) again() error {
	if !v.recursive {
		return nil
	}
	return v.descend("", false)
}

// read takes what inotify has.
func (v *watcher) read() error {
	buf := make([]byte, watchBuffer)
	n, err := unix.Read(v.notify, buf)
	if is(err, unix.EAGAIN, unix.EINTR) {
		return nil
	}
	if err != nil {
		return err
	}
	for buf = buf[:n]; len(buf) >= unix.SizeofInotifyEvent; {
		wd := int(int32(binary.NativeEndian.Uint32(buf)))
		mask, cookie, size := binary.NativeEndian.Uint32(buf[4:]), binary.NativeEndian.Uint32(buf[8:]), binary.NativeEndian.Uint32(buf[12:])
		if int(size) > len(buf)-unix.SizeofInotifyEvent {
			return io.ErrUnexpectedEOF
		}
		name := strings.TrimRight(string(buf[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+int(size)]), "\x00")
		buf = buf[unix.SizeofInotifyEvent+int(size):]
		if err := v.event(wd, mask, cookie, name); err != nil {
			return err
		}
		if err := v.flushFull(); err != nil {
			return err
		}
	}
	return nil
}

func (v *watcher) event(wd int, mask, cookie uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		v.tell(watchOverflow, "", "", true)
		v.rescan = true
		return nil
	}
	dir, known := v.paths[wd]
	if !known {
		return nil
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(v.paths, wd)
		if v.watches[dir] == wd {
			delete(v.watches, dir)
		}
		return nil
	}
	if name == "" {
		v.itself(dir, mask)
		return nil
	}
	if v.file != "" && name != v.file {
		return nil
	}
	path, isDir := within(dir, name), mask&unix.IN_ISDIR != 0
	switch {
	case mask&unix.IN_CREATE != 0:
		v.tell(watchCreated, path, "", isDir)
		return v.arrived(path, isDir)
	case mask&unix.IN_MOVED_FROM != 0:
		v.moves[cookie] = move{path, isDir}
	case mask&unix.IN_MOVED_TO != 0:
		from, paired := v.moves[cookie]
		if !paired {
			v.tell(watchCreated, path, "", isDir)
			return v.arrived(path, isDir)
		}
		delete(v.moves, cookie)
		v.tell(watchMoved, path, from.path, isDir)
		v.rename(from.path, path, isDir)
	case mask&unix.IN_DELETE != 0:
		v.tell(watchRemoved, path, "", isDir)
	case mask&unix.IN_MODIFY != 0:
		v.tell(watchModified, path, "", isDir)
	case mask&unix.IN_ATTRIB != 0:
		v.tell(watchAttributes, path, "", isDir)
	}
	return nil
}

// itself handles an event about a watched directory. Those below the root are told by the directory above them.
func (v *watcher) itself(dir string, mask uint32) {
	if dir != "" {
		return
	}
	switch {
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0:
		v.tell(watchRemoved, "", "", true)
		v.gone = true
	case mask&unix.IN_ATTRIB != 0 && v.file == "":
		v.tell(watchAttributes, "", "", true)
	}
}

// arrived watches a directory that is new here.
func (v *watcher) arrived(path string, isDir bool) error {
	if !isDir || !v.recursive {
		return nil
	}
	err := v.descend(path, true)
	if is(err, unix.ENOSPC, unix.ENOMEM) {
		v.tell(watchOverflow, path, "", true) // it is not watched
		return nil
	}
	return err
}

// rename gives watched directories their new paths.
func (v *watcher) rename(from, to string, isDir bool) {
	if !isDir {
		return
	}
	for wd, path := range v.paths {
		if path != from && !strings.HasPrefix(path, from+"/") {
			continue
		}
		if v.watches[path] == wd {
			delete(v.watches, path)
		}
		moved := to + path[len(from):]
		v.paths[wd], v.watches[moved] = moved, wd
	}
}

// unpaired takes renames whose second half did not come for what they are: the file left the tree.
func (v *watcher) unpaired() {
	for cookie, m := range v.moves {
		delete(v.moves, cookie)
		v.tell(watchRemoved, m.path, "", m.dir)
		if !m.dir {
			continue
		}
		for wd, path := range v.paths {
			if path == m.path || strings.HasPrefix(path, m.path+"/") {
				_, _ = unix.InotifyRmWatch(v.notify, uint32(wd)) // it answers with IN_IGNORED
			}
		}
	}
}

// tell adds an event, unless it is the one told last.
func (v *watcher) tell(kind, rel, from string, isDir bool) {
	key := kind + "\x00" + rel
	if key == v.last && kind != watchMoved {
		return
	}
	v.last = key
	e := &harenav1.WatchFilesResponse{Kind: kind, Time: timestamppb.Now(), Directory: isDir}
	e.Path, e.PathBytes = display(v.absolute(rel))
	if kind == watchMoved {
		e.From, e.FromBytes = display(v.absolute(from))
	}
	b, err := proto.Marshal(e)
	if err != nil {
		return // of two strings and a time it does not happen
	}
	v.out = append(binary.AppendUvarint(v.out, uint64(len(b))), b...)
}

func (v *watcher) absolute(rel string) string {
	if rel == "" {
		rel = v.file
	}
	if rel == "" {
		return v.path
	}
	return join(v.path, rel)
}

// flushFull sends events when there are many.
func (v *watcher) flushFull() error {
	if len(v.out) < maxPayload-32<<10 {
		return nil
	}
	return v.flush()
}

// flush sends the events that were told.
func (v *watcher) flush() error {
	if len(v.out) == 0 {
		return nil
	}
	v.last = ""
	out := v.out
	v.out = v.out[:0]
	return v.w.write(framePart, out)
}
