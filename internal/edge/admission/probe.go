package admission

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Probe reads the state of this machine.
type Probe struct {
	// Dir is where the sandboxes' disk is.
	Dir string
	// Proc is /proc, but for tests.
	Proc string
}

// Snapshot reads everything. What cannot be read is -1, or missing.
func (p Probe) Snapshot() Snapshot {
	s := Snapshot{
		MemoryTotal: -1, MemoryAvailable: -1, DiskTotal: -1, DiskFree: -1, InodesFree: -1,
		Pids: -1, PidsMax: -1, FDs: -1, FDsMax: -1, Cores: float64(runtime.NumCPU()),
	}
	if b, err := os.ReadFile(p.proc("meminfo")); err == nil {
		m := keyed(b, ":")
		s.MemoryTotal, s.MemoryAvailable = kib(m["MemTotal"]), kib(m["MemAvailable"])
		s.SwapTotal, s.SwapFree = max(0, kib(m["SwapTotal"])), max(0, kib(m["SwapFree"]))
	}
	if s.SwapTotal > 0 {
		s.ZramBytes, s.DiskSwapUsed = p.swaps()
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.Dir, &st); err == nil {
		s.DiskTotal, s.DiskFree = int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
		// btrfs and others have no fixed number of inodes and say 0 of 0.
		if st.Files > 0 {
			s.InodesFree = int64(st.Ffree)
		}
	}
	// The fourth field is "runnable/existing" scheduling entities (proc_loadavg(5)).
	if b, err := os.ReadFile(p.proc("loadavg")); err == nil {
		if f := strings.Fields(string(b)); len(f) == 5 {
			_, total, _ := strings.Cut(f[3], "/")
			s.Pids = number(total)
		}
	}
	if b, err := os.ReadFile(p.proc("sys/kernel/pid_max")); err == nil {
		s.PidsMax = number(strings.TrimSpace(string(b)))
	}
	if b, err := os.ReadFile(p.proc("sys/kernel/threads-max")); err == nil {
		s.PidsMax = min(s.PidsMax, number(strings.TrimSpace(string(b))))
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err == nil {
		s.FDsMax = int64(min(r.Cur, 1<<40))
	}
	s.FDs = countFDs(p.proc("self/fd"))
	for _, resource := range []string{"memory", "cpu", "io"} {
		b, err := os.ReadFile(p.proc("pressure/" + resource))
		if err != nil {
			continue
		}
		if v, ok := psi(string(b)); ok {
			if s.Pressure == nil {
				s.Pressure = map[string]float64{}
			}
			s.Pressure[resource] = v
		}
	}
	return s
}

// OOMKills returns how many processes the kernel killed for want of memory since boot, in any cgroup: one number that
// tells whether it is worth looking at each sandbox. -1 when unknown.
func (p Probe) OOMKills() int64 {
	b, err := os.ReadFile(p.proc("vmstat"))
	if err != nil {
		return -1
	}
	const key = "\noom_kill "
	i := bytes.Index(b, []byte(key))
	if i < 0 {
		return -1
	}
	value, _, _ := bytes.Cut(b[i+len(key):], []byte("\n"))
	return number(string(value))
}

func (p Probe) proc(name string) string {
	root := p.Proc
	if root == "" {
		root = "/proc"
	}
	return filepath.Join(root, name)
}

// swaps reads what zram devices take of memory for what was swapped to them, and how much is in swap elsewhere.
func (p Probe) swaps() (zram, disk int64) {
	b, err := os.ReadFile(p.proc("swaps"))
	if err != nil {
		return 0, 0
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	for _, line := range lines[1:] {
		// Filename, type, size, used (KiB), priority; spaces in names are escaped.
		f := strings.Fields(line)
		if len(f) != 5 {
			continue
		}
		name := filepath.Base(f[0])
		if !strings.HasPrefix(name, "zram") {
			disk += max(0, number(f[3])) << 10
			continue
		}
		// The third number is mem_used_total (Documentation/admin-guide/blockdev/zram.rst).
		stat, err := os.ReadFile(filepath.Join(p.sys(), "block", name, "mm_stat"))
		if n := strings.Fields(string(stat)); err == nil && len(n) > 2 {
			zram += max(0, number(n[2]))
		}
	}
	return zram, disk
}

func (p Probe) sys() string {
	if p.Proc == "" {
		return "/sys"
	}
	return filepath.Join(p.Proc, "../sys")
}

// countFDs uses the size of /proc/PID/fd, which since Linux 6.2 is the number of open descriptors; older kernels say 0.
func countFDs(dir string) int64 {
	if st, err := os.Stat(dir); err == nil && st.Size() > 0 {
		return st.Size()
	}
	names, err := os.ReadDir(dir)
	if err != nil {
		return -1
	}
	return int64(len(names))
}

// psi returns avg10 of the line "some avg10=1.23 …".
func psi(s string) (float64, bool) {
	for line := range strings.Lines(s) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "some" {
			continue
		}
		v, found := strings.CutPrefix(f[1], "avg10=")
		n, err := strconv.ParseFloat(v, 64)
		return n, found && err == nil
	}
	return 0, false
}

func keyed(b []byte, sep string) map[string]string {
	m := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		if k, v, ok := strings.Cut(lines.Text(), sep); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}

func kib(s string) int64 {
	n := number(strings.TrimSuffix(s, " kB"))
	if n < 0 {
		return -1
	}
	return n << 10
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return -1
	}
	return n
}
