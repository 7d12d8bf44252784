package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// Probe says where to try what starts of sandboxes depend on.
type Probe struct {
	// Dir is a directory on the file system of the writable layers.
	Dir string
	// Layer is the mount of a layer; "" when there is none yet.
	Layer string
	// Group is a cgroup2 directory in which a child may be made; "" when there is none.
	Group string
	// IDBase is the first of 65,536 host IDs to use.
	IDBase int
}

// Statuses of checks.
const (
	statusOK          = "ok"
	statusDegraded    = "degraded"
	statusUnsupported = "unsupported"
	statusUnverified  = "unverified"
	statusFailed      = "failed"
)

// Checks tries each feature of the node that starts depend on, for real, and cleans up.
func Checks(p Probe) []*harenav1.Check {
	out := []*harenav1.Check{namespaceLimits(), seccompCheck(), pidnsCheck(), sharedLimits("/proc/sys")}
	image, err := zygote.NewImage()
	if err != nil {
		return append(out, verdict("sandbox.zygote", err, ""))
	}
	defer image.Close() //nolint:errcheck // in memory
	userns, release, err := image.UserNamespace(p.IDBase, idRange)
	out = append(out, verdict("sandbox.userns", err, "user namespaces can be made and mapped"))
	if err == nil {
		defer release()
		out = append(out, overlayCheck("overlay.idmap", p, userns, nil))
		if p.Layer == "" {
			out = append(out, &harenav1.Check{Name: "overlay.layer", Status: statusUnverified, Detail: "no layer is mounted yet"})
		} else {
			out = append(out, overlayCheck("overlay.layer", p, userns, []string{p.Layer}))
		}
	}
	return append(out, cgroupCheck(p.Group, image))
}

// verdict turns the outcome of a trial into a check.
func verdict(name string, err error, ok string) *harenav1.Check {
	if err == nil {
		return &harenav1.Check{Name: name, Status: statusOK, Detail: ok}
	}
	c := &harenav1.Check{Name: name, Status: statusFailed, Detail: err.Error()}
	var e *errs.Error
	if errors.As(err, &e) {
		c.Hint = e.Hint
		if e.Kind == errs.Unsupported {
			c.Status = statusUnsupported
		}
	}
	return c
}

// namespaceLimits: whether the limits of user_namespaces(7) let a sandbox have its namespaces. They count by owner, and every
// sandbox's are owned by its own host ID.
func namespaceLimits() *harenav1.Check {
	const want = 4 // at a time, while one is made
	c := &harenav1.Check{Name: "sandbox.namespace-limits", Status: statusOK, Detail: "each kind of namespace may be made"}
	for _, kind := range []string{"user", "pid", "mnt", "net", "ipc", "uts", "cgroup"} {
		name := "/proc/sys/user/max_" + kind + "_namespaces"
		b, err := os.ReadFile(name)
		if err != nil {
			return verdict(c.Name, err, "")
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			return verdict(c.Name, err, "")
		}
		if n < want {
			c.Status, c.Detail, c.Hint = statusUnsupported, fmt.Sprintf("%s is %d", name, n), fmt.Sprintf("set it to %d or more", want)
			return c
		}
	}
	return c
}

// sharedLimits: what the kernel counts for the whole node and gives no sandbox a share of, one sandbox can use up.
func sharedLimits(sysctls string) *harenav1.Check {
	c := &harenav1.Check{Name: "node.shared-limits", Status: statusOK, Detail: "limits of the whole node are above what a sandbox can use up cheaply"}
	for _, l := range []struct {
		name  string
		least int
	}{
		{"fs/aio-max-nr", 1 << 24}, // requests of io_setup(2): 70 bytes each, 1.1 GiB of a memory limit
		{"fs/file-max", 1 << 23},   // 250 bytes each, 2 GiB
		{"kernel/pty/max", 4096},   // a sandbox has at most 256
	} {
		b, err := os.ReadFile(filepath.Join(sysctls, l.name))
		if errors.Is(err, os.ErrNotExist) {
			continue // not in this kernel
		}
		if err != nil {
			return verdict(c.Name, err, "")
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return verdict(c.Name, err, "")
		}
		if n < uint64(l.least) {
			c.Status, c.Detail = statusDegraded, fmt.Sprintf("one sandbox can use up %s for the whole node: it is %d", strings.ReplaceAll(l.name, "/", "."), n)
			c.Hint = fmt.Sprintf("sysctl -w %s=%d, or more", strings.ReplaceAll(l.name, "/", "."), l.least)
			return c
		}
	}
	return c
}

func seccompCheck() *harenav1.Check {
	b, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err == nil && !bytes.Contains(b, []byte("errno")) {
		err = fmt.Errorf("actions are %q", b)
	}
	if err != nil {
		return &harenav1.Check{Name: "sandbox.seccomp", Status: statusUnsupported, Detail: err.Error(), Hint: "use a kernel with CONFIG_SECCOMP_FILTER"}
	}
	return &harenav1.Check{Name: "sandbox.seccomp", Status: statusOK, Detail: "system call filters can be installed"}
}

// pidnsCheck: nothing depends on the option; it tells which way procfs could be made on a node that covers parts of its own.
func pidnsCheck() *harenav1.Check {
	err := func() error {
		fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return err
		}
		defer unix.Close(fs) //nolint:errcheck // never mounted
		ns, err := os.Open("/proc/self/ns/pid")
		if err != nil {
			return err
		}
		defer ns.Close() //nolint:errcheck // a namespace
		return unix.FsconfigSetFd(fs, "pidns", int(ns.Fd()))
	}()
	if err != nil {
		return &harenav1.Check{Name: "procfs.pidns", Status: statusUnsupported, Detail: "not needed: " + err.Error(), Hint: "Linux 6.17 has it"}
	}
	return &harenav1.Check{Name: "procfs.pidns", Status: statusOK, Detail: "procfs takes a pid namespace"}
}

// overlayCheck mounts a root file system as a start does, writes to it, and looks at the disk.
func overlayCheck(name string, p Probe, userns *os.File, lowers []string) *harenav1.Check {
	return verdict(name, tryOverlay(p, userns, lowers), "root file systems with mapped IDs work, canonical IDs on disk")
}

func tryOverlay(p Probe, userns *os.File, lowers []string) (err error) {
	dir, err := os.MkdirTemp(p.Dir, ".probe-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, d := range []string{"lower/x", "upper/data", "upper/work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	if lowers == nil {
		lowers = []string{filepath.Join(dir, "lower")}
	}
	root, release, err := overlay(lowers, filepath.Join(dir, "upper/data"), filepath.Join(dir, "upper/work"), userns, p.IDBase)
	defer release()
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // a mount
	const made = ".harena-probe"
	if err := asOwner(p.IDBase, func() error { return unix.Mkdirat(int(root.Fd()), made, 0o700) }); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "upper/data", made), &st); err != nil {
		return err
	}
	if st.Uid != 0 || st.Gid != 0 {
		return fmt.Errorf("what the sandbox's root makes belongs to %d:%d on disk", st.Uid, st.Gid)
	}
	return nil
}

// cgroupCheck starts a process in a new group and kills it by the group.
func cgroupCheck(group string, image *zygote.Image) *harenav1.Check {
	const name = "cgroup.start-and-kill"
	if group == "" {
		return &harenav1.Check{Name: name, Status: statusUnverified, Detail: "no cgroup2 directory was given"}
	}
	return verdict(name, tryCgroup(filepath.Join(group, fmt.Sprintf("probe-%d", os.Getpid())), image), "processes start in a group (clone3) and die by it (cgroup.kill)")
}

func tryCgroup(dir string, image *zygote.Image) (err error) {
	d := cgroup.Dir(dir)
	if err := d.Make(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	defer func() { err = errors.Join(err, d.Remove(ctx)) }()
	g, err := openPath(dir, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer g.Close() //nolint:errcheck // a directory
	z, err := image.Start()
	if err != nil {
		return err
	}
	defer z.Close(ctx) //nolint:errcheck // it is dead, or Remove says what is left
	if err := z.Move(ctx, g, nil); err != nil {
		return errs.E(errs.Unsupported, "start in a cgroup: %w", err).WithHint("Linux 5.7 or newer is needed, and a writable cgroup2 hierarchy")
	}
	if err := d.Kill(); err != nil {
		return err
	}
	select {
	case <-z.Exited():
		return nil
	case <-ctx.Done():
		return errs.E(errs.Unsupported, "cgroup.kill did not kill a process").WithHint("Linux 5.14 or newer is needed")
	}
}
