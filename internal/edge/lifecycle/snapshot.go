package lifecycle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Bounds of snapshots.
const (
	maxRules = 1 << 20 // bytes
	maxKeep  = 1000
	// listPiece is how many bytes of paths go into one message.
	listPiece = 256 << 10
	// maxRemembered is how many bytes of paths are kept for a repeated request; with more, only their numbers are.
	maxRemembered = 1 << 20
	// snapshotWidth bounds snapshots under way for one call: each has a sandbox stand still, and the disk is one.
	snapshotWidth = 4
)

// SnapshotMark is what is known of the last snapshot of a sandbox after a restart.
type SnapshotMark struct {
	Request  string        `json:"request,omitempty"`
	Print    string        `json:"print,omitempty"`
	Layer    Layer         `json:"layer"`
	Frozen   time.Duration `json:"frozen"`
	Stored   int64         `json:"stored"`
	Logical  int64         `json:"logical"`
	Counts   [4]int64      `json:"counts"` // added, changed, deleted, cleaned
	Finished time.Time     `json:"finished"`
}

// snapped is a snapshot that was taken.
type snapped struct {
	mark    SnapshotMark
	packed  *Packed
	timings []*harenav1.Timing
}

// Snapshot takes snapshots of the selected sandboxes and calls send, one call at a time, with what becomes of each. What fails
// for one sandbox is told in its messages and stops no other.
func (e *Edge) Snapshot(ctx context.Context, req *harenav1.SnapshotRequest, send func(*harenav1.SnapshotResponse) error) error {
	switch {
	case req.GetName() == "":
		return errs.E(errs.Invalid, "no name was given for the snapshot").WithHint("give name[:tag]; it is then an image for new sandboxes")
	case len(req.GetRules()) > maxRules:
		return errs.OverLimit(errs.Invalid, "bytes of rules", maxRules, len(req.GetRules()))
	case len(req.GetKeep()) > maxKeep:
		return errs.OverLimit(errs.Invalid, "paths to keep", maxKeep, len(req.GetKeep()))
	case req.GetNoClean() && (req.GetRules() != "" || len(req.GetKeep()) > 0):
		return errs.E(errs.Invalid, "there are residue rules, but nothing is to be cleaned").WithHint("leave out either no_clean, or rules and keep")
	}
	boxes, missing, err := e.selected(req.GetSelector(), sandbox.State.CanExec)
	if err != nil {
		return err
	}
	print, err := snapshotPrint(req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	tell := func(m *harenav1.SnapshotResponse) {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		if err := send(m); err != nil {
			cancel(err) // nobody listens any more
		}
	}
	for _, o := range missing {
		tell(&harenav1.SnapshotResponse{SandboxId: o.GetSandboxId(), Phase: "failed", Error: o.GetError(), ErrorMessage: o.GetErrorMessage()})
	}
	single := len(req.GetSelector().GetIds()) == 1
	gate := make(chan struct{}, snapshotWidth)
	var wg sync.WaitGroup
	for _, b := range boxes {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			name := req.GetName()
			if !single {
				name = nameFor(name, b.id)
			}
			s, err := e.snapshotOnce(ctx, b, req, name, print, tell)
			if err != nil {
				detail, message := errs.Detail(err)
				if errs.Is(err, errs.Internal) {
					e.log.Error("a snapshot failed", "sandbox", b.id, "err", err)
				}
				tell(&harenav1.SnapshotResponse{SandboxId: string(b.id), Phase: "failed", Error: detail, ErrorMessage: message})
				return
			}
			s.tell(string(b.id), tell)
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// nameFor is the name of one sandbox's snapshot where several are taken: "-ID" comes before the tag.
func nameFor(name string, id sandbox.ID) string {
	base, tag, tagged := strings.Cut(name, ":")
	if tagged {
		tag = ":" + tag
	}
	return base + "-" + string(id) + tag
}

func snapshotPrint(req *harenav1.SnapshotRequest) (string, error) {
	same := proto.Clone(req).(*harenav1.SnapshotRequest)
	// A selector by labels means other sandboxes at another time; each has a request of its own.
	same.Selector, same.RequestId = nil, ""
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(same)
	if err != nil {
		return "", fmt.Errorf("encode request: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16]), nil
}

// snapshotOnce takes a snapshot, or returns what an equal request came to.
func (e *Edge) snapshotOnce(ctx context.Context, b *box, req *harenav1.SnapshotRequest, name, print string, tell func(*harenav1.SnapshotResponse)) (*snapped, error) {
	var fresh *snapped
	kept, err := e.snapshots.do(ctx, callKey{string(b.id), req.GetRequestId()}, print, func() (*snapped, error) {
		if m := b.record().Snapshot; m != nil && req.GetRequestId() != "" && m.Request == req.GetRequestId() {
			if m.Print != print {
				return nil, errs.E(errs.Exists, "request_id %q was used for another request", m.Request).
					WithHint("use a new request_id for each request")
			}
			return &snapped{mark: *m}, nil
		}
		if !e.begin() {
			return nil, errs.E(errs.Capacity, "the server is shutting down").WithHint("try again")
		}
		defer e.work.Done()
		s, err := e.takeSnapshot(ctx, b, req, name, print, tell)
		if err != nil {
			return nil, err
		}
		fresh = s
		return s.remembered(), nil
	})
	if fresh != nil {
		return fresh, err
	}
	return kept, err
}

func (e *Edge) takeSnapshot(ctx context.Context, b *box, req *harenav1.SnapshotRequest, name, print string, tell func(*harenav1.SnapshotResponse)) (*snapped, error) {
	watch := &stopwatch{last: time.Now()}
	use, err := e.Enter(ctx, b.id, false)
	if err != nil {
		return nil, err
	}
	defer use.Leave()
	tell(&harenav1.SnapshotResponse{SandboxId: string(b.id), Phase: "capturing"})
	project := req.GetProject()
	if project == "" {
		project = b.record().Project
	}
	c, err := e.capture(ctx, b, PackOptions{
		Project: project, Name: name, Clean: !req.GetNoClean(), Rules: req.GetRules(), Keep: req.GetKeep(), Examine: true, Strict: req.GetStrict(),
	}, watch)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := e.fault("snapshot.finish"); err != nil {
		return nil, err
	}
	packed, err := c.Finish(ctx, nil)
	if err != nil {
		if packed != nil { // what a strict snapshot was refused for
			for piece := range pieces(packed.Findings) {
				tell(&harenav1.SnapshotResponse{SandboxId: string(b.id), Phase: "listing", Findings: piece})
			}
		}
		return nil, err
	}
	watch.lap("finish")
	s := &snapped{packed: packed, timings: watch.steps, mark: SnapshotMark{
		Request: req.GetRequestId(), Print: print, Layer: packed.Layer, Frozen: c.frozen, Stored: packed.StoredBytes, Logical: packed.LogicalBytes,
		Counts:   [4]int64{packed.AddedCount, packed.ChangedCount, packed.DeletedCount, packed.CleanedCount},
		Finished: e.clock.Now(),
	}}
	if err := e.commit(b, true, func(r *Record) error {
		r.Snapshot = &s.mark
		return nil
	}); err != nil {
		e.log.Debug("a snapshot outlived its sandbox", "sandbox", b.id, "err", err)
	}
	e.event("sandbox.snapshot", b.record(), "took the snapshot "+name, map[string]string{"layer": packed.Layer.Digest, "name": name})
	return s, nil
}

// tell sends a snapshot: the message with phase packed, pieces of the lists, and the one with phase done.
func (s *snapped) tell(id string, send func(*harenav1.SnapshotResponse)) {
	m := s.mark
	whole := func(phase string) *harenav1.SnapshotResponse {
		return &harenav1.SnapshotResponse{
			SandboxId: id, Phase: phase, Layer: &harenav1.LayerRef{Name: m.Layer.Name, Digest: m.Layer.Digest, Kind: m.Layer.Kind},
			Frozen: durationpb.New(m.Frozen), StoredBytes: m.Stored, LogicalBytes: m.Logical,
			AddedCount: m.Counts[0], ChangedCount: m.Counts[1], DeletedCount: m.Counts[2], CleanedCount: m.Counts[3],
		}
	}
	send(whole("packed"))
	if p := s.packed; p != nil {
		for _, l := range []struct {
			paths []string
			set   func(*harenav1.SnapshotResponse, []string)
		}{
			{p.Added, func(r *harenav1.SnapshotResponse, l []string) { r.Added = l }},
			{p.Changed, func(r *harenav1.SnapshotResponse, l []string) { r.Changed = l }},
			{p.Deleted, func(r *harenav1.SnapshotResponse, l []string) { r.Deleted = l }},
			{p.Cleaned, func(r *harenav1.SnapshotResponse, l []string) { r.Cleaned = l }},
			{p.Findings, func(r *harenav1.SnapshotResponse, l []string) { r.Findings = l }},
			{p.Warnings, func(r *harenav1.SnapshotResponse, l []string) { r.Warnings = l }},
		} {
			for piece := range pieces(l.paths) {
				r := &harenav1.SnapshotResponse{SandboxId: id, Phase: "listing"}
				l.set(r, piece)
				send(r)
			}
		}
	}
	last := whole("done")
	last.Timings = s.timings
	send(last)
}

// pieces splits a list so that each fits into a message.
func pieces(all []string) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		start, size := 0, 0
		for i, p := range all {
			if size += len(p) + 8; size > listPiece && i > start {
				if !yield(all[start:i]) {
					return
				}
				start, size = i, len(p)+8
			}
		}
		if start < len(all) {
			yield(all[start:])
		}
	}
}

// remembered is the snapshot without long lists, which are told once only.
func (s *snapped) remembered() *snapped {
	size := 0
	for _, l := range [][]string{s.packed.Added, s.packed.Changed, s.packed.Deleted, s.packed.Cleaned} {
		for _, p := range l {
			size += len(p) + 16
		}
	}
	if size <= maxRemembered {
		return s
	}
	return &snapped{mark: s.mark, timings: s.timings}
}
