// Package guestconn is the HTTP client side of a sandbox's supervisor.
package guestconn

import (
	"context"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/harena-dev/harena/internal/sandbox"
)

// idle is how long an unused connection to a supervisor is kept.
const idle = 10 * time.Second

// hostSuffix makes a sandbox ID into a host name that can never be resolved (RFC 6761).
const hostSuffix = ".sandbox.invalid"

// Dialer connects to the supervisor of a sandbox.
type Dialer func(ctx context.Context, id sandbox.ID) (net.Conn, error)

// NewTransport makes an HTTP/2 (prior knowledge) transport over dial. One transport serves all sandboxes; it keeps a
// connection for each that is in use, because the host of a URL made by URL names the sandbox.
func NewTransport(dial Dialer) *http.Transport {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			id, _, _ := strings.Cut(addr, ".")
			return dial(ctx, sandbox.ID(id))
		},
		IdleConnTimeout:    idle,
		DisableCompression: true,
		Protocols:          new(http.Protocols),
		// A slow reader of one stream must not make the edge hold megabytes.
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 1 << 20},
	}
	t.Protocols.SetUnencryptedHTTP2(true)
	return t
}

// Host returns the host name by which a transport finds the supervisor of id.
func Host(id sandbox.ID) string { return string(id) + hostSuffix }

// URL returns the base URL of the supervisor of id.
func URL(id sandbox.ID) string { return "http://" + Host(id) }
