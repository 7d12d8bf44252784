package files

import (
	"bytes"
	"path"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/harena-dev/harena/internal/errs"
)

// maxPath is what a system call takes, without the final NUL (PATH_MAX of limits.h).
const maxPath = 4095

// tempPrefix begins the names of files that are not complete yet. They exist for
// the moment of a rename, or longer on file systems without O_TMPFILE.
const tempPrefix = ".harena-tmp-"

// absolute returns the path that a request means: exact, when the caller gave
// bytes, else text; relative to home.
func absolute(home, text string, exact []byte) (string, error) {
	p := text
	if len(exact) > 0 {
		p = string(exact)
	}
	switch {
	case p == "":
		return "", errs.E(errs.Invalid, "no path was given")
	case strings.IndexByte(p, 0) >= 0:
		return "", errs.E(errs.Invalid, "path %s has a NUL byte", show(p))
	}
	if p[0] != '/' {
		if home == "" || home[0] != '/' {
			home = "/"
		}
		p = strings.TrimRight(home, "/") + "/" + p
	}
	if len(p) > maxPath {
		return "", errs.OverLimit(errs.Invalid, "bytes of a path", maxPath, len(p))
	}
	return p, nil
}

// split parts a path into a directory and the last name in it. base is "" for
// the root, and may be "." or ".."; dir is never empty. slash is true when the
// path can only mean a directory. Nothing else is tidied: what ".." means depends
// on symbolic links, so only the kernel can tell.
func split(p string) (dir, base string, slash bool) {
	trimmed := strings.TrimRight(p, "/")
	slash = len(trimmed) < len(p)
	i := strings.LastIndexByte(trimmed, '/')
	dir, base = trimmed[:i+1], trimmed[i+1:]
	if dir == "" {
		dir = "/"
	}
	return dir, base, slash
}

// ordinary reports whether base can be created, renamed or removed in a directory.
func ordinary(base string) bool { return base != "" && base != "." && base != ".." }

// join adds a name to a path that may end in slashes.
func join(dir, name string) string {
	return strings.TrimRight(dir, "/") + "/" + name
}

// display gives a name the two forms of the API: text always, the bytes only
// where text cannot be exact.
func display(name string) (text string, exact []byte) {
	if utf8.ValidString(name) {
		return name, nil
	}
	return string(bytes.ToValidUTF8([]byte(name), []byte("\uFFFD"))), []byte(name)
}

// tarName checks the name of an archive's entry and returns it relative to the
// directory that is unpacked into; "." is that directory.
func tarName(name string) (string, *failure) {
	if name == "" || strings.IndexByte(name, 0) >= 0 {
		return "", &failure{code: failBadTar, text: "an entry has no valid name"}
	}
	if name[0] == '/' {
		return "", &failure{code: failOutside, text: name}
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", &failure{code: failOutside, text: name}
		}
	}
	// Without ".." cleaning is exact, whatever the links.
	clean := path.Clean(name)
	if len(clean) > maxPath {
		return "", &failure{code: failBadTar, text: "an entry's name is longer than 4095 bytes"}
	}
	return clean, nil
}

func quote(s string) string { return strconv.Quote(s) }
