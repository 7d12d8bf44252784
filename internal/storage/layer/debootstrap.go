package layer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// SchemeDebootstrap begins sources that debootstrap serves.
const SchemeDebootstrap = "debootstrap:"

var (
	suitePattern   = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,63}$`)
	packagePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,127}$`) // Debian Policy 5.6.7
)

const maxPackages = 2000

// Bootstrap is a parsed debootstrap:SUITE[:PKG,PKG].
type Bootstrap struct {
	Suite    string
	Packages []string // sorted, distinct
}

// String is the canonical source: the same packages in any order are one source.
func (b Bootstrap) String() string {
	s := SchemeDebootstrap + b.Suite
	if len(b.Packages) > 0 {
		s += ":" + strings.Join(b.Packages, ",")
	}
	return s
}

// ParseBootstrap checks a source that comes from outside. Its parts are safe as arguments.
func ParseBootstrap(source string) (Bootstrap, error) {
	suite, list, _ := strings.Cut(strings.TrimPrefix(source, SchemeDebootstrap), ":")
	b := Bootstrap{Suite: suite}
	if !strings.HasPrefix(source, SchemeDebootstrap) || !suitePattern.MatchString(suite) {
		return b, errs.E(errs.Invalid, "%.80q is not a debootstrap source", source).
			WithHint("write debootstrap:SUITE[:PKG,PKG], such as debootstrap:bookworm:git,python3")
	}
	for p := range strings.SplitSeq(list, ",") {
		if p = strings.TrimSpace(p); p == "" {
			continue
		}
		if !packagePattern.MatchString(p) {
			return b, errs.E(errs.Invalid, "%.80q is not a package name", p).
				WithHint("packages are separated by commas: debootstrap:SUITE:PKG,PKG")
		}
		b.Packages = append(b.Packages, p)
	}
	slices.Sort(b.Packages)
	b.Packages = slices.Compact(b.Packages)
	if n := len(b.Packages); n > maxPackages {
		return b, errs.OverLimit(errs.Invalid, "packages of a debootstrap source", maxPackages, n)
	}
	return b, nil
}

// bootstrapScript runs as PID 1 of its own pid and mount namespaces, so that
// every process and mount that package scripts leave ends with it. The data
// directory is nosuid,nodev, which debootstrap refuses: lifted for the target, here only.
const bootstrapScript = `set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$1" "$1"
mount -o remount,bind,rw,suid,dev,exec "$1"
shift
exec debootstrap "$@"
`

// ImportDebootstrap makes a layer of Debian packages from the machine's own
// mirror. unsupported: debootstrap is not installed; not-found: the mirror has
// no such suite or package; precondition: no apt source, or the mirror cannot be reached.
func (s *Store) ImportDebootstrap(ctx context.Context, b Bootstrap, o ImportOptions) (*Imported, error) {
	o.Source = b.String()
	o.Config.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, o.Config.Env...)
	if _, err := o.check(); err != nil {
		return nil, err
	}
	for _, tool := range []string{"debootstrap", "mount", "gpgv"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, errs.E(errs.Unsupported, "%s needs the program %s, which this node does not have", o.Source, tool).
				WithHint("install it (apt-get install debootstrap gpgv mount), or import a tar archive of a root file system")
		}
	}
	report := newReporter(o.Progress)
	report.start(PhaseFetching, "looking for a mirror of "+b.Suite, 0)
	machine, err := readMachineSources("/")
	if err != nil {
		return nil, err
	}
	mirror, err := machine.mirrorOf(b.Suite)
	if err != nil {
		return nil, err
	}
	released, err := mirror.check(ctx)
	if err != nil {
		return nil, err
	}
	select {
	case s.bootstrap <- struct{}{}:
	default:
		report.start(PhaseFetching, "waiting for another debootstrap import", 0)
		select {
		case s.bootstrap <- struct{}{}:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	defer func() { <-s.bootstrap }()
	return s.bootstrapAndImport(ctx, b, mirror, released, o, report)
}

func (s *Store) bootstrapAndImport(ctx context.Context, b Bootstrap, mirror mirror, released time.Time,
	o ImportOptions, report *reporter,
) (_ *Imported, err error) {
	debs := filepath.Join(s.cache, "debs")
	if err := makeDir(debs); err != nil {
		return nil, s.diskError(err)
	}
	tmp, err := os.MkdirTemp(s.tmp(), "bootstrap-*")
	if err != nil {
		return nil, s.diskError(err)
	}
	defer func() {
		if rerr := removeTree(tmp); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	// The root's mode becomes that of the layer's root directory.
	root := filepath.Join(tmp, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return nil, s.diskError(err)
	}
	args := []string{root, "--variant=minbase", "--cache-dir=" + debs, "--components=" + strings.Join(mirror.Components, ",")}
	if len(b.Packages) > 0 {
		args = append(args, "--include="+strings.Join(b.Packages, ","))
	}
	args = append(args, mirror.trustArgs()...)
	args = append(args, b.Suite, root, mirror.URI)
	tail, err := runBootstrap(ctx, args, bootstrapEnv(os.Environ(), released), func(line string) { reportBootstrap(report, line) })
	if err != nil {
		return nil, s.diskError(bootstrapError(ctx, b, mirror, tail, err))
	}
	report.start(PhaseBuilding, "cleaning the root file system", 0)
	if err := cleanRoot(root, mirror.sourcesList(), released); err != nil {
		return nil, s.diskError(fmt.Errorf("clean %s: %w", o.Source, err))
	}
	if err := trimCache(debs, maxDebCache); err != nil {
		return nil, s.diskError(err)
	}
	return s.importDir(ctx, root, o, report)
}

// tailLines is how much of debootstrap's output is kept for an error.
const tailLines = 20

// runBootstrap runs the script with args, hands on each line of output, and
// returns the last ones. When ctx ends everything is killed.
func runBootstrap(ctx context.Context, args, env []string, line func(string)) (tail []string, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", append([]string{"-c", bootstrapScript, "bootstrap"}, args...)...)
	cmd.Env = env
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	started, exited := make(chan error, 1), make(chan error, 1)
	go func() {
		// Pdeathsig fires when the thread that started the process ends (prctl(2)): this one stays until it has exited.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			exited <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		w.Close()
		return nil, err
	}
	w.Close()
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 64<<10), 1<<20)
	for sc.Scan() {
		l := strings.TrimRight(sc.Text(), "\r ")
		line(l)
		tail = append(tail, l)
		if len(tail) > tailLines {
			tail = tail[1:]
		}
	}
	if sc.Err() != nil { // an endless line: read on, so that the writer does not block
		_, _ = io.Copy(io.Discard, r)
	}
	return tail, <-exited
}

// bootstrapEnv passes proxies on and nothing else of the server's environment.
func bootstrapEnv(environ []string, released time.Time) []string {
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LC_ALL=C", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", "DEBCONF_NONINTERACTIVE_SEEN=true",
		// dpkg(1): its defaults, and no fsync of each file: the root is thrown away after a crash.
		"DPKG_FORCE=security-mac,downgrade,unsafe-io",
	}
	if !released.IsZero() { // so that the days in /etc/shadow do not depend on today (shadow-utils honours it)
		env = append(env, fmt.Sprintf("SOURCE_DATE_EPOCH=%d", released.Unix()))
	}
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		switch strings.ToLower(name) {
		case "http_proxy", "https_proxy", "ftp_proxy", "no_proxy":
			env = append(env, kv)
		}
	}
	return env
}

// reportBootstrap turns a line of output into progress.
func reportBootstrap(report *reporter, line string) {
	text, ok := strings.CutPrefix(line, "I: ")
	if !ok {
		return
	}
	phase := PhaseBuilding
	for _, p := range []string{"Retrieving", "Validating", "Checking", "Valid Release", "Resolving", "Found", "Target"} {
		if strings.HasPrefix(text, p) {
			phase = PhaseFetching
		}
	}
	report.say(phase, text)
}

// bootstrapError says what went wrong from what debootstrap printed.
func bootstrapError(ctx context.Context, b Bootstrap, m mirror, tail []string, cause error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", b, context.Cause(ctx))
	}
	said := func(what string) (string, bool) {
		for _, l := range tail {
			if i := strings.Index(l, what); i >= 0 {
				return strings.TrimSpace(l[i+len(what):]), true
			}
		}
		return "", false
	}
	if _, ok := said("No space left on device"); ok {
		return errs.E(errs.Capacity, "%s: %w", b, syscall.ENOSPC)
	}
	if names, ok := said("Couldn't find these debs:"); ok {
		return errs.E(errs.NotFound, "suite %s of %s has no package %s", b.Suite, m.shown(), strings.Join(strings.Fields(names), ", ")).
			WithHint("check the spelling; only packages of the components %s are looked at", strings.Join(m.Components, ", "))
	}
	if _, ok := said("No such script:"); ok {
		return errs.E(errs.NotFound, "debootstrap does not know the suite %q", b.Suite).
			WithHint("use a suite that has a file in /usr/share/debootstrap/scripts, such as bookworm, or install a newer debootstrap")
	}
	if _, ok := said("Failed getting release file"); ok {
		return errs.E(errs.Precondition, "the mirror %s does not give the release file of %s", m.shown(), b.Suite).
			WithHint("check the network, and the machine's apt sources")
	}
	for _, what := range []string{"Couldn't download packages:", "Couldn't download"} {
		if names, ok := said(what); ok {
			return errs.E(errs.Precondition, "the mirror %s did not deliver %s", m.shown(), names).
				WithHint("try again; if it goes on, run apt-get update to see whether the mirror is well")
		}
	}
	for _, what := range []string{"Release signed by unknown key", "Invalid Release signature", "Error executing gpgv", "Keyring-based check"} {
		if _, ok := said(what); ok {
			return errs.E(errs.Precondition, "the release file of %s on %s is not signed by a key that this machine trusts", b.Suite, m.shown()).
				WithHint("install the distribution's current archive keyring, or name it with Signed-By in the apt source")
		}
	}
	var complaints []string
	for _, l := range tail {
		if text, ok := strings.CutPrefix(l, "E: "); ok {
			complaints = append(complaints, text)
		} else if text, ok := strings.CutPrefix(l, "W: "); ok {
			complaints = append(complaints, text)
		}
	}
	if len(complaints) == 0 && len(tail) > 0 {
		complaints = tail[max(0, len(tail)-3):]
	}
	return errs.E(errs.Precondition, "debootstrap of %s failed (%v): %s", b.Suite, cause, strings.Join(complaints, "; ")).
		WithHint("run debootstrap %s by hand to see all of its output", b.Suite)
}

// maxDebCache bounds the packages kept for the next import.
const maxDebCache = 4 << 30

// trimCache removes the oldest files until the rest fits.
func trimCache(dir string, limit int64) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	type cached struct {
		path    string
		size    int64
		changed time.Time
	}
	var files []cached
	var total int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		files = append(files, cached{filepath.Join(dir, e.Name()), info.Size(), info.ModTime()})
		total += info.Size()
	}
	slices.SortFunc(files, func(a, b cached) int { return a.changed.Compare(b.changed) })
	for _, f := range files {
		if total <= limit {
			return nil
		}
		if err := os.Remove(f.path); err != nil {
			return err
		}
		total -= f.size
	}
	return nil
}
