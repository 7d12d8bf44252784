package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/harena-dev/harena/internal/errs"
)

// partSize is the size of part i, from 0: 8 MiB at first, and larger ones later, so that 10,000 make 290 GiB.
func partSize(i int) int { return s3Part << (i / (s3Parts / 4)) }

// Put implements Store. Memory is four parts.
func (s *S3) Put(ctx context.Context, name string, r io.Reader) error {
	if err := errors.Join(CheckName(name), contextError(ctx)); err != nil {
		return err
	}
	r = &contextReader{ctx, r}
	var first bytes.Buffer
	n, err := io.CopyN(&first, r, s3Part)
	if err != nil && !errors.Is(err, io.EOF) {
		return putError(name, err)
	}
	if n < s3Part {
		return s.o.Retry.within(ctx, func() error {
			_, err := s.client.PutObject(ctx, s.o.Bucket, s.prefix+name, bytes.NewReader(first.Bytes()), n, "", hexSum(first.Bytes()),
				putOptions())
			if err != nil {
				return s.fail(ctx, "put object "+name, err)
			}
			return nil
		})
	}
	return s.putParts(ctx, name, first.Bytes(), r)
}

// putOptions let the client sign the digest of the body that it is given, over HTTP as over HTTPS. What it does by itself
// over HTTP, chunks that are signed one by one, is not understood by every server (versitygw and empty objects).
func putOptions() minio.PutObjectOptions {
	return minio.PutObjectOptions{ContentType: "application/octet-stream", DisableContentSha256: true}
}

func hexSum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// putParts uploads an object in parts, of which the first has been read.
func (s *S3) putParts(ctx context.Context, name string, first []byte, r io.Reader) error {
	key := s.prefix + name
	var id string
	err := s.o.Retry.within(ctx, func() (err error) {
		id, err = s.client.NewMultipartUpload(ctx, s.o.Bucket, key, putOptions())
		if err != nil {
			return s.fail(ctx, "begin to put object "+name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	parts, err := s.sendParts(ctx, name, id, first, r)
	if err == nil {
		err = s.complete(ctx, name, id, parts)
	}
	if err != nil {
		// Also when ctx has ended: parts cost space until they are removed.
		abort, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
		defer cancel()
		_ = s.client.AbortMultipartUpload(abort, s.o.Bucket, key, id) // else Sweep does it
	}
	return err
}

func (s *S3) complete(ctx context.Context, name, id string, parts []minio.CompletePart) error {
	for attempt := 0; ; attempt++ {
		_, err := s.client.CompleteMultipartUpload(ctx, s.o.Bucket, s.prefix+name, id, parts, minio.PutObjectOptions{})
		if err == nil {
			return nil
		}
		var r minio.ErrorResponse
		if errors.As(err, &r) && r.Code == minio.NoSuchUpload && attempt > 0 {
			return nil // done by the attempt whose answer was lost; nobody else knows the upload
		}
		err = s.fail(ctx, "complete object "+name, err)
		if !s.o.Retry.wait(ctx, attempt, err) {
			return &exhausted{err}
		}
	}
}

// sendParts uploads what r has, some parts at a time. All its goroutines have ended when it returns.
func (s *S3) sendParts(ctx context.Context, name, id string, first []byte, r io.Reader) ([]minio.CompletePart, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	type sent struct {
		number int
		part   minio.CompletePart
		buf    []byte
		err    error
	}
	results := make(chan sent)
	var parts []minio.CompletePart
	free := make([][]byte, 0, s3Parallel+1)
	flying := 0
	var failure error
	collect := func() {
		r := <-results
		flying--
		if r.err != nil && failure == nil {
			failure = r.err
			cancel(r.err)
		}
		parts[r.number] = r.part
		free = append(free, r.buf)
	}
	buf, n, last := first, len(first), false
	for i := 0; failure == nil && n > 0; i++ {
		if i == s3Parts {
			failure = errs.OverLimit(errs.Invalid, "parts of object "+name, s3Parts, "more")
			break
		}
		parts = append(parts, minio.CompletePart{})
		flying++
		go func(buf []byte, n int) {
			p, err := s.sendPart(ctx, name, id, i+1, buf[:n])
			results <- sent{i, p, buf, err}
		}(buf, n)
		for flying >= s3Parallel {
			collect()
		}
		if last || failure != nil {
			break
		}
		if k := len(free); k > 0 && cap(free[k-1]) >= partSize(i+1) {
			buf, free = free[k-1][:partSize(i+1)], free[:k-1]
		} else {
			buf = make([]byte, partSize(i+1))
		}
		var err error
		n, err = io.ReadFull(r, buf)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			last = true
		case err != nil:
			failure = putError(name, err)
			cancel(failure)
		}
	}
	for flying > 0 {
		collect()
	}
	return parts, failure
}

func (s *S3) sendPart(ctx context.Context, name, id string, number int, b []byte) (minio.CompletePart, error) {
	var p minio.ObjectPart
	digest := hexSum(b)
	err := s.o.Retry.within(ctx, func() (err error) {
		p, err = s.client.PutObjectPart(ctx, s.o.Bucket, s.prefix+name, id, number, bytes.NewReader(b), int64(len(b)),
			minio.PutObjectPartOptions{Sha256Hex: digest, DisableContentSha256: true})
		if err != nil {
			return s.fail(ctx, "put a part of object "+name, err)
		}
		return nil
	})
	return minio.CompletePart{PartNumber: number, ETag: p.ETag}, err
}

// Sweep implements Sweeper: it aborts uploads.
func (s *S3) Sweep(ctx context.Context, before time.Time) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n := 0
	for u := range s.client.ListIncompleteUploads(ctx, s.o.Bucket, s.prefix, true) {
		if u.Err != nil {
			return n, s.fail(ctx, "list unfinished uploads", u.Err)
		}
		if !strings.HasPrefix(u.Key, s.prefix) || !u.Initiated.Before(before) {
			continue
		}
		err := s.client.AbortMultipartUpload(ctx, s.o.Bucket, u.Key, u.UploadID)
		if err != nil && !absent(err) {
			return n, s.fail(ctx, "abort an unfinished upload", err)
		}
		n++
	}
	return n, nil
}
