package exec

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/users"
)

// digest identifies a request's content.
type digest [sha256.Size]byte

func digestOf(method string, m proto.Message) (digest, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return digest{}, errs.E(errs.Invalid, "the request cannot be encoded: %w", err)
	}
	return sha256.Sum256(append([]byte(method+"\x00"), b...)), nil
}

// begin starts a command, or finds the one that an earlier call with the same
// request_id or op_id started; then attached is true. With follow, r is a
// reader from the first byte on, registered before anything was printed.
func (s *Service) begin(ctx context.Context, cmd *harenav1.Command, requestID string, follow bool) (c *command, r *reader, attached bool, err error) {
	if err := validate(cmd); err != nil {
		return nil, nil, false, err
	}
	hash, err := digestOf("command", cmd)
	if err != nil {
		return nil, nil, false, err
	}
	attached = true
	for {
		v, err := s.calls.do(ctx, requestID, hash, func() (any, error) {
			c, fresh, err := s.admit(cmd, hash)
			if err != nil || !fresh {
				return c, err
			}
			attached = false
			if cmd.GetSession() != "" {
				r, err = s.launchInSession(ctx, c, cmd, follow)
			} else {
				r, err = s.launch(ctx, c, cmd, follow)
			}
			return c, err
		})
		if err != nil {
			return nil, nil, false, err
		}
		c = v.(*command)
		if r != nil {
			return c, r, attached, nil
		}
		select {
		case <-c.ready:
		case <-ctx.Done():
			return nil, nil, false, ctx.Err()
		}
		if c.startErr == nil {
			break
		}
		if !attached || !errors.Is(c.startErr, errGivenUp) {
			return nil, nil, false, c.startErr
		}
		// Another call began it and went away before it was started: now it is this one's.
	}
	if follow {
		r, err = c.attach([2]int64{}, false)
	}
	return c, r, attached, err
}

// errGivenUp: the call that was to start a command ended before it had.
var errGivenUp = errors.New("the call ended before the command was started")

// admit registers a new command, or returns the one that has its op_id.
func (s *Service) admit(cmd *harenav1.Command, hash digest) (c *command, fresh bool, err error) {
	if cmd.GetOpId() != "" {
		// Looking an operation up and registering it are one step.
		s.opMu.Lock()
		defer s.opMu.Unlock()
		c, err := s.operation(cmd.GetOpId(), hash)
		if err != nil {
			return nil, false, err
		}
		if c != nil {
			if c.hash != hash {
				return nil, false, errs.E(errs.Exists, "op_id %q was used for another command, %s", c.opID, c.id).
					WithHint("use a new op_id for every new operation")
			}
			return c, false, nil
		}
	}
	if s.cfg.FilesOnly {
		return nil, false, errs.E(errs.Precondition, "sandbox %s has failed: it runs no commands any more", s.cfg.SandboxID).On("sandbox %s", s.cfg.SandboxID).
			WithHint("its files, its log and the results of operations can still be read; `harena stop` removes it")
	}
	if cmd.GetOpId() != "" {
		defer func() {
			if err != nil {
				err = errors.Join(err, s.journal.Cancel(cmd.GetOpId()))
			}
		}()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil, false, errs.E(errs.Precondition, "the sandbox is stopping")
	}
	if limit := s.cfg.Limits.Running; len(s.alive) >= limit {
		return nil, false, errs.OverLimit(errs.Capacity, "running commands of a sandbox, detached ones included", limit, len(s.alive)+1).
			WithHint("wait for commands to end, or kill some: `harena commands` lists them")
	}
	number := s.numbers.next()
	c = s.newCommand(number, fmt.Sprintf("c%d", number))
	c.hash, c.opID, c.tag, c.tty, c.line = hash, cmd.GetOpId(), cmd.GetTag(), cmd.GetPty() != nil, commandLine(cmd)
	c.begun, c.clock = s.cfg.Now(), time.Now()
	for _, other := range s.alive {
		other.overlap()
		c.shared = true
	}
	s.alive[c.id] = c
	s.running++
	if c.opID != "" {
		s.ops[c.opID] = c
	}
	s.wg.Add(1)
	return c, true, nil
}

func (c *command) overlap() {
	c.mu.Lock()
	c.shared = true
	c.mu.Unlock()
}

// launch starts an admitted command. The client's context counts until the
// process is forked, no longer: from then on it runs.
func (s *Service) launch(ctx context.Context, c *command, cmd *harenav1.Command, follow bool) (r *reader, err error) {
	defer close(c.ready)
	var undo []func()
	defer func() {
		if err == nil {
			return
		}
		for i := len(undo) - 1; i >= 0; i-- {
			undo[i]()
		}
		c.startErr = err
		s.forget(c)
		s.wg.Done()
	}()

	name := cmd.GetUser()
	if name == "" {
		name = s.cfg.Defaults.GetUser()
	}
	user, err := s.cfg.Users.Resolve(ctx, name)
	if err != nil {
		return nil, err
	}
	c.setUser(user)
	c.spec = plan(cmd, user, s.cfg.Defaults, s.cfg.Hostname)
	resolved := time.Now()

	if c.opID != "" {
		if err = s.journal.Start(entryOf(c)); err != nil {
			return nil, err
		}
	}
	if c.group, err = makeGroup(s.cfg.Groups, c.id); err != nil {
		return nil, err
	}
	undo = append(undo, func() { s.removeGroup(c) })
	d, err := s.stdio(c, cmd)
	if err != nil {
		return nil, err
	}
	undo = append(undo, d.closeAll)
	c.in = newInput(d.in, d.tty)
	c.in.note = func(data []byte, eof bool) { s.logInput(c, data, eof) }
	rest := c.in.fill(cmd.GetStdin())
	c.spec.Stdin, c.spec.Stdout, c.spec.Stderr, c.spec.Cgroup = d.stdin, d.stdout, d.stderr, c.group.dir
	c.oomsThen = s.cfg.OOMKills()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", errGivenUp, err)
	}
	forking := time.Now()
	if c.proc, err = s.cfg.Spawner.Spawn(s.ctx, c.spec); err != nil {
		return nil, err
	}
	d.closeTheirs()
	c.spec.Stdin, c.spec.Stdout, c.spec.Stderr = nil, nil, nil
	s.logStart(c, cmd)
	c.timings = []*harenav1.Timing{timing("resolve", resolved.Sub(c.clock)), timing("spawn", time.Since(forking))}
	c.follow(d, cmd.GetMaxOutput())
	if follow {
		// Cannot fail: nothing was printed yet, offset 0 exists.
		if r, err = c.attach([2]int64{}, false); err != nil {
			return nil, err
		}
	}
	s.feed(c, rest, cmd.GetStdinOpen() || d.tty && len(cmd.GetStdin()) == 0)
	for _, st := range c.streams {
		if st.file != nil {
			go st.pump()
		}
	}
	go c.supervise(s.ctx, cmd.GetTimeout().AsDuration())
	return r, nil
}

// setUser: a command is listed while it starts.
func (c *command) setUser(u users.User) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.user = u.Name; c.user == "" {
		c.user = fmt.Sprint(u.UID)
	}
}

// stdio makes the command's descriptors.
func (s *Service) stdio(c *command, cmd *harenav1.Command) (*stdio, error) {
	if c.tty {
		return s.terminal(c.spec.UID, cmd.GetPty())
	}
	return s.pipes(c.spec.UID, c.spec.GID, cmd.GetStdinOpen() || len(cmd.GetStdin()) > 0)
}

// follow prepares the streams of a command that was spawned.
func (c *command) follow(d *stdio, record int64) {
	if record == 0 {
		record = defOutput
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pid = int64(c.proc.Pid())
	c.streams[0].file, c.streams[1].file = d.out, d.err
	for _, st := range c.streams {
		st.rec.max = record
		if st.file == nil {
			st.eof = true
		} else {
			c.pumps++
		}
	}
}

// feed hands the command what is left of the input that came with it, and
// ends the input unless it stays open.
func (s *Service) feed(c *command, rest []byte, open bool) {
	if c.in.file == nil || len(rest) == 0 && open {
		return
	}
	if len(rest) == 0 && !c.in.tty {
		c.in.close(inputEOF)
		return
	}
	c.in.turn <- struct{}{} // before any SendInput: nobody knows the command yet
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		defer func() { <-c.in.turn }()
		// An error means that the command does not read any more, which is its right.
		if err := c.in.write(s.ctx, rest); err == nil && !open {
			_ = c.in.end(s.ctx)
		}
	}()
}
