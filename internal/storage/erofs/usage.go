package erofs

// Used collects which blocks of data blobs images refer to.
type Used struct {
	runs map[string][]extent // by the name of the blob
}

// Add adds what an image refers to. names are those of its blobs, in the order of
// its device table.
func (u *Used) Add(m *Image, names []string) error {
	if u.runs == nil {
		u.runs = make(map[string][]extent)
	}
	return m.eachExtent(func(r extent) error {
		if int(r.device) > len(names) {
			return damaged("it has more data blobs than were named")
		}
		name := names[r.device-1]
		runs := append(u.runs[name], r)
		if n := len(runs); n >= 1<<12 && n&(n-1) == 0 {
			runs = union(runs) // the same blocks again and again take no memory
		}
		u.runs[name] = runs
		return nil
	})
}

// Bytes returns how many bytes of a blob the images refer to.
func (u *Used) Bytes(name string) int64 { return unionBlocks(u.runs[name]) * blockSize }

// UsedBytes returns of every data blob, in the order of the device table, how many
// bytes the image refers to, each block counted once.
func (m *Image) UsedBytes() ([]int64, error) {
	runs := make([][]extent, len(m.super.devices))
	err := m.eachExtent(func(r extent) error {
		runs[r.device-1] = append(runs[r.device-1], r)
		return nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]int64, len(runs))
	for i, r := range runs {
		out[i] = unionBlocks(r) * blockSize
	}
	return out, nil
}

// eachExtent calls fn for every run of blocks of every file, holes left out.
func (m *Image) eachExtent(fn func(extent) error) error {
	budget := int64(m.super.blocks) * (blockSize / chunkIndexSize)
	seen := make(map[uint64]struct{})
	return m.Walk(func(_ string, e *Entry) error {
		if e.Mode&modeFmt != modeReg {
			return nil
		}
		if e.Nlink > 1 {
			if _, ok := seen[e.NID]; ok {
				return nil
			}
			seen[e.NID] = struct{}{}
		}
		x, err := e.extents(&budget)
		if err != nil {
			return err
		}
		for _, r := range x {
			if r.at == nullBlock {
				continue
			}
			if err := fn(r); err != nil {
				return err
			}
		}
		return nil
	})
}

// union sorts runs of one device and joins those that touch.
func union(runs []extent) []extent {
	unionBlocks(runs) // sorts
	out := runs[:0]
	for _, r := range runs {
		if n := len(out); n > 0 {
			last := &out[n-1]
			if end := uint64(last.at) + uint64(last.n); uint64(r.at) <= end {
				if to := uint64(r.at) + uint64(r.n); to > end {
					last.n += uint32(to - end)
				}
				continue
			}
		}
		out = append(out, r)
	}
	return out
}
