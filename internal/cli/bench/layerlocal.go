package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

const (
	smallImage = "bench-small:1"
	smallTree  = 16 << 20
)

// mounted mounts an image, by making a sandbox of it, and returns where.
func (n *benchNode) mounted(ctx context.Context, image string) (string, error) {
	l, err := n.client.Layer(ctx, image)
	if err != nil {
		return "", err
	}
	sb, err := n.client.CreateSandbox(ctx, harena.Spec{Image: image})
	if err != nil {
		return "", err
	}
	return filepath.Join(n.data, "mounts", strings.TrimPrefix(l.GetDigest(), "sha256:")), sb.Remove(ctx)
}

// local compares a node that has got all of the image from the store with one that never had a store, in turn; and on the former, what
// creating costs with a small and with the large image.
func (b *layerBench) local(ctx context.Context) error {
	small := b.path("small.tar")
	if err := writeTree(ctx, small, smallTree); err != nil {
		return err
	}
	err := b.fill(ctx, "image", func(n *benchNode) error {
		_, _, err := n.client.ImportLayer(ctx, harena.ImportOptions{Name: smallImage, Source: "tar:" + small})
		return err
	})
	if err != nil {
		return err
	}
	alone, err := startNode(ctx, b.path("alone"), "")
	if err != nil {
		return err
	}
	if _, _, err = alone.client.ImportLayer(ctx, harena.ImportOptions{Name: layerImage, Source: "tar:" + b.tar}); err == nil {
		err = b.with(ctx, "image", func(n *benchNode, k *link) error {
			tree, err := n.mounted(ctx, layerImage)
			if err != nil {
				return err
			}
			b.progress("layer: all of the image")
			if err := errors.Join(pages{tree}.each(readAll), k.quiet(ctx)); err != nil {
				return err
			}
			return errors.Join(b.inTurn(ctx, alone, n), b.bySize(ctx, n))
		})
	}
	return errors.Join(err, alone.stop(ctx))
}

func readAll(f *os.File, _ int64) error {
	_, err := io.Copy(io.Discard, f)
	return err
}

// inTurn runs the jobs on two nodes that have all of the image.
func (b *layerBench) inTurn(ctx context.Context, alone, completed *benchNode) error {
	for _, job := range []string{"echo", "python", "cc"} {
		if !b.has("layer_touched_by_" + job) {
			continue
		}
		samples := map[*benchNode][]time.Duration{}
		for i := range b.n(10) + 2 {
			for _, n := range []*benchNode{alone, completed} {
				took, sb, err := runJob(ctx, n.client, harena.Spec{Image: layerImage}, jobs()[job])
				if err != nil {
					return err
				}
				if err := sb.Remove(ctx); err != nil {
					return err
				}
				if i >= 2 { // the first ones fill caches
					samples[n] = append(samples[n], took)
				}
			}
		}
		r := summarise("layer_completed_"+job, samples[completed], 0)
		r.Peers = map[string]float64{"without store": median(samples[alone])}
		b.add(r)
		b.progress("layer: %s with and without a store", job)
	}
	return nil
}

// bySize creates sandboxes of a small and of the large image in turn, on a node with a store.
func (b *layerBench) bySize(ctx context.Context, n *benchNode) error {
	if _, err := n.mounted(ctx, smallImage); err != nil {
		return err
	}
	samples := map[string][]time.Duration{}
	for range b.n(30) {
		for _, image := range []string{smallImage, layerImage} {
			start := time.Now()
			sb, err := n.client.CreateSandbox(ctx, harena.Spec{Image: image})
			if err != nil {
				return err
			}
			samples[image] = append(samples[image], time.Since(start))
			if err := sb.Remove(ctx); err != nil {
				return err
			}
		}
	}
	r := summarise(fmt.Sprintf("layer_create_of_%d_MiB", b.imageSize()>>20), samples[layerImage], 0)
	r.Peers = map[string]float64{fmt.Sprintf("of %d MiB", smallTree>>20): median(samples[smallImage])}
	b.add(r)
	return nil
}
