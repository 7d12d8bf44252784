package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// defaultImage is the least that runs: busybox, made from this machine's.
const defaultImage = "harena-bench:1"

// needImage settles which image is used and makes the default one when it is missing.
func (r *runner) needImage(ctx context.Context) error {
	if r.o.Image != "" {
		return nil
	}
	r.o.Image = defaultImage
	_, err := r.client.Layer(ctx, defaultImage)
	if !harena.IsKind(err, harena.KindNotFound) {
		return err
	}
	argv, err := staticTrue()
	if err != nil {
		return fmt.Errorf("%w, or name an image", err)
	}
	dir, err := os.MkdirTemp("", "harena-bench-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	for _, d := range []string{"bin", "etc", "tmp", "root"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	busybox, err := os.ReadFile(argv[0])
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/busybox"), busybox, 0o755); err != nil {
		return err
	}
	for _, applet := range []string{"sh", "echo", "true", "cat", "sleep"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", applet)); err != nil {
			return err
		}
	}
	_, _, err = r.client.ImportLayer(ctx, harena.ImportOptions{Name: defaultImage, Source: "dir:" + dir})
	return err
}
