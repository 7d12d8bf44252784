package harenatest

import (
	"context"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

// command is a scripted command with all that it printed.
type command struct {
	id   string
	argv []string
	pty  bool

	mu       sync.Mutex
	change   chan struct{}
	out      [2][]byte // stdout, stderr
	input    []byte
	inputEOF bool
	signals  []string
	result   *harenav1.Result
}

func (c *command) changed() {
	close(c.change)
	c.change = make(chan struct{})
}

func (c *command) print(stream int, b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out[stream] = append(c.out[stream], b...)
	c.changed()
}

func (c *command) end(r *harenav1.Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.Stdout = &harenav1.StreamRecord{Total: int64(len(c.out[0])), Recorded: int64(len(c.out[0]))}
	r.Stderr = &harenav1.StreamRecord{Total: int64(len(c.out[1])), Recorded: int64(len(c.out[1]))}
	r.Timings = []*harenav1.Timing{{Step: "spawn", Micros: 250}}
	c.result = r
	c.changed()
}

// Pattern is what spew prints: every 4 bytes differ from all others within 64 KiB.
func Pattern(n int) []byte {
	b := make([]byte, 0, n+4)
	for i := 0; len(b) < n; i++ {
		b = append(b, byte(i>>8), byte(i), byte(i>>16), byte(i*7))
	}
	return b[:n]
}

// run plays the script. It is a goroutine of its own.
func (c *command) run(stdin []byte, open bool) {
	c.mu.Lock()
	c.input, c.inputEOF = append(c.input, stdin...), !open
	c.mu.Unlock()
	args := strings.Join(c.argv[1:], " ")
	switch c.argv[0] {
	case "echo":
		c.print(0, []byte(args+"\n"))
	case "err":
		c.print(1, []byte(args+"\n"))
	case "both":
		c.print(0, []byte("out\n"))
		c.print(1, []byte("err\n"))
	case "bytes":
		b, _ := hex.DecodeString(args)
		c.print(0, b)
	case "exit":
		n, _ := strconv.Atoi(args)
		c.end(&harenav1.Result{ExitCode: int32(n)}) //nolint:gosec // a test's number
		return
	case "kill":
		n, _ := strconv.Atoi(args)
		c.end(&harenav1.Result{ExitCode: int32(128 + n), Signal: unix.SignalName(syscall.Signal(n))}) //nolint:gosec // a test's number
		return
	case "timeout":
		c.print(0, []byte("partial\n"))
		c.end(&harenav1.Result{ExitCode: 124, TimedOut: true})
		return
	case "cat":
		c.cat()
	case "spew":
		n, _ := strconv.Atoi(args)
		b := Pattern(n)
		for at := 0; at < n; at += 10_000 {
			c.print(0, b[at:min(at+10_000, n)])
			c.print(1, b[at:min(at+10_000, n)])
		}
	case "block":
		name := c.untilSignal()
		c.print(0, []byte(name+"\n"))
		c.end(&harenav1.Result{ExitCode: int32(128 + int(unix.SignalNum(name))), Signal: name}) //nolint:gosec // small
		return
	default:
		c.end(&harenav1.Result{ExitCode: 127, Message: fmt.Sprintf("%q not found in PATH", c.argv[0])})
		return
	}
	c.end(&harenav1.Result{})
}

func (c *command) cat() {
	for at := 0; ; {
		c.mu.Lock()
		b, eof, change := c.input[at:], c.inputEOF, c.change
		c.mu.Unlock()
		switch {
		case len(b) > 0:
			c.print(0, b)
			at += len(b)
		case eof:
			return
		default:
			<-change
		}
	}
}

func (c *command) untilSignal() string {
	for {
		c.mu.Lock()
		got, change := c.signals, c.change
		c.mu.Unlock()
		if len(got) > 0 {
			return got[0]
		}
		<-change
	}
}

type execs struct {
	harenav1connect.UnimplementedExecServiceHandler
	s *Server
}

// begin starts a command, or finds the one that the request ID started.
func (s *Server) begin(sandboxID, request string, p *harenav1.Command) (*command, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb, ok := s.sandboxes[sandboxID]; !ok || sb.GetState() != "running" {
		return nil, false, notFound("sandbox " + sandboxID)
	}
	if id, ok := s.requests[request]; ok && request != "" {
		return s.commands[id], true, nil
	}
	argv := p.GetArgv()
	if len(argv) == 0 {
		argv = strings.Fields(p.GetShell())
	}
	if p.GetSession() != "" || len(argv) == 0 {
		return nil, false, failure(connect.CodeUnimplemented, "unsupported", "sessions are not built yet", "leave the session out")
	}
	c := &command{id: fmt.Sprintf("c%d", len(s.commands)+1), argv: argv, change: make(chan struct{}), pty: p.GetPty() != nil}
	s.commands[c.id] = c
	s.requests[request] = c.id
	go c.run(p.GetStdin(), p.GetStdinOpen())
	return c, false, nil
}

func (s *Server) command(id string) (*command, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.commands[id]
	if !ok {
		return nil, notFound("command " + id)
	}
	return c, nil
}

// follow sends a command's life from the offsets on.
func (c *command) follow(ctx context.Context, attached bool, offsets [2]int64, send func(*harenav1.Output) error) error {
	if err := send(&harenav1.Output{Event: &harenav1.Output_Started{Started: &harenav1.Started{CommandId: c.id, Pid: 2, Attached: attached}}}); err != nil {
		return err
	}
	for {
		c.mu.Lock()
		var chunks [2][]byte
		for i := range chunks {
			chunks[i] = c.out[i][min(offsets[i], int64(len(c.out[i]))):]
			chunks[i] = chunks[i][:min(len(chunks[i]), 32<<10)]
			offsets[i] += int64(len(chunks[i]))
		}
		result, change := c.result, c.change
		c.mu.Unlock()
		if len(chunks[0])+len(chunks[1]) == 0 {
			if result != nil {
				return send(&harenav1.Output{Event: &harenav1.Output_Result{Result: result}})
			}
			select {
			case <-change:
			case <-ctx.Done():
				return ctx.Err()
			}
			continue
		}
		if len(chunks[0]) > 0 {
			if err := send(&harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: chunks[0]}}); err != nil {
				return err
			}
		}
		if len(chunks[1]) > 0 {
			if err := send(&harenav1.Output{Event: &harenav1.Output_Stderr{Stderr: chunks[1]}}); err != nil {
				return err
			}
		}
	}
}

func (h *execs) Run(ctx context.Context, r *connect.Request[harenav1.RunRequest], out *connect.ServerStream[harenav1.RunResponse]) error {
	c, attached, err := h.s.begin(r.Msg.GetSandboxId(), r.Msg.GetRequestId(), r.Msg.GetCommand())
	if err != nil {
		return err
	}
	return c.follow(ctx, attached, [2]int64{}, func(o *harenav1.Output) error { return out.Send(&harenav1.RunResponse{Output: o}) })
}

func (h *execs) Start(_ context.Context, r *connect.Request[harenav1.StartRequest]) (*connect.Response[harenav1.StartResponse], error) {
	c, attached, err := h.s.begin(r.Msg.GetSandboxId(), r.Msg.GetRequestId(), r.Msg.GetCommand())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&harenav1.StartResponse{Started: &harenav1.Started{CommandId: c.id, Pid: 2, Attached: attached}}), nil
}

func (h *execs) Connect(ctx context.Context, r *connect.Request[harenav1.ConnectRequest], out *connect.ServerStream[harenav1.ConnectResponse]) error {
	c, err := h.s.command(r.Msg.GetCommandId())
	if err != nil {
		return err
	}
	return c.follow(ctx, true, [2]int64{r.Msg.GetStdoutOffset(), r.Msg.GetStderrOffset()}, func(o *harenav1.Output) error {
		return out.Send(&harenav1.ConnectResponse{Output: o})
	})
}

func (h *execs) SendInput(_ context.Context, r *connect.Request[harenav1.SendInputRequest]) (*connect.Response[harenav1.SendInputResponse], error) {
	c, err := h.s.command(r.Msg.GetCommandId())
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	data := r.Msg.GetData()
	if r.Msg.Offset != nil {
		have := int64(len(c.input))
		if r.Msg.GetOffset() > have {
			return nil, failure(connect.CodeInvalidArgument, "invalid", "there is a gap in the input", "send from where it ended")
		}
		data = data[min(have-r.Msg.GetOffset(), int64(len(data))):]
	}
	if c.inputEOF && len(data) > 0 {
		return nil, failure(connect.CodeFailedPrecondition, "precondition", "the input has ended", "")
	}
	c.input = append(c.input, data...)
	c.inputEOF = c.inputEOF || r.Msg.GetEof()
	c.changed()
	return connect.NewResponse(&harenav1.SendInputResponse{Offset: int64(len(c.input))}), nil
}

func (h *execs) Resize(context.Context, *connect.Request[harenav1.ResizeRequest]) (*connect.Response[harenav1.ResizeResponse], error) {
	return connect.NewResponse(&harenav1.ResizeResponse{}), nil
}

func (h *execs) Signal(_ context.Context, r *connect.Request[harenav1.SignalRequest]) (*connect.Response[harenav1.SignalResponse], error) {
	c, err := h.s.command(r.Msg.GetCommandId())
	if err != nil {
		return nil, err
	}
	name := strings.ToUpper(r.Msg.GetSignal())
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.signals = append(c.signals, name)
	c.changed()
	return connect.NewResponse(&harenav1.SignalResponse{}), nil
}

func (h *execs) ListCommands(_ context.Context, r *connect.Request[harenav1.ListCommandsRequest]) (*connect.Response[harenav1.ListCommandsResponse], error) {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	res := &harenav1.ListCommandsResponse{}
	for i := 1; i <= len(h.s.commands); i++ {
		c := h.s.commands[fmt.Sprintf("c%d", i)]
		c.mu.Lock()
		info := &harenav1.CommandInfo{CommandId: c.id, CommandLine: strings.Join(c.argv, " "), State: "running", Pid: 2, User: "root", Started: created(), Result: c.result, Pty: c.pty}
		if c.result != nil {
			info.State = "ended"
		}
		c.mu.Unlock()
		res.Commands = append(res.Commands, info)
	}
	return connect.NewResponse(res), nil
}
