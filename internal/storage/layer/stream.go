package layer

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"

	"github.com/harena-dev/harena/internal/errs"
)

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
