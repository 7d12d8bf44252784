// Package blob keeps bytes under names in stores outside the node, and defines the
// form that large objects have there: seekable zstd.
//
// # Stores
//
// Store is the contract; Memory, Dir (a directory, possibly of a network file
// system) and S3 implement it, and package blobtest has the suite that each of them passes. Open makes
// one from a URL with retry, rate limit and metrics around it.
//
// # Seekable zstd
//
// Compress writes a stream as independent zstd frames of equal raw size, followed by
// an index in a skippable frame (RFC 8878, section 3.1.2), so that `zstd -d` gives
// the raw bytes back without Harena:
//
//	frame 0 … frame n-1 | 0x184D2A5E u32 | payload length u32 | entry 0 … entry n-1 | footer
//
//	entry   stored length of the frame u32 | SHA-256 of its raw bytes
//	footer  SHA-256 of all raw bytes | raw size u64 | frame size u32 | frames u32
//	        | SHA-256 of entries and footer up to here | "HRNAZSK1"
//
// All integers are little-endian. Frames follow each other without gaps, so an index cannot
// make them overlap; only the last one may be shorter than the frame size.
// Frames that do not get smaller hold raw blocks, which decode at the speed of a copy.
package blob

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// Store keeps immutable and small mutable objects under names.
//
// # Names
//
// A name is one or more segments joined by "/". A segment has 1 to 255 of the
// characters A-Z a-z 0-9 . _ + = @ - and does not begin with "."; a name has at most 640.
// Others are refused with kind invalid, by every method. No name may be a
// directory of another ("a" and "a/b"): what then happens is not defined, except
// that nothing outside the store is touched.
//
// # Life of an object
//
// Put publishes an object whole or not at all, whatever dies in between: until it returns nil,
// readers see what was there before. After it returned nil the object is
// durable, and Get, Stat and List by anyone show it. A reader of an object that is being
// replaced gets the old bytes or the new ones, or an error, never a mixture.
//
// # Errors
//
// Errors have kinds of package errs: not-found (Get and Stat of what is not there),
// invalid (a name or range), unauthenticated and denied (credentials), capacity (the
// store is full or throttles), timeout, cancelled, internal (everything else, such as
// a network that fails). Transient tells which may go away by waiting.
//
// Methods may be called concurrently. They honour the context: also a body that
// Get returned fails once the context of Get ends.
type Store interface {
	// Put reads r to its end and publishes that under the name, replacing what
	// was there. An error of r is returned, and nothing is published then.
	Put(ctx context.Context, name string, r io.Reader) error
	// Get returns n bytes from offset off; n < 0 means to the end. A negative off
	// means the last -off bytes, or all when there are fewer, and n must be negative then. A range is cut at
	// the end of the object: one that begins there or after it is empty. A body that ends
	// before its range does fails with an error other than io.EOF. The caller closes it.
	Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error)
	// Stat describes an object.
	Stat(ctx context.Context, name string) (Info, error)
	// List returns objects whose names begin with prefix (which need not end at a
	// "/"; empty means all) and are greater than after, in the order of the bytes of
	// their names, at most limit. Fewer than limit means that there are no more.
	// limit is 1 to 10,000.
	List(ctx context.Context, prefix, after string, limit int) ([]Info, error)
	// Delete removes objects; those that are not there are no error. When it fails,
	// some may have been removed.
	Delete(ctx context.Context, names ...string) error
}

// Info describes an object.
type Info struct {
	Name     string
	Size     int64
	Modified time.Time
}

// Sweeper is implemented by stores in which an interrupted Put can leave
// something behind that only costs space.
type Sweeper interface {
	// Sweep removes what Puts that began before the time have left, and returns
	// how much that was. Puts that take longer than that fail.
	Sweep(ctx context.Context, before time.Time) (int, error)
}

// Versioned is implemented by bodies of Get that know which version of the
// object they are of. Two bodies of one version have the same bytes.
type Versioned interface {
	Version() string
}

const (
	maxName    = 640
	maxSegment = 255
	maxList    = 10_000
)

// CheckName refuses what is no name of an object.
func CheckName(name string) error {
	if len(name) == 0 || len(name) > maxName {
		return errs.E(errs.Invalid, "object name %.80q has %d characters; it must have 1 to %d", name, len(name), maxName)
	}
	for segment := range strings.SplitSeq(name, "/") {
		if segment == "" || len(segment) > maxSegment || segment[0] == '.' || !plain(segment) {
			return errs.E(errs.Invalid, "object name %.80q has a bad part %.80q", name, segment).
				WithHint("the parts between slashes have 1 to %d of the characters A-Z a-z 0-9 . _ + = @ - and do not begin with a dot", maxSegment)
		}
	}
	return nil
}

// checkPrefix refuses what cannot be the beginning of a name.
func checkPrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	return CheckName(strings.TrimSuffix(prefix, "/"))
}

func plain(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case strings.IndexByte("._+=@-", c) >= 0:
		default:
			return false
		}
	}
	return true
}

func checkRange(off, n int64) error {
	if off < 0 && n >= 0 {
		return errs.E(errs.Invalid, "a range of the last %d bytes has a length of its own, %d", -off, n)
	}
	return nil
}

func checkList(prefix, after string, limit int) error {
	if err := checkPrefix(prefix); err != nil {
		return err
	}
	if after != "" {
		if err := CheckName(after); err != nil {
			return err
		}
	}
	if limit < 1 || limit > maxList {
		return errs.OverLimit(errs.Invalid, "objects of a listing", maxList, limit)
	}
	return nil
}

// span returns the part of an object of the given size that a range asks for.
func span(size, off, n int64) (from, length int64) {
	if off < 0 {
		return max(0, size+off), min(size, -off)
	}
	off = min(off, size)
	if n < 0 || n > size-off {
		n = size - off
	}
	return off, n
}

func notFound(name string) error {
	return errs.E(errs.NotFound, "the store has no object %s", name).On("object %s", name)
}

// ReadAll returns a whole object of at most limit bytes.
func ReadAll(ctx context.Context, s Store, name string, limit int64) ([]byte, error) {
	body, err := s.Get(ctx, name, 0, limit+1)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	b, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, errs.OverLimit(errs.Invalid, "bytes of object "+name, limit, "more")
	}
	return b, nil
}
