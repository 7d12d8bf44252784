package cgroup

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// model is a cgroup2 hierarchy as cgroup-v2.rst describes it, as far as this package uses it: controllers come from the
// parent's subtree_control, a group other than the real root has either processes or controllers for its children, and
// files exist only for controllers.
type model struct {
	mount  string
	real   bool // mount is the hierarchy's real root
	swap   bool
	denied map[string]bool // directories below which nothing can be made
	groups map[string]*modelGroup
	log    []string // effects, in order
}

type modelGroup struct {
	controllers, subtree []string
	procs                []string
	files                map[string]string
}

func newModel(mount string, real bool, controllers ...string) *model {
	m := &model{mount: mount, real: real, swap: true, denied: map[string]bool{}, groups: map[string]*modelGroup{}}
	m.groups[mount] = &modelGroup{controllers: controllers, files: map[string]string{}}
	return m
}

func (m *model) group(name string) (*modelGroup, string, error) {
	dir, file := path.Split(name)
	g := m.groups[strings.TrimSuffix(dir, "/")]
	if g == nil {
		return nil, "", &fs.PathError{Op: "open", Path: name, Err: unix.ENOENT}
	}
	return g, file, nil
}

func (m *model) read(name string) (string, error) {
	g, file, err := m.group(name)
	if err != nil {
		return "", err
	}
	switch file {
	case "cgroup.controllers":
		return strings.Join(g.controllers, " ") + "\n", nil
	case "cgroup.subtree_control":
		return strings.Join(g.subtree, " ") + "\n", nil
	case "cgroup.procs":
		return strings.Join(g.procs, "\n"), nil
	case "cgroup.events":
		return "populated 0\nfrozen 0\n", nil
	}
	if !m.exists(g, file) {
		return "", &fs.PathError{Op: "open", Path: name, Err: unix.ENOENT}
	}
	return g.files[file], nil
}

func (m *model) isRealRoot(g *modelGroup) bool { return m.real && g == m.groups[m.mount] }

func (m *model) exists(g *modelGroup, file string) bool {
	c, _, _ := strings.Cut(file, ".")
	if file == "memory.swap.max" && !m.swap || g == m.groups[m.mount] {
		return false
	}
	return slices.Contains(g.controllers, c)
}

func (m *model) write(name, value string) error {
	g, file, err := m.group(name)
	if err != nil {
		return err
	}
	fail := func(e unix.Errno) error { return &fs.PathError{Op: "write", Path: name, Err: e} }
	switch file {
	case "cgroup.subtree_control":
		if len(g.procs) > 0 && !m.isRealRoot(g) {
			return fail(unix.EBUSY)
		}
		for _, c := range strings.Fields(value) {
			c = strings.TrimPrefix(c, "+")
			if !slices.Contains(g.controllers, c) {
				return fail(unix.ENOENT)
			}
			if !slices.Contains(g.subtree, c) {
				g.subtree = append(g.subtree, c)
			}
		}
		dir := path.Dir(name)
		for name, child := range m.groups {
			if path.Dir(name) == dir {
				child.controllers = slices.Clone(g.subtree)
			}
		}
	case "cgroup.procs":
		if len(g.subtree) > 0 && !m.isRealRoot(g) {
			return fail(unix.EBUSY)
		}
		for _, other := range m.groups {
			other.procs = slices.DeleteFunc(other.procs, func(p string) bool { return p == value })
		}
		g.procs = append(g.procs, value)
	default:
		if !m.exists(g, file) {
			return fail(unix.ENOENT)
		}
		g.files[file] = value
	}
	m.log = append(m.log, fmt.Sprintf("%s = %s", strings.TrimPrefix(name, m.mount+"/"), value))
	return nil
}

func (m *model) mkdir(dir string) error {
	if m.groups[dir] != nil {
		return nil
	}
	parent := m.groups[path.Dir(dir)]
	if parent == nil {
		return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOENT}
	}
	if m.denied[path.Dir(dir)] {
		return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.EACCES}
	}
	m.groups[dir] = &modelGroup{controllers: slices.Clone(parent.subtree), files: map[string]string{}}
	m.log = append(m.log, "mkdir "+strings.TrimPrefix(dir, m.mount+"/"))
	return nil
}

func (m *model) rmdir(dir string) error {
	delete(m.groups, dir)
	return nil
}

func (m *model) dirs(dir string) ([]string, error) {
	var out []string
	for name := range m.groups {
		if path.Dir(name) == dir {
			out = append(out, path.Base(name))
		}
	}
	slices.Sort(out)
	return out, nil
}
