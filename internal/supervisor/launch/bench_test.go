package launch_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/supervisor/launch"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// median of durations, as a benchmark metric in µs.
func median(b *testing.B, name string, d []time.Duration) {
	if len(d) > 0 {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds()), name)
	}
}

// BenchmarkLaunch starts sandboxes with a zygote that waits, as a pool has them. The end of
// one sandbox slows the start of the next (the kernel frees network namespaces under the lock
// that makes them), so both are measured: each closed before the next, and all closed at the end.
func BenchmarkLaunch(b *testing.B) {
	b.Run("alone", func(b *testing.B) { benchmarkLaunch(b, false) })
	b.Run("kept", func(b *testing.B) { benchmarkLaunch(b, true) })
}

func benchmarkLaunch(b *testing.B, keep bool) {
	lower := busyboxLayer(b)
	steps := map[string][]time.Duration{}
	var total []time.Duration
	for range b.N {
		b.StopTimer()
		l, _ := newLaunch(b, options{lowers: []string{lower}})
		p, err := launch.Prepare(nil)
		mustDo(b, err)
		time.Sleep(5 * time.Millisecond) // until the zygote waits
		b.StartTimer()
		began := time.Now()
		s, err := p.Launch(context.Background(), l)
		total = append(total, time.Since(began))
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		for _, t := range s.Timings() {
			steps[t.GetStep()] = append(steps[t.GetStep()], time.Duration(t.GetMicros())*time.Microsecond)
		}
		if keep {
			b.Cleanup(func() { mustDo(b, s.Close()) })
		} else {
			mustDo(b, s.Close())
		}
		b.StartTimer()
	}
	median(b, "p50-µs", total)
	for name, d := range steps {
		median(b, name+"-µs", d)
	}
}

// BenchmarkFloorNamespaces is clone+exec of a static program into the same namespaces.
func BenchmarkFloorNamespaces(b *testing.B) {
	busybox := requireRoot(b)
	var total []time.Duration
	for range b.N {
		began := time.Now()
		cmd := exec.Command(busybox, "true")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
			UidMappings: []syscall.SysProcIDMap{{HostID: 3_800_000_000, Size: 65536}},
			GidMappings: []syscall.SysProcIDMap{{HostID: 3_800_000_000, Size: 65536}},
		}
		mustDo(b, cmd.Run())
		total = append(total, time.Since(began))
	}
	median(b, "p50-µs", total)
}

// BenchmarkSpawn is one command from Spawn to Wait.
func BenchmarkSpawn(b *testing.B) {
	bed := start(b, options{})
	s := bed.spec(b, "/bin/busybox", "true")
	ctx := context.Background()
	var total []time.Duration
	for b.Loop() {
		began := time.Now()
		p, err := bed.Spawner().Spawn(ctx, s)
		mustDo(b, err)
		if e, err := p.Wait(ctx); err != nil || e.Code != 0 {
			b.Fatalf("%+v %v", e, err)
		}
		total = append(total, time.Since(began))
	}
	median(b, "p50-µs", total)
}

// BenchmarkFloorSpawn is fork and exec of the same program on the node.
func BenchmarkFloorSpawn(b *testing.B) {
	busybox := requireRoot(b)
	var total []time.Duration
	for b.Loop() {
		began := time.Now()
		p, err := os.StartProcess(busybox, []string{"busybox", "true"}, &os.ProcAttr{Env: []string{}})
		mustDo(b, err)
		_, err = p.Wait()
		mustDo(b, err)
		total = append(total, time.Since(began))
	}
	median(b, "p50-µs", total)
}

// BenchmarkSpawnMany is what 16 callers at once get.
func BenchmarkSpawnMany(b *testing.B) {
	bed := start(b, options{})
	s := bed.spec(b, "/bin/busybox", "true")
	ctx := context.Background()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			p, err := bed.Spawner().Spawn(ctx, s)
			if err == nil {
				var e zygote.Exit
				if e, err = p.Wait(ctx); err == nil && e.Code != 0 {
					err = fmt.Errorf("%+v", e)
				}
			}
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}
