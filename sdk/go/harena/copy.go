package harena

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// CopyTo copies a local file or tree into the sandbox, as docker cp does: into
// remote when that is a directory (or ends with a slash), else as remote. Of a local path that
// ends with "/." the contents are copied. Modes and times are kept; what is copied belongs to the user.
//
// With WithOpID nothing is decided by what is in the sandbox, so that a repetition is the same request: remote is the place of the copy itself, unless it
// ends with a slash.
func (s *Sandbox) CopyTo(ctx context.Context, local, remote string, warn func(string), opts ...FileOption) error {
	fi, err := os.Stat(local)
	if err != nil {
		return &Error{Kind: KindNotFound, Message: err.Error(), cause: err}
	}
	opID := fileOpts(opts).opID
	remoteDir := strings.HasSuffix(remote, "/")
	if opID == "" {
		if remoteDir, err = s.isDir(ctx, remote, opts); err != nil {
			return err
		}
	}
	if !fi.IsDir() {
		if !fi.Mode().IsRegular() {
			return &Error{Kind: KindInvalid, Message: local + " is neither a file nor a directory"}
		}
		if remoteDir || strings.HasSuffix(remote, "/") {
			remote = path.Join(remote, filepath.Base(local))
		}
		f, err := os.Open(local)
		if err != nil {
			return &Error{Kind: KindInvalid, Message: err.Error(), cause: err}
		}
		defer func() { _ = f.Close() }()
		return s.Upload(ctx, remote, f, append([]FileOption{WithMode(fi.Mode().Perm())}, opts...)...)
	}
	o := TreeOptions{Anonymous: true, Warn: warn}
	if contents(local) {
		o.NoRoot = remoteDir
	} else if remoteDir {
		remote = path.Join(remote, baseOf(local))
	}
	if opID != "" {
		return s.c.lasting(ctx, func() error { return s.sendTree(ctx, local, remote, o, opts) })
	}
	return s.sendTree(ctx, local, remote, o, opts)
}

func (s *Sandbox) sendTree(ctx context.Context, local, remote string, o TreeOptions, opts []FileOption) error {
	pr, pw := io.Pipe()
	written := make(chan error, 1)
	go func() {
		w := bufio.NewWriterSize(pw, 256<<10)
		err := WriteTree(ctx, w, local, o)
		if err == nil {
			err = w.Flush()
		}
		pw.CloseWithError(err)
		written <- err
	}()
	err := s.UploadTar(ctx, remote, pr, opts...)
	_ = pr.Close()
	if werr := <-written; err == nil {
		err = werr
	}
	return err
}

func contents(p string) bool { return p == "." || strings.HasSuffix(p, "/.") }

// baseOf names the copy of a tree: of "." and ".." the real directory's name.
func baseOf(p string) string {
	if abs, err := filepath.Abs(p); err == nil {
		p = abs
	}
	return filepath.Base(p)
}

// isDir reports whether path inside is a directory; false when nothing is there.
func (s *Sandbox) isDir(ctx context.Context, p string, opts []FileOption) (bool, error) {
	info, err := s.StatFollow(ctx, p, opts...)
	if IsKind(err, KindNotFound) {
		// A sandbox that does not exist is another matter.
		var e *Error
		if errors.As(err, &e) && strings.HasPrefix(e.Resource, "sandbox ") {
			return false, err
		}
		return false, nil
	}
	return info.GetType() == "directory", err
}

// CopyFrom copies a file or tree out of the sandbox; see CopyTo. Set-ID bits and
// owners are not taken over, devices, FIFOs and sockets are left out with a warning. Whatever
// the sandbox answers, nothing outside of local is written.
func (s *Sandbox) CopyFrom(ctx context.Context, remote, local string, warn func(string), opts ...FileOption) error {
	info, err := s.StatFollow(ctx, remote, opts...)
	if err != nil {
		return err
	}
	fi, serr := os.Stat(local)
	localDir := serr == nil && fi.IsDir()
	base := path.Base(path.Clean(remote))
	switch info.GetType() {
	case "file":
		if localDir || strings.HasSuffix(local, "/") {
			local = filepath.Join(local, base)
		}
		return s.copyFile(ctx, remote, local, fs.FileMode(info.GetMode()).Perm(), opts)
	case "directory":
		if localDir && !contents(remote) && base != "/" && base != "." {
			local = filepath.Join(local, base)
		}
		return s.copyTree(ctx, remote, local, warn, opts)
	}
	return &Error{Kind: KindInvalid, Message: fmt.Sprintf("%s is a %s", remote, info.GetType()), Hint: "only files and directories can be copied"}
}

func (s *Sandbox) copyFile(ctx context.Context, remote, local string, mode fs.FileMode, opts []FileOption) (err error) {
	r, err := s.Open(ctx, remote, opts...)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	f, err := os.OpenFile(local, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return localError(err)
	}
	_, err = io.Copy(f, r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Chmod(local, mode)
	}
	return localError(err)
}

func localError(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return &Error{Kind: KindInvalid, Message: err.Error(), cause: err}
	}
	return err
}

func (s *Sandbox) copyTree(ctx context.Context, remote, local string, warn func(string), opts []FileOption) error {
	r, err := s.DownloadTar(ctx, remote, opts...)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	return localError(extract(r, local, warn))
}

// extract unpacks a tar, which a hostile sandbox may have made, below dir.
// os.Root keeps every name and every link that is followed below it.
func extract(r io.Reader, dir string, warn func(string)) error {
	if warn == nil {
		warn = func(string) {}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	var dirs []*tar.Header // their modes and times are set last
	tr := tar.NewReader(bufio.NewReaderSize(r, 256<<10))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		name := path.Clean(h.Name)
		if !filepath.IsLocal(name) {
			return fmt.Errorf("the archive names %q, which is outside of it", h.Name)
		}
		if h.Typeflag == tar.TypeDir {
			if err := root.MkdirAll(name, 0o700); err != nil {
				return err
			}
			dirs = append(dirs, h)
			continue
		}
		if err := extractEntry(root, name, h, tr, warn); err != nil {
			return err
		}
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		name := path.Clean(dirs[i].Name)
		if err := root.Chmod(name, fs.FileMode(dirs[i].Mode).Perm()); err != nil { //nolint:gosec // nine bits
			return err
		}
		_ = root.Chtimes(name, dirs[i].ModTime, dirs[i].ModTime)
	}
	return nil
}

func extractEntry(root *os.Root, name string, h *tar.Header, content io.Reader, warn func(string)) error {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeSymlink, tar.TypeLink:
	default:
		warn(fmt.Sprintf("%s is neither file, directory nor link and was left out", name))
		return nil
	}
	if parent := path.Dir(name); parent != "." {
		if err := root.MkdirAll(parent, 0o755); err != nil {
			return err
		}
	}
	// What is in the way goes first: a file is replaced, not written through a link.
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(path.Clean(h.Linkname), name)
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	if err == nil {
		err = f.Chmod(fs.FileMode(h.Mode).Perm()) //nolint:gosec // nine bits
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = root.Chtimes(name, h.ModTime, h.ModTime)
	}
	return err
}
