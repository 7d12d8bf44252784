package exec

import (
	"context"
	"encoding/hex"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// Log implements ExecService.
func (s *Service) Log(ctx context.Context, req *connect.Request[harenav1.LogRequest], out *connect.ServerStream[harenav1.LogResponse]) error {
	if err := s.enter(req.Msg.GetSandboxId()); err != nil {
		return errs.ToConnect(err)
	}
	return errs.ToConnect(s.opLog.Read(ctx, req.Msg, func(e *harenav1.LogEntry) error {
		return out.Send(&harenav1.LogResponse{Entry: e})
	}))
}

// logStart logs a command that was started, before anybody is told.
func (s *Service) logStart(c *command, cmd *harenav1.Command) {
	if s.opLog == nil {
		return
	}
	// Its input is kept in another form.
	bare := &harenav1.Command{
		Argv: cmd.GetArgv(), ArgvBytes: cmd.GetArgvBytes(), Shell: cmd.GetShell(), User: cmd.GetUser(), Cwd: cmd.GetCwd(), Env: cmd.GetEnv(),
		Timeout: cmd.GetTimeout(), StdinOpen: cmd.GetStdinOpen(), Pty: cmd.GetPty(), MaxOutput: cmd.GetMaxOutput(),
		OpId: cmd.GetOpId(), Session: cmd.GetSession(), Tag: cmd.GetTag(),
	}
	s.opLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_Start{Start: &harenav1.LogStart{
		CommandId: c.id, Command: bare, Input: s.opLog.Content(cmd.GetStdin()),
	}}})
}

func (s *Service) logInput(c *command, data []byte, eof bool) {
	if s.opLog == nil {
		return
	}
	s.opLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_Input{Input: &harenav1.LogInput{
		CommandId: c.id, Data: s.opLog.Content(data), Eof: eof,
	}}})
}

func (s *Service) logSignal(c *command, name string, tree bool) {
	if s.opLog == nil {
		return
	}
	s.opLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_Signal{Signal: &harenav1.LogSignal{CommandId: c.id, Signal: name, Tree: tree}}})
}

// logEnd logs a result whose streams are counted; the command's mutex may be held.
func (s *Service) logEnd(c *command, r *harenav1.Result) {
	if s.opLog == nil {
		return
	}
	sum := func(st *stream) string { return hex.EncodeToString(st.rec.sum.Sum(nil)) }
	s.opLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_End{End: &harenav1.LogEnd{
		CommandId: c.id, StdoutSha256: sum(c.streams[0]), StderrSha256: sum(c.streams[1]),
		Result: &harenav1.Result{
			ExitCode: r.GetExitCode(), Signal: r.GetSignal(), TimedOut: r.GetTimedOut(), OomKilled: r.GetOomKilled(), Stdout: r.GetStdout(), Stderr: r.GetStderr(),
			Detached: r.GetDetached(), Duration: r.GetDuration(), CpuTime: r.GetCpuTime(), Message: r.GetMessage(),
		},
	}}})
}

func (s *Service) logLost(c *command, err error) {
	if s.opLog == nil {
		return
	}
	s.opLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_End{End: &harenav1.LogEnd{CommandId: c.id, Lost: err.Error()}}})
}
