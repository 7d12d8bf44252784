package packdiff

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxListed bounds the bytes of the paths in one list; a path counts for 32 more.
const MaxListed = 64 << 20

// List is a list of paths, without leading slashes. Its count is right also where not all could be kept.
type List struct {
	Paths []string
	Count int64
	size  int
}

// Add appends a path, or just counts it.
func (l *List) Add(path string) {
	l.Count++
	if l.size += len(path) + 32; l.size <= MaxListed {
		l.Paths = append(l.Paths, path)
	}
}

// distinct sorts the list and drops repetitions.
func (l *List) distinct() {
	n := len(l.Paths)
	slices.Sort(l.Paths)
	l.Paths = slices.Compact(l.Paths)
	l.Count -= int64(n - len(l.Paths))
}

// Quote writes a path as callers see it: absolute, with \xNN for the bytes of what does not print (what is no UTF-8, control
// characters, marks of direction, spaces but the common one) and for backslashes, so that two different paths do not look alike, and
// none steers a terminal.
func Quote(path string) string {
	const digits = "0123456789abcdef"
	var b strings.Builder
	b.WriteByte('/')
	for i := 0; i < len(path); {
		r, n := utf8.DecodeRuneInString(path[i:])
		if r == utf8.RuneError && n <= 1 || r == '\\' || !unicode.IsPrint(r) {
			for _, c := range []byte(path[i : i+n]) {
				b.WriteString(`\x`)
				b.WriteByte(digits[c>>4])
				b.WriteByte(digits[c&15])
			}
		} else {
			b.WriteString(path[i : i+n])
		}
		i += n
	}
	return b.String()
}
