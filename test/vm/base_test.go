package vm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	// baseSource is what the machine's root file system is made of, and the image of the scenarios that run in it:
	// that of README.md and what tests call beside it.
	baseSource = "debootstrap:bookworm:python3,sudo,apparmor,attr,btrfs-progs,busybox-static,curl,e2fsprogs,erofs-utils,iproute2,kmod,libcap2-bin,procps,xfsprogs,zstd"
	baseName   = "debian:12"
)

// base is a layer in a node's store.
type base struct {
	data       string // the node's directory
	meta, blob string // the layer's objects, which make one EROFS image
}

// findBase makes the layer once, by a node that is started for that.
func findBase(ctx context.Context, cache string) (base, error) {
	b := base{data: filepath.Join(cache, "node")}
	if b.find() == nil {
		return b, nil
	}
	if err := b.importLayer(ctx); err != nil {
		return b, err
	}
	return b, b.find()
}

// find reads the layer's manifest (docs/architecture.md, "On disk").
func (b *base) find() error {
	layers := filepath.Join(b.data, "layers")
	name, tag, _ := strings.Cut(baseName, ":")
	digest, err := os.ReadFile(filepath.Join(layers, "tags", "default", name, tag))
	if err != nil {
		return err
	}
	file := func(dir, digest, suffix string) (string, error) {
		_, hex, ok := strings.Cut(strings.TrimSpace(digest), ":")
		if !ok || len(hex) != 64 {
			return "", fmt.Errorf("%q in %s is no digest", digest, layers)
		}
		return filepath.Join(layers, dir, hex[:2], hex+suffix), nil
	}
	manifest, err := file("manifests", string(digest), ".json")
	if err != nil {
		return err
	}
	text, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	var m struct {
		Source     string
		Meta, Blob struct{ Digest string }
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return fmt.Errorf("%s: %w", manifest, err)
	}
	if !samePackages(m.Source, baseSource) {
		return fmt.Errorf("%s is of %s", baseName, m.Source)
	}
	var merr, berr error
	b.meta, merr = file("objects", m.Meta.Digest, "")
	b.blob, berr = file("objects", m.Blob.Digest, "")
	return errors.Join(merr, berr)
}

// samePackages: the store sorts what it was asked for.
func samePackages(a, b string) bool {
	set := func(s string) map[string]bool {
		m := map[string]bool{}
		for p := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == ':' || r == ',' }) {
			m[p] = true
		}
		return m
	}
	x, y := set(a), set(b)
	for p := range x {
		if !y[p] {
			return false
		}
	}
	return len(x) == len(y)
}

func (b *base) importLayer(ctx context.Context) (err error) {
	harena, err := filepath.Abs(filepath.Join(checkout, "bin", "harena"))
	if err != nil {
		return err
	}
	release, err := guard(`exec "$0" down --data "$1" >/dev/null 2>&1`, harena, b.data)
	if err != nil {
		return err
	}
	defer release()
	up := exec.CommandContext(ctx, harena, "up", "--data", b.data, "--listen", "127.0.0.1:0")
	up.Stderr = os.Stderr
	out, err := up.StdoutPipe()
	if err != nil {
		return err
	}
	if err := up.Start(); err != nil {
		return fmt.Errorf("%w (make build first)", err)
	}
	defer func() {
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		_, derr := command(dctx, "", harena, "down", "--data", b.data)
		_ = up.Wait()
		err = errors.Join(err, derr)
	}()
	s := bufio.NewScanner(out)
	for s.Scan() {
		if strings.HasPrefix(s.Text(), "ready ") {
			break
		}
	}
	text, err := os.ReadFile(filepath.Join(b.data, "client.json"))
	if err != nil {
		return fmt.Errorf("the node did not start: %w", err)
	}
	var profile struct{ URL, Token string }
	if err := json.Unmarshal(text, &profile); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, harena, "layer", "import", "--name", baseName, baseSource)
	cmd.Env = append(os.Environ(), "HARENA_URL="+profile.URL, "HARENA_TOKEN="+profile.Token)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("import %s: %w: %s", baseSource, err, text)
	}
	return nil
}
