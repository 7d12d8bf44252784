package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// mirror is where one suite is fetched from.
type mirror struct {
	URI, Suite string
	Components []string
	Keyring    string // empty: debootstrap's default for the suite
	Trusted    bool   // the machine's administrator asked not to check signatures
	Updates    []suiteLine
}

type suiteLine struct {
	uri, suite string
	components []string
}

// trustArgs are debootstrap's arguments about signatures. Without
// --force-check-gpg it would go on unchecked over https when it misses its keyring.
func (m mirror) trustArgs() []string {
	if m.Trusted {
		return []string{"--no-check-gpg"}
	}
	args := []string{"--force-check-gpg"}
	if m.Keyring != "" {
		args = append(args, "--keyring="+m.Keyring)
	}
	return args
}

// shown is the mirror's URI for messages, without a password.
func (m mirror) shown() string {
	u, err := url.Parse(m.URI)
	if err != nil {
		return "of this machine"
	}
	return u.Redacted()
}

// sourcesList is /etc/apt/sources.list for the image: the same mirrors, without
// credentials and without paths of this machine.
func (m mirror) sourcesList() string {
	var b strings.Builder
	for _, l := range append([]suiteLine{{m.URI, m.Suite, m.Components}}, m.Updates...) {
		u, err := url.Parse(l.uri)
		if err != nil || u.Scheme == "file" {
			continue
		}
		u.User = nil
		fmt.Fprintf(&b, "deb %s %s %s\n", u, l.suite, strings.Join(l.components, " "))
	}
	return b.String()
}

// checkTimeout bounds the request that tells an unreachable mirror at once;
// debootstrap alone would retry for many minutes.
const checkTimeout = 20 * time.Second

// check asks for the suite's release file and returns when it was published (zero
// if it does not say). not-found: the mirror answers that it has no such suite;
// precondition: it cannot be reached.
func (m mirror) check(ctx context.Context) (time.Time, error) {
	base, err := url.Parse(m.URI)
	if err != nil {
		return time.Time{}, errs.E(errs.Precondition, "an apt source of this machine is not a URL: %w", reason(err))
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	for _, name := range []string{"InRelease", "Release"} {
		text, err := fetchStart(ctx, base.JoinPath("dists", m.Suite, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return time.Time{}, errs.E(errs.Precondition, "the mirror %s cannot be used: %w", base.Redacted(), reason(err)).
				WithHint("check the network and the apt sources of this machine (apt-get update must work)")
		}
		return releaseDate(text), nil
	}
	return time.Time{}, errs.E(errs.NotFound, "the mirror %s has no suite %q", base.Redacted(), m.Suite).
		WithHint("check the spelling; the mirror is the one of this machine's apt sources")
}

// releaseHead is more than the fields before a release file's lists of digests.
const releaseHead = 64 << 10

// fetchStart reads the start of a small file; fs.ErrNotExist when there is none.
func fetchStart(ctx context.Context, target *url.URL) (string, error) {
	if target.Scheme == "file" {
		b, err := os.ReadFile(target.Path)
		return string(b[:min(len(b), releaseHead)]), err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return "", err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	switch res.StatusCode {
	case http.StatusOK:
		b, err := io.ReadAll(io.LimitReader(res.Body, releaseHead))
		return string(b), err
	case http.StatusNotFound, http.StatusGone, http.StatusForbidden: // object stores say forbidden for what is not there
		return "", fs.ErrNotExist
	}
	return "", fmt.Errorf("it answers with HTTP status %d", res.StatusCode)
}

// reason cuts the URL, which may hold a password, off the front of a client's error.
func reason(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return fmt.Errorf("its name %s cannot be resolved", dns.Name)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no answer within %v", checkTimeout)
	}
	return err
}

// releaseDate reads the Date field of a release file (Debian wiki, RepositoryFormat).
func releaseDate(release string) time.Time {
	for line := range strings.Lines(release) {
		v, ok := strings.CutPrefix(line, "Date:")
		if !ok {
			continue
		}
		v = strings.TrimSpace(v)
		for _, layout := range []string{"Mon, 2 Jan 2006 15:04:05 MST", time.RFC1123Z} {
			if t, err := time.Parse(layout, v); err == nil {
				return t
			}
		}
	}
	return time.Time{}
}
