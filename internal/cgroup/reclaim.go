package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// Reclaimed is what a Reclaim came to, in bytes.
type Reclaimed struct {
	Before, After int64
	Swapped       int64 // moved to swap
	CacheDropped  int64 // cached files let go of
	Anonymous     int64 // what stayed of memory that only swap can hold
}

// Reclaim makes the kernel take back the memory of the sandbox, which should be frozen, until hardly anything is left, nothing
// more can be taken, or ctx ends; the end of ctx is no error. No limit is touched on v1; on v2 swap is allowed meanwhile, and
// not any more afterwards, so what was swapped can only come back. Of a caller that is killed Thaw undoes it.
func (g *Group) Reclaim(ctx context.Context) (r Reclaimed, err error) {
	dir, file, v2 := g.reclaimer()
	if file == "" {
		return Reclaimed{}, errs.E(errs.Unsupported, "this node has no memory cgroup controller")
	}
	before, err := g.memory()
	if err != nil {
		return Reclaimed{}, err
	}
	if v2 && g.r.swap {
		if err := (osFS{}).write(dir+"/memory.swap.max", "max"); err != nil {
			return Reclaimed{}, err
		}
		defer func() { err = errors.Join(err, g.closeSwap()) }()
	}
	last := before.usage
	for range maxRounds {
		value := "0"
		if v2 {
			value = strconv.FormatInt(max(last, 4096), 10)
		}
		err = pressed(ctx, path.Join(dir, file), value)
		now, uerr := g.memory()
		if uerr != nil {
			return Reclaimed{}, uerr
		}
		// Dirty files are written out first, which takes a moment: another round gets them.
		done := now.usage < enough || last-now.usage < last/64 && now.cache < enough
		last = now.usage
		// EBUSY and EAGAIN: not everything could be taken. EINTR: ctx has ended.
		if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return Reclaimed{}, err
		}
		if done || sleep(ctx, roundPause) != nil {
			break
		}
	}
	after, err := g.memory()
	return Reclaimed{
		Before: before.usage, After: after.usage, Swapped: max(0, after.swap-before.swap),
		CacheDropped: max(0, before.cache-after.cache), Anonymous: after.anonymous,
	}, err
}

const (
	// enough: what a sandbox of which hardly anything is left still uses (page tables, stacks, sockets).
	enough     = 2 << 20
	maxRounds  = 8
	roundPause = 20 * time.Millisecond
)

// reclaimer is where, and by which file, the kernel is asked to reclaim: memory.reclaim (Linux 5.19, cgroup-v2.rst), or v1's
// memory.force_empty, which does the same up to the last page, swap included, and leaves the limits alone. Both stop early
// when the caller has a signal pending.
func (g *Group) reclaimer() (dir, file string, v2 bool) {
	switch {
	case slices.Contains(g.r.v2, memory):
		return string(g.Paths().Dir), "memory.reclaim", true
	case g.r.v1[memory] != "":
		return path.Join(g.r.v1[memory], g.id), "memory.force_empty", false
	}
	return "", "", false
}

// closeSwap makes the memory limit hold without swap, as plan has it. It does nothing on v1, and without the group.
func (g *Group) closeSwap() error {
	dir, _, v2 := g.reclaimer()
	if !v2 || !g.r.swap {
		return nil
	}
	limit, err := osFS{}.read(path.Join(dir, "memory.max"))
	if gone(err) || err == nil && strings.TrimSpace(limit) == "max" {
		return nil
	}
	return errors.Join(err, Dir(dir).writeIfThere("memory.swap.max", "0"))
}

// account is what memory is used for.
type account struct{ usage, swap, cache, anonymous int64 }

func (g *Group) memory() (account, error) {
	dir, _, v2 := g.reclaimer()
	usage, stat := "memory.usage_in_bytes", "memory.stat"
	if v2 {
		usage = "memory.current"
	}
	n, err := number(path.Join(dir, usage))
	if gone(err) {
		return account{}, errs.E(errs.NotFound, "sandbox %s has no cgroup", g.id)
	}
	if err != nil {
		return account{}, err
	}
	s, err := osFS{}.read(path.Join(dir, stat))
	if err != nil {
		return account{}, err
	}
	if !v2 {
		// v1's cache has shared memory in it, which is swapped and not dropped.
		shmem := field(s, "shmem")
		return account{usage: n, swap: field(s, "swap"), cache: max(0, field(s, "cache")-shmem), anonymous: field(s, "rss") + shmem}, nil
	}
	shmem := field(s, "shmem")
	a := account{usage: n, cache: max(0, field(s, "file")-shmem), anonymous: field(s, "anon") + shmem}
	a.swap, err = number(path.Join(dir, "memory.swap.current"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // no swap accounting
	}
	return a, err
}

// Swapped is how much of the sandbox's memory is in swap.
func (g *Group) Swapped() (int64, error) {
	if _, file, _ := g.reclaimer(); file == "" {
		return 0, nil
	}
	a, err := g.memory()
	return a.swap, err
}

// pressed writes value to a file whose write takes long, and ends it early when ctx ends: by a signal to the writing thread,
// which the kernel looks for between batches of pages. The runtime's own preemption signal is used; it does nothing else here.
func pressed(ctx context.Context, name, value string) error {
	fd, err := unix.Open(name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is buffered
	if err := ctx.Err(); err != nil {
		return unix.EINTR
	}
	thread := make(chan int, 1)
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		_, err := unix.Write(fd, []byte(value))
		result <- err
	}()
	tid := <-thread
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
	}
	for {
		// Between the result and the end of the thread's goroutine the signal does no harm either.
		_ = unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
		select {
		case err := <-result:
			if err == nil {
				return nil // in the last moment
			}
			return unix.EINTR
		case <-time.After(5 * time.Millisecond):
		}
	}
}
