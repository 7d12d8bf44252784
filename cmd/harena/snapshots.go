package main

import (
	"time"

	"github.com/harena-dev/harena/internal/edge/lifecycle"
	"github.com/harena-dev/harena/internal/edge/snapshots"
	"github.com/harena-dev/harena/internal/storage/layer"
)

// packer makes snapshots of the node's sandboxes.
func packer(store *layer.Store, mounts *layer.Mounts) lifecycle.Packer {
	return &snapshots.Packer{Store: store, Mounts: mounts, Now: time.Now, InUse: mounts.InUse}
}
