package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

const (
	burstImages     = 16
	burstContainers = 64
	burstTree       = 60 << 20

	workspaceBoxes = 32
	workspaceFiles = 2000
)

// burst starts 64 containers over 16 images at once, on a node that has nothing of them.
func (b *layerBench) burst(ctx context.Context) error {
	file := b.path("burst.tar")
	if err := writeTree(ctx, file, burstTree); err != nil {
		return err
	}
	image := func(i int) string { return fmt.Sprintf("bench-burst-%d:1", i%burstImages) }
	b.progress("layer: %d images", burstImages)
	// One bucket for each: a store that kept the images' common files once would make the burst cheaper than it is for images of other origin.
	err := b.fill(ctx, "burst", func(n *benchNode) error {
		for i := range burstImages {
			if err := appendUnique(file, i); err != nil {
				return err
			}
			if _, _, err := n.client.ImportLayer(ctx, harena.ImportOptions{Name: image(i), Source: "tar:" + file}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return b.with(ctx, "burst", func(n *benchNode, k *link) error {
		for _, name := range []string{"layer_burst_cold", "layer_burst_warm"} {
			var (
				mu     sync.Mutex
				wg     sync.WaitGroup
				first  []time.Duration
				failed error
				all    []*harena.Sandbox
			)
			start := time.Now()
			for i := range burstContainers {
				wg.Go(func() {
					_, sb, err := runJob(ctx, n.client, harena.Spec{Image: image(i), Memory: 256 << 20}, "echo ready")
					mu.Lock()
					defer mu.Unlock()
					if failed = errors.Join(failed, err); err == nil {
						// From the beginning of the burst: what waits for others counts.
						first, all = append(first, time.Since(start)), append(all, sb)
					}
				})
			}
			wg.Wait()
			wall := time.Since(start)
			moved := k.moved()
			_, err := removeAll(ctx, all, 8)
			if err := errors.Join(failed, err); err != nil {
				return err
			}
			b.add(summarise(name, first, wall))
			b.add(movedBytes(name+"_moved", moved))
		}
		return nil
	})
}

// appendUnique makes an image another one: a file that only it has is put at the end of its tar.
func appendUnique(file string, i int) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	const end = 1024 // two blocks of zeros
	extra := file + ".extra"
	if err := randomTar(extra, fmt.Sprintf("unique-%d", i), 1<<20); err != nil {
		return err
	}
	content, err := os.ReadFile(extra)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(content, info.Size()-end)
	return errors.Join(err, f.Close(), os.Remove(extra))
}

// workspaces gives 32 sandboxes the same workspace, as a layer and by unpacking an archive in each.
func (b *layerBench) workspaces(ctx context.Context) error {
	const layer, archive = "bench-workspace:1", "bench-archive:1"
	tree, packed := b.path("workspace"), b.path("archive")
	if err := makeWorkspace(tree); err != nil {
		return err
	}
	if err := os.Mkdir(packed, 0o755); err != nil {
		return err
	}
	tar := b.path("workspace.tar")
	f, err := os.Create(tar)
	if err != nil {
		return err
	}
	if err := errors.Join(harena.WriteTree(ctx, f, tree, harena.TreeOptions{}), f.Close()); err != nil {
		return err
	}
	if err := gzipFile(ctx, tar, packed+"/workspace.tar.gz"); err != nil {
		return err
	}
	return b.fill(ctx, "workspace", func(n *benchNode) error {
		for name, o := range map[string]harena.ImportOptions{
			layerImage: {Source: "tar:" + b.path("burst.tar")},
			layer:      {Source: "dir:" + tree, Kind: "workspace"},
			archive:    {Source: "dir:" + packed, Kind: "toolkit"},
		} {
			o.Name = name
			if _, _, err := n.client.ImportLayer(ctx, o); err != nil {
				return err
			}
		}
		variants := []struct {
			name string
			spec harena.Spec
			job  string
		}{
			{"layer_workspace_erofs", harena.Spec{Image: layerImage, Workspace: layer}, "ls /w | wc -l"},
			{"layer_workspace_targz", harena.Spec{Image: layerImage, Toolkits: []string{archive}}, "tar -xzf /workspace.tar.gz -C / && ls /w | wc -l"},
		}
		for _, v := range variants {
			v.spec.Memory = 256 << 20
			// The first mounts what all share.
			if _, sb, err := runJob(ctx, n.client, harena.Spec{Image: v.spec.Image, Workspace: v.spec.Workspace, Toolkits: v.spec.Toolkits}, "echo ready"); err != nil {
				return err
			} else if err := sb.Remove(ctx); err != nil {
				return err
			}
			before, err := readUsage()
			if err != nil {
				return err
			}
			var samples []time.Duration
			var all []*harena.Sandbox
			for range workspaceBoxes {
				took, sb, err := runJob(ctx, n.client, v.spec, v.job)
				if err != nil {
					return err
				}
				samples, all = append(samples, took), append(all, sb)
			}
			after, err := readUsage()
			if err != nil {
				return err
			}
			if _, err := removeAll(ctx, all, 4); err != nil {
				return err
			}
			b.add(summarise(v.name, samples, 0))
			b.add(amount(v.name+"_cpu", "ms", after.cpu-before.cpu))
			b.add(amount(v.name+"_written", "kB", after.written-before.written))
		}
		return nil
	})
}

// makeWorkspace makes a tree like that of a project: small files of text.
func makeWorkspace(dir string) error {
	for i := range workspaceFiles {
		sub := fmt.Sprintf("%s/w/%02d", dir, i%50)
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
		text := strings.Repeat(fmt.Sprintf("line of file %d that a compiler would read\n", i), 50+i%400)
		if err := os.WriteFile(fmt.Sprintf("%s/%d.txt", sub, i), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
