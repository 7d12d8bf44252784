package layer

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/harena-dev/harena/internal/errs"
)

// maxWindow bounds the memory that a zstd stream can ask for: 128 MiB is what
// the zstd command needs for --ultra -22, and more than --long's default.
const maxWindow = 128 << 20

// maxTrailer bounds what may follow an archive: tar pads to a record, usually 10 KiB.
const maxTrailer = 16 << 20

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

// drain reads the padding that follows an archive, so that the check sums of
// the compression are verified and the sender is not cut off.
func drain(r io.Reader) error {
	n, err := io.Copy(io.Discard, io.LimitReader(r, maxTrailer+1))
	if err != nil {
		return err
	}
	if n > maxTrailer {
		return errs.OverLimit(errs.Invalid, "bytes after the end of the archive", maxTrailer, "more")
	}
	return nil
}

// isFormatError reports whether err means that a stream is not what it should be.
func isFormatError(err error) bool {
	for _, e := range []error{
		tar.ErrHeader, tar.ErrFieldTooLong, gzip.ErrHeader, gzip.ErrChecksum, zstd.ErrMagicMismatch, zstd.ErrCRCMismatch,
		zstd.ErrUnexpectedBlockSize, zstd.ErrBlockTooSmall, zstd.ErrReservedBlockType, zstd.ErrWindowSizeExceeded,
		zstd.ErrWindowSizeTooSmall, zstd.ErrDecoderSizeExceeded, zstd.ErrUnknownDictionary, zstd.ErrFrameSizeExceeded,
		zstd.ErrFrameSizeMismatch, zstd.ErrCompressedSizeTooBig,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	var bz bzip2.StructuralError
	var fl interface{ Error() string }
	return errors.As(err, &bz) || errors.As(err, &fl) && bytes.HasPrefix([]byte(fl.Error()), []byte("flate: corrupt"))
}
