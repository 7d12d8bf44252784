package blobd

import (
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// readSequential reads all files in the order of the blob.
func (img image) readSequential(b *testing.B, dir string) {
	b.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "f*"))
	if err != nil || len(names) != len(img.files) {
		b.Fatal(names, err)
	}
	buf := make([]byte, 1<<20)
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buf); err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}

// cpuTime is what a process has used; proc_pid_stat(5), in ticks of 10 ms.
func cpuTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(max(1, user+system)) * 10 * time.Millisecond
}

func BenchmarkSequential(b *testing.B) {
	const size = 32 << 20
	for _, bb := range []struct {
		name    string
		latency time.Duration
		rate    int64
		options []string
	}{
		{"zero", 0, 0, nil},
		{"zero-directio", 0, 0, []string{"directio"}},
		{"5ms-100MBs", 5 * time.Millisecond, 100e6, nil},
		{"5ms-100MBs-directio", 5 * time.Millisecond, 100e6, []string{"directio"}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			r := newRemote(b, bb.latency, bb.rate)
			n := startNode(b, r, nil)
			var moved atomic.Int64
			for b.Loop() {
				b.StopTimer()
				img := newImage(b, r, 4, size)
				p := n.attach(img.blob.Digest, img.blob)
				dir := img.mount(b, p[0].Path, bb.options...)
				before := r.moved.Load()
				b.StartTimer()
				pid := n.status().Pid
				cpu := cpuTime(b, pid)
				begin := time.Now()
				img.readSequential(b, dir)
				took := time.Since(begin)
				b.ReportMetric(float64(img.bytes)/1e6/(cpuTime(b, pid)-cpu).Seconds(), "MB/cpu-s")
				b.ReportMetric(float64(img.bytes)/1e6/took.Seconds(), "MB/s")
				moved.Store(r.moved.Load() - before)
				b.ReportMetric(float64(moved.Load())/1e6/took.Seconds(), "linkMB/s")
				b.StopTimer()
				// Again, from the daemon's files, without page cache.
				n.event(EventComplete)
				_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
				cpu = cpuTime(b, pid)
				begin = time.Now()
				img.readSequential(b, dir)
				b.ReportMetric(float64(img.bytes)/1e6/time.Since(begin).Seconds(), "localMB/s")
				b.ReportMetric(float64(img.bytes)/1e6/(cpuTime(b, pid)-cpu).Seconds(), "localMB/cpu-s")
				p = n.attach("direct", img.blob)
				direct := img.mount(b, p[0].Path, bb.options...)
				_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
				begin = time.Now()
				img.readSequential(b, direct)
				b.ReportMetric(float64(img.bytes)/1e6/time.Since(begin).Seconds(), "directMB/s")
				b.StartTimer()
			}
		})
	}
}
