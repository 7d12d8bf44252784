package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
)

func TestUnaryRelay(t *testing.T) {
	n := newNode(t, "edgeaa")
	f := n.edges[0]
	for name, opts := range map[string][]connect.ClientOption{
		"connect": nil, "json": {connect.WithProtoJSON()}, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			c := harenav1connect.NewExecServiceClient(n.client(t), n.url, opts...)
			id := f.sandboxID("1")
			res, err := c.Start(within(t), connect.NewRequest(&harenav1.StartRequest{SandboxId: id, Command: &harenav1.Command{Shell: "x"}}))
			if err != nil || res.Msg.GetStarted().GetCommandId() != "c1" {
				t.Fatalf("%v, %v", res, err)
			}
			if got := f.lastHeader(); got.Get("Harena-Sandbox") != id || got.Get("Authorization") != "" {
				t.Errorf("header at the edge: %v", got)
			}
			_, err = c.Start(within(t), connect.NewRequest(&harenav1.StartRequest{SandboxId: id, Command: &harenav1.Command{Shell: "fail"}}))
			e := kindOf(t, err, errs.Quota, "fewer")
			if e.Resource != "sandbox x" || e.Limit == nil || *e.Limit != (errs.Limit{Name: "commands", Value: "5", Asked: "6"}) {
				t.Errorf("details were lost: %#v", e)
			}
		})
	}
}

func TestStreamRelay(t *testing.T) {
	n := newNode(t, "edgeaa")
	c := harenav1connect.NewExecServiceClient(n.client(t), n.url)
	run := func(ctx context.Context, shell string) *connect.ServerStreamForClient[harenav1.RunResponse] {
		t.Helper()
		s, err := c.Run(ctx, connect.NewRequest(&harenav1.RunRequest{SandboxId: n.edges[0].sandboxID("1"), Command: &harenav1.Command{Shell: shell}}))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	var got []string
	s := run(within(t), "hello")
	for s.Receive() {
		got = append(got, fmt.Sprintf("%T", s.Msg().GetOutput().GetEvent()))
	}
	if s.Err() != nil || len(got) != 3 {
		t.Errorf("%v, %v", got, s.Err())
	}
	s = run(within(t), "fail")
	if !s.Receive() {
		t.Error("the message before the error was lost")
	}
	if s.Receive() {
		t.Error("another message")
	}
	kindOf(t, s.Err(), errs.Quota, "fewer")
	// Its sandbox came to its end: that is said, not that a connection broke.
	s = run(within(t), "die")
	for s.Receive() {
	}
	if e := kindOf(t, s.Err(), errs.Precondition, "files can still be read"); !strings.Contains(e.Message, "is failed (supervisor-lost)") {
		t.Errorf("%v", e)
	}
	s = run(within(t), "internal")
	for s.Receive() {
	}
	if e := errs.FromConnect(s.Err()); strings.Contains(e.Error(), "secret") && !errs.Is(e, errs.Internal) {
		t.Errorf("%v", e)
	}
}

func TestBackPressureAndCancelReachTheEdge(t *testing.T) {
	n := newNode(t, "edgeaa")
	f := n.edges[0]
	c := harenav1connect.NewExecServiceClient(n.client(t), n.url)
	ctx, cancel := context.WithCancel(within(t))
	s, err := c.Run(ctx, connect.NewRequest(&harenav1.RunRequest{SandboxId: f.sandboxID("1"), Command: &harenav1.Command{Shell: "endless"}}))
	if err != nil || !s.Receive() {
		t.Fatalf("%v, %v", err, s.Err())
	}
	// Nobody reads: what was sent settles at what the windows on the way hold.
	settled(t, &f.sent)
	if held := f.sent.Load() * 64 << 10; held > 64<<20 {
		t.Errorf("%d MiB are held on the way to a reader that does not read", held>>20)
	}
	cancel()
	wait(t, "the end of the call at the edge", f.cancelled)
	_ = s.Close()

	f.seen(nil)
	ctx, cancel = context.WithCancel(within(t))
	done := make(chan error, 1)
	go func() {
		_, err := c.Start(ctx, connect.NewRequest(&harenav1.StartRequest{SandboxId: f.sandboxID("1"), Command: &harenav1.Command{Shell: "hang"}}))
		done <- err
	}()
	for f.lastHeader().Get("Harena-Sandbox") == "" {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-done; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("%v", err)
	}
	wait(t, "the end of the unary call at the edge", f.cancelled)

	// A deadline of the caller is the edge's too.
	ctx, cancel = context.WithTimeout(within(t), 50*time.Millisecond)
	defer cancel()
	_, err = c.Start(ctx, connect.NewRequest(&harenav1.StartRequest{SandboxId: f.sandboxID("1"), Command: &harenav1.Command{Shell: "hang"}}))
	if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("%v", err)
	}
	wait(t, "the deadline at the edge", f.cancelled)
}

// settled waits until a counter stands still.
func settled(t *testing.T, c interface{ Load() int64 }) {
	t.Helper()
	for last, same := int64(-1), 0; same < 10; {
		if now := c.Load(); now == last {
			same++
		} else {
			last, same = now, 0
		}
		if t.Context().Err() != nil {
			t.Fatal("it never settled")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestPlainRelay(t *testing.T) {
	n := newNode(t, "edgeaa")
	f := n.edges[0]
	id := f.sandboxID("1")
	h1 := &http.Client{Transport: bearer{&http.Transport{}, n.token}}
	for name, client := range map[string]*http.Client{"http/1": h1, "http/2": n.client(t)} {
		t.Run(name, func(t *testing.T) {
			get := func(method, path string, body io.Reader) *http.Response {
				t.Helper()
				req, err := http.NewRequestWithContext(within(t), method, n.url+path, body)
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Range", "bytes=1-2")
				res, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = res.Body.Close() })
				return res
			}
			res := get(http.MethodGet, "/v1/sandboxes/"+id+"/files?path=%2Fa%FFb%3Bc&user=u", nil)
			b, err := io.ReadAll(res.Body)
			if err != nil || string(b) != "GET /v1/sandboxes/"+id+"/files\n" || res.Header.Get("X-Query") != "path=%2Fa%FFb%3Bc&user=u" || res.Header.Get("Content-Range") != "bytes=1-2" {
				t.Errorf("%q, %v, %v", b, res.Header, err)
			}
			if h := f.lastHeader(); h.Get("Harena-Sandbox") != id || h.Get("Authorization") != "" {
				t.Errorf("header at the edge: %v", h)
			}
			sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
			res = get(http.MethodPut, "/v1/sandboxes/"+id+"/tar?path=/x", bytes.NewReader(sent))
			if b, err = io.ReadAll(res.Body); err != nil || !bytes.HasSuffix(b, sent) {
				t.Errorf("%d bytes came back of %d: %v", len(b), len(sent), err)
			}
			res = get(http.MethodPost, "/v1/layers?name=n", strings.NewReader("tar"))
			if b, err = io.ReadAll(res.Body); err != nil || string(b) != "POST /v1/layers\ntar" || res.Header.Get("X-Query") != "name=n&project=default" {
				t.Errorf("%q, %q, %v", b, res.Header.Get("X-Query"), err)
			}
			res = get(http.MethodGet, "/v1/sandboxes/"+id+"/files?path=/cut", nil)
			if b, err = io.ReadAll(res.Body); err == nil {
				t.Errorf("a cut answer looks whole: %q", b)
			}
			for path, want := range map[string]struct {
				status int
				text   string
			}{
				"/v1/sandboxes/" + id + "/files?path=/none":        {404, "not-found"},
				"/v1/sandboxes/nope/files?path=/x":                 {400, "harena ps"},
				"/v1/sandboxes/zzzzzz" + id[6:] + "/files?path=/x": {404, "does not know"},
				"/v1/nothing": {404, "not-found"},
				"/v1/sandboxes/" + id + "/files?path=/x&request_id=" + "%01":       {400, "request_id"},
				"/v1/sandboxes/" + id + "/files/../../../etc?path=/none&user=root": {404, "not-found"},
			} {
				res := get(http.MethodGet, path, nil)
				b, _ := io.ReadAll(res.Body)
				if res.StatusCode != want.status || !strings.Contains(string(b), want.text) {
					t.Errorf("%s: %d %s", path, res.StatusCode, b)
				}
			}
		})
	}
}

func TestPlainStreamsAreNotHeld(t *testing.T) {
	n := newNode(t, "edgeaa")
	f := n.edges[0]
	ctx, cancel := context.WithCancel(within(t))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.url+"/v1/sandboxes/"+f.sandboxID("1")+"/files?path=/endless", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := n.client(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	settled(t, &f.sent)
	if held := f.sent.Load() * 64 << 10; held > 64<<20 {
		t.Errorf("%d MiB are held", held>>20)
	}
	cancel()
	wait(t, "the end of the transfer at the edge", f.cancelled)

	// Both directions at once: an answer begins before the request has ended.
	pr, pw := io.Pipe()
	req, err = http.NewRequestWithContext(within(t), http.MethodPut, n.url+"/v1/sandboxes/"+f.sandboxID("1")+"/files?path=/x", pr)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.WriteString(pw, "first") }()
	res, err = n.client(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got := make([]byte, len("PUT /v1/sandboxes/"+f.sandboxID("1")+"/files\nfirst"))
	if _, err := io.ReadFull(res.Body, got); err != nil || !strings.HasSuffix(string(got), "first") {
		t.Errorf("%q, %v", got, err)
	}
	_ = pw.Close()
}

func TestCurl(t *testing.T) {
	n := newNode(t, "edgeaa")
	post := func(path, body string) (int, map[string]any) {
		t.Helper()
		req, err := http.NewRequestWithContext(within(t), http.MethodPost, n.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "bearer "+n.token)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var v map[string]any
		if err := json.NewDecoder(res.Body).Decode(&v); err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, v
	}
	status, v := post("/harena.v1.SandboxService/Create", `{"spec": {"image": "debian:12"}}`)
	if sb, _ := v["sandbox"].(map[string]any); status != 200 || sb["state"] != "running" || !strings.HasPrefix(fmt.Sprint(sb["id"]), "edgeaa") {
		t.Errorf("%d %v", status, v)
	}
	status, v = post("/harena.v1.FileService/Read", `{"sandbox_id": "`+n.edges[0].sandboxID("1")+`", "path": "/x"}`)
	if status != 200 || v["content"] != "Y29udGVudCBvZiAveA==" {
		t.Errorf("%d %v", status, v)
	}
	status, v = post("/harena.v1.SandboxService/Create", `{"spec": {"image": "missing"}}`)
	if status != 404 || v["code"] != "not_found" || !strings.Contains(fmt.Sprint(v["details"]), "import it") {
		t.Errorf("%d %v", status, v)
	}
	status, v = post("/harena.v1.FunctionService/Run", `{}`)
	if status != 501 || !strings.Contains(fmt.Sprint(v["details"]), "not built yet") {
		t.Errorf("%d %v", status, v)
	}
	status, v = post("/harena.v1.IAMService/WhoAmI", `{}`)
	if status != 200 || v["role"] != "admin" {
		t.Errorf("%d %v", status, v)
	}
}

func TestAuthentication(t *testing.T) {
	n := newNode(t, "edgeaa")
	for name, test := range map[string]struct {
		path, header string
		status       int
		hint         string
	}{
		"livez":         {"/livez", "", 200, "ok"},
		"readyz":        {"/readyz", "", 200, "ok"},
		"version":       {"/harena.v1.FleetService/Version", "", 200, "v1"},
		"none":          {"/harena.v1.FleetService/ListEdges", "", 401, "Authorization: Bearer"},
		"basic":         {"/harena.v1.FleetService/ListEdges", "Basic eA==", 401, "Authorization: Bearer"},
		"only a scheme": {"/harena.v1.FleetService/ListEdges", "Bearer", 401, "Authorization: Bearer"},
		"odd form":      {"/harena.v1.FleetService/ListEdges", "Bearer x", 401, "client.json"},
		"unknown":       {"/harena.v1.FleetService/ListEdges", "Bearer hrn_" + strings.Repeat("A", 43), 401, "client.json"},
		"unknown e2b":   {"/harena.v1.FleetService/ListEdges", "Bearer e2b_" + strings.Repeat("0", 40), 401, "client.json"},
		"good":          {"/harena.v1.FleetService/ListEdges", "Bearer " + n.token, 200, "edgeaa"},
		"plain":         {"/v1/layers", "", 401, "Authorization: Bearer"},
		"nowhere":       {"/nowhere", "", 401, "Authorization: Bearer"},
	} {
		t.Run(name, func(t *testing.T) {
			method, body := http.MethodPost, "{}"
			if strings.HasSuffix(test.path, "z") {
				method, body = http.MethodGet, ""
			}
			req, err := http.NewRequestWithContext(within(t), method, n.url+test.path, strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			if test.header != "" {
				req.Header.Set("Authorization", test.header)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			b, _ := io.ReadAll(res.Body)
			if res.StatusCode != test.status || !strings.Contains(string(b), test.hint) {
				t.Errorf("%d %s", res.StatusCode, b)
			}
		})
	}
	// Streams and gRPC get the error in their own form.
	for name, opts := range map[string][]connect.ClientOption{"connect": nil, "grpc": {connect.WithGRPC()}} {
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetUnencryptedHTTP2(true)
		c := harenav1connect.NewExecServiceClient(&http.Client{Transport: tr}, n.url, opts...)
		s, err := c.Run(within(t), connect.NewRequest(&harenav1.RunRequest{}))
		if err == nil && !s.Receive() {
			err = s.Err()
		}
		if e := kindOf(t, err, errs.Unauthenticated, "Bearer"); e.Kind == "" {
			t.Error(name)
		}
		tr.CloseIdleConnections()
	}
	if strings.Contains(n.log.String(), n.token) || strings.Contains(n.log.String(), "AAAAAAAA") {
		t.Error("a token is in the log")
	}
}

// Every procedure of the API has a rule of access: none is open, or shut, by oversight.
func TestEveryProcedureHasARule(t *testing.T) {
	n := newNode(t, "edgeaa")
	client := n.client(t)
	seen := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("harena.v1", func(fd protoreflect.FileDescriptor) bool {
		for i := range fd.Services().Len() {
			svc := fd.Services().Get(i)
			for j := range svc.Methods().Len() {
				m := svc.Methods().Get(j)
				seen++
				path := fmt.Sprintf("/%s/%s", svc.FullName(), m.Name())
				kind, body := "application/json", "{}"
				if m.IsStreamingServer() {
					kind, body = "application/connect+json", "\x00\x00\x00\x00\x02{}"
				}
				ctx, cancel := context.WithTimeout(within(t), 200*time.Millisecond)
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, n.url+path, strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", kind)
				res, err := client.Do(req)
				if err == nil {
					b, _ := io.ReadAll(res.Body)
					_ = res.Body.Close()
					if strings.Contains(string(b), "rule of access") {
						t.Errorf("%s has no rule", path)
					}
					if res.StatusCode == http.StatusNotImplemented && !strings.Contains(string(b), "ErrorDetail") {
						t.Errorf("%s is not built and does not say why: %s", path, b)
					}
				}
				cancel()
			}
		}
		return true
	})
	if seen < 50 {
		t.Errorf("only %d procedures were tried", seen)
	}
}

func TestPanicsAreAnsweredAndLogged(t *testing.T) {
	n := newNode(t, "edgeaa")
	_, err := n.sandboxes(t).Create(within(t), create("panic", ""))
	e := kindOf(t, err, errs.Internal, "error ID ")
	_, id, _ := strings.Cut(e.Hint, "error ID ")
	log := n.log.String()
	if id == "" || !strings.Contains(log, "error_id="+id) || !strings.Contains(log, "a secret") {
		t.Errorf("hint %q, log %s", e.Hint, log)
	}
	if strings.Contains(e.Message+e.Hint, "secret") {
		t.Errorf("internals leak: %v", e)
	}
}

// TestUnreadableRequests: what Connect refuses before anything of ours is asked has the form of all errors.
func TestUnreadableRequests(t *testing.T) {
	n := newNode(t, "edgeaa")
	const list, run = "/harena.v1.SandboxService/List", "/harena.v1.ExecService/Run"
	for name, c := range map[string]struct {
		method, path, kind, body string
		status                   int
		want                     string
	}{
		"no JSON":      {"POST", list, "application/json", "{", 400, "not the JSON of its message"},
		"empty":        {"POST", list, "application/json", "", 400, "not the JSON of its message"},
		"wrong type":   {"POST", list, "application/json", `{"page": 7}`, 400, "not the JSON of its message"},
		"no type":      {"POST", list, "text/plain", "{}", 400, "Content-Type: application/json"},
		"method":       {"GET", list, "application/json", "", 400, "use POST"},
		"no procedure": {"POST", list + "s", "application/json", "{}", 404, "no procedure"},
		"no service":   {"POST", "/harena.v1.None/List", "application/json", "{}", 404, "no procedure"},
		"stream":       {"POST", run, "application/json", "{}", 400, "application/connect+json"},
		"too long":     {"POST", list, "application/json", `{"unknown": "` + strings.Repeat("x", 5<<20) + `"}`, 400, "the limit of bytes of a request is 4194304"},
		"fine":         {"POST", list, "application/json; charset=utf-8", "{}", 200, ""},
	} {
		t.Run(name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(within(t), c.method, n.url+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", c.kind)
			res, err := n.client(t).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(res.Body)
			_ = res.Body.Close()
			if err != nil || res.StatusCode != c.status || !strings.Contains(string(body), c.want) {
				t.Errorf("%s %s, %v; want %d and %q", res.Status, body, err, c.status, c.want)
			}
			if c.status != 200 && !strings.Contains(string(body), "harena.v1.ErrorDetail") || strings.Contains(string(body), "harenav1") {
				t.Errorf("%s", body)
			}
		})
	}
}
