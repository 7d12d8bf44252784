package layer

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// aptSource is one enabled binary source of the machine (sources.list(5)).
type aptSource struct {
	URIs, Suites, Components []string
	// SignedBy is a keyring file, or empty: fingerprints and embedded keys are left to the default keyring.
	SignedBy string
	Trusted  bool
}

// machineSources are what apt on this machine uses.
type machineSources struct {
	sources  []aptSource
	id       string // of the running distribution, such as debian; may be empty
	codename string // of its release, may be empty
	root     string // where this machine's files are
}

// readMachineSources reads apt's sources and os-release below root.
func readMachineSources(root string) (*machineSources, error) {
	release := readIfAny(filepath.Join(root, "etc/os-release"))
	m := &machineSources{id: osField(release, "ID"), codename: osField(release, "VERSION_CODENAME"), root: root}
	etc := filepath.Join(root, "etc/apt")
	m.sources = parseOneLine(readIfAny(filepath.Join(etc, "sources.list")))
	parts, err := os.ReadDir(filepath.Join(etc, "sources.list.d"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, p := range parts { // in order of name, as apt reads them
		text := readIfAny(filepath.Join(etc, "sources.list.d", p.Name()))
		switch filepath.Ext(p.Name()) {
		case ".list":
			m.sources = append(m.sources, parseOneLine(text)...)
		case ".sources":
			m.sources = append(m.sources, parseDeb822(text)...)
		}
	}
	return m, nil
}

func readIfAny(path string) string {
	b, _ := os.ReadFile(path) // a file that is not there or not readable adds no source
	return string(b)
}

func osField(osRelease, name string) string {
	for line := range strings.Lines(osRelease) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), name+"="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}

// parseOneLine reads the form "deb [option=value …] uri suite component…".
func parseOneLine(text string) []aptSource {
	var out []aptSource
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(strings.ReplaceAll(line, "\t", " ")), "deb ")
		if !ok {
			continue
		}
		var s aptSource
		rest = strings.TrimSpace(rest)
		if strings.HasPrefix(rest, "[") {
			options, after, closed := strings.Cut(rest[1:], "]")
			if !closed {
				continue
			}
			for _, o := range strings.Fields(options) {
				name, value, _ := strings.Cut(o, "=")
				s.setOption(name, value)
			}
			rest = after
		}
		f := strings.Fields(rest)
		if len(f) < 2 {
			continue
		}
		s.URIs, s.Suites, s.Components = f[:1], f[1:2], f[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822 reads stanzas of "Field: value" with continuation lines.
func parseDeb822(text string) []aptSource {
	var out []aptSource
	fields := make(map[string]string)
	last := ""
	flush := func() {
		types := strings.Fields(fields["types"])
		if slices.Contains(types, "deb") && !isNo(fields["enabled"]) {
			s := aptSource{
				URIs: strings.Fields(fields["uris"]), Suites: strings.Fields(fields["suites"]), Components: strings.Fields(fields["components"]),
			}
			s.setOption("signed-by", fields["signed-by"])
			s.setOption("trusted", fields["trusted"])
			out = append(out, s)
		}
		clear(fields)
		last = ""
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				fields[last] += "\n" + strings.TrimSpace(line)
			}
		default:
			name, value, ok := strings.Cut(line, ":")
			if last = ""; ok {
				last = strings.ToLower(strings.TrimSpace(name))
				fields[last] = strings.TrimSpace(value)
			}
		}
	}
	flush()
	return out
}

func (s *aptSource) setOption(name, value string) {
	switch strings.ToLower(name) {
	case "signed-by":
		if f := strings.Fields(value); len(f) == 1 && filepath.IsAbs(f[0]) {
			s.SignedBy = f[0]
		}
	case "trusted":
		s.Trusted = strings.EqualFold(value, "yes") || strings.EqualFold(value, "true") || value == "1"
	}
}

func isNo(v string) bool {
	return strings.EqualFold(v, "no") || strings.EqualFold(v, "false") || v == "0"
}

// uri returns the first mirror of a kind that debootstrap can use.
func (s *aptSource) uri() string {
	for _, u := range s.URIs {
		p, err := url.Parse(u)
		if err == nil && (p.Scheme == "http" || p.Scheme == "https" || p.Scheme == "file") && !strings.Contains(u, "$(") {
			return strings.TrimRight(u, "/")
		}
	}
	return ""
}

// rank orders sources that carry a suite: the distribution's own archive has the
// component main and is signed by the archive keyring; others often use the
// same suite names (Docker's "bookworm stable").
func (s *aptSource) rank() int {
	r := 0
	if slices.Contains(s.Components, "main") {
		r += 2
	}
	if s.SignedBy == "" || strings.Contains(filepath.Base(s.SignedBy), "archive-keyring") {
		r++
	}
	return r
}

// find returns the best source that carries a suite.
func (m *machineSources) find(suite string) *aptSource {
	var best *aptSource
	for i := range m.sources {
		s := &m.sources[i]
		if s.uri() == "" || !slices.Contains(s.Suites, suite) || !slices.Contains(s.Components, "main") {
			continue
		}
		if best == nil || s.rank() > best.rank() {
			best = s
		}
	}
	return best
}

// debianSuites are Debian's since 2019, which another distribution's archive does not have.
var debianSuites = []string{"buster", "bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable"}

// debianArchive is where the machine's debootstrap fetches a Debian suite when it is told no mirror: what the suite's script
// names, else the program's own default. Empty when neither is an archive of Debian's.
func (m *machineSources) debianArchive(suite string) string {
	for file, setting := range map[string]string{"share/debootstrap/scripts/" + suite: "default_mirror ", "sbin/debootstrap": "DEF_MIRROR="} {
		for line := range strings.Lines(readIfAny(filepath.Join(m.root, "usr", file))) {
			value, ok := strings.CutPrefix(strings.TrimSpace(line), setting)
			s := aptSource{URIs: []string{strings.Trim(value, `"'`)}}
			if ok && strings.HasSuffix(s.uri(), "/debian") {
				return s.uri()
			}
		}
	}
	return ""
}

// mirrorOf chooses where to fetch a suite: a source that lists it, else the
// archive that the machine's own distribution comes from. On a machine of
// another distribution, such as Ubuntu, Debian's suites come from Debian.
func (m *machineSources) mirrorOf(suite string) (mirror, error) {
	s := m.find(suite)
	foreign := m.id != "" && m.id != "debian" && slices.Contains(debianSuites, suite)
	if s == nil && foreign {
		if uri := m.debianArchive(suite); uri != "" {
			return mirror{URI: uri, Suite: suite, Components: []string{"main"}}, nil
		}
	}
	if s == nil && !foreign && m.codename != "" {
		s = m.find(m.codename)
	}
	if s == nil {
		return mirror{}, errs.E(errs.Precondition, "no apt source of this machine has suite %s or the machine's own distribution", suite).
			WithHint("add one to /etc/apt/sources.list, such as: deb http://MIRROR/debian %s main", suite)
	}
	out := mirror{URI: s.uri(), Suite: suite, Components: s.Components, Keyring: s.SignedBy, Trusted: s.Trusted}
	// Updates and security are separate suites, security with an archive of its own.
	for _, name := range []string{suite + "-updates", suite + "-security", suite + "/updates"} {
		if u := m.find(name); u != nil {
			out.Updates = append(out.Updates, suiteLine{u.uri(), name, u.Components})
		}
	}
	return out, nil
}
