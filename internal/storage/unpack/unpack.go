// Package unpack recognises how a stream is compressed and decompresses it.
package unpack

import (
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

// Tar returns what a tar stream holds: plain, or compressed with gzip, zstd or
// bzip2. It goes by the first bytes, never by what somebody says of the stream.
func Tar(r io.Reader) (io.ReadCloser, error) {
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
