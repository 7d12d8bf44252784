package oci

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/harena-dev/harena/internal/errs"
)

// Access says how registries are reached. It is the operator's, read from a file.
type Access struct {
	// Registries are by host[:port], under the same short names as in references.
	Registries map[string]RegistryAccess `json:"registries"`
}

// RegistryAccess is how one registry is reached. Empty credentials mean anonymous access.
type RegistryAccess struct {
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	// Token is sent as it is, as a bearer token.
	Token string `json:"token,omitempty"`
	// Mirrors, host[:port][/prefix], are asked first, in this order. What they need is under their own host.
	Mirrors []string `json:"mirrors,omitempty"`
	// CAFile has certificates in PEM that are trusted besides the machine's.
	CAFile string `json:"ca_file,omitempty"`
}

// ReadAccess reads the file, which may be missing.
func ReadAccess(path string) (*Access, error) {
	a := &Access{}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return a, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d := json.NewDecoder(f)
	d.DisallowUnknownFields()
	if err := d.Decode(a); err != nil {
		return nil, errs.E(errs.Precondition, "the registries file of the server is not valid").
			WithHint("the server's operator can correct %s: %v", "registries.json in the data directory", err)
	}
	return a, nil
}

func (a *Access) of(host string) RegistryAccess {
	if r, ok := a.Registries[host]; ok {
		return r
	}
	for key, r := range a.Registries {
		if reg, err := name.NewRegistry(key); err == nil && reg.RegistryStr() == host {
			return r
		}
	}
	return RegistryAccess{}
}

func (r RegistryAccess) authenticator() authn.Authenticator {
	if r.Username == "" && r.Password == "" && r.Token == "" {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{Username: r.Username, Password: r.Password, RegistryToken: r.Token})
}

// endpoint is a registry, or a mirror of one, that has the image.
type endpoint struct {
	repo   name.Repository
	access RegistryAccess
	client *http.Client // nil until it was connected
	base   string
	// patience bounds an answer that is small.
	patience time.Duration
}

// endpoints returns where a repository is, mirrors first.
func (a *Access) endpoints(repo name.Repository) ([]*endpoint, error) {
	host := repo.RegistryStr()
	var out []*endpoint
	for _, m := range a.of(host).Mirrors {
		r, err := name.NewRepository(strings.TrimSuffix(m, "/") + "/" + repo.RepositoryStr())
		if err != nil {
			return nil, errs.E(errs.Precondition, "the mirror %.100q of %s is not valid", m, host).WithHint("the server's operator can correct registries.json: host[:port][/prefix]")
		}
		out = append(out, &endpoint{repo: r, access: a.of(r.RegistryStr()), patience: stall})
	}
	return append(out, &endpoint{repo: repo, access: a.of(host), patience: stall}), nil
}

// connect asks the endpoint how it wants to be talked to, and for a token.
func (e *endpoint) connect(ctx context.Context) error {
	if e.client != nil {
		return nil
	}
	host := e.repo.RegistryStr()
	plain := isLoopback(host)
	t, err := newTransport(e.access.CAFile)
	if err != nil {
		return err
	}
	ctx, cancel := e.soon(ctx)
	defer cancel()
	rt, err := transport.NewWithContext(ctx, e.repo.Registry, e.access.authenticator(), &guard{inner: t, host: host, loopback: plain, proxy: t.Proxy}, []string{e.repo.Scope(transport.PullScope)})
	if err != nil {
		return e.explain(ctx, err)
	}
	e.client = &http.Client{Transport: rt}
	e.base = "https://" + host + "/v2/" + e.repo.RepositoryStr()
	return nil
}

// soon bounds what is small: answers to come with their bodies, however slowly they are sent.
func (e *endpoint) soon(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, e.patience, errs.E(errs.Precondition, "registry %s does not end its answer", e.repo.RegistryStr()).
		WithHint("try later, or set a mirror in registries.json of the server"))
}

func newTransport(caFile string) (*http.Transport, error) {
	t := &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: 15 * time.Second, ControlContext: checkDial}).DialContext,
		TLSHandshakeTimeout: 15 * time.Second, ResponseHeaderTimeout: 60 * time.Second,
		ForceAttemptHTTP2: true, IdleConnTimeout: 30 * time.Second, MaxIdleConnsPerHost: parallel,
		// What is stored compressed must arrive so: its digest is of those bytes.
		DisableCompression: true,
	}
	if caFile == "" {
		return t, nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	pem, err := os.ReadFile(caFile)
	if err != nil || !pool.AppendCertsFromPEM(pem) {
		return nil, errs.E(errs.Precondition, "the certificates that the server is to trust for this registry cannot be read").
			WithHint("the server's operator can correct ca_file in registries.json")
	}
	t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	return t, nil
}

// guard lets nothing out that a registry, which is not trusted, might lead to:
// no unencrypted traffic but to a registry on this machine itself, nothing to the
// machine's loopback on behalf of another, no link-local addresses (metadata services of clouds).
type guard struct {
	inner    http.RoundTripper
	host     string // of the registry
	loopback bool
	proxy    func(*http.Request) (*url.URL, error)
}

func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	host := r.URL.Host
	if isLoopback(host) && !g.loopback {
		return nil, errs.E(errs.Denied, "the registry leads to this server's own address %s", host).WithHint("name another registry")
	}
	if r.URL.Scheme != "https" && (r.URL.Scheme != "http" || !isLoopback(host)) {
		return nil, errs.E(errs.Denied, "plain HTTP to %s is refused", host).WithHint("serve the registry with TLS; plain HTTP is for registries on the server's own loopback only")
	}
	if a, err := netip.ParseAddr(r.URL.Hostname()); err == nil && neverRegistry(a) {
		return nil, notRegistry(host)
	}
	// Names are resolved when they are dialled. The registry's own may mean this machine, that of a proxy anything.
	rule := dialLoopback
	if !g.loopback && host != g.host {
		rule = dialRemote
	}
	if g.proxy != nil {
		if u, err := g.proxy(r); err == nil && u != nil {
			rule = dialAny
		}
	}
	return g.inner.RoundTrip(r.WithContext(context.WithValue(r.Context(), dialKey{}, rule)))
}

type dialKey struct{}

// dialRule says which addresses a name may mean.
type dialRule int

const (
	dialRemote   dialRule = iota // no addresses of this machine
	dialLoopback                 // those as well
	dialAny
)

// checkDial is asked before each connection is made, with the address that a name was resolved to.
func checkDial(ctx context.Context, _, address string, _ syscall.RawConn) error {
	rule, _ := ctx.Value(dialKey{}).(dialRule)
	at, err := netip.ParseAddrPort(address)
	switch a := at.Addr().Unmap(); {
	case rule == dialAny:
	case err != nil || neverRegistry(a):
		return notRegistry(address)
	case rule == dialRemote && a.IsLoopback():
		return errs.E(errs.Denied, "the registry leads to this server's own address %s", address).WithHint("name another registry")
	}
	return nil
}

func neverRegistry(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsLinkLocalUnicast() || a.IsUnspecified() || a.IsMulticast()
}

func notRegistry(address string) error {
	return errs.E(errs.Denied, "the address %s is not a registry's", address).WithHint("check the name of the registry; it is, or leads to, an address of this network only")
}

// isLoopback tells whether host[:port] is this machine.
func isLoopback(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	a, err := netip.ParseAddr(host)
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || err == nil && a.Unmap().IsLoopback()
}

// explain makes an error of talking to a registry one that says what to do.
func (e *endpoint) explain(ctx context.Context, err error) error {
	host := e.repo.RegistryStr()
	var known *errs.Error
	var terr *transport.Error
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.As(err, &known):
		return known // what is around it has URLs, in which there may be tokens
	case errors.As(err, &terr):
		return e.status(terr.StatusCode)
	}
	var verify *tls.CertificateVerificationError
	if errors.As(err, &verify) {
		return errs.E(errs.Precondition, "the certificate of registry %s is not trusted: %v", host, verify.Err).
			WithHint("set ca_file for it in registries.json of the server")
	}
	return errs.E(errs.Precondition, "registry %s cannot be reached: %v", host, rootCause(err)).
		WithHint("check its name, and that the server can connect to it")
}

// rootCause leaves URLs out, in which there may be tokens.
func rootCause(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

// status explains an answer that is no success.
func (e *endpoint) status(code int) error {
	host, repo := e.repo.RegistryStr(), e.repo.Name()
	switch code {
	case http.StatusUnauthorized, http.StatusForbidden:
		return errs.E(errs.Denied, "registry %s does not let this server read %s", host, repo).
			WithHint("check the name; for private images set username and password, or token, of %s in registries.json of the server", host)
	case http.StatusNotFound:
		return errs.E(errs.NotFound, "registry %s has no such image in %s", host, repo).WithHint("check repository and tag, or digest")
	case http.StatusTooManyRequests:
		return errs.E(errs.Capacity, "registry %s asks for fewer requests", host).WithHint("try later, or set credentials or a mirror in registries.json of the server")
	}
	return fmt.Errorf("registry %s: %w", host, errs.E(errs.Precondition, "it answers with status %d", code).WithHint("try later"))
}
