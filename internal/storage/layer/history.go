package layer

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// maxHistory bounds how many former digests of a name are remembered.
const maxHistory = 64

func (s *Store) historyPath(r Ref) string {
	return filepath.Join(s.dir, "history", dirName(r.Project), dirName(r.Name), r.Tag)
}

// Earlier returns what a name pointed at before, the latest first, as far as this
// node has seen it. It keeps nothing from being collected.
func (s *Store) Earlier(r Ref) []Digest {
	b, err := os.ReadFile(s.historyPath(r))
	if err != nil {
		return nil
	}
	var out []Digest
	for line := range strings.Lines(string(b)) {
		if d, err := ParseDigest(strings.TrimSpace(line)); err == nil {
			out = append(out, d)
		}
	}
	return out
}

// moved remembers what a name pointed at. That it cannot is not worth an error: only reports use it.
func (s *Store) moved(r Ref, before, now Digest) {
	if before == now {
		return
	}
	out := []Digest{before}
	for _, d := range s.Earlier(r) {
		if len(out) < maxHistory && d != now && !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	var b strings.Builder
	for _, d := range out {
		b.WriteString(string(d) + "\n")
	}
	_ = writeFile(s.tmp(), s.historyPath(r), []byte(b.String()))
}
