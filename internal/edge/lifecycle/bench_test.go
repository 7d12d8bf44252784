package lifecycle

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/admission"
)

// BenchmarkCreate measures a creation and a stop beside a number of live sandboxes. Its cost must not depend on the number.
func BenchmarkCreate(b *testing.B) {
	for _, live := range []int{1, 100, 500, 5000} {
		b.Run(strconv.Itoa(live), func(b *testing.B) {
			w := newWorld(b)
			w.config = func(c *Config) { c.Limits, c.Clock = admission.Limits{Sandboxes: 8000}, SystemClock{} }
			e := w.up()
			fill(b, e, live)
			for b.Loop() {
				resp, err := e.Create(context.Background(), &edgev1.CreateRequest{Spec: spec()})
				if err != nil {
					b.Fatal(err)
				}
				_, err = e.Stop(context.Background(), &harenav1.StopRequest{Selector: &harenav1.Selector{Ids: []string{resp.GetSandbox().GetId()}}, Remove: true})
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRecover measures how long a server takes to find its sandboxes again.
func BenchmarkRecover(b *testing.B) {
	for _, live := range []int{100, 1000} {
		b.Run(strconv.Itoa(live), func(b *testing.B) {
			w := newWorld(b)
			w.config = func(c *Config) { c.Clock = SystemClock{} }
			fill(b, w.up(), live)
			for b.Loop() {
				b.StopTimer()
				w.down()
				b.StartTimer()
				w.up()
			}
		})
	}
}

func fill(b *testing.B, e *Edge, n int) {
	b.Helper()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := i; j < n; j += 4 {
				_, err := e.Create(context.Background(), &edgev1.CreateRequest{Spec: spec(), RequestId: fmt.Sprint(j), Project: "lab"})
				if err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
