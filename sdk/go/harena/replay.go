package harena

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Step is what became of one operation that was run again.
type Step struct {
	Number    int64  // of the log's entry
	CommandID string // in the log; empty for other operations
	What      string // the command or operation, for people
	// Skipped says why it was not run; empty when it was.
	Skipped string
	// Differences, none when it did the same.
	Differences []Difference
}

// Difference is one way in which a step did not do the same.
type Difference struct {
	What string // exit code, signal, timed out, stdout, stderr, error
	Was  string
	Now  string
}

// Replay runs the operations of a log in a sandbox, in order, and tells after each how it went. It goes on after differences
// until each returns an error.
func (s *Sandbox) Replay(ctx context.Context, log *LogFile, each func(Step) error) error {
	p := &player{s: s, log: log, each: each, running: map[string]*played{}}
	defer p.close()
	for _, e := range log.Entries {
		if err := p.play(ctx, e); err != nil {
			return err
		}
	}
	left := slices.SortedFunc(maps.Values(p.running), func(a, b *played) int { return cmp.Compare(a.step.Number, b.step.Number) })
	for _, r := range left {
		r.step.Skipped = "it had not ended at the end of the log; now it runs"
		if err := each(r.step); err != nil {
			return err
		}
	}
	return nil
}

// player runs a log again.
type player struct {
	s       *Sandbox
	log     *LogFile
	each    func(Step) error
	running map[string]*played // by the ID of the log
}

// played is a command that was started again.
type played struct {
	c           *Command
	cancel      context.CancelFunc
	step        Step
	out, outErr *digestWriter
}

// digestWriter takes the digest of the first bytes, as many as were recorded, and counts all.
type digestWriter struct {
	sum   hash.Hash
	left  int64
	total int64
}

func (d *digestWriter) Write(p []byte) (int, error) {
	d.total += int64(len(p))
	n := min(d.left, int64(len(p)))
	d.sum.Write(p[:n])
	d.left -= n
	return len(p), nil
}

func (p *player) close() {
	for _, r := range p.running {
		r.close()
	}
}

func (r *played) close() {
	r.c.Close()
	r.cancel()
}

func (p *player) play(ctx context.Context, e *harenav1.LogEntry) error {
	switch ev := e.GetEvent().(type) {
	case *harenav1.LogEntry_Start:
		return p.start(ctx, e.GetNumber(), ev.Start)
	case *harenav1.LogEntry_Input:
		return p.input(ctx, e.GetNumber(), ev.Input)
	case *harenav1.LogEntry_Signal:
		if r := p.running[ev.Signal.GetCommandId()]; r != nil {
			err := p.s.Signal(ctx, r.c.ID(), ev.Signal.GetSignal(), ev.Signal.GetTree())
			if err != nil && !IsKind(err, KindPrecondition) { // it may have ended by itself
				return err
			}
		}
	case *harenav1.LogEntry_End:
		return p.end(ctx, ev.End)
	case *harenav1.LogEntry_File:
		return p.file(ctx, e.GetNumber(), ev.File)
	case *harenav1.LogEntry_Session:
		return p.session(ctx, e.GetNumber(), ev.Session)
	}
	return nil
}

func (p *player) start(ctx context.Context, number int64, st *harenav1.LogStart) error {
	step := Step{Number: number, CommandID: st.GetCommandId(), What: describeCommand(st.GetCommand())}
	end := p.log.ends[st.GetCommandId()]
	cmd, err := p.command(st)
	if err != nil {
		step.Skipped = err.Error()
		return p.each(step)
	}
	r := &played{step: step, out: newDigest(end.GetResult().GetStdout()), outErr: newDigest(end.GetResult().GetStderr())}
	cmd.Stdout, cmd.Stderr = r.out, r.outErr
	// What it waits for, such as the turn in a session, may never come where things went another way.
	running, cancel := context.WithCancel(ctx)
	patience := time.AfterFunc(overtime, cancel)
	r.c, err = p.s.Start(running, cmd)
	patience.Stop()
	r.cancel = cancel
	if err != nil {
		cancel()
		step.Differences = []Difference{{"error", "started", err.Error()}}
		return p.failed(ctx, step)
	}
	p.running[st.GetCommandId()] = r
	return nil
}

// failed tells of a step that failed, unless it is the replay itself that ends.
func (p *player) failed(ctx context.Context, step Step) error {
	if ctx.Err() != nil {
		return p.s.c.failure(ctx, ctx.Err())
	}
	return p.each(step)
}

func newDigest(r *harenav1.StreamRecord) *digestWriter {
	return &digestWriter{sum: sha256.New(), left: max(r.GetRecorded(), 0)}
}

// command is the command of a log's entry, without its op_id: it is to run again.
func (p *player) command(st *harenav1.LogStart) (Cmd, error) {
	c := st.GetCommand()
	cmd := Cmd{
		Argv: c.GetArgv(), Shell: c.GetShell(), User: c.GetUser(), Cwd: c.GetCwd(), Env: c.GetEnv(), Timeout: c.GetTimeout().AsDuration(),
		MaxOutput: c.GetMaxOutput(), Session: c.GetSession(), Tag: c.GetTag(),
	}
	for _, a := range c.GetArgvBytes() {
		cmd.Argv = append(cmd.Argv, string(a))
	}
	if c.GetPty() != nil {
		cmd.PTY = &PTY{Cols: c.GetPty().GetCols(), Rows: c.GetPty().GetRows(), Term: c.GetPty().GetTerm()}
	}
	content, err := p.log.open(st.GetInput())
	if err != nil {
		return cmd, err
	}
	defer func() { _ = content.Close() }()
	b, err := io.ReadAll(io.LimitReader(content, maxInlineStdin+1))
	switch {
	case err != nil:
		return cmd, err
	case len(b) > maxInlineStdin:
		return cmd, errors.New("its input is larger than a command may have")
	case c.GetStdinOpen():
		cmd.OpenStdin, cmd.input = true, b
	case len(b) > 0:
		cmd.Stdin = bytes.NewReader(b)
	}
	return cmd, nil
}

func (p *player) input(ctx context.Context, number int64, in *harenav1.LogInput) error {
	r := p.running[in.GetCommandId()]
	if r == nil || r.c.Stdin() == nil {
		return nil
	}
	step := Step{Number: number, CommandID: in.GetCommandId(), What: "input of " + in.GetCommandId()}
	content, err := p.log.open(in.GetData())
	if err != nil {
		step.Skipped = err.Error()
		return p.each(step)
	}
	defer func() { _ = content.Close() }()
	// A command that does not read any more, as it did, must not hold the replay.
	patience := time.AfterFunc(overtime, r.cancel)
	_, err = io.Copy(r.c.Stdin(), content)
	patience.Stop()
	if err == nil && in.GetEof() {
		err = r.c.Stdin().Close()
	}
	if err != nil {
		step.Differences = []Difference{{"error", "accepted", err.Error()}}
		return p.failed(ctx, step)
	}
	return nil
}

const (
	// overtime is how much longer than before a command may take until it is killed, and how long its start and its input may.
	overtime = 10 * time.Minute
	// longest bounds what is believed of how long it took.
	longest = 1000 * time.Hour
)

func (p *player) end(ctx context.Context, end *harenav1.LogEnd) error {
	r := p.running[end.GetCommandId()]
	if r == nil {
		return nil
	}
	delete(p.running, end.GetCommandId())
	defer r.close()
	if end.GetLost() != "" {
		r.step.Skipped = "how it ended is not in the log: " + end.GetLost()
		return p.each(r.step)
	}
	was := end.GetResult()
	limit := min(10*min(max(was.GetDuration().AsDuration(), 0), longest)+overtime, longest)
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	now, err := r.c.Wait(wait)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		kill, cancel := context.WithTimeout(ctx, lastCalls)
		defer cancel()
		_ = r.c.Kill(kill)
		err = fmt.Errorf("it did not end within %v and was killed", limit)
	}
	if err != nil {
		r.step.Differences = []Difference{{"error", "ended", err.Error()}}
		return p.failed(ctx, r.step)
	}
	r.step.Differences = compare(end, now, r)
	return p.each(r.step)
}

// compare tells how a command's end differs from the one in the log.
func compare(end *harenav1.LogEnd, now *Result, r *played) (out []Difference) {
	was := end.GetResult()
	add := func(what string, was, now any) {
		if was != now {
			out = append(out, Difference{what, fmt.Sprint(was), fmt.Sprint(now)})
		}
	}
	add("exit code", int(was.GetExitCode()), now.ExitCode)
	add("signal", was.GetSignal(), now.Signal)
	add("timed out", was.GetTimedOut(), now.TimedOut)
	stream := func(what, sum string, was *harenav1.StreamRecord, d *digestWriter) {
		got := hex.EncodeToString(d.sum.Sum(nil))
		if got != sum || d.total != was.GetTotal() {
			out = append(out, Difference{what, outputText(was.GetTotal(), sum), outputText(d.total, got)})
		}
	}
	stream("stdout", end.GetStdoutSha256(), was.GetStdout(), r.out)
	stream("stderr", end.GetStderrSha256(), was.GetStderr(), r.outErr)
	return out
}

func outputText(n int64, sum string) string {
	return fmt.Sprintf("%d bytes %.12s", n, sum)
}

func (p *player) file(ctx context.Context, number int64, f *harenav1.LogFile) error {
	step := Step{Number: number, What: DescribeFile(f)}
	err := p.change(ctx, f)
	switch {
	case errors.Is(err, errNotKept):
		step.Skipped = err.Error()
	case err != nil && !f.GetUnknown():
		step.Differences = []Difference{{"error", "done", err.Error()}}
	}
	return p.failed(ctx, step)
}

// change does a file operation again.
func (p *player) change(ctx context.Context, f *harenav1.LogFile) error {
	path := string(f.GetPath())
	opts := []FileOption{AsUser(f.GetUser())}
	switch f.GetOperation() {
	case "write", "unpack":
		content, err := p.log.open(f.GetContent())
		if err != nil {
			return err
		}
		defer func() { _ = content.Close() }()
		o := fileOpts(opts)
		o.bits = f.GetMode()
		what := "files"
		if f.GetOperation() == "unpack" {
			what = "tar"
		}
		return p.s.put(ctx, what, path, o, content)
	case "move":
		return p.s.moveWith(ctx, path, string(f.GetTo()), f.GetNoReplace(), opts)
	case "remove":
		return p.s.removeWith(ctx, path, f.GetRecursive(), f.GetMissingOk(), opts)
	case "mkdir":
		return p.s.mkdirWith(ctx, path, f.GetMode(), f.GetParents(), opts)
	}
	return fmt.Errorf("the operation %q is not known", f.GetOperation())
}

func (p *player) session(ctx context.Context, number int64, ses *harenav1.LogSession) (err error) {
	step := Step{Number: number, What: "session " + ses.GetName() + " " + ses.GetEvent()}
	switch ses.GetEvent() {
	case "created":
		err = p.s.CreateSession(ctx, ses.GetName(), ses.GetUser())
	case "closed":
		err = p.s.CloseSession(ctx, ses.GetName())
	default:
		return nil // by what its commands do
	}
	if err != nil {
		step.Differences = []Difference{{"error", ses.GetEvent(), err.Error()}}
	}
	return p.failed(ctx, step)
}
