package container

import (
	"context"
	"fmt"
	"time"

	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/sandbox"
)

// freezeTimeout bounds Freeze whatever the caller's patience: runnable processes stop within milliseconds.
const freezeTimeout = 5 * time.Second

// Freeze implements backend.Backend.
func (b *Backend) Freeze(ctx context.Context, id sandbox.ID) error {
	group, err := b.group(id)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	if err := b.step(ctx, "freeze"); err != nil {
		return err
	}
	return group.Freeze(ctx)
}

// Thaw implements backend.Backend.
func (b *Backend) Thaw(_ context.Context, id sandbox.ID) error {
	group, err := b.group(id)
	if err != nil {
		return err
	}
	if err := b.fault("thaw"); err != nil {
		return err
	}
	if err := group.Thaw(); err != nil {
		return fmt.Errorf("thaw sandbox %s: %w", id, err)
	}
	return nil
}

// group is the sandbox's, once its ID is known to be one.
func (b *Backend) group(id sandbox.ID) (*cgroup.Group, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return nil, err // a name such as "control" must not become a path
	}
	return b.cgroups.Group(string(id)), nil
}

// Reclaim implements backend.Backend.
func (b *Backend) Reclaim(ctx context.Context, id sandbox.ID) (backend.Reclaimed, error) {
	group, err := b.group(id)
	if err != nil {
		return backend.Reclaimed{}, err
	}
	if err := b.fault("reclaim"); err != nil {
		return backend.Reclaimed{}, err
	}
	r, err := group.Reclaim(ctx)
	return backend.Reclaimed{Before: r.Before, After: r.After, Swapped: r.Swapped, CacheDropped: r.CacheDropped, Anonymous: r.Anonymous}, err
}
