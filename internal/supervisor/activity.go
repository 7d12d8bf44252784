package supervisor

import (
	"fmt"
	"net/http"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

const (
	// trimAfter is the quiet time after which a supervisor makes itself small.
	trimAfter = 3 * time.Second
	// gcPercent is the collector's while there is work: a live heap of under a megabyte may grow to 8 MiB.
	gcPercent = 200
	// worthTrimming is the private memory in bytes, 2 MiB when fresh, from which on a collection gains more than it costs:
	// with its workers, bitmaps and queues the first one adds about 300 KiB for ever.
	worthTrimming = 5 << 20
)

// activity notes when somebody last had use of the sandbox, and keeps the
// supervisor small when nobody has. Then the collector is off, which the edge
// starts it with (GOGC=off): an idle heap does not grow, and the runtime would
// collect it every two minutes all the same.
type activity struct {
	mu         sync.Mutex
	running    func() (commands, streams int) // commands allocate without a call
	calls      int                            // running, of all kinds
	useful     int                            // of them, those that keep a sandbox from being idle
	last       time.Time
	timer      *time.Timer
	collecting bool
}

func newActivity() *activity {
	a := &activity{last: time.Now(), running: func() (int, int) { return 0, 0 }}
	// A fresh supervisor is small: nothing to do before the first call.
	a.timer = time.AfterFunc(trimAfter, a.trim)
	a.timer.Stop()
	return a
}

// watch says how to count commands.
func (a *activity) watch(running func() (commands, streams int)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running = running
}

// track counts the calls of h. GuestService is the edge's own.
func (a *activity) track(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		useful := 1
		if strings.HasPrefix(r.URL.Path, "/harena.guest.") {
			useful = 0
		}
		a.add(1, useful)
		defer a.add(-1, -useful)
		h.ServeHTTP(w, r)
	})
}

// touch notes activity outside calls, such as the end of a command.
func (a *activity) touch() {
	a.mu.Lock()
	a.last = time.Now()
	a.mu.Unlock()
	a.add(0, 0)
}

func (a *activity) add(calls, useful int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls += calls
	a.useful += useful
	if useful != 0 {
		a.last = time.Now()
	}
	if a.calls == 0 {
		a.timer.Reset(trimAfter)
		return
	}
	a.timer.Stop()
	if !a.collecting {
		a.collecting = true
		debug.SetGCPercent(gcPercent)
	}
}

// trim makes the supervisor small after a quiet time.
func (a *activity) trim() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls > 0 {
		return
	}
	// Not by runtime.ReadMemStats: it flushes the allocator's caches, which costs 600 KiB for ever (a block of 4 KiB in each
	// of 136 span sets).
	if private() > worthTrimming {
		debug.FreeOSMemory()
	}
	if commands, _ := a.running(); commands == 0 {
		a.collecting = false
		debug.SetGCPercent(-1)
	} else if !a.collecting {
		a.collecting = true
		debug.SetGCPercent(gcPercent)
	}
}

// private returns the bytes of memory of this process that are backed by no file; 0 when it cannot be told.
func private() int {
	f, err := os.Open("/proc/self/statm")
	if err != nil {
		return 0
	}
	defer f.Close() //nolint:errcheck // read only
	buf := make([]byte, 128)
	n, err := f.Read(buf)
	if err != nil {
		return 0
	}
	var size, resident, shared int // pages; see proc_pid_statm(5)
	if _, err := fmt.Sscan(string(buf[:n]), &size, &resident, &shared); err != nil {
		return 0
	}
	return (resident - shared) * os.Getpagesize()
}

// lastUse returns the time of the last activity, which is now while a call runs.
func (a *activity) lastUse() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.useful > 0 {
		return time.Now()
	}
	return a.last
}
