package supervisor

import (
	"net/http"
	"runtime/debug"
	"sync"
	"time"
)

// trimAfter is the quiet time after which memory goes back to the node: many
// idle supervisors share one, and a forced collection costs milliseconds.
const trimAfter = 3 * time.Second

// activity notes when somebody last had use of the sandbox, and returns memory
// to the node when nobody has.
type activity struct {
	mu    sync.Mutex
	calls int // running
	last  time.Time
	trim  *time.Timer
}

func newActivity() *activity {
	// The first trim is for what the start itself used.
	return &activity{last: time.Now(), trim: time.AfterFunc(trimAfter, debug.FreeOSMemory)}
}

// track counts the calls of h.
func (a *activity) track(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.add(1)
		defer a.add(-1)
		h.ServeHTTP(w, r)
	})
}

// touch notes activity outside calls, such as the end of a command.
func (a *activity) touch() { a.add(0) }

func (a *activity) add(calls int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls += calls
	a.last = time.Now()
	if a.calls == 0 {
		a.trim.Reset(trimAfter)
	} else {
		a.trim.Stop()
	}
}

// read returns the time of the last activity, which is now while a call runs.
func (a *activity) read() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls > 0 {
		return time.Now()
	}
	return a.last
}
