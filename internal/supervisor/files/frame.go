package files

import (
	"encoding/binary"
	"fmt"
	"io"
)

// frameType is the first byte of a frame; see the package's documentation.
type frameType byte

const (
	frameRequest frameType = 'Q'
	frameGo      frameType = 'G'
	frameData    frameType = 'D'
	frameEnd     frameType = 'E'
	frameAbort   frameType = 'A'
	frameReady   frameType = 'R'
	frameInfo    frameType = 'I'
	framePart    frameType = 'P'
	frameFail    frameType = 'F'
	frameAlive   frameType = 'K'
)

const (
	// maxPayload bounds a frame and so what either side holds for one.
	maxPayload = 256 << 10
	headerSize = 5
)

// op is the first byte of a request's payload; the rest is a message of
// harena.v1 whose path_bytes are absolute.
type op byte

const (
	opRead    op = 'r' // StatRequest
	opWrite   op = 'w' // WriteRequest without content
	opStat    op = 's' // StatRequest
	opList    op = 'l' // ListFilesRequest
	opMove    op = 'm' // MoveRequest
	opRemove  op = 'd' // RemoveRequest
	opMakeDir op = 'k' // MakeDirRequest
	opTarOut  op = 'o' // StatRequest
	opTarIn   op = 'i' // StatRequest
	opWatch   op = 'n' // WatchFilesRequest
)

func (t frameType) valid() bool {
	switch t {
	case frameRequest, frameGo, frameData, frameEnd, frameAbort, frameReady, frameInfo, framePart, frameFail, frameAlive:
		return true
	}
	return false
}

// frames reads and writes frames. Neither direction is safe for concurrent use,
// but one goroutine may read while another writes.
type frames struct {
	r io.Reader
	w io.Writer
	// in holds the payload received last, out is where the next one is built.
	in, out []byte
}

// newBuffer makes a buffer for one direction of frames.
func newBuffer() []byte { return make([]byte, headerSize+maxPayload) }

// read returns the next frame. The payload is valid until the next read. io.EOF
// means that the other side closed between two frames.
func (f *frames) read() (frameType, []byte, error) {
	head := f.in[:headerSize]
	if _, err := io.ReadFull(f.r, head); err != nil {
		return 0, nil, err
	}
	t, n := frameType(head[0]), binary.BigEndian.Uint32(head[1:])
	if !t.valid() || n > maxPayload {
		return 0, nil, fmt.Errorf("malformed frame: type %#x, %d bytes", byte(t), n)
	}
	payload := f.in[headerSize : headerSize+n]
	if _, err := io.ReadFull(f.r, payload); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return t, payload, nil
}

// body is where a payload can be built in place for send.
func (f *frames) body() []byte { return f.out[headerSize:] }

// send sends the first n bytes of body, in one write.
func (f *frames) send(t frameType, n int) error {
	f.out[0] = byte(t)
	binary.BigEndian.PutUint32(f.out[1:], uint32(n))
	_, err := f.w.Write(f.out[:headerSize+n])
	return err
}

// write sends a payload that was built elsewhere.
func (f *frames) write(t frameType, payload []byte) error {
	if len(payload) > maxPayload {
		return fmt.Errorf("frame of %d bytes is over the limit of %d", len(payload), maxPayload)
	}
	return f.send(t, copy(f.body(), payload))
}
