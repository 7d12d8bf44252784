package container

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"
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
