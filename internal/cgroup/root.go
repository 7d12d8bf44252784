package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Root is one edge's part of the node's hierarchies. It holds no state that
// is not on the node: any process that opens it with the same name sees the same groups.
type Root struct {
	fs      filesystem
	dir     string            // <cgroup2 base>/<name>
	v2      []string          // controllers limited through v2
	v1      map[string]string // controller → <v1 mount>/<name>
	missing []string
	swap    bool // memory.swap.max, or memory.memsw.limit_in_bytes, exists
	sockets bool // v1's memory.kmem.tcp.limit_in_bytes exists
}

// Open makes, or finds, the groups of the edge called name (such as
// "harena-abc123"). It needs root. Errors: unsupported.
func Open(name string) (*Root, error) {
	l, err := probe()
	if err != nil {
		return nil, err
	}
	if len(l.Bases) == 0 {
		if err := mountPrivate(); err != nil {
			return nil, err
		}
		l.Bases = []string{PrivateMount}
	}
	if err := favorMoves(l.Bases[0], l.Options); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("tune cgroup2: %w", err)
	}
	return open(osFS{}, l, name)
}

// favorMoves makes the kernel expect that processes are moved between groups,
// which every start of a sandbox does. Without it the first move for a while
// waits for an RCU grace period, about 8 ms; with it forks on the node cost
// slightly more, since Linux 6.18 hardly anything (cgroup-v2.rst, favordynmods).
// Kernels before 6.0 do not have it (EINVAL), and in a cgroup namespace it is not ours to set.
func favorMoves(mount string, options []string) error {
	const option = "favordynmods"
	if slices.Contains(options, option) {
		return nil
	}
	fd, err := unix.Fspick(unix.AT_FDCWD, mount, unix.FSPICK_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// A reconfiguration sets all options, so those that are there are given again.
	for _, o := range append(options, option) {
		if o == "seclabel" {
			continue // shown by SELinux, not an option
		}
		if err := unix.FsconfigSetFlag(fd, o); err != nil {
			return fmt.Errorf("option %s: %w", o, err)
		}
	}
	return unix.FsconfigReconfigure(fd)
}

func probe() (Layout, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Layout{}, fmt.Errorf("find cgroup hierarchies: %w", err)
	}
	self, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Layout{}, fmt.Errorf("find cgroup hierarchies: %w", err)
	}
	return parseLayout(string(mounts), string(self)), nil
}

func mountPrivate() error {
	if err := os.MkdirAll(PrivateMount, 0o700); err != nil {
		return fmt.Errorf("make mount point of cgroup2: %w", err)
	}
	if err := unix.Mount("cgroup2", PrivateMount, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return errs.E(errs.Unsupported, "no cgroup2 hierarchy is mounted, and mounting one failed: %w", err).
			WithHint("run as root outside a restricted container, on Linux 5.14 or newer")
	}
	return nil
}

// open tries the bases in turn.
func open(fs filesystem, l Layout, name string) (*Root, error) {
	var all error
	for _, base := range l.Bases {
		r, err := openAt(fs, l, base, name)
		if err == nil {
			return r, nil
		}
		all = errors.Join(all, fmt.Errorf("in %s: %w", base, err))
	}
	return nil, errs.E(errs.Unsupported, "no usable cgroup2 hierarchy: %w", all).
		WithHint("run as root, with a writable cgroup2 mount or a delegated subtree (systemd: Delegate=yes)")
}

func openAt(fs filesystem, l Layout, base, name string) (*Root, error) {
	controllers, err := fs.read(base + "/cgroup.controllers")
	if err != nil {
		return nil, err
	}
	v2, v1, missing := l.split(controllers)
	r := &Root{fs: fs, dir: path.Join(base, name), v2: v2, v1: map[string]string{}, missing: missing}
	if err := enable(fs, base, v2); err != nil {
		return nil, err
	}
	for _, dir := range []string{r.dir, r.Control()} {
		if err := fs.mkdir(dir); err != nil {
			return nil, err
		}
		if dir == r.dir {
			if err := enable(fs, dir, v2); err != nil {
				return nil, err
			}
		}
	}
	// cgroup.kill came last of all that is needed here (5.14).
	if _, err := fs.read(r.Control() + "/cgroup.events"); err != nil {
		return nil, err
	}
	for c, mount := range v1 {
		r.v1[c] = path.Join(mount, name)
		if err := fs.mkdir(r.v1[c]); err != nil {
			return nil, err
		}
	}
	switch {
	case slices.Contains(v2, memory):
		_, err = fs.read(r.Control() + "/memory.swap.max")
		r.swap = err == nil
	case r.v1[memory] != "":
		_, err = fs.read(r.v1[memory] + "/memory.memsw.limit_in_bytes")
		r.swap = err == nil
		_, err = fs.read(r.v1[memory] + "/" + socketLimit)
		r.sockets = err == nil
	}
	return r, nil
}

// enable makes controllers usable by the children of dir. A group that is not
// the hierarchy's real root may not have processes of its own then ("no
// internal processes", cgroup-v2.rst); where it has (the root of a container,
// a delegated unit) they move to a leaf beside ours, as container engines in
// containers do.
func enable(fs filesystem, dir string, controllers []string) error {
	on, err := fs.read(dir + "/cgroup.subtree_control")
	if err != nil {
		return err
	}
	var want []string
	for _, c := range controllers {
		if !slices.Contains(strings.Fields(on), c) {
			want = append(want, "+"+c)
		}
	}
	if len(want) == 0 {
		return nil
	}
	value := strings.Join(want, " ")
	err = fs.write(dir+"/cgroup.subtree_control", value)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	leaf := dir + "/harena-init"
	if err := fs.mkdir(leaf); err != nil {
		return err
	}
	// Processes fork meanwhile: a few rounds.
	for range 10 {
		procs, rerr := fs.read(dir + "/cgroup.procs")
		if rerr != nil {
			return rerr
		}
		for _, pid := range strings.Fields(procs) {
			if werr := fs.write(leaf+"/cgroup.procs", pid); werr != nil && !errors.Is(werr, unix.ESRCH) {
				return werr
			}
		}
		if err = fs.write(dir+"/cgroup.subtree_control", value); !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return err
}

// Service is the group of a process that serves all sandboxes. It is no child of theirs, so nothing that a sandbox
// does to its own group reaches it, and so much of its memory is not reclaimed for others, where the kernel can
// promise that (v2's memory.min, which the parent has to promise as well).
func (r *Root) Service(keep int64) (string, error) {
	dir := path.Join(r.dir, service)
	if err := r.fs.mkdir(dir); err != nil {
		return "", err
	}
	if slices.Contains(r.v2, memory) {
		for _, d := range []string{r.dir, dir} {
			// Not permitted in a subtree that was delegated without it: the service works all the same.
			if err := r.fs.write(d+"/memory.min", strconv.FormatInt(keep, 10)); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) && !gone(err) {
				return "", fmt.Errorf("keep memory of %s: %w", dir, err)
			}
		}
	}
	return dir, nil
}

// service is the name of the group of Service; no sandbox has it.
const service = "blobd"

// Control is the group of the supervisors.
func (r *Root) Control() string { return r.dir + "/control" }

// Dir is the edge's own group on the cgroup2 hierarchy.
func (r *Root) Dir() string { return r.dir }

// Missing lists controllers that the node does not have.
func (r *Root) Missing() []string { return r.missing }

// Describe says in one line what is used.
func (r *Root) Describe() string {
	s := "tracking in " + r.dir
	if len(r.v2) > 0 {
		s += "; v2: " + strings.Join(r.v2, " ")
	}
	for _, c := range wanted {
		if dir := r.v1[c]; dir != "" {
			s += "; v1: " + dir
		}
	}
	if len(r.missing) > 0 {
		s += "; missing: " + strings.Join(r.missing, " ")
	}
	if !r.swap {
		s += "; swap not limited"
	}
	return s
}

// SwapLimited reports whether memory limits cover swap.
func (r *Root) SwapLimited() bool { return r.swap }

// Group is the sandbox called id. It has no effect.
func (r *Root) Group(id string) *Group { return &Group{r: r, id: id} }

// Groups lists the IDs that have a group on any hierarchy.
func (r *Root) Groups() ([]string, error) {
	var ids []string
	for _, dir := range r.roots() {
		names, err := Dir(dir).Children()
		if err != nil {
			return nil, err
		}
		ids = append(ids, names...)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	return slices.DeleteFunc(ids, func(n string) bool { return n == path.Base(r.Control()) || n == service }), nil
}

func (r *Root) roots() []string {
	dirs := []string{r.dir}
	for _, c := range wanted {
		if r.v1[c] != "" {
			dirs = append(dirs, r.v1[c])
		}
	}
	return dirs
}

// Remove removes the edge's groups when nothing is in them.
func (r *Root) Remove(ctx context.Context) error {
	err := errors.Join(Dir(r.Control()).Remove(ctx), Dir(path.Join(r.dir, service)).Remove(ctx))
	if err != nil {
		return err
	}
	for _, dir := range r.roots() {
		err = errors.Join(err, r.fs.rmdir(dir))
	}
	return err
}

// removeGrace bounds how long Group.Create's own clean-up waits.
const removeGrace = 2 * time.Second
