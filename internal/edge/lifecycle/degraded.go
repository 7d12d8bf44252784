package lifecycle

import "github.com/harena-dev/harena/internal/sandbox"

// SetDegraded says why a sandbox is not what it should be; nothing when it is. It
// lasts until the sandbox ends. Unknown sandboxes, and those that have ended, are left alone.
func (e *Edge) SetDegraded(id string, why []string) {
	b, err := e.find(sandbox.ID(id))
	if err != nil {
		return
	}
	b.commitMu.Lock()
	defer b.commitMu.Unlock()
	if b.gone || b.state().Ended() {
		return
	}
	b.degraded.Store(&why)
	e.show(b, b.record())
}
