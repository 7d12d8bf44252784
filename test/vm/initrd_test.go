package vm

import (
	"bytes"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

var (
	//go:embed testdata/initrd.sh
	initrdScript string
	//go:embed testdata/init.sh
	initScript string
	//go:embed testdata/compiler.sh
	compilerScript string
)

// writeInitrd makes the initial file system: busybox, a script, and the modules that the root file system needs.
func writeInitrd(path string, k kernel) error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("busybox-static is needed: %w", err)
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	modules := filepath.Join(k.lib, "modules", k.release)
	dep, err := os.ReadFile(filepath.Join(modules, "modules.dep"))
	if err != nil {
		return err
	}
	var a archive
	for _, d := range []string{"bin", "modules"} {
		a.add(d, 0o040755, nil)
	}
	a.add("bin/busybox", 0o100755, program)
	a.add("init", 0o100755, []byte(initrdScript))
	var order []string
	for _, m := range moduleFiles(dep, "virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4", "erofs", "overlay") {
		text, err := os.ReadFile(filepath.Join(modules, m))
		if err != nil {
			return err
		}
		a.add("modules/"+filepath.Base(m), 0o100644, text)
		order = append(order, filepath.Base(m))
	}
	a.add("modules/order", 0o100644, []byte(strings.Join(order, "\n")))
	a.add("TRAILER!!!", 0, nil)
	return os.WriteFile(path, a.buf.Bytes(), 0o600)
}

// archive is a cpio in the form that the kernel takes (driver-api/early-userspace/buffer-format.rst).
type archive struct {
	buf bytes.Buffer
	n   int
}

func (a *archive) add(name string, mode int, content []byte) {
	a.n++
	fmt.Fprintf(&a.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", a.n, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	a.buf.WriteString(name + "\x00")
	a.pad()
	_, _ = io.Copy(&a.buf, bytes.NewReader(content))
	a.pad()
}

func (a *archive) pad() {
	for a.buf.Len()%4 != 0 {
		a.buf.WriteByte(0)
	}
}
