// Package backendtest is the conformance suite of backend.Backend. Every implementation runs it.
package backendtest

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/edge/guestconn"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Harness is what an implementation gives to the suite.
type Harness struct {
	// Open opens the backend. A second call, after Close of the first, is the restart of a server on the same node: it must
	// find the sandboxes of the first. The suite closes what it opens.
	Open func(t *testing.T) backend.Backend
	// Config returns what is needed for one fresh sandbox: an ID never used before, a normalised spec, a Dir that exists
	// with upper/data and upper/work, lowers and an ID range of its own. It cleans up what it made.
	Config func(t *testing.T) backend.Config
	// Kill makes the sandbox end by itself, as a crash of its supervisor would.
	Kill func(t *testing.T, b backend.Backend, id sandbox.ID)
}

// patience bounds every wait; nothing is asserted about speed.
const patience = 30 * time.Second

// Run runs the suite. It makes up to 8 sandboxes at a time and leaves none.
func Run(t *testing.T, h Harness) {
	tests := []struct {
		name string
		run  func(*testing.T, Harness)
	}{
		{"CreateDialDestroy", createDialDestroy},
		{"CreateRefusedWhenCancelled", createCancelled},
		{"CreateInterrupted", createInterrupted},
		{"DestroyIsIdempotent", destroyIdempotent},
		{"ExitedTellsDeath", exitedTellsDeath},
		{"ExitedIsSilentOnDestroy", exitedSilent},
		{"RecoverAfterRestart", recoverAfterRestart},
		{"RecoverDead", recoverDead},
		{"DestroyAfterRestart", destroyAfterRestart},
		{"LeaksAreWhatNobodyOwns", leaks},
		{"FilesOnly", filesOnly},
		{"Usage", usage},
		{"FreezeThaw", freezeThaw},
		{"FreezeEnds", freezeEnds},
		{"Reclaim", reclaim},
		{"FreezeOutlivesServer", freezeOutlivesServer},
		{"FreezeCancelled", freezeCancelled},
		{"Concurrent", concurrent},
		{"Checks", checks},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.run(t, h) })
	}
}

// open opens the backend, closes it with the test and then expects that no sandbox is left.
func open(t *testing.T, h Harness) backend.Backend {
	t.Helper()
	b := h.Open(t)
	t.Cleanup(func() {
		expectNone(t, b)
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return b
}

func expectNone(t *testing.T, b backend.Backend) {
	t.Helper()
	left, err := b.Leaks(nil)
	if err != nil {
		t.Errorf("leaks: %v", err)
	}
	for _, l := range left {
		t.Errorf("left over: %s %s", l.Kind, l.Name)
		if l.Release != nil {
			if err := l.Release(); err != nil {
				t.Errorf("release of %s: %v", l.Name, err)
			}
		}
	}
}

func create(t *testing.T, b backend.Backend, h Harness) backend.Config {
	t.Helper()
	c := h.Config(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// Also when the test fails half-way nothing may stay on the machine. What the test itself destroys is checked there.
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = b.Destroy(ctx, c.ID)
	})
	timings, err := b.Create(ctx, c)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	if len(timings) == 0 {
		t.Error("create returned no timings")
	}
	for _, step := range timings {
		if step.GetStep() == "" || step.GetMicros() < 0 {
			t.Errorf("bad timing %v", step)
		}
	}
	return c
}

func destroy(t *testing.T, b backend.Backend, id sandbox.ID) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.Destroy(ctx, id); err != nil {
		t.Errorf("destroy %s: %v", id, err)
	}
}

func status(t *testing.T, b backend.Backend, id sandbox.ID) (*guestv1.StatusResponse, error) {
	t.Helper()
	transport := guestconn.NewTransport(b.Dial)
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client := guestv1connect.NewGuestServiceClient(&http.Client{Transport: transport}, guestconn.URL(id))
	resp, err := client.Status(ctx, connect.NewRequest(&guestv1.StatusRequest{}))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

func expectAlive(t *testing.T, b backend.Backend, id sandbox.ID) {
	t.Helper()
	s, err := status(t, b, id)
	if err != nil {
		t.Fatalf("status: %v", err)
	}
	if !s.GetAlive() || s.GetSandboxId() != string(id) {
		t.Errorf("status is %v, want alive %s", s, id)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func wait(t *testing.T, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("%s did not happen within %v", what, patience)
	}
}

func createDialDestroy(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	expectAlive(t, b, c.ID)
	if isClosed(b.Exited(c.ID)) {
		t.Error("a fresh sandbox has exited")
	}
	destroy(t, b, c.ID)
	if _, err := status(t, b, c.ID); err == nil {
		t.Error("the supervisor answers after destroy")
	}
	if _, err := os.Stat(c.Dir); err != nil {
		t.Errorf("destroy must leave Dir alone: %v", err)
	}
}

func createCancelled(t *testing.T, h Harness) {
	b := open(t, h)
	c := h.Config(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Create(ctx, c); err == nil {
		t.Error("create with a cancelled context succeeded")
		destroy(t, b, c.ID)
	}
}

// createInterrupted cancels at different moments; whatever Create answers must be true.
func createInterrupted(t *testing.T, h Harness) {
	b := open(t, h)
	for i := range 8 {
		c := h.Config(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*2*time.Millisecond)
		_, err := b.Create(ctx, c)
		cancel()
		if err == nil {
			expectAlive(t, b, c.ID)
			destroy(t, b, c.ID)
		}
		expectNone(t, b)
	}
}

func destroyIdempotent(t *testing.T, h Harness) {
	b := open(t, h)
	destroy(t, b, h.Config(t).ID)
	c := create(t, b, h)
	destroy(t, b, c.ID)
	destroy(t, b, c.ID)
}

func exitedTellsDeath(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	exited := b.Exited(c.ID)
	h.Kill(t, b, c.ID)
	wait(t, exited, "exit")
	destroy(t, b, c.ID)
}

func exitedSilent(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	exited := b.Exited(c.ID)
	destroy(t, b, c.ID)
	if isClosed(exited) {
		t.Error("destroy was reported as an exit")
	}
}

func recoverAfterRestart(t *testing.T, h Harness) {
	first := h.Open(t)
	c := create(t, first, h)
	if err := first.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	b := open(t, h)
	if err := b.Recover(t.Context(), c); err != nil {
		t.Fatalf("recover: %v", err)
	}
	expectAlive(t, b, c.ID)
	exited := b.Exited(c.ID)
	if isClosed(exited) {
		t.Error("a recovered sandbox has exited")
	}
	h.Kill(t, b, c.ID)
	wait(t, exited, "exit of a recovered sandbox")
	destroy(t, b, c.ID)
}

func recoverDead(t *testing.T, h Harness) {
	first := h.Open(t)
	c := create(t, first, h)
	exited := first.Exited(c.ID)
	h.Kill(t, first, c.ID)
	wait(t, exited, "exit")
	if err := first.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	b := open(t, h)
	if err := b.Recover(t.Context(), c); !errs.Is(err, errs.Precondition) {
		t.Errorf("recover of a dead sandbox: %v, want precondition", err)
	}
	if err := b.Recover(t.Context(), h.Config(t)); !errs.Is(err, errs.Precondition) {
		t.Errorf("recover of a sandbox that never was: %v, want precondition", err)
	}
	destroy(t, b, c.ID)
}

func destroyAfterRestart(t *testing.T, h Harness) {
	first := h.Open(t)
	c := create(t, first, h)
	if err := first.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	b := open(t, h)
	destroy(t, b, c.ID)
}

func leaks(t *testing.T, h Harness) {
	first := h.Open(t)
	kept, lost := create(t, first, h), create(t, first, h)
	live := map[sandbox.ID]bool{kept.ID: true, lost.ID: true}
	if found, err := first.Leaks(live); err != nil || len(found) != 0 {
		t.Errorf("leaks while all are owned: %v, %v", found, err)
	}
	if err := first.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	b := open(t, h)
	if err := b.Recover(t.Context(), kept); err != nil {
		t.Fatalf("recover: %v", err)
	}
	delete(live, lost.ID)
	found, err := b.Leaks(live)
	if err != nil || len(found) == 0 {
		t.Fatalf("leaks of a sandbox that nobody owns: %v, %v", found, err)
	}
	for _, l := range found {
		if l.Kind == "" || l.Name == "" || l.Release == nil {
			t.Errorf("incomplete leak %+v", l)
			continue
		}
		if err := l.Release(); err != nil {
			t.Errorf("release of %s %s: %v", l.Kind, l.Name, err)
		}
	}
	if found, err = b.Leaks(live); err != nil || len(found) != 0 {
		t.Errorf("leaks after release: %v, %v", found, err)
	}
	expectAlive(t, b, kept.ID)
	destroy(t, b, kept.ID)
}

func filesOnly(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	exited := b.Exited(c.ID)
	h.Kill(t, b, c.ID)
	wait(t, exited, "exit")
	destroy(t, b, c.ID)
	c.FilesOnly = true
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := b.Create(ctx, c); err != nil {
		t.Fatalf("create for files only: %v", err)
	}
	if _, err := status(t, b, c.ID); err != nil {
		t.Errorf("status: %v", err)
	}
	destroy(t, b, c.ID)
}

func usage(t *testing.T, h Harness) {
	b := open(t, h)
	c := create(t, b, h)
	u, err := b.Usage(c.ID)
	if err != nil {
		t.Fatalf("usage: %v", err)
	}
	if u.MemoryBytes < 0 || u.CPUNanos < 0 || u.Pids < 0 || u.OOMKills != 0 || u.PidsHits != 0 {
		t.Errorf("usage of a fresh sandbox is %+v", u)
	}
	destroy(t, b, c.ID)
	if _, err := b.Usage(c.ID); err == nil {
		t.Error("usage of a destroyed sandbox succeeded")
	}
}

func concurrent(t *testing.T, h Harness) {
	b := open(t, h)
	configs := make([]backend.Config, 8)
	for i := range configs {
		configs[i] = h.Config(t)
	}
	results := make([]error, len(configs))
	var wg sync.WaitGroup
	for i, c := range configs {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if _, err := b.Create(ctx, c); err != nil {
				results[i] = fmt.Errorf("create: %w", err)
				return
			}
			if i%2 == 0 {
				if s, err := status(t, b, c.ID); err != nil || s.GetSandboxId() != string(c.ID) {
					results[i] = fmt.Errorf("status %v: %w", s, err)
				}
			}
			if err := b.Destroy(ctx, c.ID); err != nil {
				results[i] = fmt.Errorf("destroy: %w", err)
			}
		})
	}
	wg.Wait()
	for i, err := range results {
		if err != nil {
			t.Errorf("sandbox %d: %v", i, err)
		}
	}
}

func checks(t *testing.T, h Harness) {
	b := open(t, h)
	known := map[string]bool{"ok": true, "degraded": true, "unsupported": true, "unverified": true, "failed": true, "leaked": true}
	found := b.Checks(t.Context())
	if len(found) == 0 {
		t.Error("no checks")
	}
	for _, c := range found {
		if c.GetName() == "" || !known[c.GetStatus()] {
			t.Errorf("bad check %v", c)
		}
		if c.GetStatus() != "ok" && c.GetHint() == "" && c.GetDetail() == "" {
			t.Errorf("check %s is %s and does not say why", c.GetName(), c.GetStatus())
		}
	}
	if b.Name() == "" {
		t.Error("the backend has no name")
	}
}
