package files

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// resolveTries bounds how often a look-up is repeated that raced with a rename
	// or a mount: openat2(2) answers EAGAIN when ".." could not be followed safely.
	resolveTries = 128
	// maxLinks is the kernel's own limit (MAXSYMLINKS of include/linux/namei.h).
	maxLinks = 40
)

// open looks path up in the sandbox's root. Neither ".." nor a link leads out
// of it, and links of procfs that jump are refused.
func (w *worker) open(path string, flags int) (int, error) {
	return openIn(w.root, path, flags, 0, unix.RESOLVE_IN_ROOT)
}

// openIn is openat2(2) with a further way to resolve.
func openIn(dir int, path string, flags int, mode uint32, resolve uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC),
		Mode:    uint64(mode),
		Resolve: resolve | unix.RESOLVE_NO_MAGICLINKS,
	}
	var err error
	for range resolveTries {
		var got int
		got, err = unix.Openat2(dir, path, &how)
		if err == nil {
			return got, nil
		}
		if !is(err, unix.EAGAIN, unix.EINTR) {
			return -1, err
		}
	}
	return -1, &failure{code: failChanged}
}

// kernelFS lists file systems whose files are interfaces of the kernel: reading
// them may have effects or never end, and writing them changes the system. Magic
// numbers: include/uapi/linux/magic.h, and fs/ for those that it lacks.
func kernelFS(magic int64) bool {
	switch uint32(magic) {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.DEVPTS_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC,
		unix.BPF_FS_MAGIC, unix.PSTOREFS_MAGIC, unix.BINFMTFS_MAGIC, unix.EFIVARFS_MAGIC,
		unix.NSFS_MAGIC, unix.SELINUX_MAGIC, unix.SMACK_MAGIC, unix.AUTOFS_SUPER_MAGIC,
		unix.USBDEVICE_SUPER_MAGIC, unix.DEVMEM_MAGIC,
		0x07655821, // resctrl (fs/resctrl/rdtgroup.c)
		0x19800202, // mqueue (ipc/mqueue.c)
		0x62656570, // configfs (fs/configfs/mount.c)
		0x67596969, // rpc_pipefs (net/sunrpc/rpc_pipe.c)
		0x65735543: // fusectl (fs/fuse/control.c)
		return true
	}
	return false
}

// allowed refuses what lies on a file system of the kernel.
func allowed(fd int) error {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(fd, &st) }); err != nil {
		return err
	}
	if kernelFS(st.Type) {
		return &failure{code: failKernelFS}
	}
	return nil
}

// parent opens the directory that holds the last name of path, as O_PATH.
func (w *worker) parent(path string) (dir int, base string, err error) {
	text, base, _ := split(path)
	dir, err = w.openDir(text)
	return dir, base, err
}

// openDir opens a directory as O_PATH.
func (w *worker) openDir(path string) (int, error) {
	dir, err := w.open(path, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	if err := allowed(dir); err != nil {
		unix.Close(dir)
		return -1, err
	}
	return dir, nil
}

// ensureDir is openDir that makes what is missing, with mode 0755.
func (w *worker) ensureDir(path string) (int, error) {
	dir, err := w.openDir(path)
	if !isMissing(err) {
		return dir, err
	}
	text, base, _ := split(path)
	if base == "" {
		return -1, err
	}
	up, err := w.ensureDir(text)
	if err != nil {
		return -1, err
	}
	defer unix.Close(up)
	if ordinary(base) {
		if err := unix.Mkdirat(up, base, 0o755); err != nil && !is(err, unix.EEXIST) {
			return -1, err
		}
	}
	return w.openDir(path)
}

// target is where a file that is to be written really is.
type target struct {
	dir  int // O_PATH; to be closed
	base string
	// old describes what is there now, nil when nothing is.
	old *unix.Stat_t
}

// followed finds the place that writing to path means: the last name, and while
// that is a symbolic link the place it points at, so that a link stays a link as
// with an editor. The links are read here and not by the kernel because the
// directory of the file is needed, for the temporary file and the rename.
// Missing directories are made.
func (w *worker) followed(path string) (target, error) {
	for range maxLinks {
		text, base, slash := split(path)
		if slash || !ordinary(base) {
			return target{}, unix.EISDIR
		}
		dir, err := w.ensureDir(text)
		if err != nil {
			return target{}, err
		}
		var st unix.Stat_t
		err = unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case isMissing(err):
			return target{dir: dir, base: base}, nil
		case err != nil:
			unix.Close(dir)
			return target{}, err
		case st.Mode&unix.S_IFMT != unix.S_IFLNK:
			return target{dir: dir, base: base, old: &st}, nil
		}
		link, err := w.readSafeLink(dir, base, &st)
		unix.Close(dir)
		if err != nil {
			return target{}, err
		}
		if !strings.HasPrefix(link, "/") {
			link = join(text, link)
		}
		if len(link) > maxPath {
			return target{}, unix.ENAMETOOLONG
		}
		path = link
	}
	return target{}, unix.ELOOP
}

// readSafeLink reads a link that is about to be followed. In a directory like
// /tmp only links of the user itself or of the directory's owner are followed,
// as the kernel's fs.protected_symlinks does, whatever the node has set.
func (w *worker) readSafeLink(dir int, base string, link *unix.Stat_t) (string, error) {
	var d unix.Stat_t
	if err := unix.Fstat(dir, &d); err != nil {
		return "", err
	}
	const shared = unix.S_ISVTX | unix.S_IWOTH
	if d.Mode&shared == shared && int(link.Uid) != w.uid && link.Uid != d.Uid {
		return "", unix.EACCES
	}
	return readLink(dir, base)
}

// readLink returns the text of a link; with base "" that of an O_PATH descriptor.
func readLink(dir int, base string) (string, error) {
	buf := make([]byte, maxPath+1)
	n, err := unix.Readlinkat(dir, base, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// is reports whether err is, or wraps, one of several errors.
func is(err error, those ...error) bool {
	for _, e := range those {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// isMissing reports whether err says that nothing has the name.
func isMissing(err error) bool { return errors.Is(err, unix.ENOENT) }

// retry repeats a system call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !is(err, unix.EINTR) {
			return err
		}
	}
}
