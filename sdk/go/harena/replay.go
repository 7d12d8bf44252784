package harena

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// LogFile is a log that was read to its end, ready to be run again. Close releases its content.
type LogFile struct {
	Header  *harenav1.LogHeader
	Entries []*harenav1.LogEntry // without the header and content

	dir  string
	ends map[string]*harenav1.LogEnd // by command
}

// NewLogFile makes an empty log; entries are added in order.
func NewLogFile() (*LogFile, error) {
	dir, err := os.MkdirTemp("", "harena-replay-")
	if err != nil {
		return nil, err
	}
	return &LogFile{dir: dir, ends: map[string]*harenav1.LogEnd{}}, nil
}

// Close removes what the log holds on disk.
func (l *LogFile) Close() error { return os.RemoveAll(l.dir) }

// maxLogLine bounds a line of a log.
const maxLogLine = 32 << 20

// ReadLog reads a log in JSON Lines, as `harena log --json` prints it.
func ReadLog(r io.Reader) (*LogFile, error) {
	l, err := NewLogFile()
	if err != nil {
		return nil, err
	}
	scan := bufio.NewScanner(r)
	scan.Buffer(make([]byte, 64<<10), maxLogLine)
	for n := 1; scan.Scan(); n++ {
		if len(bytes.TrimSpace(scan.Bytes())) == 0 {
			continue
		}
		e := &harenav1.LogEntry{}
		err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(scan.Bytes(), e)
		if err == nil {
			err = l.Add(e)
		}
		if err != nil {
			_ = l.Close()
			return nil, &Error{Kind: KindInvalid, Message: fmt.Sprintf("line %d is not of an operation log: %v", n, err), Hint: "such a log is what `harena log --json SANDBOX` prints", cause: err}
		}
	}
	err = scan.Err()
	if err == nil && l.Header == nil {
		err = errors.New("it has no header")
	}
	if err != nil {
		_ = l.Close()
		return nil, &Error{Kind: KindInvalid, Message: "the log cannot be read: " + err.Error(), cause: err}
	}
	return l, nil
}

// Add adds the next entry.
func (l *LogFile) Add(e *harenav1.LogEntry) error {
	switch ev := e.GetEvent().(type) {
	case *harenav1.LogEntry_Header:
		if ev.Header.GetVersion() != 1 {
			return fmt.Errorf("its version is %d, this program reads 1", ev.Header.GetVersion())
		}
		l.Header = ev.Header
		return nil
	case *harenav1.LogEntry_Content:
		return l.keep(ev.Content)
	case *harenav1.LogEntry_End:
		l.ends[ev.End.GetCommandId()] = ev.End
	}
	l.Entries = append(l.Entries, e)
	return nil
}

func (l *LogFile) contentFile(sum string) (string, error) {
	if b, err := hex.DecodeString(sum); err != nil || len(b) != sha256.Size {
		return "", fmt.Errorf("%.80q is not a digest", sum)
	}
	return filepath.Join(l.dir, sum), nil
}

func (l *LogFile) keep(c *harenav1.LogContent) error {
	name, err := l.contentFile(c.GetSha256())
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(c.GetData())
	return errors.Join(err, f.Close())
}

var errNotKept = errors.New("its content was not kept in the log")

// open returns the content that b stands for.
func (l *LogFile) open(b *harenav1.LogBytes) (io.ReadCloser, error) {
	switch {
	case b.GetSize() == 0:
		return io.NopCloser(bytes.NewReader(nil)), nil
	case b.GetDropped():
		return nil, errNotKept
	case int64(len(b.GetInline())) == b.GetSize():
		return io.NopCloser(bytes.NewReader(b.GetInline())), nil
	}
	name, err := l.contentFile(b.GetSha256())
	if err != nil {
		return nil, err
	}
	f, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errNotKept
	}
	return f, err
}

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
	for _, r := range p.running {
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
		r.c.Close()
	}
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
	if r.c, err = p.s.Start(ctx, cmd); err != nil {
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
	return &digestWriter{sum: sha256.New(), left: r.GetRecorded()}
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
	_, err = io.Copy(r.c.Stdin(), content)
	if err == nil && in.GetEof() {
		err = r.c.Stdin().Close()
	}
	if err != nil {
		step.Differences = []Difference{{"error", "accepted", err.Error()}}
		return p.failed(ctx, step)
	}
	return nil
}

// overtime is how much longer than before a command may take until it is killed.
const overtime = 10 * time.Minute

func (p *player) end(ctx context.Context, end *harenav1.LogEnd) error {
	r := p.running[end.GetCommandId()]
	if r == nil {
		return nil
	}
	delete(p.running, end.GetCommandId())
	defer r.c.Close()
	if end.GetLost() != "" {
		r.step.Skipped = "how it ended is not in the log: " + end.GetLost()
		return p.each(r.step)
	}
	was := end.GetResult()
	limit := 10*was.GetDuration().AsDuration() + overtime
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
