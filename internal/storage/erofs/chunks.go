package erofs

import "crypto/sha256"

// chunkKey is SHA-256 cut to 192 bits. Equal keys are taken as equal content, also
// across layers of different authors: whoever can put two blocks of one key into
// layers (2^96 work) could show a sandbox other content than was imported.
// 128 bits would not do: 2^64 hashes are within reach.
type chunkKey [24]byte

func keyOf(block []byte) chunkKey {
	sum := sha256.Sum256(block)
	return chunkKey(sum[:])
}

// maxIndexed bounds the blocks of a blob that are remembered, for deduplication
// and in its chunk index: the first 128 GiB.
const maxIndexed = 1 << 25

// chunkTable finds blocks by their keys. It takes some 32 bytes a block.
type chunkTable struct {
	pages [][]chunkKey // keys in the order of blocks
	n     uint32
	slots []uint32 // open addressing: block number + 1; 0 is free
}

const tablePage = 1 << 12

func (t *chunkTable) key(block uint32) *chunkKey {
	return &t.pages[block/tablePage][block%tablePage]
}

// slot returns where key is or belongs.
func (t *chunkTable) slot(key *chunkKey) int {
	mask := len(t.slots) - 1
	for i := int(le.Uint32(key[:])) & mask; ; i = (i + 1) & mask {
		if at := t.slots[i]; at == 0 || *t.key(at - 1) == *key {
			return i
		}
	}
}

// find returns the first block with the key.
func (t *chunkTable) find(key *chunkKey) (uint32, bool) {
	if t.n == 0 {
		return 0, false
	}
	at := t.slots[t.slot(key)]
	return at - 1, at != 0
}

// add appends the key of the next block. Blocks past maxIndexed are forgotten.
func (t *chunkTable) add(key *chunkKey) {
	if t.n == maxIndexed {
		return
	}
	if int(t.n)*4 >= len(t.slots)*3 {
		t.grow()
	}
	if t.n%tablePage == 0 {
		t.pages = append(t.pages, make([]chunkKey, tablePage))
	}
	*t.key(t.n) = *key
	t.n++
	if i := t.slot(key); t.slots[i] == 0 {
		t.slots[i] = t.n
	}
}

func (t *chunkTable) grow() {
	old := t.slots
	t.slots = make([]uint32, max(1<<10, 2*len(old)))
	for _, at := range old {
		if at != 0 {
			t.slots[t.slot(t.key(at-1))] = at
		}
	}
}

// findRun returns the first of consecutive blocks with the keys.
func (t *chunkTable) findRun(keys []chunkKey) (uint32, bool) {
	at, ok := t.find(&keys[0])
	if !ok || uint64(at)+uint64(len(keys)) > uint64(t.n) {
		return 0, false
	}
	for i := 1; i < len(keys); i++ {
		if *t.key(at + uint32(i)) != keys[i] {
			return 0, false
		}
	}
	return at, true
}
