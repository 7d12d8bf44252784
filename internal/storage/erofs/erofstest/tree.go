// Package erofstest makes a tree with every kind of file that a layer can hold,
// and compares trees in everything that a layer must preserve.
package erofstest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Node is what is compared of one name.
type Node struct {
	Mode   uint32 // st_mode
	UID    uint32
	GID    uint32
	Size   int64 // 0 for directories
	Sec    int64
	Nsec   int64
	Nlink  uint64 // 0 for directories: file systems count them differently
	Device string // "major:minor" of devices
	Link   string
	Digest string // SHA-256 of content
	Xattrs map[string]string
	Same   string // the first name of the same file
}

// Tree maps paths, "." for the root, to nodes.
type Tree map[string]Node

// Compare fails the test for every difference between the trees below a and b:
// names, types, modes, owners, times, devices, links, hard-link groups, extended
// attributes and content.
func Compare(t testing.TB, a, b string) {
	t.Helper()
	CompareTrees(t, ReadTree(t, a), ReadTree(t, b))
}

// CompareTrees fails the test for every difference between a and b.
func CompareTrees(t testing.TB, a, b Tree) {
	t.Helper()
	const most = 20
	diffs := Diff(a, b)
	for _, d := range diffs[:min(len(diffs), most)] {
		t.Error(d)
	}
	if len(diffs) > most {
		t.Errorf("%d more differences", len(diffs)-most)
	}
}

// Diff describes the differences between a and b.
func Diff(a, b Tree) []string {
	var out []string
	for _, path := range slices.Sorted(maps.Keys(a)) {
		y, ok := b[path]
		if !ok {
			out = append(out, fmt.Sprintf("%q: missing in the second tree", path))
			continue
		}
		x := a[path]
		if !maps.Equal(x.Xattrs, y.Xattrs) {
			out = append(out, fmt.Sprintf("%q: extended attributes %.200q, %.200q", path, x.Xattrs, y.Xattrs))
		}
		x.Xattrs, y.Xattrs = nil, nil
		if fmt.Sprint(x) != fmt.Sprint(y) {
			out = append(out, fmt.Sprintf("%q:\n  %.600s\n  %.600s", path, fmt.Sprintf("%+v", x), fmt.Sprintf("%+v", y)))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[path]; !ok {
			out = append(out, fmt.Sprintf("%q: missing in the first tree", path))
		}
	}
	return out
}

// ReadTree reads the tree below dir.
func ReadTree(t testing.TB, dir string) Tree {
	t.Helper()
	tree, first := make(Tree), make(map[[2]uint64]string)
	err := filepath.WalkDir(dir+"/.", func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		n, id, err := readNode(path)
		if err != nil {
			return fmt.Errorf("%q: %w", path, err)
		}
		if n.Nlink > 0 {
			if first[id] == "" {
				first[id] = rel
			}
			n.Same = first[id]
		}
		tree[rel] = n
		return nil
	})
	if err != nil {
		t.Fatalf("read tree %s: %v", dir, err)
	}
	return tree
}

func readNode(path string) (Node, [2]uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return Node{}, [2]uint64{}, err
	}
	n := Node{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Size: st.Size, Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec, Nlink: st.Nlink}
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		n.Size, n.Nlink = 0, 0
	case unix.S_IFLNK:
		n.Link, err = os.Readlink(path)
	case unix.S_IFCHR, unix.S_IFBLK:
		n.Device = fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFREG:
		n.Digest, err = fileDigest(path)
	}
	if err == nil {
		n.Xattrs, err = xattrs(path)
	}
	return n, [2]uint64{st.Dev, st.Ino}, err
}

func fileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return Digest(f)
}

// Digest returns what Node.Digest holds for the content of r: a hash of pieces of
// 64 KiB, of which zero ones are only counted, so that sparse files are quick.
func Digest(r io.Reader) (string, error) {
	h := sha256.New()
	buf := make([]byte, 1<<16)
	for {
		n, err := io.ReadFull(r, buf)
		if n == len(buf) && buf[0] == 0 && bytes.Equal(buf[1:], buf[:n-1]) {
			h.Write([]byte("zeros"))
		} else {
			h.Write(buf[:n])
		}
		switch err {
		case nil:
		case io.EOF, io.ErrUnexpectedEOF:
			return hex.EncodeToString(h.Sum(nil)), nil
		default:
			return "", err
		}
	}
}

func xattrs(path string) (map[string]string, error) {
	if n, err := unix.Llistxattr(path, nil); errors.Is(err, unix.EOPNOTSUPP) || err == nil && n == 0 {
		return nil, nil
	}
	list, value := make([]byte, 1<<16), make([]byte, 1<<16)
	n, err := unix.Llistxattr(path, list)
	if err != nil || n == 0 { // overlay counts attributes that it then hides
		return nil, err
	}
	out := make(map[string]string)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return nil, fmt.Errorf("attribute %q: %w", name, err)
		}
		out[name] = string(value[:n])
	}
	return out, nil
}
