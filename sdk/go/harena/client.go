// Package harena is the Go SDK of Harena: sandboxes for agents, their commands,
// files and layers.
//
//	c, err := harena.FromEnv()
//	sb, err := c.CreateSandbox(ctx, harena.Spec{Image: "debian:12"})
//	defer sb.Stop(context.Background())
//	res, err := sb.RunShell(ctx, "echo hello world")
//	fmt.Printf("%s", res.Stdout)
//
// Every error that comes from the server, or from the way to it, is an *Error.
// Calls may be made concurrently.
//
// # Retries
//
// A call that reaches no server, or whose connection breaks, is repeated a few
// times; every call that changes something carries a request ID of its own, so that it
// happens once. A broken stream of a command's output is taken up again where it broke, for a minute.
//
// A call with an operation ID (Cmd.OpID, WithOpID) is repeated for a minute, also while the server is started again, and may be made again by
// another process: it happens once in the sandbox's life, and every repetition gets the result of the first.
package harena

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
)

// Client talks to one apiserver.
type Client struct {
	url     string
	token   string
	project string
	http    *http.Client

	sandboxes harenav1connect.SandboxServiceClient
	exec      harenav1connect.ExecServiceClient
	file      harenav1connect.FileServiceClient
	layer     harenav1connect.LayerServiceClient
	event     harenav1connect.EventServiceClient
	fleet     harenav1connect.FleetServiceClient
	job       harenav1connect.JobServiceClient

	// patience is how long a broken stream is tried again without any progress.
	patience time.Duration
}

// Option sets one property of a Client.
type Option func(*options)

type options struct {
	url, token, project, profile string
	transport                    http.RoundTripper
	patience                     time.Duration
}

// WithURL names the server, such as http://127.0.0.1:7070.
func WithURL(u string) Option { return func(o *options) { o.url = u } }

// WithToken sets the bearer token.
func WithToken(t string) Option { return func(o *options) { o.token = t } }

// WithProject sets the project of what is created; default: the token's.
func WithProject(p string) Option { return func(o *options) { o.project = p } }

// WithProfile names the file that FromEnv reads URL and token from. It comes before the
// environment; the profile that is read without it, ~/.config/harena/client.json, after.
func WithProfile(path string) Option { return func(o *options) { o.profile = path } }

// WithTransport replaces how HTTP requests are made.
func WithTransport(t http.RoundTripper) Option { return func(o *options) { o.transport = t } }

// WithPatience sets how long a command's broken output stream is tried again
// without progress; default one minute.
func WithPatience(d time.Duration) Option { return func(o *options) { o.patience = d } }

// FromEnv makes a client from, in this order, the options, the profile that WithProfile
// names, HARENA_URL, HARENA_TOKEN and HARENA_PROJECT, and the default profile.
func FromEnv(opts ...Option) (*Client, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	if o.profile != "" && (o.url == "" || o.token == "") {
		if err := o.fromProfile(); err != nil {
			return nil, err
		}
	}
	setDefault(&o.url, os.Getenv("HARENA_URL"))
	// A token goes only to the server that it is for.
	if env := os.Getenv("HARENA_URL"); o.profile == "" || env == "" || env == o.url {
		setDefault(&o.token, os.Getenv("HARENA_TOKEN"))
		setDefault(&o.project, os.Getenv("HARENA_PROJECT"))
	}
	if o.profile == "" && (o.url == "" || o.token == "") {
		if err := o.fromProfile(); err != nil {
			return nil, err
		}
	}
	return newClient(o)
}

// fromProfile adds what the profile has.
func (o *options) fromProfile() error {
	p, err := readProfile(o.profile)
	if err != nil {
		return err
	}
	setDefault(&o.url, p.URL)
	if o.url == p.URL {
		setDefault(&o.token, p.Token)
		setDefault(&o.project, p.Project)
	}
	return nil
}

// New makes a client from options alone.
func New(opts ...Option) (*Client, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	return newClient(o)
}

func setDefault(field *string, value string) {
	if *field == "" {
		*field = value
	}
}

func newClient(o options) (*Client, error) {
	if o.url == "" {
		return nil, fromErrs(errs.E(errs.Invalid, "no server is known").
			WithHint("set HARENA_URL and HARENA_TOKEN, or start a node with `harena up`, which writes a profile; that of `harena up --data DIR` is DIR/client.json, for --profile"))
	}
	u, err := url.Parse(o.url)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fromErrs(errs.E(errs.Invalid, "%.200q is not the URL of a server", o.url).WithHint("it looks like http://127.0.0.1:7070"))
	}
	if o.transport == nil {
		o.transport = newTransport()
	}
	if o.patience == 0 {
		o.patience = time.Minute
	}
	base := strings.TrimSuffix(o.url, "/")
	c := &Client{url: base, token: o.token, project: o.project, patience: o.patience}
	c.http = &http.Client{Transport: &authorized{o.transport, o.token}}
	// Output is not worth compressing on the way.
	opts := connect.WithClientOptions(connect.WithInterceptors(&caller{c}), connect.WithAcceptCompression("gzip", nil, nil))
	c.sandboxes = harenav1connect.NewSandboxServiceClient(c.http, base, opts)
	c.exec = harenav1connect.NewExecServiceClient(c.http, base, opts)
	c.file = harenav1connect.NewFileServiceClient(c.http, base, opts)
	c.layer = harenav1connect.NewLayerServiceClient(c.http, base, opts)
	c.event = harenav1connect.NewEventServiceClient(c.http, base, opts)
	c.fleet = harenav1connect.NewFleetServiceClient(c.http, base, opts)
	c.job = harenav1connect.NewJobServiceClient(c.http, base, opts)
	return c, nil
}

// URL returns the server's address.
func (c *Client) URL() string { return c.url }

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// newTransport makes a transport that speaks HTTP/2 to http:// URLs (with prior
// knowledge: one connection for all streams) and whatever TLS negotiates to https://.
func newTransport() http.RoundTripper {
	h2 := &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second, MaxReceiveBufferPerStream: 1 << 20}
	dial := (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	plain := &http.Transport{DialContext: dial, DisableCompression: true, Protocols: new(http.Protocols), HTTP2: h2}
	plain.Protocols.SetUnencryptedHTTP2(true)
	secure := &http.Transport{
		DialContext: dial, DisableCompression: true, Protocols: new(http.Protocols), HTTP2: h2,
		Proxy: http.ProxyFromEnvironment, TLSHandshakeTimeout: 10 * time.Second,
	}
	secure.Protocols.SetHTTP1(true)
	secure.Protocols.SetHTTP2(true)
	return &byScheme{plain, secure}
}

type byScheme struct{ plain, secure *http.Transport }

func (t *byScheme) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme == "http" {
		return t.plain.RoundTrip(r)
	}
	return t.secure.RoundTrip(r)
}

// CloseIdleConnections serves http.Client.
func (t *byScheme) CloseIdleConnections() {
	t.plain.CloseIdleConnections()
	t.secure.CloseIdleConnections()
}

// authorized adds the token to requests.
type authorized struct {
	next  http.RoundTripper
	token string
}

func (a *authorized) RoundTrip(r *http.Request) (*http.Response, error) {
	if a.token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+a.token)
	}
	return a.next.RoundTrip(r)
}

// CloseIdleConnections serves http.Client.
func (a *authorized) CloseIdleConnections() {
	if c, ok := a.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// newID makes an ID for a request or operation.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// sleep waits, or returns ctx's error.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
