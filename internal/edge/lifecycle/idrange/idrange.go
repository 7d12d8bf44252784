// Package idrange gives every sandbox of a node its own 65,536 host user and group IDs. It does no I/O: what is held is
// read from the sandboxes' records, so the allocator has no state of its own to lose.
package idrange

import "math/bits"

const (
	// Slots is how many nodes one kernel can carry. Slot n owns the IDs from n<<29 on; slot 0 is the machine's own.
	Slots = 7
	// Size is how many IDs one sandbox owns.
	Size = 1 << 16

	slotShift = 29
	perSlot   = 1 << (slotShift - 16)
	words     = perSlot / 64
	lastSlot  = Slots
)

// Pool is the ranges of one slot. It is not safe for concurrent use.
type Pool struct {
	slot int
	held [words]uint64
	next int // where the search goes on, so that a range rests before it is used again
	free int
}

// New returns the pool of a slot (1 to Slots) in which the ranges that begin at bases are held. Bases outside the slot are ignored.
func New(slot int, bases []uint32) *Pool {
	p := &Pool{slot: slot, free: perSlot}
	if slot == lastSlot {
		// The range at the top holds 2^32-1, which means "no ID" to the kernel (INVALID_UID) and cannot be mapped.
		p.take(perSlot - 1)
	}
	for _, base := range bases {
		p.Hold(base)
	}
	return p
}

// Take returns the first ID of a range that nobody holds, and holds it; false when all are held.
func (p *Pool) Take() (uint32, bool) {
	if p.free == 0 {
		return 0, false
	}
	for i := range words + 1 {
		w := (p.next/64 + i) % words
		candidates := ^p.held[w]
		if i == 0 {
			candidates &= ^uint64(0) << (p.next % 64)
		}
		if candidates == 0 {
			continue
		}
		n := w*64 + bits.TrailingZeros64(candidates)
		p.take(n)
		p.next = (n + 1) % perSlot
		return p.base(n), true
	}
	return 0, false
}

// Hold holds the range that begins at base; it reports false if it was held already or is not of this slot.
func (p *Pool) Hold(base uint32) bool {
	n, ok := p.index(base)
	if !ok || p.held[n/64]&(1<<(n%64)) != 0 {
		return false
	}
	p.take(n)
	return true
}

// Free gives a range back. Freeing one that is not held does nothing.
func (p *Pool) Free(base uint32) {
	n, ok := p.index(base)
	if !ok || p.slot == lastSlot && n == perSlot-1 {
		return
	}
	if bit := uint64(1) << (n % 64); p.held[n/64]&bit != 0 {
		p.held[n/64] &^= bit
		p.free++
	}
}

// Available returns how many ranges nobody holds.
func (p *Pool) Available() int { return p.free }

func (p *Pool) take(n int) {
	p.held[n/64] |= 1 << (n % 64)
	p.free--
}

func (p *Pool) base(n int) uint32 { return uint32(p.slot)<<slotShift | uint32(n)<<16 }

func (p *Pool) index(base uint32) (int, bool) {
	n := int(base>>16) & (perSlot - 1)
	return n, base == p.base(n)
}
