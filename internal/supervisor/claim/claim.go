// Package claim is how an edge takes a supervisor from its pool: frames of a
// 4-byte big-endian length and a message, over a socket that the supervisor inherits.
//
//	supervisor → edge   LaunchResult, empty: ready to be claimed (or its error)
//	edge → supervisor   Launch, once
//	supervisor → edge   LaunchResult; then the supervisor closes the channel
//
// The end of the channel before the second LaunchResult means that the other
// side is gone or gave up: the supervisor leaves nothing behind and exits.
package claim

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

const (
	// FD is the supervisor's end of the channel.
	FD = 3
	// Socket is the name, in the sandbox's directory, of the socket that a supervisor serves on.
	Socket = "guest.sock"
	// Log is the supervisor's log in the sandbox's directory.
	Log = "supervisor.log"
	// ExitFile is where a supervisor that ends says why, in the sandbox's directory.
	ExitFile = "exit.json"
	// maxFrame bounds a message: 64 layers, and an environment of up to 128 KiB.
	maxFrame = 1 << 20
)

// Exit is the content of ExitFile.
type Exit struct {
	// Reason is shutdown, or ended (PID 1 or the zygote died).
	Reason string `json:"reason"`
	// Detail is for people.
	Detail string `json:"detail,omitempty"`
	Time   string `json:"time"`
}

// Write sends one message.
func Write(w io.Writer, m proto.Message) error {
	b := make([]byte, 4, 512)
	b, err := proto.MarshalOptions{}.MarshalAppend(b, m)
	if err != nil {
		return fmt.Errorf("encode claim frame: %w", err)
	}
	if len(b)-4 > maxFrame {
		return fmt.Errorf("claim frame of %d bytes is over the limit of %d", len(b)-4, maxFrame)
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	_, err = w.Write(b)
	return err
}

// Read receives one message; io.EOF when the other side closed before it.
func Read(r io.Reader, m proto.Message) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return fmt.Errorf("claim frame of %d bytes is over the limit of %d", n, maxFrame)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return fmt.Errorf("read claim frame: %w", err)
	}
	return proto.Unmarshal(b, m)
}
