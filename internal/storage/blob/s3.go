package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// s3Part is the least size of a part of an upload, and of what is buffered to see whether it takes
	// several. S3 allows 10,000 parts, so later ones are larger: see partSize.
	s3Part     = 8 << 20
	s3Parts    = 10_000
	s3Parallel = 3
	// s3Silence is how long a server may send nothing before a connection is given up.
	s3Silence = 60 * time.Second
	// abortTimeout bounds the removal of an upload that failed.
	abortTimeout = 20 * time.Second
)

// S3Options say where a bucket is.
type S3Options struct {
	Endpoint    string // host[:port]
	Plain       bool   // HTTP
	Region      string
	Bucket      string
	Prefix      string // of all names, without a slash at its end; may be empty
	Credentials Credentials
	// Retry is for the parts of an upload, which only the store can repeat.
	Retry RetryPolicy
}

// S3 is a Store in a bucket of a server that speaks Amazon's protocol. Objects of up to
// 8 MiB are sent in one request, larger ones in parts, three at a time. Both appear
// at once and whole. A Put that fails aborts its upload; Sweep finds those whose process died.
type S3 struct {
	client *minio.Core
	o      S3Options
	prefix string // "" or with a slash at its end
}

// NewS3 returns the store in a bucket, which must exist. Nothing is asked of the server yet.
func NewS3(o S3Options) (*S3, error) {
	lookup := minio.BucketLookupPath
	if strings.HasSuffix(o.Endpoint, ".amazonaws.com") {
		lookup = minio.BucketLookupDNS
	}
	transport, err := minio.DefaultTransport(!o.Plain)
	if err != nil {
		return nil, fmt.Errorf("make a transport: %w", err)
	}
	dial := (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext
	transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &impatient{c}, nil
	}
	transport.MaxIdleConnsPerHost = 64
	// What is stored is compressed by us, and ranges are of the bytes as stored.
	transport.DisableCompression = true
	client, err := minio.NewCore(o.Endpoint, &minio.Options{
		Creds:        credentials.NewStaticV4(o.Credentials.AccessKey, o.Credentials.SecretKey, o.Credentials.SessionToken),
		Secure:       !o.Plain,
		Region:       o.Region,
		BucketLookup: lookup,
		Transport:    transport,
		MaxRetries:   1, // retries are of package blob, in one place
	})
	if err != nil {
		return nil, errs.E(errs.Invalid, "the store's endpoint %q cannot be used: %w", o.Endpoint, err)
	}
	prefix := o.Prefix
	if prefix != "" {
		prefix += "/"
	}
	return &S3{client, o, prefix}, nil
}

// impatient is a connection on which silence is an error, so that a server that
// accepts and never answers is no reason to wait for good.
type impatient struct{ net.Conn }

func (c *impatient) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(s3Silence)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c *impatient) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(s3Silence)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// fail gives an error of the client a kind.
func (s *S3) fail(ctx context.Context, what string, err error) error {
	if e := contextError(ctx); e != nil {
		return e
	}
	var e *errs.Error
	if errors.As(err, &e) {
		return err
	}
	var r minio.ErrorResponse
	if !errors.As(err, &r) {
		// The text only: how a connection ended is no fact about the object.
		return errs.E(errs.Internal, "%s: the store at %s does not answer: %v", what, s.o.Endpoint, err)
	}
	switch {
	case r.Code == minio.NoSuchBucket:
		return errs.E(errs.Precondition, "%s: the store at %s has no bucket %s", what, s.o.Endpoint, s.o.Bucket).
			WithHint("create the bucket, or correct the store's URL")
	case r.Code == "InvalidAccessKeyId", r.Code == "SignatureDoesNotMatch", strings.HasSuffix(r.Code, "UserNotFound"), r.StatusCode == http.StatusUnauthorized:
		return errs.E(errs.Unauthenticated, "%s: the store at %s does not accept the credentials: %s", what, s.o.Endpoint, r.Code).
			WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the credentials file")
	case r.StatusCode == http.StatusForbidden:
		return errs.E(errs.Denied, "%s: the store at %s does not allow it: %s", what, s.o.Endpoint, r.Code).
			WithHint("give the credentials the rights to get, put, list and delete objects of bucket %s", s.o.Bucket)
	case r.StatusCode == http.StatusTooManyRequests, r.StatusCode == http.StatusServiceUnavailable, r.StatusCode == http.StatusInsufficientStorage,
		r.Code == "SlowDown":
		return errs.E(errs.Capacity, "%s: the store at %s asks for less: %s", what, s.o.Endpoint, r.Code)
	}
	return errs.E(errs.Internal, "%s: the store at %s answers %s (%d): %s", what, s.o.Endpoint, r.Code, r.StatusCode, r.Message)
}

// absent tells a missing object from other things that servers call not found, such as buckets and users.
func absent(err error) bool {
	var r minio.ErrorResponse
	return errors.As(err, &r) && (r.Code == minio.NoSuchKey || r.Code == minio.NoSuchUpload)
}

// Get implements Store.
func (s *S3) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	if err := errors.Join(CheckName(name), checkRange(off, n), contextError(ctx)); err != nil {
		return nil, err
	}
	if n == 0 { // cannot be said in a Range header
		if _, err := s.Stat(ctx, name); err != nil {
			return nil, err
		}
		return http.NoBody, nil
	}
	var o minio.GetObjectOptions
	ranged := off != 0 || n > 0
	switch {
	case off < 0:
		o.Set("Range", fmt.Sprintf("bytes=%d", off))
	case n > 0:
		o.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	case off > 0:
		o.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	r, info, header, err := s.client.GetObject(ctx, s.o.Bucket, s.prefix+name, o)
	var answer minio.ErrorResponse
	switch {
	case err == nil:
	case absent(err):
		return nil, notFound(name)
	case errors.As(err, &answer) && answer.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return http.NoBody, nil
	default:
		return nil, s.fail(ctx, "get object "+name, err)
	}
	left := info.Size
	if ranged && header.Get("Content-Range") == "" {
		// The server took no notice of the range, which is right only where that is all.
		if from, length := span(info.Size, off, n); from != 0 || length != info.Size {
			r.Close()
			return nil, errs.E(errs.Unsupported, "the store at %s does not serve ranges", s.o.Endpoint)
		}
	}
	if n > 0 {
		left = min(left, n)
	}
	return &s3Body{s: s, ctx: ctx, name: name, r: r, left: left, version: info.ETag}, nil
}

// s3Body is a response's body that ends when all that was announced has come, and not before.
type s3Body struct {
	s       *S3
	ctx     context.Context
	name    string
	r       io.ReadCloser
	left    int64
	version string
}

func (b *s3Body) Version() string { return b.version }
func (b *s3Body) Close() error    { return b.r.Close() }

func (b *s3Body) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	switch {
	case b.left == 0:
		return n, nil
	case err != nil:
		return n, b.s.fail(b.ctx, fmt.Sprintf("get object %s, %d bytes before the end", b.name, b.left), err)
	}
	return n, nil
}

// Stat implements Store.
func (s *S3) Stat(ctx context.Context, name string) (Info, error) {
	if err := errors.Join(CheckName(name), contextError(ctx)); err != nil {
		return Info{}, err
	}
	o, err := s.client.StatObject(ctx, s.o.Bucket, s.prefix+name, minio.StatObjectOptions{})
	if absent(err) {
		return Info{}, notFound(name)
	}
	if err != nil {
		return Info{}, s.fail(ctx, "look up object "+name, err)
	}
	return Info{name, o.Size, o.LastModified}, nil
}

// List implements Store.
func (s *S3) List(ctx context.Context, prefix, after string, limit int) ([]Info, error) {
	if err := errors.Join(checkList(prefix, after, limit), contextError(ctx)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	o := minio.ListObjectsOptions{Prefix: s.prefix + prefix, Recursive: true, MaxKeys: min(limit, 1000)}
	if after != "" {
		o.StartAfter = s.prefix + after
	}
	var found []Info
	for e := range s.client.ListObjectsIter(ctx, s.o.Bucket, o) {
		if e.Err != nil {
			return nil, s.fail(ctx, "list objects", e.Err)
		}
		name, ok := strings.CutPrefix(e.Key, s.prefix)
		// Directories that some servers list, and what is not ours.
		if !ok || CheckName(name) != nil || name <= after {
			continue
		}
		found = append(found, Info{name, e.Size, e.LastModified})
		if len(found) == limit {
			break
		}
	}
	return found, nil
}

// Delete implements Store.
func (s *S3) Delete(ctx context.Context, names ...string) error {
	if err := errors.Join(checkNames(names), contextError(ctx)); err != nil || len(names) == 0 {
		return err
	}
	if len(names) == 1 {
		err := s.client.RemoveObject(ctx, s.o.Bucket, s.prefix+names[0], minio.RemoveObjectOptions{})
		if err != nil && !absent(err) {
			return s.fail(ctx, "delete object "+names[0], err)
		}
		return nil
	}
	results, err := s.client.RemoveObjectsWithIter(ctx, s.o.Bucket, func(yield func(minio.ObjectInfo) bool) {
		for _, name := range names {
			if !yield(minio.ObjectInfo{Key: s.prefix + name}) {
				return
			}
		}
	}, minio.RemoveObjectsOptions{})
	if err != nil {
		return s.fail(ctx, "delete objects", err)
	}
	var failure error
	for r := range results {
		if r.Err != nil && !absent(r.Err) && failure == nil {
			failure = s.fail(ctx, "delete object "+strings.TrimPrefix(r.ObjectName, s.prefix), r.Err)
		}
	}
	return failure
}
