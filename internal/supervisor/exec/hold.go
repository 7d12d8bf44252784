package exec

import "time"

// Hold stops the clocks of time-outs while the sandbox stands still, and lets them go on from where they were. Idempotent.
func (s *Service) Hold(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held == on {
		return
	}
	s.held = on
	for _, c := range s.alive {
		c.hold(on)
	}
}

// limit starts the clock of c's time-out, which strikes; with the sandbox held, once it is not held any more.
func (c *command) limit(timeout time.Duration, strike func()) {
	if timeout <= 0 {
		return
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left, c.onLimit = timeout, strike
	if !c.s.held {
		c.run()
	}
}

// run lets the clock go on; mu is held.
func (c *command) run() {
	c.due = time.Now().Add(c.left)
	c.timeout = time.AfterFunc(c.left, c.onLimit)
}

func (c *command) hold(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.exited || c.killed || c.left == 0:
	case on:
		// One that has just struck is on its way to kill: that it does.
		if c.timeout != nil && c.timeout.Stop() {
			c.left = max(time.Until(c.due), time.Nanosecond)
		}
	default:
		c.run()
	}
}
