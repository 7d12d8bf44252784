package container

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/guestconn"
)

// BenchmarkCreate reports the median of Create, with Destroy between, and the rate of both together.
func BenchmarkCreate(b *testing.B) {
	for name, parallel := range map[string]int{"1": 1, "16": 16} {
		b.Run(name, func(b *testing.B) { benchmarkCreate(b, parallel) })
	}
}

func benchmarkCreate(b *testing.B, parallel int) {
	n := newNode(b)
	back := n.open(b)
	defer back.Close()
	until(b, "the pool is full", func() bool { return len(back.pool.pids()) >= 2 })
	var (
		mu    sync.Mutex
		times []time.Duration
		steps = map[string][]int64{}
		wg    sync.WaitGroup
		work  = make(chan int)
	)
	cpu := cpuTime(b, back)
	began := time.Now()
	for range parallel {
		wg.Go(func() {
			for range work {
				c := n.config(b)
				start := time.Now()
				timings, err := back.Create(context.Background(), c)
				took := time.Since(start)
				if err != nil {
					b.Errorf("create: %v", err)
					continue
				}
				if err := back.Destroy(context.Background(), c.ID); err != nil {
					b.Errorf("destroy: %v", err)
				}
				mu.Lock()
				times = append(times, took)
				for _, s := range timings {
					steps[s.GetStep()] = append(steps[s.GetStep()], s.GetMicros())
				}
				mu.Unlock()
			}
		})
	}
	for i := range b.N {
		work <- i
	}
	close(work)
	wg.Wait()
	total := time.Since(began)
	// On a machine that others use too this tells more than the clock.
	b.ReportMetric(float64((cpuTime(b, back)-cpu).Microseconds())/1000/float64(b.N), "cpu-ms/op")
	if len(times) == 0 {
		return
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, "create-p50-ms")
	b.ReportMetric(float64(times[len(times)*9/10].Microseconds())/1000, "create-p90-ms")
	b.ReportMetric(float64(len(times))/total.Seconds(), "create+destroy/s")
	for name, v := range steps {
		slices.Sort(v)
		b.ReportMetric(float64(v[len(v)/2])/1000, name+"-ms")
	}
}

// cpuTime is what this process and all in the edge's cgroup have used, ever.
func cpuTime(b *testing.B, back *Backend) time.Duration {
	b.Helper()
	text, err := os.ReadFile(filepath.Join(back.cgroups.Dir(), "cpu.stat"))
	if err != nil {
		b.Fatal(err)
	}
	var micros int64
	if _, err := fmt.Sscanf(string(text), "usage_usec %d", &micros); err != nil {
		b.Fatal(err)
	}
	var self unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &self); err != nil {
		b.Fatal(err)
	}
	return time.Duration(micros)*time.Microsecond + time.Duration(self.Utime.Nano()+self.Stime.Nano())
}

// BenchmarkBurst reports how many sandboxes a second 16 clients create, all of which live at once.
func BenchmarkBurst(b *testing.B) {
	n := newNode(b)
	back := opened(b, n)
	configs := make([]backend.Config, b.N)
	for i := range configs {
		configs[i] = n.config(b)
	}
	until(b, "the pool is full", func() bool { return len(back.pool.pids()) >= 2 })
	each := func(f func(backend.Config) error) {
		work := make(chan backend.Config)
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for c := range work {
					if err := f(c); err != nil {
						b.Error(err)
					}
				}
			})
		}
		for _, c := range configs {
			work <- c
		}
		close(work)
		wg.Wait()
	}
	cpu, began := cpuTime(b, back), time.Now()
	each(func(c backend.Config) error {
		_, err := back.Create(context.Background(), c)
		return err
	})
	b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "create/s")
	b.ReportMetric(float64((cpuTime(b, back)-cpu).Microseconds())/1000/float64(b.N), "cpu-ms/create")
	cpu, began = cpuTime(b, back), time.Now()
	each(func(c backend.Config) error { return back.Destroy(context.Background(), c.ID) })
	b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "destroy/s")
	b.ReportMetric(float64((cpuTime(b, back)-cpu).Microseconds())/1000/float64(b.N), "cpu-ms/destroy")
}

// BenchmarkExec is the round trip of a command through the backend's own connection.
func BenchmarkExec(b *testing.B) {
	n := newNode(b)
	back := opened(b, n)
	c := n.config(b)
	create(b, back, c)
	api := harenav1connect.NewExecServiceClient(client(b, back), guestconn.URL(c.ID))
	var times []time.Duration
	for b.Loop() {
		start := time.Now()
		stream, err := api.Run(b.Context(), connect.NewRequest(&harenav1.RunRequest{
			SandboxId: string(c.ID), Command: &harenav1.Command{Argv: []string{"/bin/true"}},
		}))
		if err != nil {
			b.Fatal(err)
		}
		for stream.Receive() {
		}
		if err := stream.Err(); err != nil {
			b.Fatal(err)
		}
		stream.Close()
		times = append(times, time.Since(start))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, "exec-p50-ms")
	b.ReportMetric(float64(times[len(times)*9/10].Microseconds())/1000, "exec-p90-ms")
}
