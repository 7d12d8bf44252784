package layer

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/harena-dev/harena/internal/errs"
)

// maxWindow bounds the memory that a zstd stream can ask for: 128 MiB is what
// the zstd command needs for --ultra -22, and more than --long's default.
const maxWindow = 128 << 20

// decompress recognises how a tar stream is compressed by its first bytes.
func decompress(r io.Reader) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(r, 256<<10)
	magic, err := b.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case len(magic) == 0:
		return nil, errs.E(errs.Invalid, "the archive is empty").WithHint("send a tar archive as the body")
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzip.NewReader(b)
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	case bytes.HasPrefix(magic, []byte("BZh")):
		return io.NopCloser(bzip2.NewReader(b)), nil
	case bytes.HasPrefix(magic, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return nil, errs.E(errs.Unsupported, "the archive is compressed with xz").
			WithHint("decompress it first (xz -dc FILE), or use gzip or zstd")
	case bytes.HasPrefix(magic, []byte("PK\x03\x04")):
		return nil, errs.E(errs.Invalid, "this is a zip file, not a tar archive").WithHint("unpack it and import the directory")
	}
	return io.NopCloser(b), nil
}

// stream is what a caller sends. It remembers what failed, to tell what is wrong
// with the archive from what is wrong with the connection, or here.
type stream struct {
	ctx    context.Context
	r      io.Reader
	read   func(n int64)
	source error // of r
	format error // of the decompressor
}

// Read reads what was sent.
func (s *stream) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		s.source = err
		return 0, err
	}
	n, err := s.r.Read(p)
	s.read(int64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		s.source = err
	}
	return n, err
}

// watch remembers errors of the decompressor.
func (s *stream) watch(in io.Reader) io.Reader {
	return readFunc(func(p []byte) (int, error) {
		n, err := in.Read(p)
		if err != nil && !errors.Is(err, io.EOF) {
			s.format = err
		}
		return n, err
	})
}

// explain gives an error of the import its kind.
func (s *stream) explain(err error) error {
	var known *errs.Error
	switch {
	case err == nil:
		return nil
	case s.ctx.Err() != nil:
		return fmt.Errorf("import: %w", context.Cause(s.ctx))
	case errors.Is(s.source, io.ErrUnexpectedEOF), s.source == nil && errors.Is(err, io.ErrUnexpectedEOF):
		return errs.E(errs.Invalid, "the archive ends early: %w", err).
			WithHint("send the whole tar archive; nothing was imported")
	case s.source != nil && errs.Is(s.source, errs.Internal): // the sender went away
		return errs.E(errs.Cancelled, "receive the archive: %w", s.source).WithHint("send it again; nothing was imported")
	case s.source != nil:
		return fmt.Errorf("receive the archive: %w", s.source)
	case errors.As(err, &known) && known.Kind != errs.Internal:
		return err
	case s.format != nil, errors.Is(err, gzip.ErrHeader):
		return errs.E(errs.Invalid, "the archive is damaged: %w", err).
			WithHint("check it with tar -t; nothing was imported")
	}
	return err
}
