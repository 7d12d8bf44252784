package packdiff

import (
	"bytes"
	"io"
	"regexp"
)

// secret is a form of credential that can be told from other text by itself.
type secret struct {
	name string
	// prefix is what every one begins with, at least two bytes.
	prefix string
	// form matches at the prefix.
	form *regexp.Regexp
}

// maxSecret bounds how long a match may be, and so how much of one piece is looked at again with the next.
const maxSecret = 512

// secretForms are the forms as their issuers document them. Those without a check of their own have long bodies, so that
// words of a program do not look like them.
func secretForms() []secret {
	form := func(name, prefix, rest string) secret {
		return secret{name, prefix, regexp.MustCompile(`^` + regexp.QuoteMeta(prefix) + rest)}
	}
	return []secret{
		// A header alone is in every program that reads keys.
		form("private key", "-----BEGIN ", `([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----(\\n|\r?\n)(([!-9;-~]+: .*)?\r?\n)*[A-Za-z0-9+/=]{32}`),
		form("AWS access key", "AKIA", `[0-9A-Z]{16}([^0-9A-Za-z]|$)`),
		form("AWS access key", "ASIA", `[0-9A-Z]{16}([^0-9A-Za-z]|$)`),
		form("GitHub token", "ghp_", `[A-Za-z0-9]{36}`),
		form("GitHub token", "gho_", `[A-Za-z0-9]{36}`),
		form("GitHub token", "ghu_", `[A-Za-z0-9]{36}`),
		form("GitHub token", "ghs_", `[A-Za-z0-9]{36}`),
		form("GitHub token", "ghr_", `[A-Za-z0-9]{36}`),
		form("GitHub token", "github_pat_", `[A-Za-z0-9_]{22}`),
		form("GitLab token", "glpat-", `[A-Za-z0-9_-]{20}`),
		form("Slack token", "xoxb-", `[0-9A-Za-z-]{20}`),
		form("Slack token", "xoxp-", `[0-9A-Za-z-]{20}`),
		form("Slack token", "xoxa-", `[0-9A-Za-z-]{20}`),
		form("Google API key", "AIza", `[0-9A-Za-z_-]{35}([^0-9A-Za-z_-]|$)`),
		form("Stripe key", "sk_live_", `[0-9A-Za-z]{24}`),
		form("Stripe key", "rk_live_", `[0-9A-Za-z]{24}`),
		form("OpenAI key", "sk-proj-", `[A-Za-z0-9_-]{40}`),
		form("Anthropic key", "sk-ant-", `[A-Za-z0-9_-]{40}`),
		form("Hugging Face token", "hf_", `[A-Za-z0-9]{34}([^0-9A-Za-z]|$)`),
		form("npm token", "npm_", `[A-Za-z0-9]{36}([^0-9A-Za-z]|$)`),
		form("PyPI token", "pypi-AgEIcHlwaS5vcmc", `[A-Za-z0-9_-]{50}`),
		form("DigitalOcean token", "dop_v1_", `[0-9a-f]{64}`),
		form("SendGrid key", "SG.", `[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}`),
		form("sandbox service token", "e2b_", `[0-9a-f]{40}`),
		form("JSON web token", "eyJ", `[A-Za-z0-9_-]{12,400}\.eyJ[A-Za-z0-9_-]{12}`),
	}
}

// scanner finds secrets in streams. It is for one stream at a time.
type scanner struct {
	forms []secret
	// first has the forms by their first two bytes; most bytes of most files are dismissed by one look into it.
	first map[uint16][]int
	hot   [1 << 16 / 64]uint64
	buf   []byte
}

func newScanner() *scanner {
	s := &scanner{forms: secretForms(), first: map[uint16][]int{}, buf: make([]byte, 1<<20)}
	for i, f := range s.forms {
		k := uint16(f.prefix[0])<<8 | uint16(f.prefix[1])
		s.first[k] = append(s.first[k], i)
		s.hot[k/64] |= 1 << (k % 64)
	}
	return s
}

// scan reads up to most bytes and returns the names of the forms that were found, each once, and whether r ended.
func (s *scanner) scan(r io.Reader, most int64) (names []string, whole bool, err error) {
	seen := map[string]bool{}
	r = io.LimitReader(r, most)
	kept := 0
	for {
		n, err := io.ReadFull(r, s.buf[kept:])
		end := err == io.EOF || err == io.ErrUnexpectedEOF
		if err != nil && !end {
			return nil, false, err
		}
		most -= int64(n)
		p := s.buf[:kept+n]
		// What begins in the last bytes may go on in the next piece.
		stop := len(p) - maxSecret
		if end {
			stop = len(p)
		}
		s.piece(p, stop, seen)
		if end {
			break
		}
		kept = copy(s.buf, p[stop:])
	}
	for _, f := range s.forms {
		if seen[f.name] {
			names = append(names, f.name)
			delete(seen, f.name)
		}
	}
	return names, most > 0, nil
}

// piece looks for secrets that begin before stop.
func (s *scanner) piece(p []byte, stop int, seen map[string]bool) {
	for i := 0; i < stop && i+1 < len(p); i++ {
		k := uint16(p[i])<<8 | uint16(p[i+1])
		if s.hot[k/64]&(1<<(k%64)) == 0 {
			continue
		}
		for _, n := range s.first[k] {
			f := &s.forms[n]
			if seen[f.name] || !bytes.HasPrefix(p[i:], []byte(f.prefix)) || i > 0 && wordByte(p[i-1]) && wordByte(p[i]) {
				continue
			}
			if f.form.Match(p[i:min(len(p), i+maxSecret)]) {
				seen[f.name] = true
			}
		}
	}
}

func wordByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
}
