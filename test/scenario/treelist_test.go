package scenario

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// listed is all that a file system says of a name, but what depends on where it lies (device, inode and times of change and access).
type listed struct {
	Path  string // below the root, as Go quotes it
	Mode  uint32
	UID   uint32
	GID   uint32
	Sec   int64
	Nsec  int64
	Rdev  uint64            `json:",omitempty"` // of devices
	Size  int64             `json:",omitempty"` // of files and links
	Nlink uint64            `json:",omitempty"` // of all but directories
	First string            `json:",omitempty"` // of the names of a file with several, the first
	Link  string            `json:",omitempty"`
	Attrs map[string]string `json:",omitempty"`
	Sum   string            `json:",omitempty"`
}

// treeListRoot makes the test binary a program that lists the tree at this root on its standard output:
// scenarios run it inside of sandboxes. The first line has the names that were left out.
const treeListRoot = "HARENA_SCENARIO_LIST"

// listTree writes a line of JSON for every name at root and below it. What is mounted below the root is left out, and what skip names.
func listTree(root string, skip []string, out io.Writer) error {
	w := bufio.NewWriterSize(out, 1<<20)
	mounts, err := mountsBelow(root)
	if err != nil {
		return err
	}
	skip = slices.Sorted(slices.Values(append(mounts, skip...)))
	b, err := json.Marshal(skip)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s\n", b)
	type job struct {
		done chan error
		l    *listed
	}
	// Files are read by two at once, and written in order.
	jobs, queue := make(chan job, 256), make(chan job, 256)
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for j := range jobs {
				j.done <- j.l.read(root)
			}
		})
	}
	walked := make(chan error, 1)
	go func() {
		defer close(queue)
		defer close(jobs)
		first := map[[2]uint64]string{}
		walked <- filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel := strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
			if _, skipped := slices.BinarySearch(skip, rel); skipped {
				if d.IsDir() {
					return filepath.SkipDir
				}
				return nil
			}
			l, err := describe(path, rel, first)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			j := job{make(chan error, 1), l}
			queue <- j
			jobs <- j
			return nil
		})
	}()
	enc := json.NewEncoder(w)
	var failed error
	for j := range queue {
		if err := <-j.done; err != nil && failed == nil {
			failed = err
		}
		if failed == nil {
			failed = enc.Encode(j.l)
		}
	}
	readers.Wait()
	if err := <-walked; err != nil {
		return err
	}
	if failed != nil {
		return failed
	}
	return w.Flush()
}

func describe(path, rel string, first map[[2]uint64]string) (*listed, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return nil, err
	}
	l := &listed{Path: strconv.Quote(rel), Mode: st.Mode, UID: st.Uid, GID: st.Gid, Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFLNK:
		l.Size = st.Size
	case unix.S_IFCHR, unix.S_IFBLK:
		l.Rdev = st.Rdev
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		l.Nlink = st.Nlink
		if st.Nlink > 1 {
			id := [2]uint64{st.Dev, st.Ino}
			if first[id] == "" {
				first[id] = l.Path
			}
			l.First = first[id]
		}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		to, err := os.Readlink(path)
		if err != nil {
			return nil, err
		}
		l.Link = strconv.Quote(to)
	}
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if err != nil {
		return nil, err
	}
	for name := range strings.SplitSeq(string(names[:n]), "\x00") {
		// trusted.* never reaches a layer; security.selinux is the machine's.
		if name == "" || strings.HasPrefix(name, "trusted.") || name == "security.selinux" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if l.Attrs == nil {
			l.Attrs = map[string]string{}
		}
		l.Attrs[name] = hex.EncodeToString(value[:n])
	}
	return l, nil
}

// read adds the digest of a file's content.
func (l *listed) read(root string) error {
	if l.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	rel, err := strconv.Unquote(l.Path)
	if err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(root, rel))
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.CopyBuffer(h, struct{ io.Reader }{f}, make([]byte, 256<<10))
	if err == nil && n != l.Size {
		err = fmt.Errorf("%s has %d bytes, its size is %d", l.Path, n, l.Size)
	}
	l.Sum = hex.EncodeToString(h.Sum(nil))
	return err
}

// mountsBelow returns where something is mounted below root, root itself not.
func mountsBelow(root string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.SplitSeq(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		if rel, ok := strings.CutPrefix(f[4], strings.TrimSuffix(root, "/")+"/"); ok && rel != "" {
			out = append(out, rel)
		}
	}
	return out, nil
}

// treeList is a list that was read.
type treeList struct {
	skipped []string
	names   map[string]listed
}

func parseTreeList(t *testing.T, r io.Reader) *treeList {
	t.Helper()
	d := json.NewDecoder(bufio.NewReaderSize(r, 1<<20))
	l := &treeList{names: map[string]listed{}}
	if err := d.Decode(&l.skipped); err != nil {
		t.Fatal(err)
	}
	for {
		var e listed
		if err := d.Decode(&e); err == io.EOF {
			return l
		} else if err != nil {
			t.Fatal(err)
		}
		l.names[e.Path] = e
	}
}

// differences says, for at most 20 names, in what two lists differ.
func (l *treeList) differences(want *treeList) []string {
	var out []string
	names := maps.Clone(want.names)
	maps.Copy(names, l.names)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		got, is := l.names[name]
		wanted, should := want.names[name]
		switch {
		case !is:
			out = append(out, name+" is missing")
		case !should:
			out = append(out, name+" should not be there")
		default:
			g, _ := json.Marshal(got)
			w, _ := json.Marshal(wanted)
			if !bytes.Equal(g, w) {
				out = append(out, fmt.Sprintf("%s\n  is        %s\n  should be %s", name, g, w))
			}
		}
	}
	if n := len(out); n > 20 {
		out = append(out[:20], fmt.Sprintf("and %d more", n-20))
	}
	return out
}

func unquoted(s string) string {
	u, _ := strconv.Unquote(s)
	return u
}

// withoutLinks forgets which names are the same file.
func (l *treeList) withoutLinks() *treeList {
	out := &treeList{l.skipped, make(map[string]listed, len(l.names))}
	for name, e := range l.names {
		e.Nlink, e.First = 0, ""
		out.names[name] = e
	}
	return out
}
