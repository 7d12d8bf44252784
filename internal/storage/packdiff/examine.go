package packdiff

import (
	"context"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// Difference is how an image of a writable layer differs from the layers below it.
type Difference struct {
	// Added: there was nothing of that name. Changed: type, mode, owner, size, modification time, target or device differ, or
	// what can be changed without that, content and file capabilities.
	// Deleted: with everything that was below. Directories count as changed for their mode and owner only.
	Added, Changed, Deleted List
	Findings                Findings
}

// Options of Examine.
type Options struct {
	// Now is what timestamps are held against.
	Now time.Time
	// Quality has quality rules applied.
	Quality bool
	// Cleaner chose what is in the image; its list is completed with directories of which nothing was left.
	Cleaner *Cleaner
}

// Examine compares the image with the layers that are mounted at lowers, lowest first, and applies the quality rules.
func Examine(ctx context.Context, img *erofs.Image, lowers []string, o Options) (*Difference, error) {
	root, err := openLowers(lowers)
	if err != nil {
		return nil, err
	}
	defer root.close()
	x := &examiner{ctx: ctx, out: &Difference{}, frames: []*frame{{lower: root}}, cleaner: o.Cleaner}
	defer x.closeAll()
	if o.Quality {
		x.quality = newQuality(&x.out.Findings, root, o.Now)
	}
	if err := img.Walk(x.visit); err != nil {
		return nil, err
	}
	for len(x.frames) > 0 {
		if err := x.pop(); err != nil {
			return nil, err
		}
	}
	if x.quality != nil {
		if err := x.quality.finish(ctx); err != nil {
			return nil, err
		}
	}
	if o.Cleaner != nil {
		return x.out, o.Cleaner.settle(root)
	}
	return x.out, nil
}

// frame is a directory on the way to where the walk is.
type frame struct {
	path  string // "" for the root
	lower *lowerDir
	// hides: it is opaque, or below such a directory: what of lower was not seen is deleted.
	hides bool
	seen  map[string]bool
}

type examiner struct {
	ctx     context.Context //nolint:containedctx // the examiner lives as long as one call
	out     *Difference
	frames  []*frame
	quality *quality
	cleaner *Cleaner
}

// closeAll closes all but the root, which is Examine's.
func (x *examiner) closeAll() {
	for _, f := range x.frames[min(1, len(x.frames)):] {
		f.lower.close()
	}
}

// pop leaves a directory.
func (x *examiner) pop() error {
	f := x.frames[len(x.frames)-1]
	if f.hides {
		names, err := f.lower.names()
		if err != nil {
			return err
		}
		for _, name := range names {
			if !f.seen[name] {
				if err := x.gone(f.lower, name, join(f.path, name)); err != nil {
					return err
				}
			}
		}
	}
	if x.frames = x.frames[:len(x.frames)-1]; len(x.frames) > 0 {
		f.lower.close()
	}
	return nil
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// visit is called for every name of the image, directories before what is in them.
func (x *examiner) visit(path string, e *erofs.Entry) error {
	if err := x.ctx.Err(); err != nil {
		return err
	}
	if path == "." {
		x.frames[0].hides = isOpaque(e)
		if x.frames[0].hides {
			x.frames[0].seen = map[string]bool{}
		}
		return nil
	}
	dir, name := split(path)
	for x.frames[len(x.frames)-1].path != dir {
		if err := x.pop(); err != nil {
			return err
		}
	}
	f := x.frames[len(x.frames)-1]
	if f.seen != nil {
		f.seen[name] = true
	}
	was, err := f.lower.lookup(name)
	if err != nil {
		return err
	}
	isDir := e.Mode&unix.S_IFMT == unix.S_IFDIR
	wasDir := was != nil && was.st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir {
		if x.cleaner != nil {
			delete(x.cleaner.held, path)
		}
		sub := &frame{path: path, hides: f.hides || isOpaque(e)}
		if wasDir {
			if sub.lower, err = f.lower.enter(name); err != nil {
				return err
			}
		}
		if sub.hides {
			sub.seen = map[string]bool{}
		}
		x.frames = append(x.frames, sub)
	}
	if isWhiteout(e.Mode, unix.Mkdev(e.Major, e.Minor)) {
		return x.gone(f.lower, name, path)
	}
	changed := false
	switch {
	case was == nil:
		if isDir && mountPoints[path] {
			return nil
		}
		x.out.Added.Add(path)
	case wasDir != isDir:
		if wasDir {
			if err := x.goneBelow(f.lower, name, path); err != nil {
				return err
			}
		}
		changed = true
	default:
		if changed, err = differs(x.ctx, f.lower, was, name, e); err != nil {
			return err
		}
	}
	if changed {
		x.out.Changed.Add(path)
	}
	if x.quality == nil || was != nil && !changed {
		return nil
	}
	had := false // file capabilities
	if was != nil && e.Xattrs[capability] != "" {
		if had, err = f.lower.hasAttr(was, name, capability); err != nil {
			return err
		}
	}
	return x.quality.look(x.ctx, path, e, was, had)
}

// differs compares what both are of one kind: two directories, or two other files.
func differs(ctx context.Context, d *lowerDir, was *found, name string, e *erofs.Entry) (bool, error) {
	st := &was.st
	if st.Mode != e.Mode || st.Uid != e.UID || st.Gid != e.GID {
		return true, nil
	}
	switch e.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return false, nil
	case unix.S_IFLNK:
		target, err := d.link(was, name)
		return target != e.Link, err
	case unix.S_IFCHR, unix.S_IFBLK:
		return st.Rdev != unix.Mkdev(e.Major, e.Minor), nil
	}
	if st.Size != e.Size || st.Mtim.Sec != e.ModTime.Unix() || st.Mtim.Nsec != int64(e.ModTime.Nanosecond()) {
		return true, nil
	}
	if e.Mode&unix.S_IFMT != unix.S_IFREG {
		return false, nil
	}
	// Times can be set back.
	if had, err := d.hasAttr(was, name, capability); err != nil || had != (e.Xattrs[capability] != "") {
		return true, err
	}
	same, err := d.sameContent(ctx, was, name, e)
	return !same, err
}

const capability = "security.capability"

func isOpaque(e *erofs.Entry) bool { return e.Xattrs["trusted.overlay.opaque"] == "y" }

// gone lists a name of the layers below that is no more, with everything below it.
func (x *examiner) gone(d *lowerDir, name, path string) error {
	was, err := d.lookup(name)
	if err != nil || was == nil {
		return err // a whiteout of what was made and removed above
	}
	x.out.Deleted.Add(path)
	if was.st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil
	}
	return x.goneBelow(d, name, path)
}

func (x *examiner) goneBelow(d *lowerDir, name, path string) error {
	if err := x.ctx.Err(); err != nil {
		return err
	}
	// The layers are mounted images, whose depth and number of names are bounded.
	sub, err := d.enter(name)
	if err != nil || sub == nil {
		return err
	}
	defer sub.close()
	names, err := sub.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := x.gone(sub, n, join(path, n)); err != nil {
			return err
		}
	}
	return nil
}

// parts takes a path apart.
func parts(path string) []string { return strings.Split(path, "/") }
