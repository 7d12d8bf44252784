package packdiff

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// cleaned tells whether rules have a path left out; every directory on the way is asked about first.
func cleaned(t *testing.T, r *Rules, path string) bool {
	t.Helper()
	c := NewCleaner(r)
	all := parts(path)
	for i := range all[:len(all)-1] {
		c.Choose(strings.Join(all[:i+1], "/"), &unix.Stat_t{Mode: unix.S_IFDIR | 0o755})
	}
	return c.Choose(path, &unix.Stat_t{Mode: unix.S_IFREG | 0o644}) == erofs.Drop
}

func TestRules(t *testing.T) {
	for _, c := range []struct {
		rules string
		keep  []string
		path  string
		want  bool
	}{
		{"/tmp/**", nil, "tmp/a", true},
		{"/tmp/**", nil, "tmp/a/b/c", true},
		{"/tmp/**", nil, "tmp", false},
		{"/tmp/**", nil, "tmpx/a", false},
		{"/tmp/**", nil, "srv/tmp/a", false},
		{"/a/b", nil, "a/b/c/d", true},
		{"**/.netrc", nil, ".netrc", true},
		{"**/.netrc", nil, "a/b/.netrc", true},
		{"**/.netrc", nil, "a/b/x.netrc", false},
		{"/a/**/z", nil, "a/z", true},
		{"/a/**/z", nil, "a/b/c/z", true},
		{"/a/**/z", nil, "a/b/c/y", false},
		{"~/.x", nil, "root/.x", true},
		{"~/.x", nil, "home/u/.x", true},
		{"~/.x", nil, ".x", true},
		{"~/.x", nil, "srv/u/.x", false},
		{"/l/*.log", nil, "l/a.log", true},
		{"/l/*.log", nil, "l/a/b.log", false},
		{"/l/[a-c]?", nil, "l/bz", true},
		{"/l/[!a-c]?", nil, "l/bz", false},
		{"/l/[]]", nil, "l/]", true},
		{`/l/\*`, nil, "l/*", true},
		{`/l/\*`, nil, "l/x", false},
		{"/l/a*b*c", nil, "l/aXbYbZc", true},
		{"/l/a*b*c", nil, "l/aXbYbZ", false},
		{"/tmp/**\n!/tmp/keep", nil, "tmp/keep/x", false},
		{"!/tmp/keep\n/tmp/**", nil, "tmp/keep/x", true},
		{"/tmp/**", []string{"/tmp/keep"}, "tmp/keep/x", false},
		{"/tmp/**", []string{"/tmp/keep"}, "tmp/other", true},
		{"/tmp/**", []string{"/tmp/a/keep"}, "tmp/a/keep", false},
		{"# comment\n\n/x", nil, "x", true},
		{"/l/\xff*", nil, "l/\xffz", true},
	} {
		r, err := Parse(false, c.rules, c.keep)
		if err != nil {
			t.Errorf("%q: %v", c.rules, err)
			continue
		}
		if got := cleaned(t, r, c.path); got != c.want {
			t.Errorf("rules %q, keep %q: %q cleaned: %t", c.rules, c.keep, c.path, got)
		}
	}
}

func TestBadRules(t *testing.T) {
	for _, r := range []string{"tmp/x", "/", "/a/../b", "/a[", `/a\`, "/a\x00b", "/" + strings.Repeat("x", maxPattern), strings.Repeat("/x\n", maxRules+1)} {
		if _, err := Parse(true, r, nil); !errs.Is(err, errs.Invalid) {
			t.Errorf("%.40q: %v", r, err)
		}
	}
}

// Deleting is never cleaned, and neither is what hides something below.
func TestWhiteoutsAreKept(t *testing.T) {
	r, err := Parse(true, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	c := NewCleaner(r)
	dir, gone := &unix.Stat_t{Mode: unix.S_IFDIR | 0o755}, &unix.Stat_t{Mode: unix.S_IFCHR}
	if got := c.Choose("tmp", dir); got != erofs.Take {
		t.Errorf("/tmp: %v", got)
	}
	if got := c.Choose("tmp/d", dir); got != erofs.TakeIfNotEmpty {
		t.Errorf("a directory: %v", got)
	}
	if got := c.Choose("tmp/d/w", gone); got != erofs.Take {
		t.Errorf("a whiteout: %v", got)
	}
	if got := c.Choose("tmp/f", &unix.Stat_t{Mode: unix.S_IFREG}); got != erofs.Drop {
		t.Errorf("a file: %v", got)
	}
	if got := c.Choose("etc", dir); got != erofs.Take {
		t.Errorf("/etc: %v", got)
	}
	if got := c.Choose("etc/hosts", &unix.Stat_t{Mode: unix.S_IFREG}); got != erofs.Drop {
		t.Errorf("/etc/hosts is the sandbox's own: %v", got)
	}
	if c.Cleaned.Count != 1 || c.Cleaned.Paths[0] != "tmp/f" {
		t.Errorf("cleaned: %q", c.Cleaned.Paths)
	}
}

func TestQuote(t *testing.T) {
	seen := map[string]string{}
	for in, want := range map[string]string{
		"a/b": "/a/b", "ä ö": "/ä ö", "a\nb": `/a\x0ab`, "a\xffb": `/a\xffb`, `a\x0ab`: `/a\x5cx0ab`, "\x7f": `/\x7f`,
		"\x1b]0;a\a": `/\x1b]0;a\x07`, "\u009b2J": `/\xc2\x9b2J`, "\u202egnp.exe": `/\xe2\x80\xaegnp.exe`, "a\u200b": `/a\xe2\x80\x8b`,
		"a\u00a0b": `/a\xc2\xa0b`, "a b": "/a b", "\ufffd": "/\ufffd", "": "/", "日本": "/日本",
	} {
		got := Quote(in)
		if got != want {
			t.Errorf("%q: %s", in, got)
		}
		if other, ok := seen[got]; ok {
			t.Errorf("%q and %q look alike", in, other)
		}
		seen[got] = in
	}
}

// The documentation has the rules that hold by default, and the kinds of findings, and no others.
func TestDocumentedDefaults(t *testing.T) {
	b, err := os.ReadFile("../../../docs/snapshots.md")
	if err != nil {
		t.Fatal(err)
	}
	section := func(title string) string {
		_, rest, ok := strings.Cut(string(b), "\n## "+title+"\n")
		if !ok {
			t.Fatalf("docs/snapshots.md has no section %s", title)
		}
		text, _, _ := strings.Cut(rest, "\n## ")
		return text
	}
	var rules, kinds []string
	for line := range strings.Lines(section("Residue")) {
		if !strings.HasPrefix(line, "- ") {
			if len(rules) > 0 {
				break // after the list of rules others explain
			}
			continue
		}
		for i, part := range strings.Split(line, "`") {
			if i%2 == 1 {
				rules = append(rules, part)
			}
		}
	}
	for line := range strings.Lines(section("Findings")) {
		if rest, ok := strings.CutPrefix(line, "| `"); ok {
			kind, _, _ := strings.Cut(rest, "`")
			kinds = append(kinds, kind)
		}
	}
	if want := Defaults(); !slices.Equal(rules, want) {
		for _, r := range want {
			if !slices.Contains(rules, r) {
				t.Errorf("docs/snapshots.md does not have %s", r)
			}
		}
		for _, r := range rules {
			if !slices.Contains(want, r) {
				t.Errorf("docs/snapshots.md has %s, which is no default", r)
			}
		}
		t.Error("docs/snapshots.md does not have the defaults in their order")
	}
	if want := []string{FindSecret, FindGit, FindHuge, FindMany, FindWritable, FindSetuid, FindOwner, FindFuture, FindUnread}; !slices.Equal(kinds, want) {
		t.Errorf("docs/snapshots.md has findings %q, want %q", kinds, want)
	}
}

func TestSecrets(t *testing.T) {
	s := newScanner()
	for _, c := range []struct{ text, want string }{
		{"key = AKIAABCDEFGHIJKLMNOP\n", "AWS access key"},
		{"XAKIAABCDEFGHIJKLMNOP\n", ""},
		{"AKIAABCDEFGHIJKLMNOPQ\n", ""},
		{"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\n", "private key"},
		{`"-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC"`, "private key"},
		{"-----BEGIN PRIVATE KEY-----\x00-----END", ""},
		{"ghp_" + strings.Repeat("a1", 18), "GitHub token"},
		{strings.Repeat("x", 1<<20-10) + " ghp_" + strings.Repeat("a1", 18) + strings.Repeat("y ", 5000), "GitHub token"},
		{"nothing to see", ""},
		{"", ""},
	} {
		got, whole, err := s.scan(strings.NewReader(c.text), maxScan)
		if err != nil || !whole || strings.Join(got, ",") != c.want {
			t.Errorf("%.60q: %q, whole %t: %v", c.text, got, whole, err)
		}
	}
}

func FuzzRules(f *testing.F) {
	f.Add("/tmp/**\n!/a/[b-z]*\\?", "tmp/a")
	f.Add("**/x/**/y", "x/x/y")
	f.Fuzz(func(t *testing.T, rules, path string) {
		r, err := Parse(true, rules, nil)
		if err != nil {
			return
		}
		at := r.root()
		for _, name := range parts(path) {
			at = r.step(at, name)
		}
	})
}
