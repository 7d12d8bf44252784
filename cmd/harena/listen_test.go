package main

import (
	"net"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// TestListenWaitsForAServerThatEnds: a port that is let go a moment later is taken; one that is kept is an error that says so.
func TestListenWaitsForAServerThatEnds(t *testing.T) {
	old, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := old.Addr().String()
	time.AfterFunc(200*time.Millisecond, func() { _ = old.Close() })
	l, err := listen(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if _, err := listen(t.Context(), address); !errs.Is(err, errs.Precondition) {
		t.Errorf("%v", err)
	}
}
