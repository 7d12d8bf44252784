package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// kernelPackages are names of 6.12 in Debian 12's security archive and in Debian 13, the smaller first.
var kernelPackages = []string{"linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64", "linux-image-6.12-amd64", "linux-image-amd64"}

type kernel struct {
	release string // as uname -r says
	image   string
	lib     string // holds modules/RELEASE, with modules.dep
}

// findKernel fetches the kernel's package once, by the machine's own settings of apt, and unpacks it.
func findKernel(ctx context.Context, cache string) (kernel, error) {
	if k, err := openKernel(filepath.Join(cache, "kernel")); err == nil {
		return k, nil
	}
	pkg, err := kernelPackage(ctx)
	if err != nil {
		// The lists may be those of a fresh machine: none.
		if _, uerr := command(ctx, "", "apt-get", "-qq", "update"); uerr != nil {
			return kernel{}, errors.Join(err, uerr)
		}
		if pkg, err = kernelPackage(ctx); err != nil {
			return kernel{}, err
		}
	}
	tmp, err := os.MkdirTemp(cache, "kernel-")
	if err != nil {
		return kernel{}, err
	}
	defer os.RemoveAll(tmp)
	// apt's own user may not write here; it says so and goes on as root.
	if _, err := command(ctx, tmp, "apt-get", "-qq", "download", pkg); err != nil {
		return kernel{}, err
	}
	debs, _ := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if len(debs) != 1 {
		return kernel{}, fmt.Errorf("apt-get download %s left %v", pkg, debs)
	}
	dir := filepath.Join(tmp, "kernel")
	if _, err := command(ctx, "", "dpkg-deb", "-x", debs[0], dir); err != nil {
		return kernel{}, err
	}
	release := strings.TrimPrefix(pkg, "linux-image-")
	if _, err := command(ctx, "", "depmod", "-b", dir, release); err != nil {
		return kernel{}, err
	}
	if err := os.Rename(dir, filepath.Join(cache, "kernel")); err != nil {
		return kernel{}, err
	}
	return openKernel(filepath.Join(cache, "kernel"))
}

func openKernel(dir string) (kernel, error) {
	images, _ := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if len(images) != 1 {
		return kernel{}, fmt.Errorf("%d kernels in %s", len(images), dir)
	}
	_, release, _ := strings.Cut(filepath.Base(images[0]), "vmlinuz-")
	k := kernel{release, images[0], filepath.Join(dir, "lib")}
	_, err := os.Stat(filepath.Join(k.lib, "modules", release, "modules.dep"))
	return k, err
}

// kernelPackage is the package with the kernel itself, on which those of the stable names depend.
func kernelPackage(ctx context.Context) (string, error) {
	for _, name := range kernelPackages {
		text, err := command(ctx, "", "apt-cache", "show", "--no-all-versions", name)
		if err != nil {
			continue
		}
		if pkg := dependedKernel(text); strings.HasPrefix(pkg, "linux-image-6.12.") {
			return pkg, nil
		}
	}
	return "", fmt.Errorf("apt knows no Linux 6.12: none of %s; on Debian 12 it is in the security archive", strings.Join(kernelPackages, ", "))
}

// dependedKernel finds the image in what apt-cache show says of a package.
func dependedKernel(show string) string {
	for line := range strings.Lines(show) {
		if list, ok := strings.CutPrefix(line, "Depends:"); ok {
			for d := range strings.SplitSeq(list, ",") {
				if name, _, _ := strings.Cut(strings.TrimSpace(d), " "); strings.HasPrefix(name, "linux-image-") {
					return name
				}
			}
		}
	}
	return ""
}

// moduleFiles lists, in the order of loading, the files of modules and of what they depend on; what is built in has none.
func moduleFiles(dep []byte, names ...string) []string {
	type module struct{ files []string } // its own, then its dependencies', deepest last (modules.dep(5))
	modules := map[string]module{}
	s := bufio.NewScanner(bytes.NewReader(dep))
	for s.Scan() {
		file, deps, ok := strings.Cut(s.Text(), ":")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(filepath.Base(file), ".ko")
		modules[strings.ReplaceAll(name, "-", "_")] = module{append([]string{file}, strings.Fields(deps)...)}
	}
	var out []string
	for _, name := range names {
		for _, f := range slices.Backward(modules[name].files) {
			if !slices.Contains(out, f) {
				out = append(out, f)
			}
		}
	}
	return out
}

// command runs a program and returns what it printed; an error has the end of that.
func command(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		text := string(out) + stderr.String()
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, text[max(0, len(text)-2000):])
	}
	return string(out), nil
}
