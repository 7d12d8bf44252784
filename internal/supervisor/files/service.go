package files

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor/journal"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
	"github.com/harena-dev/harena/internal/supervisor/users"
)

// Limits of the API.
const (
	// MaxContent is the most that Read and Write carry.
	MaxContent = 16 << 20

	defaultLimit = 10_000
	maxLimit     = 100_000
	maxDepth     = 32

	// Operations at a time, and so workers, of one sandbox. Transfers have their
	// own, so that slow clients do not keep small operations waiting.
	maxSmall, maxTransfers = 4, 8

	// progressWithin is how long an operation may be silent.
	progressWithin = 30 * time.Second
	// wholeSmall bounds operations that do one thing, wholeTree those that work on
	// a tree and say that they make progress.
	wholeSmall, wholeTree = 30 * time.Second, 10 * time.Minute
	// uploadGrace is how long a cancelled upload may take to leave no trace.
	uploadGrace = 3 * time.Second

	uploadHint = "transfer larger content over plain HTTP: GET and PUT /v1/sandboxes/{id}/files?path=…"
)

// Config is what a Service needs.
type Config struct {
	SandboxID sandbox.ID
	Starter   Starter
	// Users finds users; it may use the service's own ReadSmall.
	Users users.Resolver
	// DefaultUser is whom an operation runs as that names nobody. Empty leaves it to Users.
	DefaultUser string
	// Activity is called whenever a caller does something, possibly often; may be nil.
	Activity func()
	Log      *slog.Logger
	// Journal of the sandbox's operations. Nil: no op_id (unsupported).
	Journal *journal.Journal
	// OpLog is the sandbox's operation log; may be nil.
	OpLog *oplog.Log
}

// Service serves the files of one sandbox. It is safe for concurrent use.
type Service struct {
	cfg        Config
	pool       pool
	buffers    buffers
	repeats    repeats
	operations operations
	small      chan struct{}
	transfers  chan struct{}
	watches    chan struct{}
	progress   time.Duration
}

var _ harenav1connect.FileServiceHandler = (*Service)(nil)

// New makes a Service. It starts nothing until the first call.
func New(cfg Config) *Service {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Service{
		cfg:       cfg,
		pool:      pool{starter: cfg.Starter, keep: idleFor, busy: make(map[*process]struct{})},
		small:     make(chan struct{}, maxSmall),
		transfers: make(chan struct{}, maxTransfers),
		watches:   make(chan struct{}, maxWatches),
		progress:  progressWithin,
	}
}

// Close ends all workers. Calls that run fail, later ones too.
func (s *Service) Close() { s.pool.close() }

func (s *Service) touch() {
	if s.cfg.Activity != nil {
		s.cfg.Activity()
	}
}

func (s *Service) oneThing() class { return class{slots: s.small, whole: wholeSmall} }
func (s *Service) aTree() class    { return class{slots: s.small, whole: wholeTree} }
func (s *Service) download() class { return class{slots: s.transfers} }
func (s *Service) upload() class   { return class{slots: s.transfers, grace: uploadGrace} }

// subject is who works on what.
type subject struct {
	id   identity
	home string
	path string
}

// subject checks what every request has.
func (s *Service) subject(ctx context.Context, sandboxID, user, path string, exact []byte) (subject, error) {
	s.touch()
	if sandboxID != string(s.cfg.SandboxID) {
		return subject{}, errs.E(errs.NotFound, "sandbox %.40q is not served here", sandboxID).On("sandbox %.40q", sandboxID)
	}
	// Before the user is looked up, which costs more.
	if _, err := absolute("/", path, exact); err != nil {
		return subject{}, err
	}
	if user == "" {
		user = s.cfg.DefaultUser
	}
	u, err := s.cfg.Users.Resolve(ctx, user)
	if err != nil {
		return subject{}, err
	}
	sub := subject{id: identity{u.UID, u.GID, u.Groups}, home: u.Home}
	sub.path, err = absolute(u.Home, path, exact)
	return sub, err
}

// Read implements FileServiceHandler.
func (s *Service) Read(ctx context.Context, req *connect.Request[harenav1.ReadRequest]) (*connect.Response[harenav1.ReadResponse], error) {
	m := req.Msg
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	resp, err := s.read(ctx, sub, m.GetOffset(), m.GetLength(), MaxContent)
	return answer(s, resp, err)
}

// read returns part of a file: length bytes at most, or up to the end when
// length is 0, and never more than limit.
func (s *Service) read(ctx context.Context, sub subject, offset, length, limit int64) (*harenav1.ReadResponse, error) {
	if offset < 0 || length < 0 {
		return nil, errs.E(errs.Invalid, "offset %d and length %d must not be negative", offset, length)
	}
	if length > limit {
		return nil, tooLarge("bytes of a read", limit, length)
	}
	c, info, _, err := s.openRead(ctx, s.oneThing(), sub)
	if err != nil {
		return nil, err
	}
	defer c.release()
	rest := max(info.GetSize()-offset, 0)
	if length == 0 {
		length = rest
		if length > limit {
			c.closeRead()
			return nil, tooLarge("bytes of a read", limit, length)
		}
	}
	content, err := c.readRange(offset, length, min(length, rest))
	if err != nil {
		return nil, err
	}
	return &harenav1.ReadResponse{Content: content, Info: info}, nil
}

func tooLarge(what string, limit, asked int64) error {
	return errs.OverLimit(errs.Invalid, what, limit, asked).WithHint(uploadHint)
}

// openRead begins to read a file; tag identifies the state that it is in. The
// worker then waits for ranges.
func (s *Service) openRead(ctx context.Context, cl class, sub subject) (c *call, info *harenav1.FileInfo, tag string, err error) {
	c, err = s.begin(ctx, sub.id, cl, opRead, sub.path, &harenav1.StatRequest{PathBytes: []byte(sub.path)})
	if err != nil {
		return nil, nil, "", err
	}
	info, err = c.info()
	if err == nil {
		var raw []byte
		raw, err = c.expect(frameReady)
		tag = string(raw)
	}
	if err == nil && (info.GetSize() < 0 || len(tag) > 128) {
		err = c.malformed()
	}
	if err != nil {
		if c.failed {
			c.idle()
		}
		c.release()
		return nil, nil, "", err
	}
	return c, info, tag, nil
}

// goRead asks for a range.
func (c *call) goRead(offset, length int64) error {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(offset))
	binary.BigEndian.PutUint64(b[8:], uint64(length))
	return c.put(frameGo, b[:])
}

// readRange returns up to length bytes, of which likely come, and ends the reading.
func (c *call) readRange(offset, length, likely int64) ([]byte, error) {
	if err := c.goRead(offset, length); err != nil {
		return nil, err
	}
	content := make([]byte, 0, likely)
	for {
		t, payload, err := c.get()
		switch {
		case err != nil:
			if c.failed {
				c.failed = false
				c.closeRead()
			}
			return nil, err
		case t == frameEnd:
			c.closeRead()
			return content, nil
		case t != frameData || int64(len(content)+len(payload)) > length:
			return nil, c.malformed()
		}
		content = append(content, payload...)
	}
}

// closeRead ends a read; when that fails the worker is ended with the call.
func (c *call) closeRead() {
	if c.put(frameAbort, nil) != nil {
		return
	}
	if _, err := c.expect(frameEnd); err == nil {
		c.idle()
	}
}

// ReadSmall reads a whole file as root inside, if it has no more than most bytes.
func (s *Service) ReadSmall(ctx context.Context, path string, most int64) ([]byte, error) {
	resp, err := s.read(ctx, subject{path: path}, 0, 0, most)
	return resp.GetContent(), err
}

// Write implements FileServiceHandler.
func (s *Service) Write(ctx context.Context, req *connect.Request[harenav1.WriteRequest]) (*connect.Response[harenav1.WriteResponse], error) {
	m := req.Msg
	if n := len(m.GetContent()); n > MaxContent {
		return nil, s.refuse(tooLarge("bytes of a write", MaxContent, int64(n)))
	}
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	log := &harenav1.LogFile{Operation: opKindWrite, Path: []byte(sub.path), User: m.GetUser(), Mode: m.GetMode()}
	resp, err := change(ctx, s, m, log, func(ctx context.Context, op *operation) (*harenav1.WriteResponse, error) {
		cl := s.upload()
		cl.whole = wholeSmall
		info, err := s.put(ctx, cl, sub, m.GetMode(), op.upload(s, bytes.NewReader(m.GetContent())))
		return &harenav1.WriteResponse{Info: info}, err
	})
	return answer(s, resp, err)
}

// Stat implements FileServiceHandler.
func (s *Service) Stat(ctx context.Context, req *connect.Request[harenav1.StatRequest]) (*connect.Response[harenav1.StatResponse], error) {
	m := req.Msg
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	info, err := s.simple(ctx, sub, s.oneThing(), opStat, &harenav1.StatRequest{PathBytes: []byte(sub.path), Follow: m.GetFollow()}, true)
	return answer(s, &harenav1.StatResponse{Info: info}, err)
}

// List implements FileServiceHandler.
func (s *Service) List(ctx context.Context, req *connect.Request[harenav1.ListFilesRequest]) (*connect.Response[harenav1.ListFilesResponse], error) {
	m := req.Msg
	depth, limit := m.GetDepth(), m.GetLimit()
	switch {
	case depth < 0 || limit < 0:
		return nil, s.refuse(errs.E(errs.Invalid, "depth %d and limit %d must not be negative", depth, limit))
	case depth > maxDepth:
		return nil, s.refuse(errs.OverLimit(errs.Invalid, "depth of a listing", maxDepth, depth))
	case limit > maxLimit:
		return nil, s.refuse(errs.OverLimit(errs.Invalid, "entries of a listing", maxLimit, limit))
	}
	if limit == 0 {
		limit = defaultLimit
	}
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	resp, err := s.list(ctx, sub, &harenav1.ListFilesRequest{PathBytes: []byte(sub.path), Depth: max(depth, 1), Limit: limit})
	return answer(s, resp, err)
}

func (s *Service) list(ctx context.Context, sub subject, m *harenav1.ListFilesRequest) (*harenav1.ListFilesResponse, error) {
	c, err := s.begin(ctx, sub.id, s.oneThing(), opList, sub.path, m)
	if err != nil {
		return nil, err
	}
	defer c.release()
	resp := &harenav1.ListFilesResponse{}
	size := 0
	for {
		t, payload, err := c.get()
		switch {
		case err != nil:
			if c.failed {
				c.idle()
			}
			return nil, err
		case t == frameEnd:
			c.idle()
			return resp, nil
		case t != framePart:
			return nil, c.malformed()
		}
		size += len(payload)
		// Merges the lists.
		if (proto.UnmarshalOptions{Merge: true}).Unmarshal(payload, resp) != nil || len(resp.Entries) > int(m.GetLimit()) || size > maxListing+maxPayload {
			return nil, c.malformed()
		}
	}
}

// Move implements FileServiceHandler.
func (s *Service) Move(ctx context.Context, req *connect.Request[harenav1.MoveRequest]) (*connect.Response[harenav1.MoveResponse], error) {
	m := req.Msg
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetFrom(), m.GetFromBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	to, err := absolute(sub.home, m.GetTo(), m.GetToBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	log := &harenav1.LogFile{Operation: opKindMove, Path: []byte(sub.path), To: []byte(to), User: m.GetUser(), NoReplace: m.GetNoReplace()}
	resp, err := change(ctx, s, m, log, func(ctx context.Context, _ *operation) (*harenav1.MoveResponse, error) {
		info, err := s.simple(ctx, sub, s.aTree(), opMove,
			&harenav1.MoveRequest{FromBytes: []byte(sub.path), ToBytes: []byte(to), NoReplace: m.GetNoReplace()}, true)
		return &harenav1.MoveResponse{Info: info}, err
	})
	return answer(s, resp, err)
}

// Remove implements FileServiceHandler.
func (s *Service) Remove(ctx context.Context, req *connect.Request[harenav1.RemoveRequest]) (*connect.Response[harenav1.RemoveResponse], error) {
	m := req.Msg
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	log := &harenav1.LogFile{Operation: opKindRemove, Path: []byte(sub.path), User: m.GetUser(), Recursive: m.GetRecursive(), MissingOk: m.GetMissingOk()}
	resp, err := change(ctx, s, m, log, func(ctx context.Context, _ *operation) (*harenav1.RemoveResponse, error) {
		_, err := s.simple(ctx, sub, s.aTree(), opRemove,
			&harenav1.RemoveRequest{PathBytes: []byte(sub.path), Recursive: m.GetRecursive(), MissingOk: m.GetMissingOk()}, false)
		return &harenav1.RemoveResponse{}, err
	})
	return answer(s, resp, err)
}

// MakeDir implements FileServiceHandler.
func (s *Service) MakeDir(ctx context.Context, req *connect.Request[harenav1.MakeDirRequest]) (*connect.Response[harenav1.MakeDirResponse], error) {
	m := req.Msg
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err != nil {
		return nil, s.refuse(err)
	}
	log := &harenav1.LogFile{Operation: opKindMakeDir, Path: []byte(sub.path), User: m.GetUser(), Mode: m.GetMode(), Parents: m.GetParents()}
	resp, err := change(ctx, s, m, log, func(ctx context.Context, _ *operation) (*harenav1.MakeDirResponse, error) {
		info, err := s.simple(ctx, sub, s.oneThing(), opMakeDir,
			&harenav1.MakeDirRequest{PathBytes: []byte(sub.path), Mode: m.GetMode(), Parents: m.GetParents()}, true)
		return &harenav1.MakeDirResponse{Info: info}, err
	})
	return answer(s, resp, err)
}

// changing is a request that changes something.
type changing interface {
	proto.Message
	GetRequestId() string
	GetOpId() string
}

// change does what a request asks, once for its request_id and once for its op_id.
func change[T proto.Message](ctx context.Context, s *Service, m changing, log *harenav1.LogFile, run func(context.Context, *operation) (T, error)) (T, error) {
	return once(ctx, &s.repeats, m.GetRequestId(), m, func() (T, error) {
		op := &operation{opID: m.GetOpId(), log: log}
		if op.opID != "" {
			var err error
			if op.print, err = printOf(m); err != nil {
				var none T
				return none, err
			}
		}
		return perform(ctx, s, op, func(ctx context.Context) (T, error) { return run(ctx, op) })
	})
}

// simple runs an operation that answers with one info, if hasInfo, and the end.
func (s *Service) simple(ctx context.Context, sub subject, cl class, o op, m proto.Message, hasInfo bool) (*harenav1.FileInfo, error) {
	c, err := s.begin(ctx, sub.id, cl, o, sub.path, m)
	if err != nil {
		return nil, err
	}
	defer c.release()
	c.sent = o != opStat
	var info *harenav1.FileInfo
	if hasInfo {
		info, err = c.info()
	}
	if err == nil {
		_, err = c.expect(frameEnd)
	}
	if err == nil || c.failed {
		c.idle()
	}
	if err != nil {
		return nil, err
	}
	return info, nil
}

// answer makes the two results of a handler.
func answer[T any](s *Service, m *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, s.refuse(err)
	}
	return connect.NewResponse(m), nil
}

// refuse gives an error the form for callers; what it hides from them is logged.
func (s *Service) refuse(err error) error {
	if errs.Is(err, errs.Internal) {
		s.cfg.Log.Error("file operation failed", "error", err)
	}
	return errs.ToConnect(err)
}
