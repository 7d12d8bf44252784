package lifecycle

import (
	"context"
	"errors"
	"time"
)

// collectPause lies before a collection of layers that forks had in common, so that one does for many forks.
const collectPause = 2 * time.Second

// collectForks removes, some time after each signal, the layers of forks that are gone. Open gives the first signal: a kill
// may have come between the end of the last fork and the removal.
func (e *Edge) collectForks() {
	for {
		select {
		case <-e.forkGone:
		case <-e.ctx.Done():
			return
		}
		select {
		case <-time.After(collectPause):
		case <-e.ctx.Done():
			return
		}
		// What comes from here on is for the next round.
		select {
		case <-e.forkGone:
		default:
		}
		if err := e.cfg.Packer.Collect(e.ctx); err != nil && !errors.Is(err, context.Canceled) && e.ctx.Err() == nil {
			e.log.Error("the layers of forks that are gone could not be removed", "err", err)
		}
	}
}

// noteForkGone has collectForks look.
func (e *Edge) noteForkGone() {
	select {
	case e.forkGone <- struct{}{}:
	default:
	}
}
