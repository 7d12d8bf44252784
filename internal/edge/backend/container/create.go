package container

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

// shmBytes is the size of /dev/shm, as Docker has it.
const shmBytes = 64 << 20

// hostnameLen is how much of the ID is the host name when none is asked for.
const hostnameLen = 12

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, c backend.Config) (_ []*harenav1.Timing, err error) {
	ctx, cancel := context.WithTimeout(ctx, launchTimeout)
	defer cancel()
	defer b.pool.used()

	b.mu.Lock()
	known := b.boxes[c.ID] != nil
	b.mu.Unlock()
	if known {
		return nil, errs.E(errs.Exists, "sandbox %s exists already", c.ID)
	}
	var (
		proc *process
		made bool // the cgroups
	)
	defer func() {
		if err == nil {
			return
		}
		err = causeOf(ctx, err)
		// The caller's patience may be over; what was made has to go all the same.
		dctx, dcancel := context.WithTimeout(context.WithoutCancel(ctx), destroyTimeout)
		defer dcancel()
		switch {
		case proc != nil:
			err = errors.Join(err, b.destroy(dctx, c.ID, proc))
			b.pool.keep(proc)
		case made:
			err = errors.Join(err, b.cgroups.Group(string(c.ID)).Remove(dctx))
		}
	}()
	clock := stopwatch{last: time.Now()}

	if err := b.step(ctx, "cgroup"); err != nil {
		return nil, err
	}
	limits := c.Spec.GetLimits()
	paths, err := b.cgroups.Group(string(c.ID)).Create(cgroup.Limits{
		CPU: limits.GetCpu(), Memory: limits.GetMemory(), Pids: limits.GetPids(),
	})
	if err != nil {
		return nil, err
	}
	made = true
	clock.lap("cgroup")

	if err := b.step(ctx, "supervisor"); err != nil {
		return nil, err
	}
	if proc, err = b.pool.take(ctx); err != nil {
		return nil, err
	}
	clock.lap("pool")

	// From here on the end of ctx makes channel operations fail at once.
	stop := context.AfterFunc(ctx, func() { _ = proc.channel.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := b.step(ctx, "send"); err != nil {
		return nil, err
	}
	if err := claim.Write(proc.channel, launchMessage(c, paths)); err != nil {
		return nil, fmt.Errorf("claim a supervisor: %w", err)
	}
	if err := b.step(ctx, "answer"); err != nil {
		return nil, err
	}
	var result guestv1.LaunchResult
	if err := claim.Read(proc.channel, &result); err != nil {
		return nil, fmt.Errorf("the supervisor ended without an answer (its log is %s): %w", filepath.Join(c.Dir, claim.Log), err)
	}
	if result.GetError() != "" {
		return nil, launchError(result.GetError())
	}
	clock.lap("launch")
	if err := b.step(ctx, "adopt"); err != nil {
		return nil, err
	}
	proc.channel.Close()
	b.adopt(c.ID, c.Dir, proc, false)
	b.pool.keep(proc)
	return append(clock.timings, result.GetTimings()...), nil
}

// step is a point where Create may end early.
func (b *Backend) step(ctx context.Context, name string) error {
	if err := b.fault(name); err != nil {
		return err
	}
	return ctx.Err()
}

// causeOf returns ctx's error with err's text when the end of ctx is why err happened.
func causeOf(ctx context.Context, err error) error {
	cerr := ctx.Err()
	if cerr == nil || errors.Is(err, cerr) {
		return err
	}
	kind := errs.KindOf(cerr)
	return errs.E(kind, "the start was ended: %w", errors.Join(cerr, err))
}

// launchMessage is what a supervisor is told.
func launchMessage(c backend.Config, p cgroup.Paths) *guestv1.Launch {
	hostname := c.Spec.GetHostname()
	if hostname == "" {
		hostname = string(c.ID[:hostnameLen])
	}
	lowers := slices.Clone(c.Lowers)
	slices.Reverse(lowers) // overlayfs has the uppermost first
	return &guestv1.Launch{
		SandboxId: string(c.ID),
		Dir:       c.Dir,
		Lowers:    lowers,
		Upper:     filepath.Join(c.Dir, "upper", "data"),
		Work:      filepath.Join(c.Dir, "upper", "work"),
		IdBase:    c.IDBase,
		Hostname:  hostname,
		Process:   c.Spec.GetProcess(),
		Socket:    filepath.Join(c.Dir, claim.Socket),
		FilesOnly: c.FilesOnly,
		ShmBytes:  shmBytes,
		Spec:      c.Spec,
		Cgroups: &guestv1.Cgroups{
			Tracking:      string(p.Work),
			V1:            p.V1,
			FilesTracking: string(p.Files),
			FilesV1:       p.FilesV1,
		},
	}
}

// launchError is the error that a supervisor told; see its text function.
func launchError(s string) error {
	kind, msg, ok := strings.Cut(s, ": ")
	switch k := errs.Kind(kind); k {
	case errs.Invalid, errs.Capacity, errs.Precondition, errs.Timeout, errs.Unsupported, errs.Denied, errs.Cancelled:
		if ok {
			return errs.E(k, "start the sandbox: %s", msg)
		}
	case errs.Internal:
		s = msg
	}
	return errs.E(errs.Internal, "start the sandbox: %s", s)
}

type stopwatch struct {
	last    time.Time
	timings []*harenav1.Timing
}

func (s *stopwatch) lap(step string) {
	now := time.Now()
	s.timings = append(s.timings, &harenav1.Timing{Step: "container." + step, Micros: now.Sub(s.last).Microseconds()})
	s.last = now
}
