package main

import (
	"context"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// nodeLayers gives the life cycle what it needs of the layer store.
type nodeLayers struct {
	store  *layer.Store
	mounts *layer.Mounts
	shared *shared // nil: there is none
}

var _ lifecycle.Layers = (*nodeLayers)(nil)

// Compose implements lifecycle.Layers.
func (l *nodeLayers) Compose(ctx context.Context, project string, spec *harenav1.SandboxSpec) (lifecycle.Composition, error) {
	found, err := l.store.Compose(ctx, project, spec.GetImage(), spec.GetWorkspace(), spec.GetToolkits())
	if err != nil {
		return lifecycle.Composition{}, err
	}
	out := lifecycle.Composition{Config: imageConfig(found.Config)}
	for _, l := range found.Layers {
		out.Layers = append(out.Layers, lifecycle.Layer{Name: l.Name, Digest: string(l.Layer.Digest), Kind: string(l.Layer.Kind)})
	}
	return out, nil
}

func imageConfig(c layer.ImageConfig) *harenav1.ImageConfig {
	return &harenav1.ImageConfig{Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels}
}

// Hold implements lifecycle.Layers.
func (l *nodeLayers) Hold() (release func()) { return l.store.Hold() }

// Acquire implements lifecycle.Layers.
func (l *nodeLayers) Acquire(ctx context.Context, owner string, digests []string) (dirs []string, err error) {
	defer func() {
		if err != nil {
			_ = l.mounts.Release(owner)
		}
	}()
	for _, s := range digests {
		d, err := layer.ParseDigest(s)
		if err != nil {
			return nil, err
		}
		dir, err := l.mounts.Acquire(ctx, d, owner)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

// Adopt implements lifecycle.Layers.
func (l *nodeLayers) Adopt(owner string, digests []string) error {
	for _, s := range digests {
		d, err := layer.ParseDigest(s)
		if err != nil {
			return err
		}
		l.mounts.Adopt(d, owner)
	}
	return nil
}

// Release implements lifecycle.Layers.
func (l *nodeLayers) Release(owner string) error { return l.mounts.Release(owner) }

// Leaks implements lifecycle.Layers.
func (l *nodeLayers) Leaks() ([]backend.Leak, error) {
	found, err := l.mounts.Leaks()
	leaks := make([]backend.Leak, 0, len(found))
	for _, f := range found {
		leaks = append(leaks, backend.Leak{Kind: f.Kind, Name: f.Name, Release: f.Release})
	}
	return leaks, err
}

// Checks implements lifecycle.Layers.
func (l *nodeLayers) Checks(ctx context.Context) []*harenav1.Check {
	c := &harenav1.Check{Name: "layers.mount", Status: "ok", Detail: "EROFS images are mounted in mode " + string(l.mounts.Mode())}
	if l.mounts.Mode() == layer.ModeLoop {
		c.Status, c.Hint = "degraded", "layers go through loop devices; Linux 6.12 mounts files by themselves"
	}
	return append([]*harenav1.Check{c}, l.shared.checks(ctx, l.store)...)
}
