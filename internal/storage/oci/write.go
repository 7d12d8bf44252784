package oci

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// Write writes what a group has as one tar. The lowest group has no whiteouts; the
// others have them as image-spec's layer.md describes. The tar is complete when
// the error is nil.
func (p *Plan) Write(ctx context.Context, group int, w io.Writer) error {
	t := p.groups[group]
	e := &emitter{w: tar.NewWriter(w), names: make(map[entryID][]string)}
	if err := e.collect(t.root, nil); err != nil {
		return err
	}
	wanted := make(map[int32]bool)
	var total int64
	for id := range e.names {
		if !wanted[id.layer] {
			wanted[id.layer] = true
			total += p.img.Layers[id.layer].Size
		}
	}
	message := fmt.Sprintf("merging layers into image %d of %d", group+1, len(p.groups))
	var done int64
	for _, i := range slices.Sorted(maps.Keys(wanted)) {
		l := &p.img.Layers[i]
		if err := p.writeLayer(ctx, e, i, func(n int64) { p.o.Progress(message, done+n, total) }); err != nil {
			return fmt.Errorf("layer %d of %d: %w", i+1, len(p.img.Layers), err)
		}
		done += l.Size
	}
	if len(e.names) > 0 {
		// The plan came from the same bytes.
		return errs.E(errs.Internal, "%d entries of the image's layers were not found again", len(e.names))
	}
	return e.w.Close()
}

// emitter writes the entries that are wanted.
type emitter struct {
	w     *tar.Writer
	names map[entryID][]string // sorted; what was written is deleted
}

// collect notes under which names each entry is wanted, and writes whiteouts.
func (e *emitter) collect(n *node, path []string) error {
	name := strings.Join(path, "/")
	if n.src != nil {
		e.names[n.src.entryID] = append(e.names[n.src.entryID], name)
	}
	var marks []string
	if n.opaque {
		marks = append(marks, opaqueName)
	}
	for _, h := range slices.Sorted(maps.Keys(n.hides)) {
		marks = append(marks, whiteoutPrefix+h)
	}
	for _, m := range marks {
		h := &tar.Header{Name: strings.TrimPrefix(name+"/"+m, "/"), Typeflag: tar.TypeReg, Format: tar.FormatPAX}
		if err := e.w.WriteHeader(h); err != nil {
			return err
		}
	}
	if n.isDir && n.src == nil && len(path) > 0 { // also when it is empty
		h := &tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatPAX}
		if err := e.w.WriteHeader(h); err != nil {
			return err
		}
	}
	for _, c := range slices.Sorted(maps.Keys(n.names)) {
		if err := e.collect(n.names[c], append(path, c)); err != nil {
			return err
		}
	}
	return nil
}

func (p *Plan) writeLayer(ctx context.Context, e *emitter, i int32, each func(n int64)) error {
	r, err := openLayer(ctx, &p.img.Layers[i], p.o.MaxBytes+maxOverhead, nil)
	if err != nil {
		return err
	}
	defer r.Close()
	r.in.each = each
	for n := int32(0); ; n++ {
		h, err := r.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		id := entryID{i, n}
		names := e.names[id]
		if len(names) == 0 {
			continue
		}
		delete(e.names, id)
		if err := e.write(h, names, r); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
}

// write passes an entry on under its names. Only what a file system keeps of it goes along.
func (e *emitter) write(h *tar.Header, names []string, r *layerReader) error {
	out := &tar.Header{
		Typeflag: h.Typeflag, Name: names[0], Linkname: h.Linkname, Size: h.Size, Mode: h.Mode & 0o7777,
		Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime, Devmajor: h.Devmajor, Devminor: h.Devminor, Format: tar.FormatPAX,
	}
	for k, v := range h.PAXRecords {
		if strings.HasPrefix(k, "SCHILY.xattr.") || strings.HasPrefix(k, "LIBARCHIVE.xattr.") || strings.HasPrefix(k, "SCHILY.acl.") {
			if out.PAXRecords == nil {
				out.PAXRecords = make(map[string]string)
			}
			out.PAXRecords[k] = v
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		out.Name += "/" // "/" is the root
		out.Size = 0
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		out.Typeflag = tar.TypeReg
	default:
		out.Size = 0
	}
	if err := e.w.WriteHeader(out); err != nil {
		return e.explain(err)
	}
	if out.Size > 0 {
		if _, err := io.Copy(writeOnly{e.w}, readOnly{r}); err != nil {
			return err
		}
	}
	for _, name := range names[1:] {
		if err := e.w.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: names[0], Format: tar.FormatPAX}); err != nil {
			return e.explain(err)
		}
	}
	return nil
}

// explain tells headers that cannot be written, which are the image's fault, from a reader that went away.
func (e *emitter) explain(err error) error {
	if errors.Is(err, tar.ErrHeader) || strings.HasPrefix(err.Error(), "archive/tar: cannot encode header") {
		return errs.E(errs.Invalid, "its attributes make no sense: %w", err)
	}
	return err
}

// writeOnly and readOnly hide the methods by which tar.Reader and tar.Writer would seek in sparse files.
type writeOnly struct{ w io.Writer }

func (w writeOnly) Write(p []byte) (int, error) { return w.w.Write(p) }

type readOnly struct{ r *layerReader }

func (r readOnly) Read(p []byte) (int, error) {
	n, err := r.r.tar.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = r.r.explain(err)
	}
	return n, err
}
