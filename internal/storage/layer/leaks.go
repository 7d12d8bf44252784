package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Leak is a mount or directory below DIR/mounts that belongs to nothing.
type Leak struct {
	Kind    string // mount or directory
	Name    string // its path
	Release func() error
}

// scanned is what lies below DIR/mounts.
type scanned struct {
	layers map[Digest]int // how often each is mounted, one over the other
	other  []string       // mount points that are no layers'
}

func (m *Mounts) scan() (scanned, error) {
	s := scanned{layers: make(map[Digest]int)}
	below, err := mountsBelow(m.dir)
	if err != nil {
		return s, err
	}
	for _, mnt := range below {
		name := strings.TrimPrefix(strings.TrimPrefix(mnt.point, m.dir), "/")
		switch {
		case name == "": // the private mount itself
		case mnt.fstype == "erofs" && hexPattern.MatchString(name):
			s.layers[Digest(digestPrefix+name)]++
		default:
			s.other = append(s.other, mnt.point)
		}
	}
	return s, nil
}

// Leaks lists what is below DIR/mounts and belongs to nothing: mounts of layers
// that the store does not have, second mounts of a layer, mounts that are no
// layers, and empty directories. Idle mounts are kept on purpose and are none.
func (m *Mounts) Leaks() ([]Leak, error) {
	found, err := m.scan()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	known := make(map[Digest]bool, len(m.entries))
	for d := range m.entries {
		known[d] = true
	}
	m.mu.Unlock()
	var leaks []Leak
	add := func(kind, path string, release func() error) {
		leaks = append(leaks, Leak{Kind: kind, Name: path, Release: release})
	}
	for d, n := range found.layers {
		path := m.path(d)
		if n > 1 {
			add("mount", path, func() error { return unmountTop(path) })
		}
		_, err := m.store.Load(d)
		switch {
		case err != nil && known[d]:
			add("mount", path, func() error { return m.unmountOne(d) })
		case !known[d]:
			add("mount", path, func() error { return detach(path) })
		}
	}
	for _, point := range found.other {
		add("mount", point, func() error { return unmountTop(point) })
	}
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		d := Digest(digestPrefix + e.Name())
		path := filepath.Join(m.dir, e.Name())
		if found.layers[d] > 0 || known[d] || isIn(found.other, path) {
			continue
		}
		add("directory", path, func() error { return os.Remove(path) })
	}
	return leaks, nil
}

func isIn(points []string, path string) bool {
	for _, p := range points {
		if p == path || strings.HasPrefix(p, path+"/") {
			return true
		}
	}
	return false
}

func unmountTop(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}
