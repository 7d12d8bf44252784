package bench

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

const (
	largeLayer = "harena-bench-large:1"
	largeBytes = 256 << 20
	largeFiles = 5000
)

// bySize measures creations with and without a large layer, in turn: what a creation costs does not depend on what its
// layers hold.
func bySize(ctx context.Context, r *runner, n int) ([]Result, error) {
	if err := r.needLargeLayer(ctx); err != nil {
		return nil, err
	}
	samples := map[bool][]time.Duration{}
	for i := range 2 * (n + 1) {
		large := i%2 == 1
		spec := r.spec()
		if large {
			spec.Toolkits = []string{largeLayer}
		}
		start := time.Now()
		sb, err := r.client.CreateSandbox(ctx, spec)
		if err != nil {
			return nil, err
		}
		took := time.Since(start)
		if err := sb.Remove(ctx); err != nil {
			return nil, err
		}
		if i >= 2 { // the first one with the layer mounts it, for all later ones
			samples[large] = append(samples[large], took)
		}
	}
	return []Result{
		summarise("create_with_small_layers", samples[false], 0),
		summarise(fmt.Sprintf("create_with_%d_MiB_layer", largeBytes>>20), samples[true], 0),
	}, nil
}

// needLargeLayer makes the large layer when it is missing: one big file and many small ones.
func (r *runner) needLargeLayer(ctx context.Context) error {
	_, err := r.client.Layer(ctx, largeLayer)
	if !harena.IsKind(err, harena.KindNotFound) {
		return err
	}
	dir, err := os.MkdirTemp("", "harena-bench-layer-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := writeRandom(filepath.Join(dir, "big"), largeBytes); err != nil {
		return err
	}
	for i := range largeFiles {
		sub := filepath.Join(dir, "many", fmt.Sprint(i%50))
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(sub, fmt.Sprint(i)), fmt.Append(nil, i), 0o644); err != nil {
			return err
		}
	}
	_, _, err = r.client.ImportLayer(ctx, harena.ImportOptions{Name: largeLayer, Kind: "toolkit", Source: "dir:" + dir})
	return err
}

func writeRandom(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, rand.Reader, size)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}
