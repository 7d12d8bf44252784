package packdiff

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/storage/erofs"
)

// Bounds of the quality rules.
const (
	hugeFile  = 512 << 20 // bytes
	manyNames = 200_000   // in the layer
	manyInDir = 50_000
	// skew is how far clocks may be apart.
	skew = 5 * time.Minute
	// overflowID owns what has no owner (kernel.overflowuid), and is nobody's in every distribution.
	overflowID = 65534
	// maxScan is how much of one file is searched for secrets, maxScanAll of all of a layer.
	maxScan    = 64 << 20
	maxScanAll = 4 << 30
	maxPasswd  = 1 << 20
	maxRepos   = 100
)

// quality applies the quality rules to what was added or changed.
type quality struct {
	out     *Findings
	root    *lowerDir
	now     time.Time
	scanner *scanner
	left    int64 // bytes that may still be searched
	names   int64
	inDir   map[string]int
	files   map[string]*erofs.Entry // small files of the image that finish reads
	owners  map[uint32]string       // user IDs and a file of each
	repos   map[string]*repo
}

func newQuality(out *Findings, root *lowerDir, now time.Time) *quality {
	return &quality{
		out: out, root: root, now: now, scanner: newScanner(), left: maxScanAll,
		inDir: map[string]int{}, files: map[string]*erofs.Entry{}, owners: map[uint32]string{}, repos: map[string]*repo{},
	}
}

// look judges one name; was is what the layers below have, capable whether that has file capabilities.
func (q *quality) look(ctx context.Context, path string, e *erofs.Entry, was *found, capable bool) error {
	q.names++
	dir, _ := split(path)
	if q.inDir[dir]++; q.inDir[dir] == manyInDir {
		q.out.add(FindMany, dir, "more than %d names in one directory", manyInDir-1)
	}
	kind := e.Mode & unix.S_IFMT
	if e.ModTime.After(q.now.Add(skew)) {
		q.out.add(FindFuture, path, "its time is %s", e.ModTime.UTC().Format(time.DateTime))
	}
	if e.UID == overflowID || e.GID == overflowID {
		q.out.add(FindOwner, path, "owned by nobody (%d:%d)", e.UID, e.GID)
	} else if _, ok := q.owners[e.UID]; !ok {
		q.owners[e.UID] = path
	}
	// A sticky directory such as /tmp is meant to be writable; links have no mode of their own.
	if e.Mode&0o002 != 0 && kind != unix.S_IFLNK && (kind != unix.S_IFDIR || e.Mode&unix.S_ISVTX == 0) {
		q.out.add(FindWritable, path, "mode %04o", e.Mode&0o7777)
	}
	if kind != unix.S_IFREG {
		return nil
	}
	if bits := e.Mode & (unix.S_ISUID | unix.S_ISGID); bits&unix.S_ISUID != 0 || bits&unix.S_ISGID != 0 && e.Mode&0o010 != 0 {
		if was == nil || was.st.Mode&bits != bits || was.st.Mode&unix.S_IFMT != unix.S_IFREG {
			q.out.add(FindSetuid, path, "mode %04o, owner %d:%d", e.Mode&0o7777, e.UID, e.GID)
		}
	}
	if e.Xattrs[capability] != "" && !capable {
		q.out.add(FindSetuid, path, "it has file capabilities")
	}
	if e.Size > hugeFile {
		q.out.add(FindHuge, path, "%d MiB", e.Size>>20)
	}
	q.git(path, e)
	return q.search(ctx, path, e)
}

// search looks for secrets in a file.
func (q *quality) search(ctx context.Context, path string, e *erofs.Entry) error {
	if e.Size == 0 {
		return nil
	}
	if q.left <= 0 {
		q.out.add(FindUnread, path, "not searched for secrets: %d GiB of the layer were", int64(maxScanAll)>>30)
		return nil
	}
	content, err := e.Content()
	if err != nil {
		return err
	}
	q.left -= min(e.Size, maxScan)
	names, whole, err := q.scanner.scan(reader{ctx, content}, maxScan)
	if err != nil {
		return err
	}
	if len(names) > 0 {
		q.out.add(FindSecret, path, "%s", strings.Join(names, ", "))
	}
	if !whole && e.Size > maxScan {
		q.out.add(FindUnread, path, "searched for secrets up to %d MiB only", maxScan>>20)
	}
	return nil
}

// reader ends with its context.
type reader struct {
	ctx context.Context //nolint:containedctx // of one call
	r   io.Reader
}

// Read implements io.Reader.
func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// finish judges what needs all names.
func (q *quality) finish(ctx context.Context) error {
	if q.names > manyNames {
		q.out.add(FindMany, "", "%d names were added or changed", q.names)
	}
	if err := q.unknownOwners(); err != nil {
		return err
	}
	return q.judgeRepos(ctx)
}

// unknownOwners finds user IDs that /etc/passwd does not have, such as those that came with an archive.
func (q *quality) unknownOwners() error {
	passwd, err := q.read("etc/passwd", maxPasswd)
	if err != nil || passwd == nil {
		return err
	}
	known := map[uint32]bool{0: true}
	for line := range strings.Lines(string(passwd)) {
		if f := strings.SplitN(line, ":", 4); len(f) == 4 {
			if id, err := strconv.ParseUint(f[2], 10, 32); err == nil {
				known[uint32(id)] = true
			}
		}
	}
	for id, path := range q.owners {
		if !known[id] {
			q.out.add(FindOwner, path, "owned by user ID %d, which /etc/passwd does not have (the first of its files)", id)
		}
	}
	return nil
}

// read returns a small file as the sandbox had it: of the image, else of the layers below. Nil when there is none.
func (q *quality) read(path string, most int64) ([]byte, error) {
	e := q.files[path]
	if e == nil {
		return q.root.readFile(parts(path), most)
	}
	if e.Size > most {
		return nil, nil
	}
	content, err := e.Content()
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(content, most))
	if err != nil {
		return nil, fmt.Errorf("read a packed file: %w", err)
	}
	return b, nil
}
