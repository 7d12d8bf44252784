package packdiff

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// Bounds of rules, which come from outside.
const (
	maxRules   = 1000
	maxPattern = 1024 // bytes
)

// Rules say which paths are residue. They are immutable and may be used concurrently.
//
// A rule is a pattern, one a line; empty lines and those that begin with # mean nothing. Patterns are of whole paths:
//
//	/var/log/**      everything below /var/log, not the directory itself
//	/etc/secret      the file, or the directory with everything below it
//	**/.netrc        at any depth
//	~/.cache/**      below every home: /root, the directories in /home, and /
//	!/tmp/keep       is kept although an earlier rule says otherwise
//
// * matches within a name, ? one byte, [a-z] and [!a-z] one byte of a set, ** any number of names. A backslash takes the next
// byte as it is. Bytes are compared, not characters. Of rules that match the same path the last one counts; what is kept by
// path (see Parse) is kept whatever rules say.
type Rules struct {
	rules []rule
	text  hash.Hash // of what they were made of
}

type rule struct {
	segments []segment
	keep     bool
	// firm: named by --keep; later rules do not undo it.
	firm bool
}

type segment struct {
	text string // the pattern
	any  bool   // **
	// literal: text has no special bytes, or none any more.
	literal bool
}

// Parse makes rules: the defaults if wanted, then lines, then keep, which are patterns too.
func Parse(defaults bool, lines string, keep []string) (*Rules, error) {
	r := &Rules{text: sha256.New()}
	var all []string
	if defaults {
		all = append(all, Defaults()...)
	}
	all = append(all, strings.Split(lines, "\n")...)
	if len(all)+len(keep) > maxRules+len(Defaults()) {
		return nil, errs.OverLimit(errs.Invalid, "residue rules", maxRules, len(all)+len(keep))
	}
	for _, line := range all {
		line = strings.TrimSuffix(line, "\r")
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pattern, isKeep := strings.CutPrefix(line, "!")
		if err := r.add(pattern, isKeep, false); err != nil {
			return nil, err
		}
	}
	for _, k := range keep {
		if err := r.add(k, true, true); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Name is the same for equal rules in the same order.
func (r *Rules) Name() string { return hex.EncodeToString(r.text.Sum(nil)) }

func (r *Rules) add(pattern string, keep, firm bool) error {
	bad := func(why string) error {
		return errs.E(errs.Invalid, "the residue rule %.200q is not valid: %s", pattern, why).
			WithHint("begin it with /, ~/ or **/; see docs/snapshots.md")
	}
	if len(pattern) > maxPattern {
		return errs.OverLimit(errs.Invalid, "bytes of a residue rule", maxPattern, len(pattern))
	}
	if strings.IndexByte(pattern, 0) >= 0 {
		return bad("it has a NUL byte")
	}
	fmt.Fprintf(r.text, "%t %t %s\x00", keep, firm, pattern)
	if rest, ok := strings.CutPrefix(pattern, "~/"); ok {
		for _, home := range []string{"/root/", "/home/*/", "/"} {
			if err := r.add(home+rest, keep, firm); err != nil {
				return err
			}
		}
		return nil
	}
	if !strings.HasPrefix(pattern, "/") && !strings.HasPrefix(pattern, "**/") {
		return bad("it is not the pattern of a whole path")
	}
	c := rule{keep: keep, firm: firm}
	for text := range strings.SplitSeq(pattern, "/") {
		switch text {
		case "", ".":
			continue
		case "..":
			return bad("it has ..")
		case "**":
			if n := len(c.segments); n > 0 && c.segments[n-1].any {
				continue // the same
			}
			c.segments = append(c.segments, segment{any: true})
			continue
		}
		s := segment{text: text}
		if !strings.ContainsAny(text, `*?[\`) {
			s.literal = true
		} else if err := checkGlob(text); err != "" {
			return bad(err)
		}
		c.segments = append(c.segments, s)
	}
	if len(c.segments) == 0 {
		return bad("it is the whole file system")
	}
	r.rules = append(r.rules, c)
	return nil
}

// state is a rule of which segments[at:] have still to match.
type state struct{ rule, at int }

// place is where a walk stands: what of the rules can still match below a directory, and what holds for the directory.
type place struct {
	states []state
	fate   fate
}

// fate is the last rule that matched a path or a directory above it.
type fate struct {
	clean bool
	firm  bool
	rule  int // the rule's number plus one; 0: none
}

// root is the place of the root directory, which no rule matches.
func (r *Rules) root() place {
	var p place
	for i := range r.rules {
		p.states = r.enter(p.states, state{rule: i})
	}
	return p
}

// enter adds a state and those that it implies: ** may match no name at all.
func (r *Rules) enter(states []state, s state) []state {
	states = append(states, s)
	if segs := r.rules[s.rule].segments; s.at < len(segs)-1 && segs[s.at].any {
		states = append(states, state{s.rule, s.at + 1})
	}
	return states
}

// step returns the place of a name in a directory.
func (r *Rules) step(dir place, name string) place {
	next := place{fate: dir.fate}
	for _, s := range dir.states {
		segs := r.rules[s.rule].segments
		seg := segs[s.at]
		switch {
		case seg.any:
			next.states = append(next.states, s) // it takes this name too
			if s.at == len(segs)-1 {
				next.matched(r, s.rule)
			} else {
				next.states = append(next.states, state{s.rule, s.at + 1})
			}
		case !seg.matches(name):
		case s.at == len(segs)-1:
			next.matched(r, s.rule)
		default:
			next.states = r.enter(next.states, state{s.rule, s.at + 1})
		}
	}
	if len(next.states) > 1 {
		slices.SortFunc(next.states, func(a, b state) int {
			if a.rule != b.rule {
				return a.rule - b.rule
			}
			return a.at - b.at
		})
		next.states = slices.Compact(next.states)
	}
	return next
}

// matched notes that a rule matches: the last one counts, but nothing undoes a firm one.
func (p *place) matched(r *Rules, i int) {
	c := r.rules[i]
	if p.fate.firm && !c.firm || p.fate.rule > i+1 {
		return
	}
	p.fate = fate{clean: !c.keep, firm: c.firm, rule: i + 1}
}

func (s segment) matches(name string) bool {
	if s.literal {
		return s.text == name
	}
	return glob(s.text, name)
}

// checkGlob says what is wrong with a pattern of one name; "" when nothing is.
func checkGlob(p string) string {
	for i := 0; i < len(p); i++ {
		switch p[i] {
		case '\\':
			if i++; i == len(p) {
				return "it ends in a backslash"
			}
		case '[':
			end := setEnd(p, i)
			if end < 0 {
				return "a [ is not closed"
			}
			i = end
		}
	}
	return ""
}

// setEnd returns where the set that begins at p[i] ends; -1: nowhere.
func setEnd(p string, i int) int {
	j := i + 1
	if j < len(p) && (p[j] == '!' || p[j] == '^') {
		j++
	}
	for first := true; j < len(p); j++ {
		switch {
		case p[j] == ']' && !first:
			return j
		case p[j] == '\\':
			j++
		}
		first = false
	}
	return -1
}

// glob matches one name. Only the last star is ever taken back, so the time is at most the product of the lengths.
func glob(p, s string) bool {
	i, j := 0, 0
	star, mark := -1, 0
	for j < len(s) {
		if i < len(p) && p[i] == '*' {
			star, mark = i, j
			i++
			continue
		}
		if n, ok := one(p, i, s[j]); ok {
			i, j = n, j+1
			continue
		}
		if star < 0 {
			return false
		}
		mark++
		i, j = star+1, mark
	}
	for i < len(p) && p[i] == '*' {
		i++
	}
	return i == len(p)
}

// one matches the element of p at i, which is no star, with c and returns where the next element begins.
func one(p string, i int, c byte) (int, bool) {
	if i >= len(p) {
		return 0, false
	}
	switch p[i] {
	case '?':
		return i + 1, true
	case '\\':
		return i + 2, p[i+1] == c
	case '[':
		end := setEnd(p, i)
		return end + 1, inSet(p[i+1:end], c)
	}
	return i + 1, p[i] == c
}

func inSet(set string, c byte) bool {
	negated := false
	if set != "" && (set[0] == '!' || set[0] == '^') {
		negated, set = true, set[1:]
	}
	next := func() byte {
		if set[0] == '\\' && len(set) > 1 {
			set = set[1:]
		}
		b := set[0]
		set = set[1:]
		return b
	}
	for set != "" {
		low := next()
		high := low
		if len(set) > 1 && set[0] == '-' {
			set = set[1:]
			high = next()
		}
		if low <= c && c <= high {
			return !negated
		}
	}
	return negated
}
