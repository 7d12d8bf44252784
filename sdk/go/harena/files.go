package harena

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// FileOption sets one property of a file call.
type FileOption func(*fileOptions)

type fileOptions struct {
	user   string
	mode   fs.FileMode
	offset int64
	length int64
	opID   string
	bits   uint32 // mode in the form of the API
}

// AsUser makes the call with the rights of a user inside; default: the sandbox's.
func AsUser(user string) FileOption { return func(o *fileOptions) { o.user = user } }

// WithMode sets the permission bits of what is written; default: those of the
// file that is replaced, else 0644 (directories: 0755).
func WithMode(mode fs.FileMode) FileOption { return func(o *fileOptions) { o.mode = mode } }

// WithOpID makes a change of files happen once in the sandbox's life, however often it is asked for under the ID. Content of an
// Upload is sent again after a connection broke if it is an io.Seeker.
func WithOpID(id string) FileOption { return func(o *fileOptions) { o.opID = id } }

// WithRange reads length bytes from offset; a length of 0 means to the end.
func WithRange(offset, length int64) FileOption {
	return func(o *fileOptions) { o.offset, o.length = offset, length }
}

func fileOpts(opts []FileOption) fileOptions {
	var o fileOptions
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// Paths are absolute, or relative to the user's home. They may hold any bytes but NUL.

// Open reads a regular file. The caller closes what is returned.
func (s *Sandbox) Open(ctx context.Context, path string, opts ...FileOption) (io.ReadCloser, error) {
	o := fileOpts(opts)
	header := http.Header{}
	if o.offset > 0 || o.length > 0 {
		spec := fmt.Sprintf("bytes=%d-", o.offset)
		if o.length > 0 {
			spec += fmt.Sprint(o.offset + o.length - 1)
		}
		header.Set("Range", spec)
	}
	res, err := s.transfer(ctx, http.MethodGet, "files", path, o, header, nil) //nolint:bodyclose // whoever closes what Open returns
	if err != nil {
		return nil, err
	}
	return &body{ctx, s.c, res.Body}, nil
}

// ReadFile reads a whole regular file.
func (s *Sandbox) ReadFile(ctx context.Context, path string, opts ...FileOption) ([]byte, error) {
	r, err := s.Open(ctx, path, opts...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	return io.ReadAll(r)
}

// Upload replaces a file with what r gives, atomically: other readers see the
// old or the new content. Missing parents are created.
func (s *Sandbox) Upload(ctx context.Context, path string, r io.Reader, opts ...FileOption) error {
	return s.put(ctx, "files", path, fileOpts(opts), r)
}

// WriteFile replaces a file with content; see Upload.
func (s *Sandbox) WriteFile(ctx context.Context, path string, content []byte, opts ...FileOption) error {
	return s.Upload(ctx, path, bytes.NewReader(content), opts...)
}

// DownloadTar reads a tree, or one file, as a tar. The caller closes what is returned.
func (s *Sandbox) DownloadTar(ctx context.Context, path string, opts ...FileOption) (io.ReadCloser, error) {
	res, err := s.transfer(ctx, http.MethodGet, "tar", path, fileOpts(opts), nil, nil) //nolint:bodyclose // whoever closes what DownloadTar returns
	if err != nil {
		return nil, err
	}
	return &body{ctx, s.c, res.Body}, nil
}

// UploadTar unpacks a tar below the directory path.
func (s *Sandbox) UploadTar(ctx context.Context, path string, r io.Reader, opts ...FileOption) error {
	return s.put(ctx, "tar", path, fileOpts(opts), r)
}

func (s *Sandbox) put(ctx context.Context, what, path string, o fileOptions, r io.Reader) error {
	seeker, ok := r.(io.Seeker)
	if o.opID == "" || !ok {
		return s.putOnce(ctx, what, path, o, r)
	}
	start, err := seeker.Seek(0, io.SeekCurrent)
	if err != nil {
		return s.putOnce(ctx, what, path, o, r)
	}
	return s.c.lasting(ctx, func() error {
		if _, err := seeker.Seek(start, io.SeekStart); err != nil {
			return &Error{Kind: KindInvalid, Message: err.Error(), cause: err}
		}
		return s.putOnce(ctx, what, path, o, r)
	})
}

func (s *Sandbox) putOnce(ctx context.Context, what, path string, o fileOptions, r io.Reader) error {
	res, err := s.transfer(ctx, http.MethodPut, what, path, o, nil, r)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	_, err = io.Copy(io.Discard, res.Body)
	return s.c.failure(ctx, err)
}

// transfer makes one plain HTTP call about a file of the sandbox.
func (s *Sandbox) transfer(ctx context.Context, method, what, path string, o fileOptions, header http.Header, content io.Reader) (*http.Response, error) {
	q := url.Values{"path": {path}}
	if o.user != "" {
		q.Set("user", o.user)
	}
	if bits := o.bits | modeBits(o.mode); bits != 0 {
		q.Set("mode", fmt.Sprintf("%04o", bits))
	}
	if o.opID != "" {
		q.Set("op_id", o.opID)
	}
	return s.c.plain(ctx, method, "/v1/sandboxes/"+url.PathEscape(s.id)+"/"+what+"?"+q.Encode(), header, content)
}

// plain makes a plain HTTP call and returns its answer if it is a success.
func (c *Client) plain(ctx context.Context, method, path string, header http.Header, content io.Reader) (*http.Response, error) {
	source := &sourceReader{r: content}
	var reqBody io.Reader
	if content != nil {
		reqBody = source
		if b, ok := content.(*bytes.Reader); ok {
			reqBody = b // net/http knows its length and can read it again
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, reqBody)
	if err != nil {
		return nil, &Error{Kind: KindInvalid, Message: err.Error(), cause: err}
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if content != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	res, err := c.http.Do(req)
	if err != nil {
		if source.err != nil {
			return nil, source.err // the caller's own reader failed
		}
		if ctx.Err() != nil {
			return nil, c.failure(ctx, err)
		}
		return nil, c.unreachable(err)
	}
	if res.StatusCode >= 300 {
		defer func() { _ = res.Body.Close() }()
		return nil, plainError(res)
	}
	return res, nil
}

// sourceReader remembers that the reader of a request's content failed.
type sourceReader struct {
	r   io.Reader
	err error
}

func (s *sourceReader) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil && err != io.EOF { //nolint:errorlint // io.Reader returns io.EOF itself
		s.err = err
	}
	return n, err
}

// body makes errors in the middle of an answer *Error.
type body struct {
	ctx context.Context //nolint:containedctx // an answer lives as long as its call
	c   *Client
	io.ReadCloser
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // io.Reader returns io.EOF itself
		if b.ctx.Err() != nil {
			return n, b.c.failure(b.ctx, err)
		}
		return n, &Error{Kind: KindCapacity, Message: "the transfer broke off: " + err.Error(), Hint: "try again", cause: err}
	}
	return n, err
}

// Stat describes a file; a final symlink itself.
func (s *Sandbox) Stat(ctx context.Context, path string, opts ...FileOption) (*harenav1.FileInfo, error) {
	return s.stat(ctx, path, false, opts)
}

// StatFollow describes what a final symlink points at.
func (s *Sandbox) StatFollow(ctx context.Context, path string, opts ...FileOption) (*harenav1.FileInfo, error) {
	return s.stat(ctx, path, true, opts)
}

func (s *Sandbox) stat(ctx context.Context, path string, follow bool, opts []FileOption) (*harenav1.FileInfo, error) {
	req := &harenav1.StatRequest{SandboxId: s.id, User: fileOpts(opts).user, Follow: follow}
	req.Path, req.PathBytes = text(path)
	res, err := s.c.file.Stat(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetInfo(), nil
}

// List lists a directory, depth levels deep (1: its entries). The second result
// says whether the listing was cut at the server's limit.
func (s *Sandbox) List(ctx context.Context, path string, depth int, opts ...FileOption) ([]*harenav1.FileInfo, bool, error) {
	req := &harenav1.ListFilesRequest{SandboxId: s.id, User: fileOpts(opts).user, Depth: int32(min(depth, 1<<20)), Limit: 100_000} //nolint:gosec // bounded
	req.Path, req.PathBytes = text(path)
	res, err := s.c.file.List(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, false, err
	}
	return res.Msg.GetEntries(), res.Msg.GetTruncated(), nil
}

// Move renames a file or directory, replacing a file that is there.
func (s *Sandbox) Move(ctx context.Context, from, to string, opts ...FileOption) error {
	return s.moveWith(ctx, from, to, false, opts)
}

func (s *Sandbox) moveWith(ctx context.Context, from, to string, noReplace bool, opts []FileOption) error {
	o := fileOpts(opts)
	req := &harenav1.MoveRequest{SandboxId: s.id, User: o.user, OpId: o.opID, NoReplace: noReplace}
	req.From, req.FromBytes = text(from)
	req.To, req.ToBytes = text(to)
	_, err := s.c.file.Move(ctx, connect.NewRequest(req))
	return err
}

// RemoveFile removes a file or an empty directory.
func (s *Sandbox) RemoveFile(ctx context.Context, path string, opts ...FileOption) error {
	return s.removeWith(ctx, path, false, false, opts)
}

// RemoveAll removes what is at path with all that is in it; nothing there is no error.
func (s *Sandbox) RemoveAll(ctx context.Context, path string, opts ...FileOption) error {
	return s.removeWith(ctx, path, true, true, opts)
}

func (s *Sandbox) removeWith(ctx context.Context, path string, recursive, missingOK bool, opts []FileOption) error {
	o := fileOpts(opts)
	req := &harenav1.RemoveRequest{SandboxId: s.id, User: o.user, OpId: o.opID, Recursive: recursive, MissingOk: missingOK}
	req.Path, req.PathBytes = text(path)
	_, err := s.c.file.Remove(ctx, connect.NewRequest(req))
	return err
}

// MkdirAll makes a directory and its missing parents.
func (s *Sandbox) MkdirAll(ctx context.Context, path string, opts ...FileOption) error {
	return s.mkdirWith(ctx, path, modeBits(fileOpts(opts).mode), true, opts)
}

func (s *Sandbox) mkdirWith(ctx context.Context, path string, mode uint32, parents bool, opts []FileOption) error {
	o := fileOpts(opts)
	req := &harenav1.MakeDirRequest{SandboxId: s.id, User: o.user, OpId: o.opID, Mode: mode, Parents: parents}
	req.Path, req.PathBytes = text(path)
	_, err := s.c.file.MakeDir(ctx, connect.NewRequest(req))
	return err
}

// modeBits are the permission bits of mode with setuid, setgid and sticky, as in chmod(2).
func modeBits(mode fs.FileMode) uint32 {
	bits := uint32(mode.Perm())
	for bit, value := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if mode&bit != 0 {
			bits |= value
		}
	}
	return bits
}
