package server

import (
	"crypto/sha256"
	"encoding/binary"
	"sort"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Placement ranks the edges on which a sandbox may be created, best first. It is
// pure: the same seed and the same edges give the same order, so that a repeated
// request reaches the edge that knows its request ID. An edge that refuses for
// want of capacity is followed by the next.
type Placement func(spec *harenav1.SandboxSpec, edges []sandbox.EdgeID, seed string) []sandbox.EdgeID

// Spread orders edges by rendezvous hashing: when edges join or leave, only the
// requests that belonged to them move.
func Spread(_ *harenav1.SandboxSpec, edges []sandbox.EdgeID, seed string) []sandbox.EdgeID {
	ranked := append([]sandbox.EdgeID(nil), edges...)
	weights := make(map[sandbox.EdgeID]uint64, len(edges))
	for _, id := range edges {
		sum := sha256.Sum256([]byte(seed + "\x00" + string(id)))
		weights[id] = binary.BigEndian.Uint64(sum[:])
	}
	sort.SliceStable(ranked, func(i, j int) bool { return weights[ranked[i]] > weights[ranked[j]] })
	return ranked
}
