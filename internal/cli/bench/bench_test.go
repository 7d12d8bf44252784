package bench

import (
	"context"
	"testing"
	"time"
)

func TestSummarise(t *testing.T) {
	var samples []time.Duration
	for i := 100; i >= 1; i-- {
		samples = append(samples, time.Duration(i)*time.Millisecond)
	}
	r := summarise("x", samples, 2*time.Second)
	if r.P50 != 50 || r.P90 != 90 || r.P99 != 99 || r.RatePerS != 50 || r.N != 100 || r.Unit != "ms" {
		t.Errorf("%+v", r)
	}
	if r := summarise("none", nil, 0); r.P50 != 0 || r.N != 0 {
		t.Errorf("of nothing: %+v", r)
	}
}

func TestFloorsAndPeersRunHere(t *testing.T) {
	if _, err := staticTrue(); err != nil {
		t.Skip(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for name, f := range map[string]func(context.Context, int) ([]time.Duration, error){"create": floorCreate, "exec": floorExec} {
		if d, err := f(ctx, 3); err != nil || len(d) != 3 {
			t.Errorf("floor of %s: %v, %v", name, d, err)
		}
	}
	got, notes, err := measurePeers(ctx, 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("peers %v, notes %v", got, notes)
	for name, p50 := range got {
		if p50 <= 0 {
			t.Errorf("%s measured %v", name, p50)
		}
	}
}
