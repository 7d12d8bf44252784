package packdiff

import (
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// Cleaner answers the writer of an image, name by name, what of a writable layer is packed. It is for one image, and not for
// concurrent use.
type Cleaner struct {
	rules *Rules
	// stack holds the directories from the root to the one whose names are asked about.
	stack []level
	// Cleaned are the paths that were left out, sorted once Examine is done.
	Cleaned List
	// held are directories that are left out if nothing below them is packed.
	held map[string]bool
}

type level struct {
	path string // "" for the root
	place
}

// NewCleaner makes a cleaner; without rules everything is packed but what Harena writes itself.
func NewCleaner(rules *Rules) *Cleaner {
	if rules == nil {
		rules = &Rules{}
	}
	return &Cleaner{rules: rules, held: map[string]bool{}, stack: []level{{place: rules.root()}}}
}

// Choose is erofs.Options.Choose: directories come before what is in them. It may be asked about several trees, one after the
// other, that become one.
func (c *Cleaner) Choose(path string, st *unix.Stat_t) erofs.Choice {
	dir, name := split(path)
	for c.stack[len(c.stack)-1].path != dir {
		c.stack = c.stack[:len(c.stack)-1]
	}
	at := c.rules.step(c.stack[len(c.stack)-1].place, name)
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir {
		c.stack = append(c.stack, level{path, at})
	}
	switch {
	case written[path] && !isDir:
		return erofs.Drop
	case !at.fate.clean || isWhiteout(st.Mode, st.Rdev):
		return erofs.Take
	case isDir:
		c.held[path] = true
		return erofs.TakeIfNotEmpty
	}
	c.Cleaned.Add(path)
	return erofs.Drop
}

// settle lists directories that were left out and are not there below either. Of held, only those are left.
func (c *Cleaner) settle(root *lowerDir) error {
	for _, path := range slices.Sorted(maps.Keys(c.held)) {
		there, err := root.isDir(parts(path))
		if err != nil {
			return err
		}
		if !there {
			c.Cleaned.Add(path)
		}
	}
	c.Cleaned.distinct()
	return nil
}

// isWhiteout tells whether a file says that a name of the layers below is gone (overlayfs.rst, "whiteouts and opaque directories").
func isWhiteout(mode uint32, device uint64) bool {
	return mode&unix.S_IFMT == unix.S_IFCHR && device == 0
}

func split(path string) (dir, name string) {
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i], path[i+1:]
	}
	return "", path
}
