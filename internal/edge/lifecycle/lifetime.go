package lifecycle

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/sandbox"
)

// How long what has ended is kept.
const (
	// keepStopped: the record of a stopped sandbox.
	keepStopped = time.Hour
	// keepFailed: the record and the files of a failed one, unless it is stopped before.
	keepFailed = 24 * time.Hour
	// keepFiles: an unused supervisor for a failed sandbox's files.
	keepFiles = time.Minute
	// maxStopped bounds the records of stopped sandboxes, which a busy node makes by the hundred thousand an hour; the
	// oldest go first.
	maxStopped = 4096
	// retryStop: a stop that failed is tried again.
	retryStop = 30 * time.Second
)

// moment is what the next step in a sandbox's life depends on.
type moment struct {
	now    time.Time
	record *Record
	// lastUse is the last call that ended or data that moved, as far as the edge knows.
	lastUse time.Time
	// busy: calls are under way now.
	busy bool
	// asked: the supervisor was asked too, and lastUse and busy have its answer.
	asked bool
	// files: a supervisor for the files of a failed sandbox is up.
	files bool
}

type action int

const (
	rest        action = iota // until next
	stop                      // for reason
	pauseIdle                 // because nobody uses it
	ask                       // the supervisor, then decide again
	endFiles                  // end the supervisor for files
	forget                    // record and files
	stopAgain                 // a stop that failed
	settleAgain               // a failed sandbox of which something could not be ended
)

// step is what to do now, or when to look again; no next means never.
type step struct {
	do     action
	reason sandbox.Reason
	next   time.Time
}

// decide is the whole policy of TTL, lease, idleness and retention. It has no effects.
func decide(m moment) step {
	r := m.record
	switch r.State {
	case sandbox.Running:
		return decideRunning(m)
	case sandbox.Paused:
		return decideClocks(m)
	case sandbox.Stopped:
		return at(m.now, r.Ended.Add(keepStopped), step{do: forget})
	case sandbox.Failed:
		if r.Reason == reasonStopFailed {
			return at(m.now, r.Ended.Add(retryStop), step{do: stopAgain})
		}
		if r.Config.IDBase != 0 && !m.files && !m.busy {
			return at(m.now, r.Ended.Add(retryStop), step{do: settleAgain})
		}
		s := at(m.now, r.Ended.Add(keepFailed), step{do: forget})
		if m.files && !m.busy {
			s = sooner(s, at(m.now, m.lastUse.Add(keepFiles), step{do: endFiles}))
		}
		if m.busy && s.do == forget {
			return step{next: m.now.Add(keepFiles)}
		}
		return s
	}
	return step{}
}

// decideClocks is about the clocks that go on whatever a sandbox does: those of TTL and lease.
func decideClocks(m moment) step {
	l := m.record.Spec.GetLifetime()
	s := step{}
	if d := duration(l.GetTtl()); d > 0 {
		s = sooner(s, at(m.now, m.record.TTLFrom.Add(d), step{do: stop, reason: sandbox.ReasonTTL}))
	}
	if d := duration(l.GetLease()); d > 0 {
		s = sooner(s, at(m.now, m.record.LeaseFrom.Add(d), step{do: stop, reason: sandbox.ReasonLease}))
	}
	return s
}

func decideRunning(m moment) step {
	l := m.record.Spec.GetLifetime()
	s := decideClocks(m)
	idle := duration(l.GetIdle())
	end := step{do: stop, reason: sandbox.ReasonIdle}
	if l.GetOnIdle() == "pause" {
		end = step{do: pauseIdle, reason: sandbox.ReasonIdle}
	}
	switch {
	case idle == 0:
	case m.busy:
		// Whatever is under way, when it ends its end is the last use, and that is found out here in time.
		s = sooner(s, step{next: m.now.Add(idle)})
	case m.asked:
		s = sooner(s, at(m.now, m.lastUse.Add(idle), end))
	default:
		s = sooner(s, at(m.now, m.lastUse.Add(idle), step{do: ask}))
	}
	return s
}

// at is then, once the time has come.
func at(now, t time.Time, then step) step {
	if t.After(now) {
		return step{next: t}
	}
	return then
}

// sooner is the step that comes first; of two that are due, a.
func sooner(a, b step) step {
	switch {
	case a.do != rest:
		return a
	case b.do != rest:
		return b
	case a.next.IsZero() || !b.next.IsZero() && b.next.Before(a.next):
		return b
	}
	return a
}

func duration(d *durationpb.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.AsDuration()
}

// withLifetime returns the record with the fields of change that are present. Their clocks start anew; a renewal renews the
// lease in any case.
func withLifetime(r Record, change *harenav1.Lifetime, spec *harenav1.SandboxSpec, now time.Time) Record {
	if change.GetTtl() != nil {
		r.TTLFrom = now
	}
	r.LeaseFrom = now
	r.Spec = spec
	return r
}

// mergeLifetime lays change over old.
func mergeLifetime(old, change *harenav1.Lifetime) *harenav1.Lifetime {
	merged := &harenav1.Lifetime{Ttl: old.GetTtl(), Idle: old.GetIdle(), OnIdle: old.GetOnIdle(), Lease: old.GetLease()}
	if change.GetTtl() != nil {
		merged.Ttl = change.GetTtl()
	}
	if change.GetIdle() != nil {
		merged.Idle = change.GetIdle()
	}
	if change.GetLease() != nil {
		merged.Lease = change.GetLease()
	}
	if change.GetOnIdle() != "" {
		merged.OnIdle = change.GetOnIdle()
	}
	return merged
}
