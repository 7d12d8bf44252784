package scenario

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// box is a sandbox of one test, stopped at its end.
type box struct {
	t  *testing.T
	id string
}

// within is the deadline of a call that should take moments: a hang fails the test instead of the run.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), slowly(d))
	t.Cleanup(cancel)
	return ctx
}

// create makes a sandbox of the suite's image; edit may change its spec.
func create(t *testing.T, edit ...func(*harenav1.SandboxSpec)) *box {
	t.Helper()
	spec := &harenav1.SandboxSpec{Image: the.image, Backend: the.backend, Labels: map[string]string{"suite": "scenario"}}
	for _, e := range edit {
		e(spec)
	}
	res, err := the.sandboxes.Create(within(t, 2*time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: spec}))
	if err != nil {
		t.Fatalf("create: %v", explain(err))
	}
	b := &box{t, res.Msg.GetSandbox().GetId()}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), slowly(time.Minute))
		defer cancel()
		if err := stop(ctx, b.id); err != nil {
			t.Errorf("stop: %v", explain(err))
		}
	})
	return b
}

func stop(ctx context.Context, id string) error {
	res, err := the.sandboxes.Stop(ctx, connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Ids: []string{id}}}))
	if err != nil {
		return err
	}
	for _, o := range res.Msg.GetOutcomes() {
		if o.GetError() != nil {
			return errors.New(o.GetErrorMessage())
		}
	}
	return nil
}

func (b *box) get() *harenav1.Sandbox {
	b.t.Helper()
	res, err := the.sandboxes.Get(within(b.t, 30*time.Second), connect.NewRequest(&harenav1.GetRequest{Id: b.id}))
	if err != nil {
		b.t.Fatalf("get: %v", explain(err))
	}
	return res.Msg.GetSandbox()
}

// output is everything a command said and how it ended.
type output struct {
	stdout, stderr []byte
	started        *harenav1.Started
	*harenav1.Result
}

// run runs a command to its end.
func (b *box) run(c *harenav1.Command) output {
	b.t.Helper()
	out, err := b.try(within(b.t, 3*time.Minute), c)
	if err != nil {
		b.t.Fatalf("run %v%s: %v", c.GetArgv(), c.GetShell(), explain(err))
	}
	return out
}

func (b *box) try(ctx context.Context, c *harenav1.Command) (output, error) {
	return the.try(ctx, b.id, c)
}

// try runs a command in a sandbox to its end.
func (n *node) try(ctx context.Context, id string, c *harenav1.Command) (output, error) {
	var out output
	stream, err := n.exec.Run(ctx, connect.NewRequest(&harenav1.RunRequest{SandboxId: id, Command: c}))
	if err != nil {
		return out, err
	}
	defer stream.Close()
	for stream.Receive() {
		out.take(stream.Msg().GetOutput())
	}
	if err := stream.Err(); err != nil {
		return out, err
	}
	if out.Result == nil {
		return out, errors.New("the stream ended without a result")
	}
	return out, nil
}

func (o *output) take(e *harenav1.Output) {
	switch e := e.GetEvent().(type) {
	case *harenav1.Output_Started:
		o.started = e.Started
	case *harenav1.Output_Stdout:
		o.stdout = append(o.stdout, e.Stdout...)
	case *harenav1.Output_Stderr:
		o.stderr = append(o.stderr, e.Stderr...)
	case *harenav1.Output_Result:
		o.Result = e.Result
	}
}

func (b *box) sh(script string) output {
	b.t.Helper()
	return b.run(&harenav1.Command{Shell: script})
}

// must runs a script that has to succeed and returns what it printed, without the last newline.
func (b *box) must(script string) string {
	b.t.Helper()
	out := b.sh(script)
	if out.GetExitCode() != 0 {
		b.t.Fatalf("%s: exit %d, stdout %q, stderr %q", script, out.GetExitCode(), out.stdout, out.stderr)
	}
	return strings.TrimSuffix(string(out.stdout), "\n")
}

func (b *box) start(c *harenav1.Command) string {
	b.t.Helper()
	res, err := the.exec.Start(within(b.t, time.Minute), connect.NewRequest(&harenav1.StartRequest{SandboxId: b.id, Command: c}))
	if err != nil {
		b.t.Fatalf("start: %v", explain(err))
	}
	return res.Msg.GetStarted().GetCommandId()
}

// follow connects to a command and reads it to its end.
func (b *box) follow(req *harenav1.ConnectRequest) output {
	b.t.Helper()
	req.SandboxId = b.id
	stream, err := the.exec.Connect(within(b.t, 3*time.Minute), connect.NewRequest(req))
	if err != nil {
		b.t.Fatalf("connect: %v", explain(err))
	}
	defer stream.Close()
	var out output
	for stream.Receive() {
		out.take(stream.Msg().GetOutput())
	}
	if err := stream.Err(); err != nil {
		b.t.Fatalf("connect: %v", explain(err))
	}
	return out
}

func (b *box) write(path string, content []byte) {
	b.t.Helper()
	_, err := the.files.Write(within(b.t, time.Minute), connect.NewRequest(&harenav1.WriteRequest{SandboxId: b.id, PathBytes: []byte(path), Content: content}))
	if err != nil {
		b.t.Fatalf("write %q: %v", path, explain(err))
	}
}

func (b *box) read(path string) []byte {
	b.t.Helper()
	res, err := the.files.Read(within(b.t, time.Minute), connect.NewRequest(&harenav1.ReadRequest{SandboxId: b.id, PathBytes: []byte(path)}))
	if err != nil {
		b.t.Fatalf("read %q: %v", path, explain(err))
	}
	return res.Msg.GetContent()
}

// plain makes a plain HTTP call on the sandbox's files or tar.
func (b *box) plain(method, what, path string, body io.Reader, header ...string) *http.Response {
	b.t.Helper()
	req, err := http.NewRequestWithContext(within(b.t, 5*time.Minute), method, the.url+"/v1/sandboxes/"+b.id+"/"+what+"?path="+url.QueryEscape(path), body)
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := the.http.Do(req)
	if err != nil {
		b.t.Fatalf("%s %s: %v", method, path, err)
	}
	b.t.Cleanup(func() { res.Body.Close() })
	return res
}

// kind returns the error kind that crossed the wire.
func kind(err error) string {
	if d := detail(err); d != nil {
		return d.GetKind()
	}
	return ""
}

func detail(err error) *harenav1.ErrorDetail {
	var ce *connect.Error
	if errors.As(err, &ce) {
		for _, d := range ce.Details() {
			if v, err := d.Value(); err == nil {
				if e, ok := v.(*harenav1.ErrorDetail); ok {
					return e
				}
			}
		}
	}
	return nil
}

func explain(err error) string {
	d := detail(err)
	if d == nil {
		return err.Error()
	}
	return err.Error() + " [" + d.GetKind() + "; " + d.GetHint() + "]"
}

func seconds(n float64) *durationpb.Duration {
	return durationpb.New(time.Duration(n * float64(time.Second)))
}

// patience is seconds that only a hang exceeds, on a machine that may be slow.
func patience(n int) *durationpb.Duration {
	return durationpb.New(slowly(time.Duration(n) * time.Second))
}

// eventually waits for something that the system does by itself.
func eventually(t *testing.T, what string, limit time.Duration, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(slowly(limit))
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, limit)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes %.200q, want %d bytes %.200q", what, len(got), got, len(want), want)
	}
}
