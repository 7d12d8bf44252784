package files

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/journal"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
)

// operations are those with an op_id that run now.
type operations struct {
	mu   sync.Mutex
	byID map[string]*operation
}

// operation is a change of files, on its way into the journal and the log.
type operation struct {
	opID  string
	print string
	done  chan struct{}
	entry *journal.Entry
	// after done:
	result  proto.Message
	content string
	unknown error

	log *harenav1.LogFile
	// spool keeps uploaded content for the log; nil when there is none.
	spool *oplog.Spool
	// repeat is the content of an upload, to be compared with that of an earlier call.
	repeat io.Reader
}

// perform does a change once for its op_id, and logs it. What the request says but its request_id is in print; a retry whose
// client saw no answer gets the first result. run must not depend on the caller's context: what was begun ends, so that its
// result can be told.
func perform[T proto.Message](ctx context.Context, s *Service, op *operation, run func(context.Context) (T, error)) (T, error) {
	var none T
	if op.opID == "" {
		result, err := run(ctx)
		s.logged(op, err)
		return result, err
	}
	earlier, err := s.takeOperation(ctx, op)
	if err != nil {
		return none, err
	}
	if earlier != nil {
		result, ok := earlier.(T)
		if !ok {
			return none, errs.E(errs.Internal, "operation %q has a result of another type", op.opID)
		}
		return result, nil
	}
	return begun(context.WithoutCancel(ctx), s, op, run)
}

// begun runs an operation whose ID is taken.
func begun[T proto.Message](ctx context.Context, s *Service, op *operation, run func(context.Context) (T, error)) (T, error) {
	var none T
	defer s.leaveOperation(op)
	op.entry = &journal.Entry{OpID: op.opID, Request: op.print, Kind: op.log.GetOperation(), Begun: time.Now().UTC()}
	if err := s.cfg.Journal.Start(op.entry); err != nil {
		return none, errors.Join(err, s.cfg.Journal.Cancel(op.opID))
	}
	result, err := run(ctx)
	s.logged(op, err)
	switch {
	case err == nil:
	case isUnknown(err):
		op.unknown = op.entry.Indeterminate()
		s.cfg.Journal.Leave(op.opID)
		return none, err
	default:
		// It had no effect, or one that doing it again completes: a retry tries again.
		return none, errors.Join(err, s.cfg.Journal.Cancel(op.opID))
	}
	if op.entry.Result, err = protojson.Marshal(result); err != nil {
		return none, err
	}
	op.entry.Content = op.content
	s.cfg.OpLog.Sync()
	if err := s.cfg.Journal.Finish(op.entry); err != nil {
		// Done, but a supervisor that takes over could not tell.
		s.cfg.Log.Error("journal a result", "operation", op.opID, "error", err)
	}
	op.result = result
	return result, nil
}

// takeOperation returns the result that an earlier call with the ID had, or nil when it is this call's turn.
func (s *Service) takeOperation(ctx context.Context, op *operation) (proto.Message, error) {
	if s.cfg.Journal == nil {
		return nil, errs.E(errs.Unsupported, "this sandbox keeps no journal for op_id").WithHint("leave op_id out")
	}
	if err := journal.CheckID(op.opID); err != nil {
		return nil, err
	}
	for {
		other, entry, err := s.claim(op)
		switch {
		case err != nil:
			return nil, err
		case entry != nil:
			return s.recorded(op, entry)
		case other == nil:
			return nil, nil
		case other.print != op.print:
			return nil, journal.Used(op.opID, "another file operation that runs")
		}
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if other.unknown != nil {
			return nil, other.unknown
		}
		if other.result != nil {
			if err := op.sameContent(other.content); err != nil {
				return nil, err
			}
			return other.result, nil
		}
		// The first one failed: now it is our turn, or somebody else's.
	}
}

// claim registers op, or returns the running operation or the entry that has its ID.
func (s *Service) claim(op *operation) (*operation, *journal.Entry, error) {
	s.operations.mu.Lock()
	defer s.operations.mu.Unlock()
	if other := s.operations.byID[op.opID]; other != nil {
		return other, nil, nil
	}
	e, err := s.cfg.Journal.Take(op.opID)
	if e != nil || err != nil {
		return nil, e, err
	}
	if s.operations.byID == nil {
		s.operations.byID = map[string]*operation{}
	}
	op.done = make(chan struct{})
	s.operations.byID[op.opID] = op
	return nil, nil, nil
}

func (s *Service) leaveOperation(op *operation) {
	s.operations.mu.Lock()
	defer s.operations.mu.Unlock()
	delete(s.operations.byID, op.opID)
	close(op.done)
}

// recorded is what the journal says of an operation with op's ID.
func (s *Service) recorded(op *operation, e *journal.Entry) (proto.Message, error) {
	switch {
	case e.Kind == "":
		return nil, journal.Used(op.opID, "command "+e.Command)
	case e.Request != op.print:
		return nil, journal.Used(op.opID, "another file operation, "+e.Kind)
	case e.Result == nil:
		return nil, e.Indeterminate()
	}
	if err := op.sameContent(e.Content); err != nil {
		return nil, err
	}
	var result proto.Message
	switch e.Kind {
	case opKindMove:
		result = &harenav1.MoveResponse{}
	case opKindRemove:
		result = &harenav1.RemoveResponse{}
	case opKindMakeDir:
		result = &harenav1.MakeDirResponse{}
	default:
		result = &harenav1.WriteResponse{}
	}
	if err := protojson.Unmarshal(e.Result, result); err != nil {
		return nil, errs.E(errs.Internal, "read the journal: %w", err)
	}
	return result, nil
}

// Kinds of operations in the journal and the log.
const (
	opKindWrite   = "write"
	opKindUnpack  = "unpack"
	opKindMove    = "move"
	opKindRemove  = "remove"
	opKindMakeDir = "mkdir"
)

// upload is content on its way in: what is read goes to the spool as well.
func (o *operation) upload(s *Service, source io.Reader) io.Reader {
	if o.spool == nil {
		o.spool = s.cfg.OpLog.Spool()
	}
	return io.TeeReader(source, o.spool)
}

// sameContent refuses a repetition with other content than the first call's.
func (o *operation) sameContent(first string) error {
	if o.repeat == nil || first == "" {
		return nil
	}
	h := sha256.New()
	if _, err := io.Copy(h, o.repeat); err != nil {
		return err
	}
	if hex.EncodeToString(h.Sum(nil)) != first {
		return journal.Used(o.opID, "an upload of other content")
	}
	return nil
}

// logged logs an operation that took effect, or may have.
func (s *Service) logged(op *operation, err error) {
	unknown := isUnknown(err)
	if err != nil && !unknown {
		if op.spool != nil {
			op.spool.Discard()
		}
		return
	}
	if op.spool != nil {
		op.content = op.spool.Sum()
		op.log.Content = op.spool.Finish()
	}
	op.log.Unknown, op.log.OpId = unknown, op.opID
	s.cfg.OpLog.Append(&harenav1.LogEntry{Event: &harenav1.LogEntry_File{File: op.log}})
}

// unknownOutcome is an error after which nobody knows whether the operation took effect.
type unknownOutcome struct{ error }

// Unwrap serves errors.As.
func (u *unknownOutcome) Unwrap() error { return u.error }

func isUnknown(err error) bool {
	var u *unknownOutcome
	return errors.As(err, &u)
}

// printOf tells requests apart; the request_id is not part of what is asked.
func printOf(req proto.Message) (string, error) {
	bare := proto.Clone(req)
	r := bare.ProtoReflect()
	r.Clear(r.Descriptor().Fields().ByName("request_id"))
	sum, err := fingerprint(bare)
	return hex.EncodeToString(sum[:]), err
}

// printOfUpload tells uploads apart whose content is compared by itself.
func printOfUpload(log *harenav1.LogFile) (string, error) {
	sum, err := fingerprint(log)
	return hex.EncodeToString(sum[:]), err
}
