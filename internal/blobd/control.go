package blobd

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	maxRequest = 1 << 20
	maxEvents  = 256 // kept for who listens later
	// lifeEvery is how often an idle stream of events shows that it is alive.
	lifeEvery = 5 * time.Second
)

// serveControl answers on the control socket, which only root reaches: its directory is 0700.
func (d *daemon) serveControl(l net.Listener) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /hello", answer(func([]byte) (any, error) {
		return helloAnswer{protocol, d.s.Version, os.Getpid(), d.s.Settings}, nil
	}))
	mux.HandleFunc("POST /attach", answer(func(b []byte) (any, error) {
		var r attachRequest
		if err := decode(b, &r); err != nil {
			return nil, err
		}
		return d.attach(r)
	}))
	mux.HandleFunc("POST /detach", answer(func(b []byte) (any, error) {
		var r detachRequest
		if err := decode(b, &r); err != nil {
			return nil, err
		}
		return struct{}{}, d.detach(r)
	}))
	mux.HandleFunc("POST /status", answer(func([]byte) (any, error) { return d.status(), nil }))
	mux.HandleFunc("POST /events", d.log.serve)
	mux.HandleFunc("POST /leave", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		d.leave()
	})
	mux.HandleFunc("POST /shutdown", answer(func([]byte) (any, error) { return struct{}{}, d.shutdown() }))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	if err := server.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
		d.s.Log.Error("the control socket has failed", "err", err)
		d.leave()
	}
}

func answer(f func(body []byte) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
		var out any
		if err == nil {
			out, err = f(b)
		}
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			fail := failure{Kind: errs.KindOf(err), Message: err.Error()}
			var e *errs.Error
			if errors.As(err, &e) {
				fail.Hint = e.Hint
			}
			w.WriteHeader(http.StatusUnprocessableEntity)
			_ = json.NewEncoder(w).Encode(fail)
			return
		}
		_ = json.NewEncoder(w).Encode(out)
	}
}

// eventLog keeps events until somebody takes them. There is one listener, the node; one that comes later takes its place.
type eventLog struct {
	mu      sync.Mutex
	events  []Event
	changed chan struct{}
	owner   int
}

func newEventLog() *eventLog { return &eventLog{changed: make(chan struct{}, 1)} }

func (l *eventLog) add(e Event) {
	e.Time = time.Now().UTC()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) == maxEvents {
		l.events = l.events[1:]
	}
	l.events = append(l.events, e)
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

func (l *eventLog) take() []Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.events
	l.events = nil
	return out
}

// giveBack puts events that could not be delivered before those that came since.
func (l *eventLog) giveBack(events []Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(events, l.events...)
	l.events = l.events[max(0, len(l.events)-maxEvents):]
}

func (l *eventLog) serve(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	l.owner++
	me := l.owner
	l.mu.Unlock()
	control := http.NewResponseController(w)
	life := time.NewTicker(lifeEvery)
	defer life.Stop()
	enc := json.NewEncoder(w)
	for r.Context().Err() == nil {
		l.mu.Lock()
		replaced := l.owner != me
		l.mu.Unlock()
		if replaced {
			return
		}
		events := l.take()
		if len(events) == 0 {
			events = []Event{{}} // a sign of life
		}
		for i, e := range events {
			if err := errors.Join(enc.Encode(e), control.Flush()); err != nil {
				if e.Kind != "" {
					l.giveBack(events[i:])
				}
				return
			}
		}
		select {
		case <-l.changed:
		case <-life.C:
		case <-r.Context().Done():
		}
	}
}
