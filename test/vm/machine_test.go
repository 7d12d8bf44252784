package vm

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// acceleration is how QEMU runs the machine, and how many times longer things then take than on the node.
type acceleration struct {
	name   string
	args   []string
	kernel string // added to its command line
	slow   int
}

// accelerator uses KVM with the processor's help only: KVM without it (PVM) does not run the distribution's kernel.
func accelerator() acceleration {
	info, _ := os.ReadFile("/proc/cpuinfo")
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err == nil {
		_ = f.Close()
		if regexp.MustCompile(`(?m)^flags.* (vmx|svm)( |$)`).Match(info) {
			return acceleration{"KVM", []string{"-accel", "kvm", "-cpu", "host", "-smp", "2"}, "", 2}
		}
	}
	// One processor: with two, each in a thread, QEMU 7.2 now and then runs old code that the kernel has patched (jump labels), and
	// the kernel dies of it; two in one thread are many times slower, and even two threads are twice as slow as one processor.
	// The kernel tests its timer and has watchdogs that go by the clock: they would find fault with a node that is busy otherwise.
	return acceleration{"TCG", []string{"-accel", "tcg", "-cpu", "max", "-smp", "1"}, "no_timer_check nowatchdog sysctl.kernel.hung_task_timeout_secs=600", 15}
}

// machine is a prepared one.
type machine struct {
	args    []string
	mark    string // begins the lines that are init's
	console string // file of the kernel's log
	disk    string
}

// prepare makes the disk and the initial file system in dir.
func prepare(ctx context.Context, dir string, k kernel, b base, accel acceleration, steps []step) (*machine, error) {
	m := &machine{mark: "@" + rand.Text(), console: filepath.Join(dir, "console"), disk: filepath.Join(dir, "disk")}
	tree := filepath.Join(dir, "tree")
	if err := layOut(ctx, tree, k, b, steps); err != nil {
		return nil, err
	}
	if err := writeSteps(filepath.Join(tree, "harena"), m.mark, accel.slow, steps); err != nil {
		return nil, err
	}
	const size = "12G" // sparse
	if _, err := command(ctx, "", "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-O", "^has_journal", "-d", tree, m.disk, size); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(tree); err != nil {
		return nil, err
	}
	initrd := filepath.Join(dir, "initrd")
	if err := writeInitrd(initrd, k); err != nil {
		return nil, err
	}
	m.args = append(accel.args, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "q35", "-m", "3G",
		"-kernel", k.image, "-initrd", initrd,
		"-append", "console=ttyS0 panic=-1 cryptomgr.notests "+accel.kernel,
		"-serial", "file:"+m.console,

		// Not stdio: that port is unplugged when QEMU has no input.
		"-chardev", "file,id=out,path=/proc/self/fd/1", "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=out,name=out")
	for serial, drive := range map[string]string{
		"meta": b.meta + ",readonly=on",
		"blob": b.blob + ",readonly=on",
		"disk": m.disk + ",cache=unsafe,discard=unmap",
	} {
		m.args = append(m.args, "-drive", "if=none,format=raw,id="+serial+",file="+drive, "-device", "virtio-blk-pci,drive="+serial+",serial="+serial)
	}
	return m, nil
}

// writeSteps writes what init runs.
func writeSteps(dir, mark string, slow int, steps []step) error {
	var list strings.Builder
	short := "" // packages with great counts or sizes have smaller ones
	if slow > 10 {
		short = "-test.short"
	}
	fmt.Fprintf(&list, "mark=%s\nexport HARENA_TEST_SLOW=%d HARENA_TEST_DATA=/var/tmp/data SHORT=%s\n", mark, slow, short)
	for i, s := range steps {
		file := fmt.Sprintf("steps/%d", i)
		fmt.Fprintf(&list, "step %s %s %d %s\n", s.name, s.dir, int(s.limit.Seconds()), file)
		if err := os.WriteFile(filepath.Join(dir, file), []byte("set -eu\n"+s.script), 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, "steps/list"), []byte(list.String()), 0o644)
}

// run boots the machine and reads what it says until it powers off.
func (m *machine) run(ctx context.Context) (map[string]*result, error) {
	p := &parser{mark: m.mark, results: map[string]*result{}}
	type outcome struct{ err error }
	done := make(chan outcome)
	go func() {
		// The death signal is sent when the thread that started QEMU ends, so that one has to live as long.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- outcome{m.boot(ctx, p)}
	}()
	o := <-done
	if o.err == nil && !p.done {
		o.err = errors.New("it ended before its init had")
	}
	return p.results, o.err
}

func (m *machine) boot(ctx context.Context, p *parser) error {
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", m.args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, cmd.Process.Pid, 10)
	perr := m.read(out, p)
	if perr != nil {
		_ = cmd.Process.Kill()
	}
	_, _ = io.Copy(io.Discard, out)
	err = cmd.Wait()
	if cerr := ctx.Err(); cerr != nil {
		return fmt.Errorf("killed: %w", cerr)
	}
	if err != nil {
		err = fmt.Errorf("qemu: %w: %s", err, stderr.String())
	}
	return errors.Join(perr, err)
}

func (m *machine) read(out io.Reader, p *parser) error {
	verbose := os.Getenv("HARENA_VM_KEEP") != ""
	begin := time.Now()
	s := bufio.NewScanner(out)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if verbose {
			fmt.Printf("%6.1f %s\n", time.Since(begin).Seconds(), s.Text())
		}
		if err := p.line(s.Text()); err != nil {
			return err
		}
	}
	return s.Err()
}

func (m *machine) consoleTail() string {
	text, err := os.ReadFile(m.console)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-3000):])
}

var faultLine = regexp.MustCompile(`(?m)^.*(BUG:|WARNING:|Oops|general protection|blocked for more than|Kernel panic).*$`)

// kernelFaults are lines of the kernel's log that no test may cause.
func (m *machine) kernelFaults() string {
	text, err := os.ReadFile(m.console)
	if err != nil {
		return err.Error()
	}
	return strings.Join(faultLine.FindAllString(string(text), 20), "\n")
}

// layOut makes the tree of the machine's disk:
//
//	upper, work   the writable part of the root file system
//	tmp, var-tmp  a file system that overlays can be made on; var-tmp/data has the layer
//	harena        what a checkout has and tests use, compiled
func layOut(ctx context.Context, tree string, k kernel, b base, steps []step) error {
	for _, d := range []string{"upper/usr/lib", "work", "tmp", "var-tmp/data", "harena/bin", "harena/steps", "harena/compilers"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			return err
		}
	}
	for _, d := range []string{"tmp", "var-tmp"} {
		if err := os.Chmod(filepath.Join(tree, d), 0o1777); err != nil {
			return err
		}
	}
	harena := filepath.Join(tree, "harena")
	if err := os.WriteFile(filepath.Join(tree, "upper/init"), []byte(initScript), 0o755); err != nil {
		return err
	}
	// In the machine compilers hand out what was compiled beside the sources.
	for _, name := range []string{"go", "gcc"} {
		if err := os.WriteFile(filepath.Join(harena, "compilers", name), []byte(compilerScript), 0o755); err != nil {
			return err
		}
	}
	copies := [][]string{
		{filepath.Join(k.lib, "modules"), filepath.Join(tree, "upper/usr/lib/modules")},
		{filepath.Join(b.data, "layers"), filepath.Join(tree, "var-tmp/data/layers")},
		{filepath.Join(b.data, "version.json"), filepath.Join(tree, "var-tmp/data/version.json")},
	}
	for _, f := range []string{"bin/harena", "bin/harena-guest", "README.md"} {
		copies = append(copies, []string{filepath.Join(checkout, f), filepath.Join(harena, f)})
	}
	for _, c := range copies {
		if _, err := command(ctx, "", "cp", "-a", c[0], c[1]); err != nil {
			return err
		}
	}
	for _, s := range steps {
		if s.dir == "." {
			continue
		}
		if err := compileSuite(ctx, harena, s.dir); err != nil {
			return err
		}
	}
	return nil
}

// compileSuite compiles a package's tests, and the C programs in its testdata.
func compileSuite(ctx context.Context, harena, pkg string) error {
	dir, err := filepath.Abs(filepath.Join(harena, pkg))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	build := exec.CommandContext(ctx, "go", "test", "-c", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(dir, "tests"), "./"+pkg)
	build.Dir = checkout
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("compile tests of %s: %w: %s", pkg, err, out)
	}
	testdata := filepath.Join(checkout, pkg, "testdata")
	if _, err := os.Stat(testdata); err != nil {
		return nil //nolint:nilerr // it has none
	}
	if _, err := command(ctx, "", "cp", "-a", testdata, dir); err != nil {
		return err
	}
	sources, _ := filepath.Glob(filepath.Join(dir, "testdata", "*.c"))
	for _, c := range sources {
		if _, err := command(ctx, "", "gcc", "-static", "-O1", "-o", strings.TrimSuffix(c, ".c")+".compiled", c); err != nil {
			return err
		}
	}
	return nil
}
