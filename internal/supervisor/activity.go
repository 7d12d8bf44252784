package supervisor

import (
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

// trimAfter is the quiet time after which memory goes back to the node: many
// idle supervisors share one, and a forced collection costs milliseconds.
const trimAfter = 3 * time.Second

// activity counts calls that are of use to somebody, which keep a sandbox from
// being idle, and returns memory when there are none.
type activity struct {
	mu      sync.Mutex
	calls   int // running
	streams int // of them, attached to a command's output
	last    time.Time
	trim    *time.Timer
}

func newActivity() *activity {
	a := &activity{last: time.Now()}
	a.trim = time.AfterFunc(time.Hour, debug.FreeOSMemory)
	a.trim.Stop()
	return a
}

// settle schedules the first trim, for what the start itself used.
func (a *activity) settle() { a.trim.Reset(trimAfter) }

// streaming are the calls that last as long as a client is attached.
func streaming(path string) bool {
	switch method := path[strings.LastIndexByte(path, '/')+1:]; method {
	case "Run", "Connect", "Watch":
		return strings.HasPrefix(path, "/harena.v1.")
	}
	return false
}

// track counts the calls of h.
func (a *activity) track(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		stream := 0
		if streaming(r.URL.Path) {
			stream = 1
		}
		a.add(1, stream)
		defer a.add(-1, -stream)
		h.ServeHTTP(w, r)
	})
}

func (a *activity) add(calls, streams int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls += calls
	a.streams += streams
	a.last = time.Now()
	if a.calls == 0 {
		a.trim.Reset(trimAfter)
	} else {
		a.trim.Stop()
	}
}

// read returns the attached streams and the time of the last activity, which
// is now while a call runs.
func (a *activity) read() (streams int, last time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls > 0 {
		return a.streams, time.Now()
	}
	return a.streams, a.last
}
