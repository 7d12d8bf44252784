package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/oci"
	"github.com/harena-dev/harena/internal/storage/unpack"
)

// maxUpload bounds an archive that is kept on disk while its image is read.
const maxUpload = 64 << 30

// ImportArchive makes a layer from a tar that holds a container image. An image
// is not read in the order of the stream, so the archive, decompressed, lies in a
// nameless file on the disk of the store meanwhile. ref says which image of several; may be empty.
func (s *Store) ImportArchive(ctx context.Context, r io.Reader, format oci.Format, ref string, o ImportOptions) (*Imported, error) {
	if _, err := o.check(); err != nil {
		return nil, err
	}
	f, size, err := s.spool(ctx, r)
	if err != nil {
		return nil, s.diskError(fmt.Errorf("import %s: %w", o.Name, err))
	}
	defer f.Close()
	img, err := oci.OpenArchive(ctx, f, size, format, ref)
	if err != nil {
		return nil, fmt.Errorf("import %s: %w", o.Name, err)
	}
	defer img.Close()
	return s.importImage(ctx, img, o)
}

// ImportRegistry makes a layer from an image that a registry has; see oci.Registry.
// How registries are reached is in DIR/registries.json.
func (s *Store) ImportRegistry(ctx context.Context, reference string, o ImportOptions) (*Imported, error) {
	if _, err := o.check(); err != nil {
		return nil, err
	}
	access, err := oci.ReadAccess(filepath.Join(filepath.Dir(s.dir), "registries.json"))
	if err != nil {
		return nil, err
	}
	report := newReporter(o.Progress)
	message := ""
	r := &oci.Registry{Access: access, Cache: s.blobs, Progress: func(m string, done, total int64) {
		if m != message {
			message = m
			report.start(PhaseFetching, m, total)
		}
		report.set(PhaseFetching, done, total)
	}}
	img, err := r.Fetch(ctx, reference)
	if err != nil {
		return nil, s.diskError(fmt.Errorf("import %s: %w", o.Name, err))
	}
	defer img.Close()
	im, err := s.importImage(ctx, img, o)
	if errs.Is(err, errs.Invalid) {
		err = errors.Join(err, img.Forget())
	}
	return im, err
}

// spool copies a stream, decompressed, into a file that is gone when it is closed.
func (s *Store) spool(ctx context.Context, r io.Reader) (_ *os.File, _ int64, err error) {
	src := &stream{ctx: ctx, r: r, read: func(int64) {}}
	in, err := unpack.Tar(src)
	if err != nil {
		return nil, 0, src.explain(err)
	}
	defer in.Close()
	f, err := os.CreateTemp(s.tmp(), "upload-*")
	if err != nil {
		return nil, 0, err
	}
	if err = os.Remove(f.Name()); err == nil {
		var n int64
		n, err = io.CopyBuffer(struct{ io.Writer }{f}, io.LimitReader(src.watch(in), maxUpload+1), make([]byte, 1<<20))
		if err == nil && n > maxUpload {
			err = errs.OverLimit(errs.Invalid, "bytes of an archive of an image", int64(maxUpload), n)
		}
		if err == nil {
			return f, n, nil
		}
		err = src.explain(err)
	}
	return nil, 0, errors.Join(err, f.Close())
}

// importImage makes one layer of an image or, of a large base, several that lie upon each other.
func (s *Store) importImage(ctx context.Context, img *oci.Image, o ImportOptions) (*Imported, error) {
	ref, err := o.check()
	if err != nil {
		return nil, err
	}
	if o.Collapse < 0 {
		return nil, errs.E(errs.Invalid, "collapse is %d, less than 0", o.Collapse).WithHint("give the bytes up to which layers are merged")
	}
	if o.Kind != Base {
		o.Collapse = -1
	}
	c := img.Config
	o.Source = img.Source
	o.Config = ImageConfig{Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels}
	report := newReporter(o.Progress)
	message := ""
	plan, err := oci.NewPlan(ctx, img, oci.Options{
		Collapse: o.Collapse, MaxBytes: s.limits.MaxBytes, MaxEntries: s.limits.MaxEntries,
		Progress: func(m string, done, total int64) {
			if m != message {
				message = m
				report.start(PhaseBuilding, m, total)
			}
			report.set(PhaseBuilding, done, total)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("import %s: %w", ref, err)
	}
	var images []*staged
	defer func() {
		for _, g := range images {
			g.remove()
		}
	}()
	for i := range plan.Groups() {
		part := o
		part.piece, part.pieces = i, plan.Groups()
		if i < plan.Groups()-1 {
			part.Config = ImageConfig{} // the topmost piece speaks for the image
		}
		g, err := s.stage(ctx, ref, part, report, func(meta, blob *os.File, w erofs.Options) (*erofs.Result, error) {
			w.OCIWhiteouts = i > 0
			return writeGroup(ctx, plan, i, meta, blob, w)
		})
		if err != nil {
			return nil, err
		}
		images = append(images, g)
	}
	return s.publishAll(ctx, ref, images, report)
}

// writeGroup turns a group of an image's layers into an EROFS image.
func writeGroup(ctx context.Context, plan *oci.Plan, i int, meta, blob *os.File, w erofs.Options) (*erofs.Result, error) {
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := plan.Write(ctx, i, pw)
		pw.CloseWithError(err) // nil becomes io.EOF
		done <- err
	}()
	res, err := erofs.FromTar(ctx, pr, meta, blob, w)
	_ = pr.Close() // the writer stops if not everything was read
	werr := <-done
	if werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		return nil, werr
	}
	return res, err
}
