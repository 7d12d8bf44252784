// Package sandbox is Harena's vocabulary: identifiers, states, reasons, and the
// specification of a sandbox with its defaults and limits. It does no I/O.
package sandbox

import (
	"fmt"
	"io"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// ID names a sandbox: 20 characters of [a-z0-9], the first 6 name its edge.
type ID string

// EdgeID names an edge: 6 characters of [a-z0-9].
type EdgeID string

const (
	edgeLen = 6
	idLen   = 20
	// 32 symbols, so that a random byte maps to one without bias; no l, o, 0, 1.
	alphabet = "abcdefghijkmnpqrstuvwxyz23456789"
)

// NewID makes an ID on an edge from random's bytes (70 bits of them).
func NewID(edge EdgeID, random io.Reader) (ID, error) {
	s, err := randomName(random, idLen-edgeLen)
	return ID(string(edge) + s), err
}

// NewEdgeID makes an edge ID.
func NewEdgeID(random io.Reader) (EdgeID, error) {
	s, err := randomName(random, edgeLen)
	return EdgeID(s), err
}

// ParseID checks s, which comes from outside.
func ParseID(s string) (ID, error) {
	if !named(s, idLen) {
		return "", errs.E(errs.Invalid, "%.40q is not a sandbox ID", s).
			WithHint("a sandbox ID has 20 characters a-z and 0-9; `harena ps` lists them")
	}
	return ID(s), nil
}

// ParseEdgeID checks s, which comes from outside.
func ParseEdgeID(s string) (EdgeID, error) {
	if !named(s, edgeLen) {
		return "", errs.E(errs.Invalid, "%.40q is not an edge ID", s).
			WithHint("an edge ID has 6 characters a-z and 0-9; `harena fleet ls` lists them")
	}
	return EdgeID(s), nil
}

// Sets of characters. There are no regular expressions here: to compile them costs each supervisor a tenth of its start
// and 100 KiB.
const (
	lower  = "abcdefghijklmnopqrstuvwxyz"
	digits = "0123456789"
	letter = lower + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

// consists reports whether s has nothing but characters of set, which are ASCII.
func consists(s, set string) bool { return strings.Trim(s, set) == "" }

// named reports whether s is n characters of a name that Harena makes.
func named(s string, n int) bool { return len(s) == n && consists(s, lower+digits) }

// Edge returns the edge that id lives on.
func (id ID) Edge() EdgeID { return EdgeID(id[:edgeLen]) }

func randomName(random io.Reader, n int) (string, error) {
	b := make([]byte, n)
	if _, err := io.ReadFull(random, b); err != nil {
		return "", fmt.Errorf("read random bytes: %w", err)
	}
	for i := range b {
		b[i] = alphabet[b[i]%byte(len(alphabet))]
	}
	return string(b), nil
}
