package erofs

import (
	"crypto/sha256"
	"fmt"
	"hash"
	"maps"
	"slices"
)

// TreeDigest returns what identifies a tree together with where its content lies:
// of two images that have the same, every file is the same. own names the image's
// own blob. Images of equal trees in other blobs have different ones.
func (m *Image) TreeDigest(own string) ([sha256.Size]byte, error) {
	h := sha256.New()
	budget := int64(m.super.blocks) * (blockSize / chunkIndexSize)
	first := make(map[uint64]string)
	err := m.Walk(func(path string, e *Entry) error {
		if link, ok := first[e.NID]; ok {
			fmt.Fprintf(h, "%q is %q\n", path, link)
			return nil
		}
		if e.Mode&modeFmt != modeDir {
			first[e.NID] = path
		}
		size := e.Size
		if e.Mode&modeFmt == modeDir {
			size = 0
		}
		fmt.Fprintf(h, "%q %o %d %d %d %d.%d %d %d %q\n", path, e.Mode, e.UID, e.GID, size, e.ModTime.Unix(), e.ModTime.Nanosecond(), e.Major, e.Minor, e.Link)
		for _, name := range slices.Sorted(maps.Keys(e.Xattrs)) {
			fmt.Fprintf(h, " %q %q\n", name, e.Xattrs[name])
		}
		if e.Mode&modeFmt != modeReg {
			return nil
		}
		return m.hashExtents(h, e, own, &budget)
	})
	return [sha256.Size]byte(h.Sum(nil)), err
}

func (m *Image) hashExtents(h hash.Hash, e *Entry, own string, budget *int64) error {
	x, err := e.extents(budget)
	if err != nil {
		return err
	}
	for _, r := range x {
		blob := ""
		switch {
		case r.at == nullBlock:
		case r.device == blobDevice:
			blob = own
		default:
			blob = m.super.devices[r.device-1].Tag
		}
		fmt.Fprintf(h, " %s %d %d\n", blob, r.at, r.n)
	}
	return nil
}
