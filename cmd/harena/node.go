package main

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/blobd"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/backend/container"
	"github.com/harena-dev/harena/internal/edge/layers"
	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	edgeserver "github.com/harena-dev/harena/internal/edge/server"
	"github.com/harena-dev/harena/internal/edge/swap"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// node is an open data directory with everything that works on it.
type node struct {
	dir       *datadir.Dir
	shared    *shared // nil: there is none
	mounts    *layer.Mounts
	container *container.Backend
	swap      *swap.Swap
	edge      *lifecycle.Edge
	handler   http.Handler // what the edge serves to the apiserver
}

type nodeConfig struct {
	data, guest string
	dataSize    int64 // of a volume, 0: none, or the one that is there
	swap        swap.Want
	store       storeConfig // shared with other nodes; empty: none
	lockWait    time.Duration
	log         *slog.Logger
}

// openNode takes the data directory and recovers what is in it. What it opened is
// closed again when a later step fails.
func openNode(ctx context.Context, c nodeConfig) (_ *node, err error) {
	guest, err := findGuest(c.guest)
	if err != nil {
		return nil, err
	}
	n := &node{}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close(ctx))
		}
	}()
	if n.dir, err = datadir.Open(c.data, datadir.Options{Rand: rand.Reader, LockWait: c.lockWait, Size: c.dataSize}); err != nil {
		return nil, err
	}
	var options []layer.Option
	if c.store.url != "" {
		if n.shared, err = openShared(ctx, c.store, n.dir, c.log); err != nil {
			return nil, err
		}
		options = append(options, n.shared.option)
	} else if layer.KnowsStores(n.dir.Path()) {
		c.log.Warn("names of layers that are in a shared store mean nothing until the node is started with --store again")
	}
	store, err := layer.Open(n.dir.Path(), layer.Limits{}, options...)
	if err != nil {
		return nil, err
	}
	// So that the store knows the node, and the node the store. An outage does not keep it from starting: doctor tells.
	if err := store.CheckShared(ctx); err != nil {
		c.log.Warn("the shared store does not answer", "error", err)
	}
	if n.mounts, err = layer.OpenMounts(ctx, store, layer.DefaultIdleMounts, n.shared.blobs()); err != nil {
		return nil, err
	}
	if err := n.shared.lostSince(ctx, n.mounts); err != nil {
		return nil, err
	}
	n.container, err = container.New(container.Config{
		Dir: n.dir.Path(), EdgeID: n.dir.Edge(), GuestBinary: guest, Log: c.log.With("part", "container"),
	})
	if err != nil {
		return nil, err
	}
	if n.swap, err = swap.Open(n.dir.Path(), n.dir.Edge(), c.swap); err != nil {
		return nil, err
	}
	n.edge, err = lifecycle.Open(ctx, lifecycle.Config{
		Dir: n.dir, Backends: []backend.Backend{n.container}, Layers: &nodeLayers{store, n.mounts, n.shared}, Packer: packer(store, n.mounts),
		Rand: rand.Reader, Log: c.log.With("part", "edge"), Version: version,
		Checks: n.swap.Checks,
	})
	if err != nil {
		return nil, err
	}
	n.shared.report(n.edge, n.mounts)
	n.handler = edgeserver.New(n.edge, edgeserver.Config{Layers: n.layerHandler(store, c.log), Log: c.log.With("part", "edge")})
	return n, nil
}

func (n *node) layerHandler(store *layer.Store, log *slog.Logger) http.Handler {
	service := layers.New(layers.Config{
		Store: store, Mounts: n.mounts, InUse: n.mounts.InUse, Log: log.With("part", "layers"), Sandboxes: n.sandboxes,
		Event: func(kind, message string, attrs map[string]string) {
			n.edge.Events().Append(&harenav1.Event{Kind: kind, Message: message, Project: attrs["project"], Attributes: attrs})
		},
	})
	mux := http.NewServeMux()
	mux.Handle(harenav1connect.NewLayerServiceHandler(service, connect.WithCompression("gzip", nil, nil)))
	mux.Handle("/v1/layers", service.ImportHandler())
	return mux
}

// sandboxes lists all sandboxes of a project that are not forgotten.
func (n *node) sandboxes(project string) ([]*harenav1.Sandbox, error) {
	var out []*harenav1.Sandbox
	req := &harenav1.ListRequest{Project: project, All: true, Page: &harenav1.Page{}}
	for {
		res, err := n.edge.List(req)
		if err != nil {
			return nil, err
		}
		out = append(out, res.GetSandboxes()...)
		if req.Page.Token = res.GetNextPageToken(); req.GetPage().GetToken() == "" {
			return out, nil
		}
	}
}

// close lets go of everything and leaves sandboxes running.
func (n *node) close(ctx context.Context) error {
	n.shared.close()
	var failed []error
	if n.edge != nil {
		failed = append(failed, n.edge.Shutdown(ctx))
	}
	if n.container != nil {
		failed = append(failed, n.container.Close())
	}
	if n.dir != nil {
		failed = append(failed, n.dir.Close())
	}
	return errors.Join(failed...)
}

// down stops all sandboxes and leaves nothing of the node but its files. A step
// that fails does not keep the others from being tried.
func (n *node) down(ctx context.Context) error {
	failed := []error{n.edge.StopAll(ctx), n.edge.Shutdown(ctx), n.mounts.Close(), n.container.Close(), n.swap.Remove()}
	failed = append(failed, blobd.Shutdown(ctx, n.dir.Path()))
	root, err := cgroup.Open("harena-" + string(n.dir.Edge()))
	if err == nil {
		err = root.Remove(ctx)
	}
	failed = append(failed, err)
	if err := errors.Join(failed...); err != nil {
		return errors.Join(err, n.dir.Close())
	}
	return n.dir.Down()
}

// findGuest returns the harena-guest that was named, or the one beside this program.
func findGuest(named string) (string, error) {
	path := named
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", errs.E(errs.Precondition, "cannot tell where this program is: %w", err).WithHint("name the guest with --guest")
		}
		path = filepath.Join(filepath.Dir(self), "harena-guest")
	}
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", errs.E(errs.Precondition, "%s is missing", path).WithHint("`make build` makes it beside harena; or name it with --guest")
	case err != nil:
		return "", errs.E(errs.Precondition, "%s cannot be used: %w", path, err).WithHint("name the guest with --guest")
	case !fi.Mode().IsRegular() || fi.Mode()&0o111 == 0:
		return "", errs.E(errs.Precondition, "%s is not an executable file", path).WithHint("name the guest with --guest")
	}
	return path, nil
}
