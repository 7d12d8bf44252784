package files

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// stallAfter is how long a transfer waits for its client to send or to take anything.
const stallAfter = 5 * time.Minute

// HTTP serves content of any size over plain HTTP: {files,tar} below
// /v1/sandboxes/{id}/, see FileService. An error before the body is a Connect
// error in JSON; one after it began ends the stream so that the client notices.
func (s *Service) HTTP() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/sandboxes/{id}/files", s.serve(map[string]transfer{
		http.MethodGet:  s.getFile,
		http.MethodHead: s.getFile,
		http.MethodPut:  s.putFile,
	}))
	mux.HandleFunc("/v1/sandboxes/{id}/tar", s.serve(map[string]transfer{
		http.MethodGet: s.getTar,
		http.MethodPut: s.putTar,
	}))
	return mux
}

// transfer handles a request. An error that it returns is the answer: then
// nothing was sent.
type transfer func(w http.ResponseWriter, r *http.Request, sub subject) error

func (s *Service) serve(methods map[string]transfer) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		handle := methods[r.Method]
		if handle == nil {
			for m := range methods {
				w.Header().Add("Allow", m)
			}
			sendError(w, r, http.StatusMethodNotAllowed, errs.E(errs.Unsupported, "%.20q is not a method of %s", r.Method, r.URL.Path))
			return
		}
		q := r.URL.Query()
		sub, err := s.subject(r.Context(), r.PathValue("id"), q.Get("user"), q.Get("path"), nil)
		if err == nil {
			err = handle(w, r, sub)
		}
		if err != nil {
			sendError(w, r, 0, s.refuse(err))
		}
	}
}

// sendError answers with an error; status 0 is the one that its kind has.
func sendError(w http.ResponseWriter, r *http.Request, status int, err error) {
	if status != 0 {
		w = &withStatus{ResponseWriter: w, status: status}
	}
	// An error of writing means that the client is gone.
	_ = connect.NewErrorWriter().Write(w, r, errs.ToConnect(err))
}

type withStatus struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (w *withStatus) WriteHeader(int) { w.ResponseWriter.WriteHeader(w.status) }

// sendInfo answers with a file's description.
func sendInfo(w http.ResponseWriter, info *harenav1.FileInfo) error {
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(&harenav1.WriteResponse{Info: info})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	// As above.
	_, _ = w.Write(append(b, '\n'))
	return nil
}

func (s *Service) getFile(w http.ResponseWriter, r *http.Request, sub subject) error {
	c, info, tag, err := s.openRead(r.Context(), s.download(), sub)
	if err != nil {
		return err
	}
	defer c.release()
	c.pr.widen()
	content := &content{c: c, size: info.GetSize()}
	h := w.Header()
	// Never a guess from hostile bytes.
	h.Set("Content-Type", "application/octet-stream")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("ETag", strconv.Quote(tag))
	buf := s.buffers.get()
	defer s.buffers.put(buf)
	guarded := &guarded{ResponseWriter: w, r: r, control: http.NewResponseController(w), buf: *buf}
	// The connection may serve other requests later.
	defer func() { _ = guarded.control.SetWriteDeadline(time.Time{}) }()
	http.ServeContent(guarded, r, "", info.GetModified().AsTime(), content)
	if content.err != nil {
		s.cfg.Log.Warn("download ended early", "path", show(sub.path), "error", content.err)
		// ServeContent drops errors of reading; the client must not take what it got for all.
		panic(http.ErrAbortHandler)
	}
	content.close()
	return nil
}

// guarded gives the answers of http.ServeContent the form of the API's errors,
// and a client that takes nothing for long an end.
type guarded struct {
	http.ResponseWriter
	r       *http.Request
	control *http.ResponseController
	refused bool
	buf     []byte
}

// ReadFrom implements io.ReaderFrom with a larger buffer than io.Copy has: the
// cost of HTTP/2 is in the number of writes.
func (g *guarded) ReadFrom(r io.Reader) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{g}, r, g.buf)
}

// WriteHeader implements http.ResponseWriter.
func (g *guarded) WriteHeader(status int) {
	var err error
	switch status {
	case http.StatusRequestedRangeNotSatisfiable:
		err = errs.E(errs.Invalid, "the range %.80q is not in the file, see Content-Range", g.r.Header.Get("Range"))
	case http.StatusPreconditionFailed:
		err = errs.E(errs.Precondition, "the file is not in the state that the request's conditions name")
	default:
		g.ResponseWriter.WriteHeader(status)
		return
	}
	g.refused = true
	g.Header().Del("Content-Length")
	sendError(g.ResponseWriter, g.r, status, err)
}

// Write implements http.ResponseWriter.
func (g *guarded) Write(p []byte) (int, error) {
	if g.refused {
		return len(p), nil
	}
	// Not every server has deadlines; then the edge's own time-outs hold.
	_ = g.control.SetWriteDeadline(time.Now().Add(stallAfter))
	return g.ResponseWriter.Write(p)
}

// content is a file as http.ServeContent wants it. It asks the worker for one
// window at a time, so that little is left over when only a range is wanted.
type content struct {
	c    *call
	size int64
	pos  int64
	// window is the size of the next window, left what is to come of this one.
	window, left int64
	active       bool
	rest         []byte
	err          error
}

const (
	firstWindow = maxPayload
	mostWindow  = 4 << 20
)

// Seek implements io.Seeker.
func (f *content) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.pos
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	if offset != f.pos {
		f.finish()
		f.pos = offset
		f.window = 0
	}
	return offset, f.err
}

// Read implements io.Reader.
func (f *content) Read(p []byte) (int, error) {
	for len(f.rest) == 0 && f.err == nil {
		if f.pos >= f.size {
			return 0, io.EOF
		}
		f.fetch()
	}
	if f.err != nil {
		return 0, f.err
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	f.pos += int64(n)
	return n, nil
}

// fetch gets the next piece.
func (f *content) fetch() {
	if !f.active {
		f.window = min(max(2*f.window, firstWindow), mostWindow)
		f.left = min(f.window, f.size-f.pos)
		if f.err = f.c.goRead(f.pos, f.left); f.err != nil {
			return
		}
		f.active = true
	}
	t, payload, err := f.c.get()
	switch {
	case err != nil:
		f.err = err
	case t == frameData && int64(len(payload)) <= f.left:
		f.rest = payload
		f.left -= int64(len(payload))
	case t == frameEnd:
		f.active = false
		if f.left > 0 {
			f.err = (&failure{code: failShrunk}).toErr(f.c.path)
		}
	default:
		f.err = f.c.malformed()
	}
}

// finish discards the rest of a window.
func (f *content) finish() {
	for f.active && f.err == nil {
		f.fetch()
	}
	f.rest = nil
}

// close leaves the worker ready for its next operation.
func (f *content) close() {
	f.finish()
	if f.err == nil {
		f.c.closeRead()
	}
}

func (s *Service) putFile(w http.ResponseWriter, r *http.Request, sub subject) error {
	mode, err := parseMode(r.URL.Query().Get("mode"))
	if err != nil {
		return err
	}
	return s.putContent(w, r, &harenav1.LogFile{Operation: opKindWrite, Path: []byte(sub.path), Mode: mode}, func(ctx context.Context, body io.Reader) (*harenav1.FileInfo, error) {
		return s.put(ctx, s.upload(), sub, mode, body)
	})
}

// putContent makes an operation of an upload over plain HTTP.
func (s *Service) putContent(w http.ResponseWriter, r *http.Request, log *harenav1.LogFile, put func(context.Context, io.Reader) (*harenav1.FileInfo, error)) error {
	q := r.URL.Query()
	log.User = q.Get("user")
	body := s.body(w, r)
	op := &operation{opID: q.Get("op_id"), log: log, repeat: body}
	if op.opID != "" {
		var err error
		if op.print, err = printOfUpload(log); err != nil {
			return err
		}
	}
	res, err := perform(r.Context(), s, op, func(ctx context.Context) (*harenav1.WriteResponse, error) {
		info, err := put(ctx, op.upload(s, body))
		return &harenav1.WriteResponse{Info: info}, err
	})
	if err != nil {
		return err
	}
	return sendInfo(w, res.GetInfo())
}

// put replaces a file by what source gives.
func (s *Service) put(ctx context.Context, cl class, sub subject, mode uint32, source io.Reader) (*harenav1.FileInfo, error) {
	return s.transferIn(ctx, cl, sub, opWrite, &harenav1.WriteRequest{PathBytes: []byte(sub.path), Mode: mode}, source)
}

func parseMode(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(s, 8, 32)
	if err != nil || mode > permissions {
		return 0, errs.E(errs.Invalid, "mode %.20q is not valid", s).WithHint("use octal permission bits, such as 0644")
	}
	return uint32(mode), nil
}

// body is a request's body that gives up when the client sends nothing for long.
func (s *Service) body(w http.ResponseWriter, r *http.Request) io.Reader {
	return &body{r: r.Body, control: http.NewResponseController(w)}
}

type body struct {
	r       io.Reader
	control *http.ResponseController
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(time.Now().Add(stallAfter))
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = errs.E(errs.Cancelled, "the upload ended early: %w", err)
	}
	return n, err
}
