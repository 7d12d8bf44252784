package exec

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// validateInSession checks what is different for commands of a session.
func validateInSession(cmd *harenav1.Command) error {
	if err := validateID("session", cmd.GetSession()); err != nil {
		return err
	}
	for what, given := range map[string]bool{
		"cwd": cmd.GetCwd() != "", "env": len(cmd.GetEnv()) > 0, "stdin": len(cmd.GetStdin()) > 0, "stdin_open": cmd.GetStdinOpen(), "pty": cmd.GetPty() != nil,
	} {
		if given {
			return errs.E(errs.Invalid, "%s cannot be set for a command of a session, whose shell has its own", what).
				WithHint("use cd, export and redirections in the command, or leave session out")
		}
	}
	return atMost("bytes of a command of a session", len(sessionText(cmd)), maxArg)
}

// sessionText is what the shell evaluates.
func sessionText(cmd *harenav1.Command) string {
	if cmd.GetShell() != "" {
		return cmd.GetShell()
	}
	words := argv(cmd)
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = quote(w)
	}
	return strings.Join(quoted, " ")
}

// enter waits until no other command runs.
func (ses *session) enter(ctx context.Context, id string) error {
	select {
	case ses.turn <- struct{}{}:
	case <-ses.gone:
		return ses.endedError()
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errGivenUp, ctx.Err())
	}
	if ses.hasEnded() {
		<-ses.turn
		return ses.endedError()
	}
	ses.mu.Lock()
	defer ses.mu.Unlock()
	ses.current = id
	return nil
}

func (ses *session) endedError() error {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	return errs.E(errs.Precondition, "session %q has ended: %s", ses.name, ses.why).
		WithHint("close it or create it again; what its shell knew is gone")
}

func (ses *session) leave() {
	ses.mu.Lock()
	ses.current = ""
	ses.mu.Unlock()
	<-ses.turn
}

// launchInSession starts an admitted command in a shell that runs already.
func (s *Service) launchInSession(ctx context.Context, c *command, cmd *harenav1.Command, follow bool) (r *reader, err error) {
	defer close(c.ready)
	entered := false
	defer func() {
		if err == nil {
			return
		}
		if entered {
			c.session.leave()
		}
		c.startErr = err
		s.forget(c)
		s.wg.Done()
	}()
	ses, err := s.session(ctx, cmd.GetSession(), cmd.GetUser())
	if err != nil {
		return nil, err
	}
	c.setUser(ses.user)
	c.session, c.group, c.in = ses, ses.group, newInput(nil, false)
	c.spec = zygote.Spec{Argv: argv(cmd)}
	if err = ses.enter(ctx, c.id); err != nil {
		return nil, err
	}
	entered = true
	resolved := time.Now()
	if c.opID != "" {
		if err = s.journal.Start(entryOf(c)); err != nil {
			return nil, err
		}
	}
	c.oomsThen = s.cfg.OOMKills()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", errGivenUp, err)
	}
	word := rand.Text()
	c.proc = &turn{ses: ses, word: word}
	if err = ses.send(ses.shell.via + ` eval '` + strings.ReplaceAll(sessionText(cmd), "'", `'\''`) + "' </dev/null 3>&-\n" + ses.shell.report(word)); err != nil {
		if !errors.Is(err, unix.EPIPE) {
			s.cfg.Log.Warn("a shell does not read its commands", "session", ses.name, "error", err)
		}
		// A part of a line is no command, so it did not run.
		if kerr := ses.kill("its shell did not read a command"); kerr != nil {
			s.cfg.Log.Error("kill a session", "session", ses.name, "error", kerr)
		}
		return nil, errs.E(errs.Precondition, "session %q takes no commands any more", ses.name).WithHint("create it again; what its shell knew is gone")
	}
	s.logStart(c, cmd)
	c.timings = []*harenav1.Timing{timing("resolve", resolved.Sub(c.clock)), timing("spawn", time.Since(resolved))}
	c.follow(&stdio{out: ses.out, err: ses.outErr}, cmd.GetMaxOutput())
	if follow {
		// Cannot fail: nothing was printed yet, offset 0 exists.
		if r, err = c.attach([2]int64{}, false); err != nil {
			return nil, err
		}
	}
	for _, st := range c.streams {
		go st.pump()
	}
	go c.superviseTurn(s.ctx, cmd.GetTimeout().AsDuration())
	return r, nil
}

// turn is a command in a shell, as a process.
type turn struct {
	ses  *session
	word string
}

// Pid implements zygote.Process.
func (t *turn) Pid() int { return t.ses.proc.Pid() }

// Signal implements zygote.Process.
func (t *turn) Signal(sig int) error { return t.ses.signal(unix.Signal(sig)) }

// Wait implements zygote.Process.
func (t *turn) Wait(ctx context.Context) (zygote.Exit, error) {
	lines := t.ses.lines
	for {
		select {
		case line, open := <-lines:
			if !open {
				lines = nil // the shell gave its place to a program, or has ended
				continue
			}
			if code, ok := parseStatus(line, t.word); ok {
				return zygote.Exit{Code: code}, nil
			}
			if err := t.ses.kill("a command wrote to the shell's own descriptors"); err != nil {
				return zygote.Exit{}, err
			}
		case <-t.ses.gone:
			select {
			case line := <-lines:
				if code, ok := parseStatus(line, t.word); ok {
					return zygote.Exit{Code: code}, nil
				}
			default:
			}
			return t.ses.exit, nil
		case <-ctx.Done():
			return zygote.Exit{}, ctx.Err()
		}
	}
}

// superviseTurn follows a command of a session to its end.
func (c *command) superviseTurn(ctx context.Context, timeout time.Duration) {
	defer c.s.wg.Done()
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	c.mu.Lock()
	c.giveUp = giveUp
	c.mu.Unlock()
	c.limit(timeout, c.strikeTurn)
	watching, stopWatch := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		c.session.watch(watching)
	}()
	exit, err := c.proc.Wait(ctx)
	ended := time.Now()
	stopWatch()
	<-watched
	c.mu.Lock()
	c.exited = true
	if c.timeout != nil {
		c.timeout.Stop()
	}
	c.mu.Unlock()

	// What is in the pipes now was written before the shell said so: it is this command's, or of an earlier one's children.
	files := []*os.File{c.session.out, c.session.outErr}
	for _, f := range files {
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	<-c.drained
	for _, f := range files {
		_ = f.SetReadDeadline(time.Time{})
	}
	hung := errors.Is(context.Cause(ctx), errHung)
	if err != nil && !hung {
		c.fail(err)
	} else {
		r := c.makeResult(exit, ended, hung)
		if c.session.hasEnded() {
			r.Message = c.session.endedError().Error()
		}
		c.publish(r)
	}
	c.in.close(inputEnded)
	c.s.left(c)
	for _, st := range c.streams {
		st.file = nil // the session's
		st.close()
	}
	c.mu.Lock()
	c.state = stateEnded
	c.mu.Unlock()
	c.s.retire(c)
	c.session.leave()
}

// strikeTurn is the time-out: it kills all but the shell and, when the shell then does not come back, the session.
func (c *command) strikeTurn() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exited {
		return
	}
	c.killed = true
	if err := c.session.signal(unix.SIGKILL); err != nil {
		c.s.cfg.Log.Error("kill a command that timed out", "command", c.id, "error", err)
	}
	c.timeout = time.AfterFunc(shellGrace, func() {
		if err := c.session.kill("a command timed out, and its shell did not come back"); err != nil {
			c.s.cfg.Log.Error("kill a session", "session", c.session.name, "error", err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.exited {
			c.timeout = time.AfterFunc(c.s.cfg.Limits.KillGrace, func() { c.giveUp(errHung) })
		}
	})
}

// CreateSession implements ExecService.
func (s *Service) CreateSession(ctx context.Context, req *connect.Request[harenav1.CreateSessionRequest]) (*connect.Response[harenav1.CreateSessionResponse], error) {
	m := req.Msg
	err := s.enter(m.GetSandboxId())
	if err == nil && m.GetName() == "" {
		err = errs.E(errs.Invalid, "a session needs a name")
	}
	if err == nil {
		err = validateID("name", m.GetName())
	}
	if err == nil {
		_, err = s.once(ctx, m.GetRequestId(), "session", m, func() (any, error) { return s.makeSession(ctx, m.GetName(), m.GetUser()) })
	}
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	return connect.NewResponse(&harenav1.CreateSessionResponse{Name: m.GetName()}), nil
}

// ListSessions implements ExecService.
func (s *Service) ListSessions(_ context.Context, req *connect.Request[harenav1.ListSessionsRequest]) (*connect.Response[harenav1.ListSessionsResponse], error) {
	if err := s.enter(req.Msg.GetSandboxId()); err != nil {
		return nil, errs.ToConnect(err)
	}
	all := s.sessions.list()
	slices.SortFunc(all, func(a, b *session) int { return cmp.Compare(a.name, b.name) })
	out := &harenav1.ListSessionsResponse{}
	for _, ses := range all {
		select {
		case <-ses.ready:
		default:
			continue // it is being made
		}
		if ses.err != nil {
			continue
		}
		info := ses.info()
		out.Sessions = append(out.Sessions, info)
		if info.GetEnded() == "" {
			out.Names = append(out.Names, ses.name)
		}
	}
	return connect.NewResponse(out), nil
}

// CloseSession implements ExecService.
func (s *Service) CloseSession(ctx context.Context, req *connect.Request[harenav1.CloseSessionRequest]) (*connect.Response[harenav1.CloseSessionResponse], error) {
	m := req.Msg
	err := s.enter(m.GetSandboxId())
	if err == nil {
		_, err = s.once(ctx, m.GetRequestId(), "close", m, func() (any, error) { return nil, s.closeSession(ctx, m.GetName()) })
	}
	if err != nil {
		return nil, errs.ToConnect(err)
	}
	return connect.NewResponse(&harenav1.CloseSessionResponse{}), nil
}

func (s *Service) closeSession(ctx context.Context, name string) error {
	s.sessions.mu.Lock()
	ses := s.sessions.byName[name]
	s.sessions.mu.Unlock()
	if ses == nil {
		return errs.E(errs.NotFound, "there is no session %.80q", name)
	}
	select {
	case <-ses.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	if ses.err == nil {
		if err := ses.kill(whyClosed); err != nil {
			return err
		}
		select {
		case <-ses.gone:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.dropSession(ses)
	return nil
}

func (s *Service) logSession(e *harenav1.LogSession) {
	if s.opLog == nil {
		return
	}
	s.opLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_Session{Session: e}})
}
