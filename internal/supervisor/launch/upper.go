package launch

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// etcFiles are written into the writable layer. Bind mounts, as Docker has them, could not be replaced by
// rename, which is how programs edit these files.
func etcFiles(hostname string) [][2]string {
	return [][2]string{
		{"hostname", hostname + "\n"},
		{"hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostname + "\n"},
		{"resolv.conf", "# This sandbox has no name server.\n"},
	}
}

// prepareUpper fills a new writable layer with what the image may lack: mount points, and files of
// /etc. Nothing untrusted has run on it, and of the hostile lowers only attributes are read: no name of theirs is followed.
func prepareUpper(upper string, lowers []string, hostname string) error {
	u, err := openDir(unix.AT_FDCWD, upper)
	if err != nil {
		return err
	}
	defer u.Close() //nolint:errcheck // nothing written to it
	var dirs []*os.File
	for _, l := range lowers {
		d, err := openDir(unix.AT_FDCWD, l)
		if err != nil {
			return err
		}
		defer d.Close() //nolint:errcheck // read only
		dirs = append(dirs, d)
	}
	_, err = u.Readdirnames(1)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: %w", upper, err)
	}
	fresh := err != nil
	if fresh && len(dirs) > 0 {
		// The upper's root is what "/" looks like inside.
		var st unix.Stat_t
		if err := unix.Fstat(int(dirs[0].Fd()), &st); err != nil {
			return err
		}
		if err := copyAttrs(u, &st); err != nil {
			return err
		}
	}
	all := append([]*os.File{u}, dirs...)
	for _, name := range []string{"proc", "sys", "dev"} {
		st, err := lookup(all, name)
		if err != nil {
			return err
		}
		if st == nil {
			if err := unix.Mkdirat(int(u.Fd()), name, 0o755); err != nil {
				return fmt.Errorf("make mount point /%s: %w", name, err)
			}
		}
	}
	// A layer that was in use already has its files, as they were left.
	if !fresh {
		return nil
	}
	if err := writeEtc(u, dirs, hostname); err != nil {
		return err
	}
	return writeIdentities(u, dirs)
}

func writeEtc(u *os.File, lowers []*os.File, hostname string) error {
	st, err := lookup(lowers, "etc")
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(int(u.Fd()), "etc", 0o755); err != nil {
		return fmt.Errorf("make /etc: %w", err)
	}
	etc, err := openDir(int(u.Fd()), "etc")
	if err != nil {
		return err
	}
	defer etc.Close() //nolint:errcheck // nothing written to it
	if st == nil {
		st = &unix.Stat_t{Mode: 0o755}
	}
	if err := copyAttrs(etc, st); err != nil {
		return err
	}
	for _, f := range etcFiles(hostname) {
		fd, err := unix.Openat(int(etc.Fd()), f[0], unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return fmt.Errorf("make /etc/%s: %w", f[0], err)
		}
		file := os.NewFile(uintptr(fd), f[0])
		_, err = file.WriteString(f[1])
		// The umask of the supervisor is not ours to change.
		if err = errors.Join(err, file.Chmod(0o644), file.Close()); err != nil {
			return fmt.Errorf("write /etc/%s: %w", f[0], err)
		}
	}
	return nil
}

// lookup finds a directory in a stack of layers as overlayfs would; nil when there is none.
func lookup(stack []*os.File, name string) (*unix.Stat_t, error) {
	for _, d := range stack {
		var st unix.Stat_t
		err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == unix.ENOENT:
			continue
		case err != nil:
			return nil, fmt.Errorf("look at /%s of a layer: %w", name, err)
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			return &st, nil
		case st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0: // a whiteout
			return nil, nil
		}
		return nil, errs.E(errs.Invalid, "/%s of the image is not a directory", name).
			WithHint("import the layer again with a directory there")
	}
	return nil, nil
}

func copyAttrs(dir *os.File, st *unix.Stat_t) error {
	if err := unix.Fchown(int(dir.Fd()), int(st.Uid), int(st.Gid)); err != nil {
		return fmt.Errorf("set owner of %s: %w", dir.Name(), err)
	}
	if err := unix.Fchmod(int(dir.Fd()), st.Mode&0o7777); err != nil {
		return fmt.Errorf("set mode of %s: %w", dir.Name(), err)
	}
	return nil
}

func openDir(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
