package packdiff

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// lowerDir is a directory as the layers below make it: one directory of each layer that has it, the uppermost first. Nothing
// of theirs is trusted: names are looked up one at a time, and nothing is followed.
type lowerDir struct{ layers []*os.File }

// openLowers opens the roots of layers, given lowest first.
func openLowers(dirs []string) (*lowerDir, error) {
	d := &lowerDir{}
	for _, dir := range slices.Backward(dirs) {
		f, err := openDirAt(unix.AT_FDCWD, dir)
		if err != nil {
			d.close()
			return nil, fmt.Errorf("open a layer: %w", err)
		}
		d.layers = append(d.layers, f)
	}
	return d, nil
}

func openDirAt(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "layer"), nil
}

func (d *lowerDir) close() {
	if d == nil {
		return
	}
	for _, f := range d.layers {
		f.Close()
	}
}

// found is what a name means in a lowerDir.
type found struct {
	st unix.Stat_t
	// layer is that of the directories which has it.
	layer int
}

// lookup finds a name; nil when there is none, or it was deleted.
func (d *lowerDir) lookup(name string) (*found, error) {
	if d == nil {
		return nil, nil
	}
	for i, f := range d.layers {
		var st unix.Stat_t
		err := unix.Fstatat(int(f.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == unix.ENOENT:
			continue
		case err != nil:
			return nil, fmt.Errorf("look into a layer: %w", err)
		case isWhiteout(st.Mode, st.Rdev):
			return nil, nil
		}
		return &found{st, i}, nil
	}
	return nil, nil
}

// enter opens the directory that a name means; nil when it means none.
func (d *lowerDir) enter(name string) (_ *lowerDir, err error) {
	if d == nil {
		return nil, nil
	}
	sub := &lowerDir{}
	defer func() {
		if err != nil {
			sub.close()
		}
	}()
	for _, f := range d.layers {
		var st unix.Stat_t
		err := unix.Fstatat(int(f.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look into a layer: %w", err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			break // it hides what is below
		}
		g, err := openDirAt(int(f.Fd()), name)
		if err != nil {
			return nil, fmt.Errorf("open a directory of a layer: %w", err)
		}
		sub.layers = append(sub.layers, g)
		var value [2]byte
		if n, err := unix.Fgetxattr(int(g.Fd()), "trusted.overlay.opaque", value[:]); err == nil && n == 1 && value[0] == 'y' {
			break
		}
	}
	if len(sub.layers) == 0 {
		return nil, nil
	}
	return sub, nil
}

// names lists what the directory has, sorted.
func (d *lowerDir) names() ([]string, error) {
	if d == nil {
		return nil, nil
	}
	seen := map[string]bool{}
	var out []string
	for _, f := range d.layers {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, fmt.Errorf("read a directory of a layer: %w", err)
		}
		all, err := f.ReadDir(-1)
		if err != nil {
			return nil, fmt.Errorf("read a directory of a layer: %w", err)
		}
		for _, e := range all {
			if seen[e.Name()] {
				continue
			}
			seen[e.Name()] = true
			if e.Type()&os.ModeCharDevice != 0 {
				if at, err := d.lookup(e.Name()); err != nil || at == nil {
					if err != nil {
						return nil, err
					}
					continue // a whiteout
				}
			}
			out = append(out, e.Name())
		}
	}
	slices.Sort(out)
	return out, nil
}

// isDir tells whether a path is a directory.
func (d *lowerDir) isDir(parts []string) (bool, error) {
	at := d
	for _, name := range parts {
		next, err := at.enter(name)
		if at != d {
			at.close()
		}
		if err != nil || next == nil {
			return false, err
		}
		at = next
	}
	at.close()
	return true, nil
}

// readFile reads a small regular file below d, following nothing; nil when there is no such file or it is too large.
func (d *lowerDir) readFile(parts []string, most int64) ([]byte, error) {
	at := d
	for i, name := range parts {
		if i < len(parts)-1 {
			next, err := at.enter(name)
			if at != d {
				at.close()
			}
			if err != nil || next == nil {
				return nil, err
			}
			at = next
			continue
		}
		b, err := at.read(name, most)
		if at != d {
			at.close()
		}
		return b, err
	}
	return nil, nil
}

func (d *lowerDir) read(name string, most int64) ([]byte, error) {
	f, err := d.lookup(name)
	if err != nil || f == nil || f.st.Mode&unix.S_IFMT != unix.S_IFREG || f.st.Size > most {
		return nil, err
	}
	in, err := d.open(f, name)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, most))
	if err != nil {
		return nil, fmt.Errorf("read a file of a layer: %w", err)
	}
	return b, nil
}

// open opens a regular file.
func (d *lowerDir) open(f *found, name string) (*os.File, error) {
	fd, err := unix.Openat(int(d.layers[f.layer].Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a file of a layer: %w", err)
	}
	return os.NewFile(uintptr(fd), "layer"), nil
}

// hasAttr tells whether a regular file has an extended attribute.
func (d *lowerDir) hasAttr(f *found, name, attr string) (bool, error) {
	if f.st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false, nil
	}
	in, err := d.open(f, name)
	if err != nil {
		return false, err
	}
	defer in.Close()
	n, err := unix.Fgetxattr(int(in.Fd()), attr, nil)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read an attribute of a layer: %w", err)
	}
	return n > 0, nil
}

// sameContent tells whether a file has the same content as one of the image that is of the same size.
func (d *lowerDir) sameContent(ctx context.Context, f *found, name string, e *erofs.Entry) (bool, error) {
	content, err := e.Content()
	if err != nil {
		return false, err
	}
	in, err := d.open(f, name)
	if err != nil {
		return false, err
	}
	defer in.Close()
	size := min(1<<17, e.Size+1)
	a, b := make([]byte, size), make([]byte, size)
	for {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		n, aerr := io.ReadFull(content, a)
		m, berr := io.ReadFull(in, b)
		end := aerr == io.EOF || aerr == io.ErrUnexpectedEOF
		switch {
		case aerr != nil && !end:
			return false, fmt.Errorf("read a packed file: %w", aerr)
		case berr != nil && berr != io.EOF && berr != io.ErrUnexpectedEOF:
			return false, fmt.Errorf("read a file of a layer: %w", berr)
		case !bytes.Equal(a[:n], b[:m]):
			return false, nil
		case end:
			return true, nil
		}
	}
}

// link reads a symbolic link.
func (d *lowerDir) link(f *found, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(d.layers[f.layer].Fd()), name, buf)
	if errors.Is(err, unix.EINVAL) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read a link of a layer: %w", err)
	}
	return string(buf[:n]), nil
}
