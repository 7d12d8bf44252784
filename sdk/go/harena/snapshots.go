package harena

import (
	"context"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// SnapshotOptions say how snapshots are taken.
type SnapshotOptions struct {
	Name      string   // name[:tag]; where several sandboxes are selected, "-ID" is added before the tag
	NoClean   bool     // leave residue in
	Rules     string   // residue rules beside the defaults, one a line
	Keep      []string // paths and patterns that are no residue
	Strict    bool     // fail when the quality rules find something
	RequestID string   // default: a new one
}

// Snapshot is a snapshot that was taken, or why it was not. Paths are absolute; unusual bytes are written \xNN.
type Snapshot struct {
	SandboxID    string
	Layer        *harenav1.LayerRef
	Frozen       time.Duration // how long the sandbox stood still
	StoredBytes  int64         // what it takes on disk
	LogicalBytes int64         // of the files in it

	Added, Changed, Deleted, Cleaned                     []string
	AddedCount, ChangedCount, DeletedCount, CleanedCount int64

	Findings []string
	Warnings []string
	Timings  []*harenav1.Timing
	Err      error
}

// Snapshot makes a layer of what the sandbox changed; it is an image for new sandboxes.
func (s *Sandbox) Snapshot(ctx context.Context, o SnapshotOptions) (*Snapshot, error) {
	all, err := s.c.Snapshots(ctx, &harenav1.Selector{Ids: []string{s.id}}, o)
	if err != nil {
		return nil, err
	}
	for _, x := range all {
		return x, x.Err
	}
	return nil, &Error{Kind: KindInternal, Message: "the server said nothing of the snapshot"}
}

// Snapshots takes snapshots of the selected sandboxes, in the order in which they ended. One that failed has Err set.
func (c *Client) Snapshots(ctx context.Context, sel *harenav1.Selector, o SnapshotOptions) ([]*Snapshot, error) {
	if o.RequestID == "" {
		o.RequestID = newID()
	}
	stream, err := c.sandboxes.Snapshot(ctx, connect.NewRequest(&harenav1.SnapshotRequest{
		RequestId: o.RequestID, Selector: sel, Name: o.Name, NoClean: o.NoClean, Strict: o.Strict, Keep: o.Keep, Rules: o.Rules, Project: c.project,
	}))
	if err != nil {
		return nil, c.failure(ctx, err)
	}
	defer func() { _ = stream.Close() }()
	open := map[string]*Snapshot{}
	var all []*Snapshot
	for stream.Receive() {
		m := stream.Msg()
		x := open[m.GetSandboxId()]
		if x == nil {
			x = &Snapshot{SandboxID: m.GetSandboxId()}
			open[m.GetSandboxId()] = x
		}
		x.Added = append(x.Added, m.GetAdded()...)
		x.Changed = append(x.Changed, m.GetChanged()...)
		x.Deleted = append(x.Deleted, m.GetDeleted()...)
		x.Cleaned = append(x.Cleaned, m.GetCleaned()...)
		x.Findings = append(x.Findings, m.GetFindings()...)
		x.Warnings = append(x.Warnings, m.GetWarnings()...)
		switch m.GetPhase() {
		case "failed":
			x.Err = fromDetail(m.GetError(), m.GetErrorMessage())
			all = append(all, x)
		case "done":
			x.Layer, x.Frozen, x.StoredBytes, x.LogicalBytes = m.GetLayer(), m.GetFrozen().AsDuration(), m.GetStoredBytes(), m.GetLogicalBytes()
			x.AddedCount, x.ChangedCount, x.DeletedCount, x.CleanedCount = m.GetAddedCount(), m.GetChangedCount(), m.GetDeletedCount(), m.GetCleanedCount()
			x.Timings = m.GetTimings()
			all = append(all, x)
		}
	}
	return all, c.failure(ctx, stream.Err())
}

// ForkOptions say what to make of a sandbox.
type ForkOptions struct {
	Count     int               // 1 to 1,000
	Labels    map[string]string // laid over those of the sandbox
	Job       string            // default: that of the sandbox
	RequestID string            // default: a new one
}

// Forked are the forks of a sandbox.
type Forked struct {
	Sandboxes []*Sandbox
	Frozen    time.Duration // how long the sandbox stood still
	Timings   []*harenav1.Timing
}

// Fork makes sandboxes with the same files, as they are at one instant: all or none.
func (s *Sandbox) Fork(ctx context.Context, o ForkOptions) (*Forked, error) {
	if o.RequestID == "" {
		o.RequestID = newID()
	}
	res, err := s.c.sandboxes.Fork(ctx, connect.NewRequest(&harenav1.ForkRequest{
		RequestId: o.RequestID, Id: s.id, Count: int32(min(o.Count, 1<<30)), Labels: o.Labels, Job: o.Job, //nolint:gosec // bounded
	}))
	if err != nil {
		return nil, err
	}
	f := &Forked{Frozen: res.Msg.GetFrozen().AsDuration(), Timings: res.Msg.GetTimings()}
	for _, info := range res.Msg.GetSandboxes() {
		f.Sandboxes = append(f.Sandboxes, s.c.handle(info))
	}
	return f, nil
}
