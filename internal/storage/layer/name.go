package layer

import (
	"regexp"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// DefaultProject is where names live when a caller gives none.
const DefaultProject = "default"

const (
	defaultTag = "latest"
	// maxPath bounds names and projects, so that each fits one directory name (NAME_MAX is 255).
	maxPath = 200
)

var (
	pathPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$`)
	tagPattern  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
)

// Ref is a parsed reference to a layer: a name and tag in a project, or a digest.
type Ref struct {
	Project, Name, Tag string
	// Digest, when not empty, pins the content; Name and Tag are empty then.
	Digest Digest
}

// String returns name:tag or the digest, as a user would write it.
func (r Ref) String() string {
	if r.Digest != "" {
		return string(r.Digest)
	}
	return r.Name + ":" + r.Tag
}

// ParseRef checks a reference that comes from outside: name, name:tag or sha256:….
// An empty project means DefaultProject. Its result is safe to build file names from.
func ParseRef(project, s string) (Ref, error) {
	if project == "" {
		project = DefaultProject
	}
	if len(project) > maxPath || !pathPattern.MatchString(project) {
		return Ref{}, errs.E(errs.Invalid, "project %.80q is not a valid path", project).
			WithHint("a path is parts of a-z, 0-9, '.', '_' and '-' joined by /, such as lab/team, up to %d characters", maxPath)
	}
	if strings.HasPrefix(s, digestPrefix) {
		d, err := ParseDigest(s)
		return Ref{Project: project, Digest: d}, err
	}
	name, tag, tagged := strings.Cut(s, ":")
	if !tagged {
		tag = defaultTag
	}
	if len(name) > maxPath || !pathPattern.MatchString(name) {
		return Ref{}, errs.E(errs.Invalid, "%.80q is not a layer name", s).
			WithHint("a name is name[:tag], such as debian:12: parts of a-z, 0-9, '.', '_' and '-' joined by /, up to %d characters; or a digest", maxPath)
	}
	if !tagPattern.MatchString(tag) {
		return Ref{}, errs.E(errs.Invalid, "tag %.80q of layer name %q is not valid", tag, name).
			WithHint("a tag has 1-128 characters of A-Z, a-z, 0-9, '_', '.' and '-' and does not start with '.' or '-'")
	}
	return Ref{Project: project, Name: name, Tag: tag}, nil
}

// parseName is ParseRef for what must be a name.
func parseName(project, s string) (Ref, error) {
	r, err := ParseRef(project, s)
	if err == nil && r.Digest != "" {
		return Ref{}, errs.E(errs.Invalid, "%s is a digest where a name is needed", s).
			WithHint("give a name[:tag]")
	}
	return r, err
}

// dirName turns a path into one directory name and back. Without it, name a/b
// and tag b of name a would claim the same file. '+' is in no path.
func dirName(path string) string { return strings.ReplaceAll(path, "/", "+") }
func pathName(dir string) string { return strings.ReplaceAll(dir, "+", "/") }
