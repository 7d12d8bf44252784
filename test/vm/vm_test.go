// Package vm runs Harena's tests on a second kernel: Debian's 6.12, with cgroup v2 only and AppArmor, in a
// virtual machine (QEMU; KVM where it can be used, else TCG, 10 to 30 times slower). What it needs is made once and kept:
//
//	HARENA_VM_CACHE   where (default ~/.cache/harena/vm): the kernel's package and a node with one base layer
//	HARENA_VM_RUN     a regular expression: only these steps
//	HARENA_VM_TESTS   a regular expression: of every package that runs, only these tests
//	HARENA_VM_SCRIPT  shell text to run in the machine, in place of all steps: for a look around
//	HARENA_VM_FORM    long: all scenarios and all packages that work on the kernel; default short; set by make soak
//	HARENA_VM_KEEP    a directory that gets the kernel's log; shows what the machine says as it comes
//
// The machine's root file system is that base layer, mounted from its two objects as they lie in the store. What the tests need lies
// on a disk that is made for each run, as a checkout would: compiled tests beside their testdata. Nothing is
// left when the test ends, however it ends: QEMU dies with its parent, and a guard removes the disk.
package vm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// checkout is the root of the repository.
const checkout = "../.."

// TestSecondKernel boots the machine and reports each step as a test of its own.
func TestSecondKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("making the machine's layer needs root")
	}
	accel := accelerator()
	steps, err := chosen(os.Getenv("HARENA_VM_FORM") == "long", os.Getenv("HARENA_VM_RUN"))
	if err != nil {
		t.Fatal(err)
	}
	var limit time.Duration
	for i := range steps {
		steps[i].limit *= time.Duration(accel.slow)
		limit += steps[i].limit
	}
	// Preparing compiles, and at first fetches and makes what is kept.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()

	dir := os.Getenv("HARENA_VM_CACHE")
	if dir == "" {
		home, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(home, "harena", "vm")
	}
	unlock, err := lock(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	begin := time.Now()
	k, err := findKernel(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := findBase(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	scratch, remove, err := makeScratch(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer remove()
	m, err := prepare(ctx, scratch, k, b, accel, steps)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("prepared in %.0f s: %s, %s", time.Since(begin).Seconds(), k.release, accel.name)

	begin = time.Now()
	// Booting counts, too; and what the steps said is reported before go test's own time-out, which would report nothing.
	end := begin.Add(limit + time.Duration(accel.slow)*10*time.Second)
	if d, ok := t.Deadline(); ok && d.Add(-time.Minute).Before(end) {
		end = d.Add(-time.Minute)
	}
	rctx, cancel := context.WithDeadline(t.Context(), end)
	defer cancel()
	results, err := m.run(rctx)
	t.Logf("ran for %.0f s", time.Since(begin).Seconds())
	if keep := os.Getenv("HARENA_VM_KEEP"); keep != "" {
		if text, err := os.ReadFile(m.console); err == nil {
			_ = os.WriteFile(filepath.Join(keep, "console"), text, 0o644)
		}
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			r, ok := results[s.name]
			switch {
			case !ok:
				t.Fatal("the machine did not come to it")
			case !r.ended:
				t.Fatalf("did not end:\n%s", r.output)
			case r.status != 0:
				t.Fatalf("exit status %d after %s s:\n%s", r.status, r.seconds, r.output)
			}
			t.Logf("%s s; %s", r.seconds, r.summary())
		})
	}
	if err != nil {
		t.Fatalf("the machine: %v\n%s", err, m.consoleTail())
	}
	if faults := m.kernelFaults(); faults != "" {
		t.Errorf("the kernel complained:\n%s", faults)
	}
}

// lock keeps two runs from making the same things, and from running two machines on one node.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return func() { _ = f.Close() }, nil
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("another run holds %s: %w", f.Name(), ctx.Err())
		case <-time.After(time.Second):
		}
	}
}

// result is what one step did.
type result struct {
	status  int
	seconds string
	ended   bool
	output  string
}

var testLine = regexp.MustCompile(`(?m)^--- (PASS|FAIL|SKIP)`)

// summary counts tests where the step ran some, else it is the output.
func (r *result) summary() string {
	found := testLine.FindAllStringSubmatch(r.output, -1)
	if len(found) == 0 {
		return r.output
	}
	n := map[string]int{}
	for _, f := range found {
		n[f[1]]++
	}
	var skipped []string
	for line := range strings.Lines(r.output) {
		if strings.HasPrefix(line, "--- SKIP") {
			skipped = append(skipped, strings.TrimSpace(line))
		}
	}
	return strings.Join(append([]string{fmt.Sprintf("%d passed, %d failed, %d skipped", n["PASS"], n["FAIL"], n["SKIP"])}, skipped...), "\n")
}

// parser takes the machine's output apart. Lines that begin with its mark are from the machine's
// init: "begin NAME" and "end NAME STATUS SECONDS"; the others belong to the step that runs.
type parser struct {
	mark    string
	results map[string]*result
	current *result
	done    bool
}

func (p *parser) line(line string) error {
	rest, ours := strings.CutPrefix(line, p.mark+" ")
	if !ours {
		if p.current != nil {
			p.current.output += line + "\n"
		}
		return nil
	}
	f := strings.Fields(rest)
	switch {
	case len(f) == 2 && f[0] == "begin":
		p.current = &result{}
		p.results[f[1]] = p.current
	case len(f) == 4 && f[0] == "end" && p.current != nil && p.results[f[1]] == p.current:
		status, err := strconv.Atoi(f[2])
		if err != nil {
			return fmt.Errorf("the machine said %q", line)
		}
		p.current.status, p.current.seconds, p.current.ended = status, f[3], true
		p.current = nil
	case len(f) == 1 && f[0] == "done":
		p.done = true
	default:
		return fmt.Errorf("the machine said %q", line)
	}
	return nil
}
