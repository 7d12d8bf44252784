package supervisor

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
)

func TestActivity(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	a := newActivity()
	defer func() { a.timer.Stop() }() // the test says when
	commands := 0
	a.watch(func() (int, int) { return commands, 0 })
	inside, leave := make(chan bool), make(chan bool)
	h := a.track(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inside <- true; <-leave }))
	call := func(path string) (end func()) {
		done := make(chan bool)
		go func() {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, path, http.NoBody))
			close(done)
		}()
		<-inside
		return func() { leave <- true; <-done }
	}
	start := a.lastUse()

	end := call("/harena.guest.v1.GuestService/Status")
	if !a.collecting {
		t.Error("the collector is off during a call")
	}
	end()
	if got := a.lastUse(); !got.Equal(start) {
		t.Errorf("the edge's own call counts: %v after %v", got, start)
	}

	end = call("/harena.v1.ExecService/Run")
	during := a.lastUse()
	if !during.After(start) {
		t.Error("a call that runs is not activity")
	}
	a.trim()
	if !a.collecting {
		t.Error("trimmed during a call")
	}
	end()
	after := a.lastUse()
	if after.Before(during) || !a.lastUse().Equal(after) {
		t.Errorf("activity after the call: %v, then %v", after, a.lastUse())
	}

	commands = 1
	a.trim()
	if !a.collecting {
		t.Error("the collector is off while a command runs")
	}
	commands = 0
	a.touch() // its end
	if !a.lastUse().After(after) {
		t.Error("the end of a command is not activity")
	}
	a.trim()
	if a.collecting || debug.SetGCPercent(-1) != -1 {
		t.Error("the collector is on while nothing happens")
	}
}

func TestTrimReturnsMemory(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	a := newActivity()
	func() {
		garbage := make([]byte, 2*worthTrimming)
		for i := 0; i < len(garbage); i += 4096 {
			garbage[i] = 1
		}
	}()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	a.trim()
	runtime.ReadMemStats(&after)
	if kept := after.HeapInuse + after.HeapIdle - after.HeapReleased; after.NumForcedGC == before.NumForcedGC || kept > worthTrimming {
		t.Errorf("%d bytes are kept after a trim", kept)
	}
}

func TestWarmGivesWay(t *testing.T) {
	asked := 0
	if err := warm(func() bool { asked++; return asked == 3 }); err != nil || asked != 3 {
		t.Errorf("warm went on to step %d, %v", asked, err)
	}
	if err := warm(func() bool { return false }); err != nil {
		t.Error(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if readable(r) {
		t.Error("an empty pipe is readable")
	}
	w.Close()
	if !readable(r) {
		t.Error("a pipe at its end is not readable")
	}
}

// TestTrimCostsNothing trims a process of which nothing can be given back. The worst case is one that never collected: the
// test starts itself anew as such.
func TestTrimCostsNothing(t *testing.T) {
	if os.Getenv("HARENA_TEST_TRIM") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestTrimCostsNothing$", "-test.v")
		cmd.Env = []string{"HARENA_TEST_TRIM=1", "GOGC=off", "GOMAXPROCS=2"}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	a := newActivity()
	before := private()
	a.trim()
	most := 128 << 10
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		most *= 16 // its shadow memory
	}
	if grew := private() - before; before == 0 || grew > most {
		t.Errorf("trimming costs %d KiB, of %d", grew>>10, before>>10)
	}
}
