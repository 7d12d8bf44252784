package cgroup

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const hybridInfo = `22 27 0:21 / /proc rw,relatime - proc proc rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,nosuid - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`

func TestParseLayout(t *testing.T) {
	v1 := map[string]string{"cpu": "/sys/fs/cgroup/cpu,cpuacct", "memory": "/sys/fs/cgroup/memory", "pids": "/sys/fs/cgroup/pids"}
	const v2Info = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n"
	tests := []struct {
		name, mountinfo, self string
		want                  Layout
	}{
		{"hybrid", hybridInfo, "4:memory:/a\n0::/\n", Layout{Bases: []string{"/sys/fs/cgroup/unified"}, V1: v1}},
		{"v2 service", v2Info, "0::/system.slice/harena.service\n",
			Layout{Bases: []string{"/sys/fs/cgroup", "/sys/fs/cgroup/system.slice/harena.service"}, Options: []string{"nsdelegate"}, V1: map[string]string{}}},
		{"v2 container", v2Info, "0::/\n", Layout{Bases: []string{"/sys/fs/cgroup"}, Options: []string{"nsdelegate"}, V1: map[string]string{}}},
		{"outside the cgroup namespace", v2Info, "0::/../other\n", Layout{Bases: []string{"/sys/fs/cgroup"}, Options: []string{"nsdelegate"}, V1: map[string]string{}}},
		{"v1 only", strings.Replace(hybridInfo, "cgroup2 cgroup2", "tmpfs tmpfs", 1), "4:memory:/\n", Layout{V1: v1}},
		{"read-only mounts do not count", strings.ReplaceAll(hybridInfo, " rw,", " ro,"), "0::/\n", Layout{V1: map[string]string{}}},
		{"escaped name", `30 23 0:26 / /sys/fs/c\040g rw - cgroup2 cgroup2 rw` + "\n", "0::/\n", Layout{Bases: []string{"/sys/fs/c g"}, V1: map[string]string{}}},
		{"optional fields", "30 23 0:26 / /c rw shared:9 master:1 - cgroup2 cgroup2 rw\n", "", Layout{Bases: []string{"/c"}, V1: map[string]string{}}},
		{"nonsense", "x\n - \n1 2 3 4 5 6 - cgroup2\n", "0:", Layout{V1: map[string]string{}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := parseLayout(test.mountinfo, test.self)
			if len(got.Options) == 0 {
				got.Options = nil
			}
			if !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestSplitPerController(t *testing.T) {
	l := Layout{V1: map[string]string{"memory": "/m", "pids": "/p"}}
	v2, v1, missing := l.split("cpuset io memory\n")
	if !slices.Equal(v2, []string{"memory"}) || !reflect.DeepEqual(v1, map[string]string{"pids": "/p"}) || !slices.Equal(missing, []string{"cpu"}) {
		t.Errorf("split: v2 %v, v1 %v, missing %v", v2, v1, missing)
	}
	if err := (Limits{CPU: 1}).need(missing); !errs.Is(err, errs.Unsupported) {
		t.Errorf("a limit that the node cannot hold: %v", err)
	}
	if err := (Limits{Memory: 1, Pids: 1}).need(missing); err != nil {
		t.Errorf("limits that it can hold: %v", err)
	}
}

func TestPlanV1(t *testing.T) {
	r := &Root{dir: "/u/h", v1: map[string]string{"cpu": "/c/h", "memory": "/m/h", "pids": "/p/h"}, swap: true, sockets: true}
	got := r.Group("id").plan(Limits{CPU: 1.5, Memory: 1 << 30, Pids: 10})
	want := []op{
		{dir: "/u/h/id"}, {dir: "/u/h/id/zygote"}, {dir: "/u/h/id/files"}, {dir: "/u/h/id/work"},
		{dir: "/c/h/id"}, {dir: "/m/h/id"}, {dir: "/p/h/id"},
		{"/m/h/id", "memory.limit_in_bytes", "1073741824"},
		{"/m/h/id", "memory.memsw.limit_in_bytes", "1073741824"},
		{"/m/h/id", "memory.kmem.tcp.limit_in_bytes", "268435456"},
		{"/c/h/id", "cpu.cfs_quota_us", "150000"},
		{"/p/h/id", "pids.max", "11"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%v\nwant\n%v", got, want)
	}
	p := r.Group("id").Paths()
	if !slices.Equal(p.V1, []string{"/c/h/id", "/m/h/id", "/p/h/id"}) || !slices.Equal(p.FilesV1, []string{"/m/h/id"}) {
		t.Errorf("paths %+v", p)
	}
}

func TestSmallestQuota(t *testing.T) {
	r := &Root{v1: map[string]string{"cpu": "/c"}}
	ops := r.Group("id").plan(Limits{CPU: 0.0001})
	if last := ops[len(ops)-1]; last.value != "1000" {
		t.Errorf("quota is %s µs; the kernel takes no less than 1000", last.value)
	}
}

// v2 runs Open and Create on the model and returns the effects.
func v2(t *testing.T, m *model, bases ...string) []string {
	t.Helper()
	r, err := open(m, Layout{Bases: bases}, "harena-x")
	if err != nil {
		t.Fatal(err)
	}
	g := r.Group("id")
	if _, err := g.Create(Limits{CPU: 2, Memory: 4096, Pids: 7}); err != nil {
		t.Fatal(err)
	}
	return m.log
}

func TestV2(t *testing.T) {
	m := newModel("/c", true, "cpuset", "cpu", "memory", "pids")
	m.groups["/c"].procs = []string{"1", "2"} // the real root may have processes
	m.groups["/c"].subtree = []string{"memory"}
	want := []string{
		"cgroup.subtree_control = +cpu +pids",
		"mkdir harena-x",
		"harena-x/cgroup.subtree_control = +cpu +memory +pids",
		"mkdir harena-x/control",
		"mkdir harena-x/id",
		"harena-x/id/memory.max = 4096",
		"harena-x/id/memory.swap.max = 0",
		"harena-x/id/cpu.max = 200000 100000",
		"harena-x/id/cgroup.subtree_control = +memory +cpu +pids",
		"mkdir harena-x/id/zygote",
		"mkdir harena-x/id/files",
		"mkdir harena-x/id/work",
		"harena-x/id/work/memory.max = 4096",
		"harena-x/id/work/cpu.max = 200000 100000",
		"harena-x/id/work/pids.max = 7",
	}
	if got := v2(t, m, "/c"); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestV2RootOfContainerIsVacated(t *testing.T) {
	m := newModel("/c", false, "cpu", "memory", "pids")
	m.groups["/c"].procs = []string{"1", "17"}
	v2(t, m, "/c")
	if procs := m.groups["/c/harena-init"].procs; !slices.Equal(procs, []string{"1", "17"}) {
		t.Errorf("processes of the root are now %v", procs)
	}
}

func TestV2FallsBackToOwnGroup(t *testing.T) {
	m := newModel("/c", true, "cpu", "memory", "pids")
	m.groups["/c"].subtree = []string{"cpu", "memory", "pids"}
	m.denied["/c"] = true
	m.groups["/c/s"] = &modelGroup{controllers: []string{"cpu", "memory", "pids"}, procs: []string{"9"}, files: map[string]string{}}
	v2(t, m, "/c", "/c/s")
	if m.groups["/c/s/harena-x/id/work"] == nil || m.groups["/c/harena-x"] != nil {
		t.Error("groups were not made in the delegated subtree")
	}
}

func TestV2WithoutSwapAccounting(t *testing.T) {
	m := newModel("/c", true, "cpu", "memory", "pids")
	m.swap = false
	for _, line := range v2(t, m, "/c") {
		if strings.Contains(line, "swap") {
			t.Errorf("effect %q on a kernel without swap accounting", line)
		}
	}
}

func TestOpenWithoutAnyBase(t *testing.T) {
	m := newModel("/c", true)
	m.denied["/c"] = true
	if _, err := open(m, Layout{Bases: []string{"/c", "/nowhere"}}, "harena-x"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("err = %v, want unsupported", err)
	}
}

func TestCreateTwice(t *testing.T) {
	m := newModel("/c", true, "cpu", "memory", "pids")
	v2(t, m, "/c")
	r, err := open(m, Layout{Bases: []string{"/c"}}, "harena-x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Group("id").Create(Limits{}); !errs.Is(err, errs.Exists) {
		t.Errorf("second create: %v, want exists", err)
	}
}

func TestInterruptedCallsAreRepeated(t *testing.T) {
	answers := []error{unix.EINTR, unix.EINTR, unix.EBUSY, nil}
	calls := 0
	err := uninterrupted(func() error { calls++; return answers[calls-1] })
	if err != unix.EBUSY || calls != 3 {
		t.Errorf("%v after %d calls", err, calls)
	}
}
