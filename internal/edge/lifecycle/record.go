package lifecycle

import (
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// recordFormat is the version of record.json. A change that an older binary would misread increases it.
const recordFormat = 1

// Record is everything that must be known of a sandbox after a kill -9 of the server. It is written before the effect that
// it describes. A record in memory is never changed, only replaced.
type Record struct {
	Format int `json:"format"`
	// Config is what the backend got. IDBase is 0 when the sandbox owns no range: a sandbox that has ended gives it back.
	Config    backend.Config        `json:"config"`
	SpecJSON  json.RawMessage       `json:"spec"`
	Spec      *harenav1.SandboxSpec `json:"-"`
	Project   string                `json:"project"`
	RequestID string                `json:"request_id,omitempty"`
	// Print tells whether another request under the same ID is the same.
	Print   string         `json:"print"`
	State   sandbox.State  `json:"state"`
	Reason  sandbox.Reason `json:"reason,omitempty"`
	Message string         `json:"message,omitempty"`
	// Boot is the boot of the machine in which it ran last.
	Boot    string    `json:"boot"`
	Layers  []Layer   `json:"layers,omitempty"`
	Created time.Time `json:"created"`
	Ended   time.Time `json:"ended,omitzero"`
	// TTLFrom and LeaseFrom are when those clocks were started.
	TTLFrom   time.Time `json:"ttl_from"`
	LeaseFrom time.Time `json:"lease_from"`
	// Pause is set while it is paused.
	Pause    *Pause `json:"pause,omitempty"`
	OOMKills int64  `json:"oom_kills,omitempty"`
	PidsHits int64  `json:"pids_hits,omitempty"`
	// Origin is the sandbox that it was forked from, or the snapshot that it was made from.
	Origin string `json:"origin,omitempty"`
	// Fork is set for one that was forked.
	Fork *ForkMark `json:"fork,omitempty"`
	// Snapshot is the last one that was taken of it.
	Snapshot *SnapshotMark `json:"snapshot,omitempty"`
}

// Layer is one layer of a sandbox, as asked and as found.
type Layer struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Kind   string `json:"kind"`
}

// ID returns the sandbox's ID.
func (r *Record) ID() sandbox.ID { return r.Config.ID }

func (r *Record) setSpec(spec *harenav1.SandboxSpec) error {
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode spec: %w", err)
	}
	r.Spec, r.SpecJSON, r.Config.Spec = spec, b, spec
	return nil
}

// to changes the state, if a sandbox may go there from where it is.
func (r *Record) to(s sandbox.State) error {
	next, err := r.State.Next(s)
	if err != nil {
		return err
	}
	r.State = next
	return nil
}

// end is to for the two states in which a sandbox has ended.
func (r *Record) end(s sandbox.State, reason sandbox.Reason, message string, now time.Time) error {
	if err := r.to(s); err != nil {
		return err
	}
	r.Ended, r.Pause = now, nil
	if reason != "" {
		r.Reason = reason
	}
	if message != "" {
		r.Message = message
	}
	return nil
}

func (r *Record) encode() ([]byte, error) { return json.Marshal(r) }

func decodeRecord(b []byte) (*Record, error) {
	r := new(Record)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("decode record: %w", err)
	}
	if r.Format < 1 || r.Format > recordFormat {
		return nil, errs.E(errs.Precondition, "record of sandbox %.20q has format %d, this version reads up to %d", r.Config.ID, r.Format, recordFormat)
	}
	if _, err := sandbox.ParseID(string(r.Config.ID)); err != nil {
		return nil, fmt.Errorf("decode record: %w", err)
	}
	r.Spec = new(harenav1.SandboxSpec)
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.SpecJSON, r.Spec); err != nil {
		return nil, fmt.Errorf("decode record: %w", err)
	}
	r.Config.Spec = r.Spec
	return r, nil
}

// view is the record as callers see it. What it returns is shared and must not be changed.
func (r *Record) view(edge sandbox.EdgeID) *harenav1.Sandbox {
	s := &harenav1.Sandbox{
		Id: string(r.ID()), State: string(r.State), Reason: string(r.Reason), Backend: r.Spec.GetBackend(), Image: r.Spec.GetImage(),
		Labels: r.Spec.GetLabels(), Job: r.Spec.GetJob(), Project: r.Project, Created: timestamppb.New(r.Created), Spec: r.Spec,
		Edge: string(edge), Message: r.Message, OomKills: r.OOMKills, Origin: r.Origin,
	}
	if !r.Ended.IsZero() {
		s.Ended = timestamppb.New(r.Ended)
	}
	if r.Pause != nil {
		s.Paused, s.Pause = timestamppb.New(r.Pause.Since), r.Pause.report()
	}
	for _, l := range r.Layers {
		s.Layers = append(s.Layers, &harenav1.LayerRef{Name: l.Name, Digest: l.Digest, Kind: l.Kind})
	}
	return s
}
