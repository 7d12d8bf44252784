package bench

import (
	"context"
	"strings"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
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

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		groups, cwd string
		want        owner
	}{
		{"0::/harena-abcdef/control\n", "/", ofPool},
		{"0::/harena-abcdef/control\n", "/data/sandboxes/abcdefghijklmnopqrst", ofSandbox},
		{"8:pids:/harena-abcdef/abcdefghijklmnopqrst\n0::/harena-abcdef/abcdefghijklmnopqrst/work\n", "/", ofSandbox},
		{"0::/harena-abcdef/abcdefghijklmnopqrst/zygote\n", "/", ofSandbox},
		{"0::/harena-zzzzzz/control\n", "/data/sandboxes/zzzzzzghijklmnopqrst", ofOthers},
		{"0::/user.slice\n", "/data/sandboxes/abcdefghijklmnopqrst", ofOthers},
	} {
		if got := place(c.groups, c.cwd, "abcdef"); got != c.want {
			t.Errorf("place(%q, %q) = %v", c.groups, c.cwd, got)
		}
	}
}

func TestStepsAreShown(t *testing.T) {
	l := laps{}
	for _, micros := range []int64{1000, 3000, 2000} {
		l.add(&harena.Sandbox{Timings: []*harenav1.Timing{{Step: "dirs", Micros: micros}}})
	}
	var out strings.Builder
	if err := (&Report{Results: []Result{{Name: "create", Unit: "ms", Steps: l.medians()}}}).Print(&out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "  dirs                            2.000\n") {
		t.Errorf("no step in\n%s", out.String())
	}
}
