package fuseblob

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// The part of the kernel's protocol that is spoken here; include/uapi/linux/fuse.h. Numbers are in the machine's byte order,
// and the layout is the same on all 64-bit machines.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opInit        = 26
	opReaddir     = 28
	opReleasedir  = 29
	opAccess      = 34
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42

	notifyResend = 7

	rootID = 1
)

const (
	flagAsyncRead     = 1 << 0
	flagAsyncDIO      = 1 << 15
	flagNoOpen        = 1 << 17
	flagParallelDirs  = 1 << 18
	flagMaxPages      = 1 << 22
	flagNoOpendir     = 1 << 24
	flagExplicitInval = 1 << 25
	flagInitExt       = 1 << 30
	flagNoExport      = 1 << 38
	flagHasResend     = 1 << 39
	wantedFlags       = flagAsyncRead | flagAsyncDIO | flagNoOpen | flagParallelDirs | flagMaxPages | flagNoOpendir |
		flagExplicitInval | flagInitExt | flagNoExport | flagHasResend
)

const (
	protocolMajor = 7
	// protocolMinor is the newest that is understood; 31 is the oldest (Linux 5.4: fields as they are below).
	protocolMinor    = 41
	minProtocolMinor = 31

	inHeaderLen  = 40
	outHeaderLen = 16
	attrLen      = 88
	initOutLen   = 64

	// maxRead is the most that one READ asks for: what the kernel's sysctl fs.fuse.max_pages_limit allows by default.
	maxRead = 1 << 20
	// maxName is that of the kernel (FUSE_NAME_MAX).
	maxName = 1024
)

var order = binary.NativeEndian

// request is one message of the kernel. Which of the fields after node mean something depends on op.
type request struct {
	op     uint32
	unique uint64
	node   uint64

	name        string // LOOKUP
	offset      uint64 // READ, READDIR
	size        uint32
	interrupted uint64 // INTERRUPT: unique of the request that it is about
	init        initIn
}

type initIn struct {
	major, minor, readahead uint32
	flags                   uint64
}

var errMalformed = errors.New("malformed request")

// parse reads one message. With an error, unique and op are right where the header was there, so that it can be answered.
func parse(b []byte) (request, error) {
	var r request
	if len(b) < inHeaderLen {
		return r, fmt.Errorf("%w: %d bytes", errMalformed, len(b))
	}
	r.op, r.unique, r.node = order.Uint32(b[4:]), order.Uint64(b[8:]), order.Uint64(b[16:])
	if n := order.Uint32(b); uint64(n) != uint64(len(b)) {
		return r, fmt.Errorf("%w: says %d bytes, has %d", errMalformed, n, len(b))
	}
	body := b[inHeaderLen:]
	need := func(n int) error {
		if len(body) < n {
			return fmt.Errorf("%w: operation %d with %d bytes", errMalformed, r.op, len(body))
		}
		return nil
	}
	switch r.op {
	case opLookup:
		end := bytes.IndexByte(body, 0)
		if end <= 0 || end > maxName {
			return r, fmt.Errorf("%w: name", errMalformed)
		}
		r.name = string(body[:end])
	case opRead, opReaddir:
		if err := need(40); err != nil {
			return r, err
		}
		r.offset, r.size = order.Uint64(body[8:]), order.Uint32(body[16:])
	case opInterrupt:
		if err := need(8); err != nil {
			return r, err
		}
		r.interrupted = order.Uint64(body)
	case opInit:
		if err := need(16); err != nil {
			return r, err
		}
		r.init = initIn{
			major: order.Uint32(body), minor: order.Uint32(body[4:]), readahead: order.Uint32(body[8:]),
			flags: uint64(order.Uint32(body[12:])),
		}
		if len(body) >= 20 && r.init.flags&flagInitExt != 0 {
			r.init.flags |= uint64(order.Uint32(body[16:])) << 32
		}
	}
	return r, nil
}

// header writes the head of an answer of n bytes in all to b.
func header(b []byte, n int, errno int32, unique uint64) {
	order.PutUint32(b, uint32(n))
	order.PutUint32(b[4:], uint32(-errno))
	order.PutUint64(b[8:], unique)
}

// appendAttr appends a fuse_attr.
func appendAttr(b []byte, f File, blockSize uint32) []byte {
	mode, nlink := uint32(0o100444), uint32(1)
	if f.Node == rootID {
		mode, nlink = 0o040555, 2
	}
	b = order.AppendUint64(b, f.Node)
	b = order.AppendUint64(b, uint64(f.Size))
	b = order.AppendUint64(b, uint64(f.Size+511)/512)
	b = append(b, make([]byte, 3*8+3*4)...) // times: zero
	for _, v := range []uint32{mode, nlink, 0, 0, 0, blockSize, 0} {
		b = order.AppendUint32(b, v)
	}
	return b
}

// validity is how long the kernel may keep what it was told: the content of a name never changes, but a name may come later.
const validity = 24 * 3600

func appendEntry(b []byte, f File) []byte {
	b = order.AppendUint64(b, f.Node)
	b = order.AppendUint64(b, 0) // generation
	b = order.AppendUint64(b, validity)
	b = order.AppendUint64(b, validity)
	b = order.AppendUint64(b, 0) // nanoseconds of both
	return appendAttr(b, f, blockSize)
}

func appendAttrOut(b []byte, f File) []byte {
	b = order.AppendUint64(b, validity)
	b = order.AppendUint64(b, 0)
	return appendAttr(b, f, blockSize)
}

const blockSize = 4096

func appendInitOut(b []byte, p Params) []byte {
	for _, v := range []uint32{protocolMajor, p.Minor, p.Readahead, uint32(p.Flags)} {
		b = order.AppendUint32(b, v)
	}
	b = order.AppendUint16(b, maxBackground)
	b = order.AppendUint16(b, maxBackground*3/4)
	b = order.AppendUint32(b, 4096) // max_write: nothing is written
	b = order.AppendUint32(b, 1)    // time_gran
	b = order.AppendUint16(b, maxRead/4096)
	b = order.AppendUint16(b, 0)
	b = order.AppendUint32(b, uint32(p.Flags>>32))
	return append(b, make([]byte, initOutLen-len(b)+outHeaderLen)...)
}

// appendDirents appends entries from the given one on, as many as fit size bytes.
func appendDirents(b []byte, size int, from uint64, files []File) []byte {
	start := len(b)
	for i := from; i < uint64(len(files)); i++ {
		f := files[i]
		n := (24 + len(f.Name) + 7) &^ 7
		if len(b)-start+n > size {
			break
		}
		b = order.AppendUint64(b, f.Node)
		b = order.AppendUint64(b, i+1)
		b = order.AppendUint32(b, uint32(len(f.Name)))
		b = order.AppendUint32(b, 8) // DT_REG
		b = append(b, f.Name...)
		b = append(b, make([]byte, n-24-len(f.Name))...)
	}
	return b
}
