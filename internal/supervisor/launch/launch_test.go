package launch_test

import "testing"

func TestLaunchAndSpawn(t *testing.T) {
	b := start(t, options{})
	for _, s := range b.Timings() {
		t.Logf("%s %d µs", s.GetStep(), s.GetMicros())
	}
	if got := b.sh(t, "echo hello"); got != "hello\n" {
		t.Errorf("got %q", got)
	}
}
