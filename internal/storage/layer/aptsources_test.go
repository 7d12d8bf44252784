package layer

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

func TestParseOneLine(t *testing.T) {
	got := parseOneLine(`
# deb http://commented.example/debian bookworm main
deb http://deb.example/debian bookworm main contrib # why
deb-src http://deb.example/debian bookworm main
	deb	[arch=amd64 signed-by=/usr/share/keyrings/k.gpg trusted=yes] https://x.example/y suite/ 
deb [ signed-by=ABCD1234 ] http://z.example stable main
deb [broken http://z.example stable main
deb http://short.example
`)
	want := []aptSource{
		{URIs: []string{"http://deb.example/debian"}, Suites: []string{"bookworm"}, Components: []string{"main", "contrib"}},
		{URIs: []string{"https://x.example/y"}, Suites: []string{"suite/"}, Components: []string{}, SignedBy: "/usr/share/keyrings/k.gpg", Trusted: true},
		{URIs: []string{"http://z.example"}, Suites: []string{"stable"}, Components: []string{"main"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
}

func TestParseDeb822(t *testing.T) {
	got := parseDeb822(`# comment
Types: deb deb-src
URIs: http://deb.example/debian
 http://second.example/debian
Suites: bookworm bookworm-updates
# a comment inside
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://off.example
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://src.example
Suites: bookworm
Components: main


types: deb
uris: http://key.example
suites: trixie
components: main
signed-by:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDME
 -----END PGP PUBLIC KEY BLOCK-----
`)
	want := []aptSource{
		{
			URIs: []string{"http://deb.example/debian", "http://second.example/debian"}, Suites: []string{"bookworm", "bookworm-updates"},
			Components: []string{"main"}, SignedBy: "/usr/share/keyrings/debian-archive-keyring.gpg",
		},
		{URIs: []string{"http://key.example"}, Suites: []string{"trixie"}, Components: []string{"main"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
}

// machine writes apt's files of a machine.
func machine(t *testing.T, files map[string]string) *machineSources {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := readMachineSources(root)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMirrorOf(t *testing.T) {
	debian := map[string]string{
		"etc/os-release":                          "ID=debian\nVERSION_CODENAME=bookworm\n",
		"etc/apt/sources.list.d/a-docker.list":    "deb [signed-by=/etc/apt/keyrings/docker.gpg] https://download.docker.example/linux/debian bookworm stable\n",
		"etc/apt/sources.list.d/b-vendor.list":    "deb [signed-by=/etc/apt/keyrings/v.gpg] https://vendor.example/apt bookworm main\n",
		"etc/apt/sources.list.d/debian.sources":   "Types: deb\nURIs: http://u:pw@deb.example/debian/\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\nTypes: deb\nURIs: http://deb.example/debian-security\nSuites: bookworm-security\nComponents: main\n",
		"etc/apt/sources.list.d/ignored.disabled": "deb http://no.example bookworm main\n",
	}
	for _, c := range []struct {
		name, suite string
		files       map[string]string
		uri, list   string
	}{
		{"listed", "bookworm", debian, "http://u:pw@deb.example/debian", "deb http://deb.example/debian bookworm main\ndeb http://deb.example/debian bookworm-updates main\ndeb http://deb.example/debian-security bookworm-security main\n"},
		{"not listed", "trixie", debian, "http://u:pw@deb.example/debian", "deb http://deb.example/debian trixie main\n"},
		{"one-line", "jammy", map[string]string{
			"etc/apt/sources.list": "deb mirror+file:/etc/m jammy main\ndeb http://archive.example/ubuntu jammy main universe\n",
		}, "http://archive.example/ubuntu", "deb http://archive.example/ubuntu jammy main universe\n"},
		{"Debian on Ubuntu", "bookworm", map[string]string{
			"etc/os-release":       "ID=ubuntu\nVERSION_CODENAME=noble\nID_LIKE=debian\n",
			"etc/apt/sources.list": "deb http://archive.example/ubuntu noble main universe",
			"usr/sbin/debootstrap": "#!/bin/sh\nDEF_MIRROR=\"http://debian.example/debian\"\n",
		}, "http://debian.example/debian", "deb http://debian.example/debian bookworm main\n"},
		{"Debian on Ubuntu, by the suite's script", "bookworm", map[string]string{
			"etc/os-release":                         "ID=ubuntu\nVERSION_CODENAME=noble\n",
			"etc/apt/sources.list":                   "deb http://archive.example/ubuntu noble main universe",
			"usr/sbin/debootstrap":                   "DEF_MIRROR=\"http://archive.example/ubuntu\"\n",
			"usr/share/debootstrap/scripts/bookworm": "\tdefault_mirror http://debian.example/debian\n",
		}, "http://debian.example/debian", "deb http://debian.example/debian bookworm main\n"},
		{"Debian on Ubuntu, of which it knows nothing", "bookworm", map[string]string{
			"etc/os-release":       "ID=ubuntu\nVERSION_CODENAME=noble\n",
			"etc/apt/sources.list": "deb http://archive.example/ubuntu noble main universe",
			"usr/sbin/debootstrap": "DEF_MIRROR=\"http://archive.example/ubuntu\"\n",
		}, "", ""},
		{"nothing", "bookworm", map[string]string{"etc/os-release": "VERSION_CODENAME=bookworm\n"}, "", ""},
	} {
		got, err := machine(t, c.files).mirrorOf(c.suite)
		if c.uri == "" {
			if !errs.Is(err, errs.Precondition) {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if err != nil || got.URI != c.uri || got.sourcesList() != c.list {
			t.Errorf("%s: %+v, %v\n%s", c.name, got, err, got.sourcesList())
		}
	}
}

func TestTrustIsNeverSilentlyDropped(t *testing.T) {
	for _, c := range []struct {
		m    mirror
		want string
	}{
		{mirror{}, "--force-check-gpg"},
		{mirror{Keyring: "/k.gpg"}, "--force-check-gpg --keyring=/k.gpg"},
		{mirror{Trusted: true}, "--no-check-gpg"},
	} {
		if got := strings.Join(c.m.trustArgs(), " "); got != c.want {
			t.Errorf("%+v: %s", c.m, got)
		}
	}
}

func TestMirrorCheck(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/debian/dists/good/Release":
			_, _ = w.Write([]byte("Origin: Debian\nDate: Sat, 11 Jul 2026 09:31:16 UTC\nSHA256:\n Date: no\n"))
		case "/debian/dists/broken/InRelease":
			w.WriteHeader(http.StatusBadGateway)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer srv.Close()
	dead := httptest.NewServer(http.NotFoundHandler())
	dead.Close()
	local := t.TempDir()
	if err := os.MkdirAll(filepath.Join(local, "dists/good"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(local, "dists/good/InRelease"), []byte("Date: Sat, 11 Jul 2026 09:31:16 UTC\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := time.Date(2026, 7, 11, 9, 31, 16, 0, time.UTC)
	for _, c := range []struct {
		uri, suite string
		kind       errs.Kind
	}{
		{srv.URL + "/debian", "good", ""},
		{srv.URL + "/debian", "bad", errs.NotFound},
		{srv.URL + "/debian", "broken", errs.Precondition},
		{dead.URL, "good", errs.Precondition},
		{"http://user:secret@no-such-name.invalid/debian", "good", errs.Precondition},
		{"file://" + local, "good", ""},
		{"file://" + local, "bad", errs.NotFound},
	} {
		at, err := mirror{URI: c.uri, Suite: c.suite}.check(context.Background())
		if errs.KindOf(err) != c.kind || err == nil && !at.Equal(want) {
			t.Errorf("%s %s: %v, %v", c.uri, c.suite, at, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("password in %v", err)
		}
	}
}
