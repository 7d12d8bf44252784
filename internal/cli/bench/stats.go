// Package bench measures a running Harena through its API, beside the physical
// floor and the peers that are installed, in the same run: on a noisy machine
// only ratios of things measured side by side mean something.
package bench

import (
	"math"
	"sort"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// Result is one measure. Times and percentiles are in Unit.
type Result struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	N    int     `json:"n"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	// RatePerS is completed operations per second of wall clock, 0 where it means nothing.
	RatePerS float64 `json:"rate_per_s,omitempty"`
	// Floor is the p50 of the least work that the kernel must do for this, 0 when there is none.
	Floor float64 `json:"floor,omitempty"`
	// Peers are the p50 of the same job done by others, by name.
	Peers map[string]float64 `json:"peers,omitempty"`
	// Steps are the p50 of the named steps of the operation, in Unit.
	Steps map[string]float64 `json:"steps,omitempty"`
	Note  string             `json:"note,omitempty"`
}

// Report is what `harena bench --json` prints.
type Report struct {
	Machine map[string]string `json:"machine"`
	Results []Result          `json:"results"`
}

// summarise makes a result from durations; wall is the time that all took together.
func summarise(name string, samples []time.Duration, wall time.Duration) Result {
	ms := make([]float64, len(samples))
	for i, d := range samples {
		ms[i] = float64(d) / float64(time.Millisecond)
	}
	sort.Float64s(ms)
	r := Result{Name: name, Unit: "ms", N: len(ms), P50: quantile(ms, 0.5), P90: quantile(ms, 0.9), P99: quantile(ms, 0.99)}
	if wall > 0 {
		r.RatePerS = round(float64(len(ms)) / wall.Seconds())
	}
	return r
}

// quantile returns the q-quantile of sorted values by the nearest-rank method.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return round(sorted[max(0, min(i, len(sorted)-1))])
}

func round(f float64) float64 { return math.Round(f*1000) / 1000 }

// median is the p50 of samples in milliseconds.
func median(samples []time.Duration) float64 { return summarise("", samples, 0).P50 }

// laps collects the times of the named steps of creations, as the node reports them.
type laps map[string][]time.Duration

func (l laps) add(sb *harena.Sandbox) {
	for _, t := range sb.Timings {
		l[t.GetStep()] = append(l[t.GetStep()], time.Duration(t.GetMicros())*time.Microsecond)
	}
}

func (l laps) medians() map[string]float64 {
	out := map[string]float64{}
	for step, samples := range l {
		out[step] = median(samples)
	}
	return out
}
