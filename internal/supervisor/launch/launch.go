// Package launch starts a sandbox: from a guestv1.Launch to a PID 1 in its
// namespaces, a zygote that spawns commands, and file workers.
package launch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

const (
	// idRange is how many IDs a sandbox owns.
	idRange = 65536
	// defaultShm is the size of /dev/shm when none is asked for; Docker's.
	defaultShm = 64 << 20
	// closeWithin bounds how long Close waits for killed processes.
	closeWithin = 10 * time.Second
)

// Prepared is a zygote that waits to be told what to start. It holds all of a
// start that needs no knowledge of the sandbox. It launches once.
type Prepared struct {
	image       *zygote.Image
	zyg         *zygote.Zygote
	worker      *os.File
	controllers map[string]string // mount point of a v1 hierarchy → its controllers
	used        bool
}

// Prepare starts a zygote. worker is the program of file workers, run with the argument "files"; nil means the running
// program itself. It should not be readable by others: what is readable inside can be traced from inside.
func Prepare(worker *os.File) (_ *Prepared, err error) {
	p := &Prepared{worker: worker}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if p.worker == nil {
		if p.worker, err = openPath("/proc/self/exe", 0); err != nil {
			return nil, err
		}
	}
	if p.controllers, err = v1Controllers(); err != nil {
		return nil, err
	}
	if p.image, err = zygote.NewImage(); err != nil {
		return nil, err
	}
	if p.zyg, err = p.image.Start(); err != nil {
		return nil, err
	}
	return p, nil
}

// Close releases what was prepared. It does nothing once Launch has succeeded.
func (p *Prepared) Close() error {
	var err error
	if p.used {
		return nil
	}
	p.used = true
	if p.zyg != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeWithin)
		defer cancel()
		err = p.zyg.Close(ctx)
	}
	if p.image != nil {
		err = errors.Join(err, p.image.Close())
	}
	if p.worker != nil {
		err = errors.Join(err, p.worker.Close())
	}
	return err
}

// Sandbox is a sandbox that runs. Close releases it, also when it ended by itself.
type Sandbox struct {
	p       *Prepared
	launch  *guestv1.Launch
	init    *zygote.Init
	initFd  *os.File // pidfd of PID 1
	timings []*harenav1.Timing
	closing sync.Once
	closed  error // what Close returned

	// Root and Devpts are descriptors of "/" and of /dev/pts inside, taken before anything untrusted ran. Root is O_PATH.
	Root, Devpts *os.File
}

// Launch starts the sandbox. Errors: invalid (the image cannot be a root file
// system), unsupported (the node lacks a feature), capacity, internal. On error, Close of p cleans up.
func (p *Prepared) Launch(ctx context.Context, l *guestv1.Launch) (_ *Sandbox, err error) {
	if p.used {
		return nil, errs.E(errs.Precondition, "this supervisor has started a sandbox already")
	}
	s := &Sandbox{p: p, launch: l}
	defer func() {
		if err != nil {
			err = errors.Join(explain(err), s.release())
		}
	}()
	began := time.Now()
	lap := func(step string) {
		now := time.Now()
		s.timings = append(s.timings, &harenav1.Timing{Step: "launch." + step, Micros: now.Sub(began).Microseconds()})
		began = now
	}
	upper := make(chan struct{})
	var upperErr error
	go func() {
		defer close(upper)
		upperErr = prepareUpper(l.GetUpper(), l.GetLowers(), l.GetHostname())
	}()
	// Whatever happens, nothing writes there after this returns.
	defer func() { <-upper }()

	work, err := s.enterCgroups(ctx)
	if err != nil {
		return nil, err
	}
	defer work.Close() //nolint:errcheck // a directory
	lap("cgroups")

	if s.init, err = p.zyg.ForkInit(ctx, work, int(l.GetIdBase())); err != nil {
		return nil, err
	}
	lap("clone")
	base := int(l.GetIdBase())
	userns, err := mapIDs(s.init.Pid(), base)
	if err != nil {
		return nil, err
	}
	defer userns.Close() //nolint:errcheck // a namespace
	lap("id-maps")

	if <-upper; upperErr != nil {
		return nil, upperErr
	}
	lap("upper")
	root, releaseMounts, err := overlay(l.GetLowers(), l.GetUpper(), l.GetWork(), userns, base)
	defer func() { go releaseMounts() }()
	if err != nil {
		return nil, err
	}
	defer func() { go root.Close() }() //nolint:errcheck // attached inside by then
	lap("overlay")

	dev, err := devices(base)
	if err != nil {
		return nil, err
	}
	defer func() { go dev.Close() }() //nolint:errcheck // attached inside by then

	shm := l.GetShmBytes()
	if shm <= 0 {
		shm = defaultShm
	}
	err = s.init.SetUp(ctx, initProgram(initConfig{
		root: root, dev: dev, hostname: l.GetHostname(), shmBytes: shm, controllers: p.visible(l.GetCgroups().GetV1()),
	}))
	if err != nil {
		return nil, fmt.Errorf("set up PID 1: %w", err)
	}
	lap("mounts")

	if err := s.open(); err != nil {
		return nil, err
	}
	if err := p.zyg.Join(ctx, s.init, base, !l.GetFilesOnly()); err != nil {
		return nil, err
	}
	lap("join")
	p.used = true
	return s, nil
}

// enterCgroups puts the zygote into its groups, so that all it forks is in
// the sandbox's, and opens the group that PID 1 is forked into.
func (s *Sandbox) enterCgroups(ctx context.Context) (*os.File, error) {
	c := s.launch.GetCgroups()
	dir := filepath.Dir(c.GetTracking())
	own, err := openPath(filepath.Join(dir, "zygote"), unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("open the zygote's cgroup: %w", err)
	}
	defer own.Close() //nolint:errcheck // a directory
	tasks, closeTasks, err := openTasks(c.GetV1())
	defer closeTasks()
	if err != nil {
		return nil, err
	}
	if err := s.p.zyg.Move(ctx, own, tasks); err != nil {
		return nil, fmt.Errorf("put the zygote into its cgroups: %w", err)
	}
	// clone3 into a command's group asks for the right to write cgroup.procs there and in the common
	// ancestor with the zygote's group (cgroup_procs_write_permission). It ends there: above, everything is the node's.
	owner := int(s.launch.GetIdBase())
	if err := os.Lchown(filepath.Join(dir, "cgroup.procs"), owner, owner); err != nil {
		return nil, fmt.Errorf("delegate cgroup: %w", err)
	}
	return openPath(c.GetTracking(), unix.O_DIRECTORY)
}

// openTasks opens the files by which a thread joins v1 groups.
func openTasks(groups []string) (files []*os.File, release func(), err error) {
	release = func() {
		for _, f := range files {
			_ = f.Close()
		}
	}
	for _, g := range groups {
		f, err := os.OpenFile(filepath.Join(g, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			return files, release, fmt.Errorf("open cgroup: %w", err)
		}
		files = append(files, f)
	}
	return files, release, nil
}

// mapIDs writes the ID maps of a new user namespace and returns it.
func mapIDs(pid, base int) (*os.File, error) {
	line := []byte(fmt.Sprintf("0 %d %d\n", base, idRange))
	for _, name := range []string{"uid_map", "gid_map"} {
		f, err := os.OpenFile(fmt.Sprintf("/proc/%d/%s", pid, name), os.O_WRONLY, 0)
		if err != nil {
			return nil, fmt.Errorf("map IDs: %w", err)
		}
		_, err = f.Write(line)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("map IDs: %w", err)
		}
	}
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
}

// open takes the descriptors that are needed later, while nothing untrusted runs yet.
func (s *Sandbox) open() (err error) {
	fd, err := unix.PidfdOpen(s.init.Pid(), 0)
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	s.initFd = os.NewFile(uintptr(fd), "init")
	if s.Root, err = openPath(fmt.Sprintf("/proc/%d/root", s.init.Pid()), unix.O_DIRECTORY); err != nil {
		return err
	}
	fd, err = unix.Openat(int(s.Root.Fd()), "dev/pts", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/pts of the sandbox: %w", err)
	}
	s.Devpts = os.NewFile(uintptr(fd), "pts")
	return nil
}

// Spawner starts commands. For a sandbox of files only it refuses.
func (s *Sandbox) Spawner() zygote.Spawner { return s.p.zyg }

// InitPid is the process ID of PID 1 on the node.
func (s *Sandbox) InitPid() int { return s.init.Pid() }

// ZygotePid is the zygote's process ID on the node.
func (s *Sandbox) ZygotePid() int { return s.p.zyg.Pid() }

// Done is closed when the sandbox has ended.
func (s *Sandbox) Done() <-chan struct{} { return s.p.zyg.Done() }

// Reason says why, once Done is closed.
func (s *Sandbox) Reason() string { return s.p.zyg.Reason() }

// Timings are the steps of the launch.
func (s *Sandbox) Timings() []*harenav1.Timing { return s.timings }

// Close kills every process of the sandbox, waits for their end, and releases what it holds. It may be called again.
func (s *Sandbox) Close() error {
	s.closing.Do(func() {
		p := s.p
		ctx, cancel := context.WithTimeout(context.Background(), closeWithin)
		defer cancel()
		s.closed = errors.Join(p.zyg.Close(ctx), s.release(), p.image.Close(), p.worker.Close())
	})
	return s.closed
}

// release kills what is in the sandbox's groups and closes descriptors. Until PID 1 is dead the zygote reaps.
func (s *Sandbox) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeWithin)
	defer cancel()
	c := s.launch.GetCgroups()
	var err error
	for _, d := range []string{c.GetTracking(), c.GetFilesTracking()} {
		if d == "" {
			continue
		}
		err = errors.Join(err, cgroup.Dir(d).Kill(), cgroup.Dir(d).WaitEmpty(ctx))
	}
	for _, f := range []*os.File{s.initFd, s.Root, s.Devpts} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// explain gives errors of the kernel the kind that they mean for a start.
func explain(err error) error {
	var e *errs.Error
	if errors.As(err, &e) {
		return err
	}
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return errs.E(errs.Capacity, "the node cannot start another sandbox: %w", err)
	case errors.Is(err, unix.ENOSPC):
		// user_namespaces(7): also the limits in /proc/sys/user.
		return errs.E(errs.Capacity, "the node cannot start another sandbox: %w", err).
			WithHint("the disk is full, or a limit in /proc/sys/user is reached; `harena doctor` tells which")
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return errs.E(errs.Invalid, "the image cannot be a root file system: %w", err).
			WithHint("proc, sys and dev must be directories, not symbolic links")
	}
	return err
}

// v1Controllers finds the mounted cgroup v1 hierarchies.
func v1Controllers() (map[string]string, error) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 4 || f[2] != "cgroup" {
			continue
		}
		var names []string
		for _, o := range strings.Split(f[3], ",") {
			switch o {
			case "cpu", "cpuacct", "memory", "pids", "cpuset", "blkio", "devices", "freezer", "hugetlb":
				names = append(names, o)
			}
		}
		if len(names) > 0 {
			out[f[1]] = strings.Join(names, ",")
		}
	}
	return out, nil
}

// visible names the hierarchies of the sandbox's v1 groups.
func (p *Prepared) visible(groups []string) []string {
	var out []string
	for _, g := range groups {
		for mount, controllers := range p.controllers {
			if strings.HasPrefix(g, mount+"/") {
				out = append(out, controllers)
			}
		}
	}
	return out
}

func openPath(name string, flags int) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_PATH|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func appendUint64(b []byte, v uint64) []byte { return binary.NativeEndian.AppendUint64(b, v) }
