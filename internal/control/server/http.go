package server

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// NewHTTPServer makes the HTTP server for h: HTTP/1.1 and, without TLS, HTTP/2
// with prior knowledge on one port. Apiserver and edge are both served by one.
func NewHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		Protocols:         new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			// One client process may hold thousands of streams of output.
			MaxConcurrentStreams: 10_000,
			// The window of the connection (the largest that net/http takes) is many times a stream's: uploads that
			// nobody reads must not stall the others.
			MaxReceiveBufferPerConnection: 4<<20 - 1,
			MaxReceiveBufferPerStream:     256 << 10,
			SendPingTimeout:               20 * time.Second,
			PingTimeout:                   20 * time.Second,
		},
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetHTTP2(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	return srv
}

// NewEdgeTransport makes the transport to an edge that dial reaches, HTTP/2 with prior knowledge.
func NewEdgeTransport(dial func(context.Context) (net.Conn, error)) *http.Transport {
	t := &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableCompression: true,
		Protocols:          new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			SendPingTimeout: 20 * time.Second,
			PingTimeout:     20 * time.Second,
			// A slow reader of one stream is stopped after this much.
			MaxReceiveBufferPerStream: 1 << 20,
		},
	}
	t.Protocols.SetUnencryptedHTTP2(true)
	return t
}
