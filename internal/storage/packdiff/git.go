package packdiff

import (
	"bytes"
	"context"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// maxGitFile bounds what is read of a repository's files: references and logs.
const maxGitFile = 4 << 20

// repo is a git repository of which something was packed.
type repo struct {
	dir string // the .git directory
	// refs are files that name commits: references, logs, FETCH_HEAD and such.
	refs []string
	// objects counts packed loose objects and packs.
	objects int
}

// git notes files of repositories, of which finish judges what commits they lead to.
func (q *quality) git(path string, e *erofs.Entry) {
	if path == "etc/passwd" {
		q.files[path] = e
		return
	}
	i := strings.LastIndex("/"+path, "/.git/")
	if i < 0 || e.Size > maxGitFile && !strings.Contains(path[i:], "/objects/") {
		return
	}
	dir, rest := path[:i+len(".git")], path[i+len(".git/"):]
	r := q.repos[dir]
	if r == nil {
		if len(q.repos) >= maxRepos {
			return
		}
		r = &repo{dir: dir}
		q.repos[dir] = r
	}
	switch {
	case strings.HasPrefix(rest, "objects/"):
		r.objects++
	case rest == "HEAD":
		q.files[path] = e
	case rest == "packed-refs", strings.HasPrefix(rest, "refs/"), strings.HasPrefix(rest, "logs/"),
		strings.HasSuffix(rest, "_HEAD"):
		q.files[path] = e
		r.refs = append(r.refs, rest)
	}
}

var (
	commitID  = regexp.MustCompile(`\b[0-9a-f]{40}([0-9a-f]{24})?\b`)
	noCommit  = regexp.MustCompile(`^0+$`)
	safeRefRE = regexp.MustCompile(`^refs/[A-Za-z0-9._/-]{1,400}$`)
)

// judgeRepos finds commits that the packed references and logs of repositories lead to, and that are not what HEAD is at: with
// them comes history, or work, that was not meant to be there (another branch, a stash, what a reset took away, a fetched future).
func (q *quality) judgeRepos(ctx context.Context) error {
	for _, dir := range slices.Sorted(maps.Keys(q.repos)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := q.repos[dir]
		head, err := q.head(dir)
		if err != nil {
			return err
		}
		for _, ref := range r.refs {
			b, err := q.read(dir+"/"+ref, maxGitFile)
			if err != nil {
				return err
			}
			mine := map[string]bool{head: true}
			if strings.HasPrefix(ref, "logs/") {
				mine = ownWay(b, head)
			}
			other := map[string]bool{}
			for _, id := range commitID.FindAll(b, -1) {
				if s := string(id); !mine[s] && !noCommit.MatchString(s) {
					other[s] = true
				}
			}
			if n := len(other); n > 0 {
				q.out.add(FindGit, dir+"/"+ref, "it leads to %d commits beside HEAD", n)
			}
		}
	}
	return nil
}

// forward is what a log says of steps after which the older commit is an ancestor of the newer one.
var forward = regexp.MustCompile(`^(commit|commit \(initial\)|commit \(merge\)|clone|pull|pull [^:]*|merge [^:]*): `)

// ownWay returns the commits of a log that are HEAD or its ancestors: those before the last step that may have gone elsewhere
// (a reset, an amended commit, a checkout) cannot be told from others without reading the objects.
func ownWay(log []byte, head string) map[string]bool {
	mine := map[string]bool{head: true}
	at := head
	for _, line := range slices.Backward(bytes.Split(bytes.TrimSuffix(log, []byte("\n")), []byte("\n"))) {
		step, message, _ := bytes.Cut(line, []byte("\t"))
		ids := bytes.SplitN(step, []byte(" "), 3)
		if len(ids) < 3 || string(ids[1]) != at || !forward.Match(message) {
			break
		}
		at = string(ids[0])
		mine[at] = true
	}
	return mine
}

// head returns the commit that HEAD is at; "" when that cannot be told.
func (q *quality) head(dir string) (string, error) {
	b, err := q.read(dir+"/HEAD", maxGitFile)
	if err != nil {
		return "", err
	}
	text := strings.TrimSpace(string(b))
	ref, ok := strings.CutPrefix(text, "ref: ")
	if !ok {
		return text, nil
	}
	if !safeRefRE.MatchString(ref) || slices.Contains(parts(ref), "..") {
		return "", nil
	}
	if b, err = q.read(dir+"/"+ref, maxGitFile); err != nil || b != nil {
		return strings.TrimSpace(string(b)), err
	}
	packed, err := q.read(dir+"/packed-refs", maxGitFile)
	for line := range bytes.Lines(packed) {
		if id, name, ok := strings.Cut(strings.TrimSpace(string(line)), " "); ok && name == ref {
			return id, err
		}
	}
	return "", err
}
