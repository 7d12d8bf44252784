package harena

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// CreateSession starts a shell that keeps its directory, variables and functions between commands; see Cmd.Session. A command
// that names a session which was never made makes it, so this is for those who want an error when there is one.
func (s *Sandbox) CreateSession(ctx context.Context, name, user string) error {
	_, err := s.c.exec.CreateSession(ctx, connect.NewRequest(&harenav1.CreateSessionRequest{SandboxId: s.id, Name: name, User: user}))
	return err
}

// Sessions lists the sandbox's sessions, also those that ended and were not closed.
func (s *Sandbox) Sessions(ctx context.Context) ([]*harenav1.Session, error) {
	res, err := s.c.exec.ListSessions(ctx, connect.NewRequest(&harenav1.ListSessionsRequest{SandboxId: s.id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSessions(), nil
}

// CloseSession ends a session with all that runs in it, and forgets it.
func (s *Sandbox) CloseSession(ctx context.Context, name string) error {
	_, err := s.c.exec.CloseSession(ctx, connect.NewRequest(&harenav1.CloseSessionRequest{SandboxId: s.id, Name: name}))
	return err
}

// LogOptions says what of a log is wanted.
type LogOptions struct {
	From      int64 // number of the first entry
	Follow    bool  // go on with what is to come, until ctx ends
	NoContent bool  // without the content of files and large inputs
}

// Log reads the sandbox's operation log, entry by entry, in order. A stream that broke is taken up again.
func (s *Sandbox) Log(ctx context.Context, o LogOptions, each func(*harenav1.LogEntry) error) error {
	next := o.From
	var failed error // of each
	read := func() error {
		stream, err := s.c.exec.Log(ctx, connect.NewRequest(&harenav1.LogRequest{SandboxId: s.id, From: next, Follow: o.Follow, NoContent: o.NoContent}))
		if err != nil {
			return err
		}
		defer func() { _ = stream.Close() }()
		inContent := false
		for stream.Receive() {
			e := stream.Msg().GetEntry()
			inContent = e.GetContent() != nil
			if failed = each(e); failed != nil {
				return nil
			}
			if e.GetContent() == nil {
				next = e.GetNumber() + 1
			}
		}
		if err := stream.Err(); err != nil && inContent {
			failed = s.c.failure(ctx, err) // a part would be told twice
			return nil
		}
		return stream.Err()
	}
	err := s.c.lasting(ctx, read)
	if failed != nil {
		return failed
	}
	return s.c.failure(ctx, err)
}

// WatchEvent is a change that Watch tells of.
type WatchEvent = harenav1.WatchFilesResponse

// Watch tells of changes in a directory, with recursive also below it, or of a file, until it is removed, ctx ends or each
// returns an error. The first event, ready, says that the watch is in place. After a connection broke, overflow says that events may be missing.
func (s *Sandbox) Watch(ctx context.Context, path string, recursive bool, each func(*WatchEvent) error, opts ...FileOption) error {
	req := &harenav1.WatchFilesRequest{SandboxId: s.id, User: fileOpts(opts).user, Recursive: recursive}
	req.Path, req.PathBytes = text(path)
	var failed error
	again := false
	watch := func() error {
		stream, err := s.c.file.Watch(ctx, connect.NewRequest(req))
		if err != nil {
			return err
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			e := stream.Msg()
			if e.GetKind() == "ready" && again {
				e = &WatchEvent{Kind: "overflow", Path: e.GetPath(), PathBytes: e.GetPathBytes(), Time: e.GetTime()}
			}
			again = true
			if failed = each(e); failed != nil {
				return nil
			}
		}
		return stream.Err()
	}
	err := s.c.lasting(ctx, watch)
	if failed != nil && !errors.Is(failed, io.EOF) {
		return failed
	}
	return s.c.failure(ctx, err)
}
