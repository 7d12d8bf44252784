package files

import (
	"crypto/rand"
	"io"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const (
	defaultFileMode = 0o644
	defaultDirMode  = 0o755
	permissions     = 0o7777
	setIDs          = unix.S_ISUID | unix.S_ISGID
)

// serveWrite replaces a file by what the service sends.
func (w *worker) serveWrite(m *harenav1.WriteRequest) error {
	path := string(m.GetPathBytes())
	u := &upload{w: w}
	info, err := w.replace(path, m.GetMode(), u)
	return u.finish(info, err)
}

// replace writes content to a new file beside the old one and renames it over
// it, so that nobody sees half of it and an aborted transfer leaves the old file.
func (w *worker) replace(path string, mode uint32, content *upload) (*harenav1.FileInfo, error) {
	t, err := w.followed(path)
	if err != nil {
		return nil, err
	}
	defer unix.Close(t.dir)
	if err := replaceable(t.old); err != nil {
		return nil, err
	}
	f, err := w.newFile(t.dir)
	if err != nil {
		return nil, err
	}
	defer f.discard()
	if err := w.send(frameReady, 0); err != nil {
		content.broken = err
		return nil, err
	}
	buf := content.w.body()
	if _, err := io.CopyBuffer(f, content, buf); err != nil {
		return nil, err
	}
	if err := f.own(t.old, mode); err != nil {
		return nil, err
	}
	if err := f.publish(t.base); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return nil, err
	}
	return fileInfo(path, &st, ""), nil
}

// replaceable refuses to put a file in the place of something else.
func replaceable(old *unix.Stat_t) error {
	switch {
	case old == nil || old.Mode&unix.S_IFMT == unix.S_IFREG:
		return nil
	case old.Mode&unix.S_IFMT == unix.S_IFDIR:
		return unix.EISDIR
	}
	return &failure{code: failNotRegular}
}

// newFile is a file that does not have its name yet.
type newFile struct {
	dir, fd int
	// temp is the file's name until it is published; "" when it has none.
	temp string
}

// newFile makes one in dir. Where the file system can, it has no name at all
// (O_TMPFILE), so that even the death of this process leaves nothing behind.
func (w *worker) newFile(dir int) (*newFile, error) {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return nil, err
	}
	can, known := w.linkable[st.Dev]
	if !known {
		can = linksNameless(dir)
		w.linkable[st.Dev] = can
	}
	if can {
		fd, err := openIn(dir, ".", unix.O_TMPFILE|unix.O_WRONLY, 0o600, 0)
		if err == nil {
			return &newFile{dir: dir, fd: fd}, nil
		}
		if !nameless(err) {
			return nil, err
		}
	}
	f := &newFile{dir: dir, temp: tempName()}
	var err error
	f.fd, err = unix.Openat(dir, f.temp, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// linksNameless probes whether dir's file system makes files without a name and
// lets this process name them: linkat(2) with AT_EMPTY_PATH is for the opener of a
// file since Linux 6.10, before that for the node's root only.
func linksNameless(dir int) bool {
	fd, err := openIn(dir, ".", unix.O_TMPFILE|unix.O_WRONLY, 0o600, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	temp := tempName()
	if unix.Linkat(fd, "", dir, temp, unix.AT_EMPTY_PATH) != nil {
		return false
	}
	return unix.Unlinkat(dir, temp, 0) == nil
}

// nameless reports whether err says that O_TMPFILE is not known here.
func nameless(err error) bool {
	return is(err, unix.EOPNOTSUPP, unix.EISDIR, unix.ENOENT, unix.EINVAL)
}

func tempName() string { return tempPrefix + rand.Text() }

// Write implements io.Writer.
func (f *newFile) Write(p []byte) (int, error) { return fd(f.fd).Write(p) }

// own gives the file the owner and mode of the one it replaces, as far as the
// user may, or a mode that was asked for.
func (f *newFile) own(old *unix.Stat_t, mode uint32) error {
	if old != nil {
		var st unix.Stat_t
		if err := unix.Fstat(f.fd, &st); err != nil {
			return err
		}
		kept := st.Uid == old.Uid && st.Gid == old.Gid
		if !kept {
			kept = unix.Fchown(f.fd, int(old.Uid), int(old.Gid)) == nil
		}
		if mode == 0 {
			mode = old.Mode & permissions
			if !kept {
				// These bits lend the old owner's rights; they must not lend another's.
				mode &^= setIDs
			}
		}
	}
	if mode == 0 {
		mode = defaultFileMode
	}
	return unix.Fchmod(f.fd, mode&permissions)
}

// publish gives the file its name, in place of what has it.
func (f *newFile) publish(base string) error {
	if f.temp == "" {
		// Only a rename can replace, and only a name can be renamed.
		temp := tempName()
		if err := unix.Linkat(f.fd, "", f.dir, temp, unix.AT_EMPTY_PATH); err != nil {
			return err
		}
		f.temp = temp
	}
	if err := unix.Renameat(f.dir, f.temp, f.dir, base); err != nil {
		return err
	}
	f.temp = ""
	return nil
}

// discard closes the file and removes what was not published.
func (f *newFile) discard() {
	if f.temp != "" {
		// Best effort: the failure that led here is the one to report.
		_ = unix.Unlinkat(f.dir, f.temp, 0)
	}
	unix.Close(f.fd)
}
