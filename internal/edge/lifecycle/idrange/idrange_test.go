package idrange

import (
	"math/rand/v2"
	"testing"
)

func TestEveryRangeOnce(t *testing.T) {
	for slot := 1; slot <= Slots; slot++ {
		p := New(slot, nil)
		want := perSlot
		if slot == lastSlot {
			want--
		}
		if p.Available() != want {
			t.Fatalf("slot %d: %d ranges available, want %d", slot, p.Available(), want)
		}
		seen := map[uint32]bool{}
		for {
			base, ok := p.Take()
			if !ok {
				break
			}
			if seen[base] || base%Size != 0 || int(base>>slotShift) != slot || uint64(base)+Size > 1<<32-1 {
				t.Fatalf("slot %d: bad or repeated base %#x", slot, base)
			}
			seen[base] = true
		}
		if len(seen) != want || p.Available() != 0 {
			t.Errorf("slot %d: took %d, %d left; want %d", slot, len(seen), p.Available(), want)
		}
	}
}

func TestNeverTakesWhatIsHeld(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := New(2, nil)
	held := map[uint32]bool{}
	var order []uint32
	for range 50_000 {
		if rng.IntN(100) < 55 || len(order) == 0 {
			base, ok := p.Take()
			if !ok {
				t.Fatal("no range although not all are held")
			}
			if held[base] {
				t.Fatalf("%#x was given twice", base)
			}
			held[base] = true
			order = append(order, base)
		} else {
			i := rng.IntN(len(order))
			base := order[i]
			order[i] = order[len(order)-1]
			order = order[:len(order)-1]
			delete(held, base)
			p.Free(base)
			p.Free(base)
		}
		if p.Available() != perSlot-len(held) {
			t.Fatalf("%d available, %d held", p.Available(), len(held))
		}
	}
	// A restart sees the same from the records alone.
	again := New(2, order)
	if again.Available() != p.Available() {
		t.Errorf("rebuilt pool has %d available, want %d", again.Available(), p.Available())
	}
	for {
		base, ok := again.Take()
		if !ok {
			break
		}
		if held[base] {
			t.Fatalf("rebuilt pool gave %#x, which a record holds", base)
		}
	}
}

func TestFreedRangeRests(t *testing.T) {
	p := New(1, nil)
	first, _ := p.Take()
	p.Free(first)
	if second, _ := p.Take(); second == first {
		t.Error("a freed range was used again at once")
	}
}

func TestHold(t *testing.T) {
	p := New(3, []uint32{3 << 29, 3<<29 | 5<<16})
	for _, test := range []struct {
		name string
		base uint32
		want bool
	}{
		{"held by a record", 3 << 29, false},
		{"free", 3<<29 | 1<<16, true},
		{"held now", 3<<29 | 1<<16, false},
		{"other slot", 2 << 29, false},
		{"inside a range", 3<<29 | 7<<16 | 1, false},
		{"zero", 0, false},
	} {
		if got := p.Hold(test.base); got != test.want {
			t.Errorf("%s: Hold(%#x) is %v, want %v", test.name, test.base, got, test.want)
		}
	}
	if p.Available() != perSlot-3 {
		t.Errorf("%d available, want %d", p.Available(), perSlot-3)
	}
}

func TestTopRangeStaysHeld(t *testing.T) {
	p := New(lastSlot, nil)
	top := p.base(perSlot - 1)
	p.Free(top)
	if p.Hold(top) == true {
		t.Error("the range with ID 2^32-1 can be taken")
	}
}

func BenchmarkTakeNearlyFull(b *testing.B) {
	p := New(1, nil)
	for range perSlot - 1 {
		p.Take()
	}
	for b.Loop() {
		base, _ := p.Take()
		p.Free(base)
	}
}
