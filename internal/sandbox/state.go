package sandbox

import "github.com/harena-dev/harena/internal/errs"

// State is where a sandbox is in its life.
type State string

// The states. Unknown and Lost are a cluster's view of a sandbox whose edge is
// not heard, or gone for good; an edge itself never uses them.
const (
	Creating State = "creating"
	Running  State = "running"
	Pausing  State = "pausing"
	Paused   State = "paused"
	Resuming State = "resuming"
	Stopping State = "stopping"
	Stopped  State = "stopped"
	Failed   State = "failed"
	Unknown  State = "unknown"
	Lost     State = "lost"
)

// Reason says why a sandbox left running when nobody asked for it.
type Reason string

// The reasons.
const (
	NoReason       Reason = ""
	ReasonTTL      Reason = "ttl"
	ReasonIdle     Reason = "idle"
	ReasonLease    Reason = "lease"
	ReasonOOM      Reason = "oom"
	ReasonLostSup  Reason = "supervisor-lost"
	ReasonRebooted Reason = "node-rebooted"
	ReasonCreate   Reason = "create-failed"
	ReasonDiskFull Reason = "disk-full"
)

// Ended reports whether nothing runs and nothing will again.
func (s State) Ended() bool { return s == Stopped || s == Failed || s == Lost }

// Live reports whether the sandbox holds resources of its node.
func (s State) Live() bool { return !s.Ended() && s != Unknown }

// next lists where a state may go. Failed is reachable from every live state.
var next = map[State][]State{
	Creating: {Running, Stopping, Failed},
	Running:  {Pausing, Stopping, Failed},
	Pausing:  {Paused, Running, Stopping, Failed},
	Paused:   {Resuming, Stopping, Failed},
	Resuming: {Running, Paused, Stopping, Failed},
	Stopping: {Stopped, Failed},
	// The files of a failed sandbox stay readable until it is stopped.
	Failed:  {Stopping},
	Stopped: {},
}

// Next returns to, or an error of kind precondition when a sandbox may not go
// from s to it.
func (s State) Next(to State) (State, error) {
	for _, n := range next[s] {
		if n == to {
			return to, nil
		}
	}
	return s, errs.E(errs.Precondition, "a sandbox that is %s cannot become %s", s, to)
}

// CanExec reports whether commands and file calls are served in s, after a
// resume where needed.
func (s State) CanExec() bool {
	return s == Running || s == Pausing || s == Paused || s == Resuming
}

// CanPause reports whether a sandbox in s takes part in pausing and resuming a group.
func (s State) CanPause() bool { return s == Creating || s.CanExec() }
