package erofs

import (
	"cmp"
	"io"
	"slices"

	"github.com/harena-dev/harena/internal/errs"
)

// MaxDevices bounds the data blobs of other layers that an image refers to: each
// is a file that every mount of the image opens.
const MaxDevices = 16

// Blob is a data blob that an image can refer to beside its own.
type Blob struct {
	// Name is what the device table calls it: 64 hexadecimal digits, its SHA-256.
	Name string
	// Size is its length, a multiple of 4096.
	Size int64
	// Index is its chunk index. Without one no content is found in it.
	Index *Index
	// Data is its content. It is read only where content has to be copied: when an
	// image would have more than MaxDevices others, or MinUsed or Copy say so. May be nil.
	Data io.ReaderAt
	// MinUsed, where Data is set, is how many of its bytes must be of use for the
	// image to refer to it; less is copied. For blobs that only this would keep.
	MinUsed int64
	// Copy has the content copied in any case: the image is not to refer to the blob.
	Copy bool
}

func (b *Blob) check() error {
	if len(b.Name) != maxTagLen || b.Size < 0 || b.Size%blockSize != 0 || b.Size > maxFileSize {
		return errs.E(errs.Invalid, "data blob %.80q of %d bytes cannot be a device", b.Name, b.Size)
	}
	if b.Index != nil && b.Index.Blocks() != b.Size/blockSize {
		return errs.E(errs.Invalid, "the chunk index of data blob %s is of another blob: it has %d blocks instead of %d", b.Name, b.Index.Blocks(), b.Size/blockSize)
	}
	return nil
}

// device returns the number of a blob, which is entered if it is new.
func (w *blobWriter) device(b *Blob) (uint16, error) {
	for i, known := range w.others {
		if known.Name == b.Name {
			if known.Size != b.Size {
				return 0, errs.E(errs.Invalid, "data blob %s has %d bytes, and %d", b.Name, known.Size, b.Size)
			}
			if known.Data == nil && b.Data != nil {
				with := *known
				with.Data = b.Data
				w.others[i] = &with
			}
			return uint16(i + 1), nil
		}
	}
	if err := b.check(); err != nil {
		return 0, err
	}
	const most = 1 << 12 // far more than the layers of any sandbox
	if len(w.others) == most {
		return 0, errs.OverLimit(errs.Invalid, "data blobs to write a layer against", most, most+1)
	}
	w.others = append(w.others, b)
	return uint16(len(w.others)), nil
}

// lookIn has content looked up in blobs, the first ones first.
func (w *blobWriter) lookIn(blobs []*Blob) error {
	for _, b := range blobs {
		if _, err := w.device(b); err != nil {
			return err
		}
	}
	w.looked = w.others[:len(w.others):len(w.others)]
	return nil
}

// settle decides which other blobs become devices: those that the tree refers to,
// in the order in which they were given, but for those whose content is copied. It
// renumbers the extents of the inodes, each of which appears once, to device slots.
func (b *builder) settle(inodes []*inode) (extra []*Blob, used []int64, err error) {
	w := b.blob
	bytes := usedBytes(inodes, len(w.others))
	var kept, doomed []int // devices
	for d := 1; d <= len(w.others); d++ {
		switch o := w.others[d-1]; {
		case bytes[d] == 0:
		case o.Copy, o.Data != nil && bytes[d] < o.MinUsed:
			doomed = append(doomed, d)
		default:
			kept = append(kept, d)
		}
	}
	if excess := len(kept) - MaxDevices; excess > 0 {
		byUse := slices.Clone(kept)
		slices.SortStableFunc(byUse, func(a, b int) int { return cmp.Compare(bytes[a], bytes[b]) })
		for _, d := range byUse[:excess] {
			doomed = append(doomed, d)
			kept = slices.DeleteFunc(kept, func(k int) bool { return k == d })
		}
	}
	if err := b.copyIn(inodes, doomed); err != nil {
		return nil, nil, err
	}
	slots := make([]uint16, len(w.others)+1)
	slots[0] = blobDevice
	for i, d := range kept {
		slots[d] = uint16(blobDevice + 1 + i)
		extra = append(extra, w.others[d-1])
		used = append(used, bytes[d])
	}
	for _, i := range inodes {
		for k := range i.data {
			i.data[k].device = slots[i.data[k].device]
		}
	}
	return extra, used, nil
}

// usedBytes returns for every device how many of its bytes the inodes refer to.
func usedBytes(inodes []*inode, others int) []int64 {
	runs := make([][]extent, others+1)
	for _, i := range inodes {
		for _, e := range i.data {
			if e.at != nullBlock && e.device > 0 {
				runs[e.device] = append(runs[e.device], e)
			}
		}
	}
	out := make([]int64, others+1)
	for d, r := range runs {
		out[d] = unionBlocks(r) * blockSize
	}
	return out
}

// unionBlocks counts the blocks that runs of one device cover; it sorts them.
func unionBlocks(runs []extent) (blocks int64) {
	slices.SortFunc(runs, func(a, b extent) int { return cmp.Compare(a.at, b.at) })
	var end uint64
	for _, r := range runs {
		from, to := uint64(r.at), uint64(r.at)+uint64(r.n)
		if from = max(from, end); to > from {
			blocks += int64(to - from)
			end = to
		}
	}
	return blocks
}

// copyIn moves what inodes refer to in some devices into the blob of the image.
func (b *builder) copyIn(inodes []*inode, devices []int) error {
	if len(devices) == 0 {
		return nil
	}
	doomed := make([]bool, len(b.blob.others)+1)
	for _, d := range devices {
		if o := b.blob.others[d-1]; o.Data == nil {
			return errs.OverLimit(errs.Invalid, "data blobs of other layers that an image refers to", MaxDevices, MaxDevices+len(devices)).
				WithHint("the content of %s must be at hand to be copied", o.Name)
		}
		doomed[d] = true
	}
	w := b.blob
	w.looked = nil
	buf := make([]byte, 1<<18)
	for _, i := range inodes {
		if !slices.ContainsFunc(i.data, func(e extent) bool { return doomed[e.device] }) {
			continue
		}
		var out extents
		for _, e := range i.data {
			if !doomed[e.device] {
				out = out.add(e.place, e.n)
				continue
			}
			from := w.others[e.device-1]
			for done := uint32(0); done < e.n; {
				n := min(e.n-done, uint32(len(buf)/blockSize))
				p := buf[:n*blockSize]
				if err := readAt(from.Data, p, int64(e.at+done)*blockSize, "data blob "+from.Name); err != nil {
					return err
				}
				var err error
				if out, err = w.store(out, p, blockSize); err != nil {
					return err
				}
				if err := b.ctx.Err(); err != nil {
					return err
				}
				done += n
			}
		}
		i.data = out
	}
	return nil
}
