package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	parallel = 3 // blobs fetched at once
	connects = 3 // attempts to connect
	attempts = 6 // without a byte of progress in between
	stall    = 60 * time.Second
	slowest  = 64 << 10 // bytes that are to come in that time
	maxImage = 64 << 30 // bytes of layers as stored
)

// Registry fetches images.
type Registry struct {
	Access *Access
	Cache  *Cache
	// Progress, if set, is told of the bytes fetched; calls come one at a time.
	Progress func(message string, done, total int64)
	// Pause waits before another attempt; nil means with growing delays.
	Pause func(ctx context.Context, failures int) error
}

// Fetch gets the image for this machine that a reference names, such as
// registry.example:5000/team/image:tag or debian@sha256:…; blobs that the cache has
// are not fetched again. Kinds: denied (credentials), not-found, unsupported (platform),
// precondition (not reachable), invalid (the reference, or what came).
func (r *Registry) Fetch(ctx context.Context, reference string) (*Image, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return nil, errs.E(errs.Invalid, "%.200q is not a reference of an image", reference).WithHint("use registry://HOST[:PORT]/REPOSITORY[:TAG], or @sha256:… instead of a tag")
	}
	f := &fetcher{Registry: r}
	if f.endpoints, err = r.Access.endpoints(ref.Context()); err != nil {
		return nil, err
	}
	if f.Progress == nil {
		f.report = func(string, int64, int64) {}
	} else {
		f.report = f.Progress
	}
	f.report("resolving "+ref.Name(), 0, 0)
	digest, m, err := f.resolve(ctx, ref.Identifier())
	if err != nil {
		return nil, err
	}
	img, err := f.image(ctx, m)
	if err != nil {
		return nil, err
	}
	img.Source = "registry://" + ref.Context().Name() + "@" + digest.String()
	return img, r.Cache.Trim()
}

type fetcher struct {
	*Registry
	endpoints []*endpoint
	report    func(message string, done, total int64)

	connecting sync.Mutex

	mu          sync.Mutex
	message     string
	done, total int64
}

// each tries the endpoints in turn until one succeeds. The last error counts: the registry's own.
func (f *fetcher) each(ctx context.Context, try func(e *endpoint) error) error {
	var err error
	for _, e := range f.endpoints {
		err = f.connect(ctx, e)
		if err == nil {
			err = try(e)
		}
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
	return err
}

func (f *fetcher) connect(ctx context.Context, e *endpoint) error {
	f.connecting.Lock()
	defer f.connecting.Unlock()
	return f.retry(ctx, connects, func() (bool, error) { return false, e.connect(ctx) })
}

// resolve gets the manifest of the image that a tag or digest means on this machine.
func (f *fetcher) resolve(ctx context.Context, id string) (v1.Hash, *v1.Manifest, error) {
	for range maxIndexDepth {
		b, digest, err := f.manifest(ctx, id)
		if err != nil {
			return digest, nil, err
		}
		doc, err := parseManifest(b)
		if err != nil {
			return digest, nil, err
		}
		if doc.image != nil {
			return digest, doc.image, nil
		}
		d, err := choose(doc.index)
		if err != nil {
			return digest, nil, err
		}
		id = d.Digest.String()
	}
	return v1.Hash{}, nil, errs.OverLimit(errs.Invalid, "indexes inside indexes", maxIndexDepth, maxIndexDepth+1)
}

func (f *fetcher) manifest(ctx context.Context, id string) ([]byte, v1.Hash, error) {
	accept := []string{string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1), string(types.DockerManifestSchema2)}
	var b []byte
	err := f.each(ctx, func(e *endpoint) error {
		return f.retry(ctx, attempts, func() (bool, error) {
			ctx, cancel := e.soon(ctx)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.base+"/manifests/"+id, nil)
			if err != nil {
				return false, err
			}
			req.Header.Set("Accept", strings.Join(accept, ", "))
			res, err := e.client.Do(req)
			if err != nil {
				return false, e.explain(ctx, err)
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusOK {
				return false, e.status(res.StatusCode)
			}
			b, err = io.ReadAll(io.LimitReader(res.Body, maxManifest+1))
			if err != nil {
				return false, e.explain(ctx, err)
			}
			if hex, pinned := strings.CutPrefix(id, "sha256:"); pinned {
				return false, checkDigest(b, hex)
			}
			return false, nil
		})
	})
	sum := sha256.Sum256(b)
	return b, v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}, err
}

// retry tries again what may go better next time: other failures than those that
// the registry decided. try reports whether it got on; that resets the count.
func (f *fetcher) retry(ctx context.Context, most int, try func() (progress bool, err error)) error {
	for failures := 0; ; {
		progress, err := try()
		if err == nil || ctx.Err() != nil {
			return err
		}
		if progress {
			failures = 0
		}
		failures++
		if k := errs.KindOf(err); failures >= most || k != errs.Precondition && k != errs.Capacity {
			return err
		}
		pause := f.Pause
		if pause == nil {
			pause = wait
		}
		if perr := pause(ctx, failures); perr != nil {
			return perr
		}
	}
}

func wait(ctx context.Context, failures int) error {
	t := time.NewTimer(200 * time.Millisecond << (failures - 1))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// image fetches config and layers.
func (f *fetcher) image(ctx context.Context, m *v1.Manifest) (_ *Image, err error) {
	if m.Config.Size > maxConfig {
		return nil, errs.OverLimit(errs.Invalid, "bytes of an image config", maxConfig, m.Config.Size)
	}
	f.total = m.Config.Size
	for _, d := range m.Layers {
		if f.total += d.Size; f.total > maxImage || f.total < 0 {
			return nil, errs.OverLimit(errs.Invalid, "bytes of the layers of an image", int64(maxImage), f.total)
		}
	}
	c, err := f.blob(ctx, m.Config, "config")
	if err != nil {
		return nil, err
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	if err != nil {
		return nil, err
	}
	img := &Image{}
	var ids []v1.Hash
	// Before the layers come: they are large, and the platform may be wrong.
	if img.Config, ids, err = parseConfig(b, len(m.Layers)); err != nil {
		return nil, err
	}
	img.forget = func() error {
		var failures []error
		for _, d := range m.Layers {
			failures = append(failures, f.Cache.forget(d.Digest.Hex))
		}
		return errors.Join(failures...)
	}
	files := make([]*os.File, len(m.Layers))
	img.close = func() error {
		var failures []error
		for _, f := range files {
			if f != nil {
				failures = append(failures, f.Close())
			}
		}
		return errors.Join(failures...)
	}
	if err := f.layers(ctx, m.Layers, files); err != nil {
		return nil, errors.Join(err, img.Close())
	}
	for i, d := range m.Layers {
		img.Layers = append(img.Layers, Layer{
			Digest: d.Digest.String(), DiffID: ids[i].String(), Size: d.Size, Open: reopen(files[i], d.Size),
		})
	}
	return img, nil
}

// layers fetches several blobs at once. The first failure ends the others, whose parts stay.
func (f *fetcher) layers(ctx context.Context, ds []v1.Descriptor, files []*os.File) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(parallel, len(ds)) {
		wg.Go(func() {
			for i := range next {
				file, err := f.blob(ctx, ds[i], fmt.Sprintf("layer %d of %d", i+1, len(ds)))
				if err != nil {
					cancel(err)
				}
				files[i] = file
			}
		})
	}
	for i := range ds {
		if ctx.Err() != nil {
			break
		}
		next <- i
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// begin reports that a blob is worked on; the message stays until the next one begins.
func (f *fetcher) begin(what string, bytes int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.message = fmt.Sprintf("%s, %d bytes", what, bytes)
	f.report(f.message, f.done, f.total)
}

// advance reports n bytes more, or less when a blob begins again.
func (f *fetcher) advance(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.done += n
	f.report(f.message, f.done, f.total)
}

// blob returns a blob as a file of the cache, checked when it was fetched.
func (f *fetcher) blob(ctx context.Context, d v1.Descriptor, what string) (*os.File, error) {
	id := d.Digest.Hex
	defer f.Cache.lock(id)()
	file, err := f.Cache.open(id, d.Size)
	if err == nil {
		f.begin(what+" (cached)", d.Size)
		f.advance(d.Size)
		return file, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	part, err := f.Cache.part(id)
	if err != nil {
		return nil, err
	}
	f.begin(what, d.Size)
	p := &partBlob{f: f, d: d, file: part}
	err = p.begin(ctx)
	if err == nil {
		err = f.each(ctx, func(e *endpoint) error { return p.fetch(ctx, e) })
	}
	if cerr := part.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = f.Cache.keep(id)
	}
	if err != nil {
		return nil, err
	}
	return f.Cache.open(id, d.Size)
}

// partBlob is a blob that arrives.
type partBlob struct {
	f    *fetcher
	d    v1.Descriptor
	file *os.File
	n    int64 // bytes that are there
	most int64 // that there were when it last got on
	sum  hash.Hash
}

// begin takes over what an earlier fetch left.
func (p *partBlob) begin(ctx context.Context) error {
	p.sum = sha256.New()
	n, err := io.Copy(p.sum, &countReader{ctx: ctx, r: io.LimitReader(p.file, p.d.Size+1)})
	if err != nil {
		return err
	}
	p.n, p.most = n, n
	p.f.advance(n)
	if n > p.d.Size {
		return p.restart()
	}
	return nil
}

func (p *partBlob) restart() error {
	p.f.advance(-p.n)
	p.n = 0
	p.sum.Reset()
	if _, err := p.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return p.file.Truncate(0)
}

// fetch gets the rest from an endpoint.
func (p *partBlob) fetch(ctx context.Context, e *endpoint) error {
	resumed := p.n > 0
	err := p.f.retry(ctx, attempts, func() (bool, error) {
		if p.n < p.d.Size {
			err := p.get(ctx, e)
			// Farther than ever: who begins again each time, or sends next to nothing, does not get on.
			progress := p.n >= p.most+slowest
			if progress {
				p.most = p.n
			}
			if err != nil {
				return progress, err
			}
		}
		got := hex.EncodeToString(p.sum.Sum(nil))
		if got == p.d.Digest.Hex {
			return true, nil
		}
		if err := p.restart(); err != nil {
			return false, err
		}
		err := badDigest(p.d.Digest.String(), "sha256:"+got)
		if resumed { // what was there before may be what is wrong
			resumed = false
			return false, errs.E(errs.Precondition, "%w", err)
		}
		return false, err
	})
	return err
}

// get makes one request. A body that brings next to nothing for a minute is given up.
func (p *partBlob) get(ctx context.Context, e *endpoint) error {
	rctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(2*stall, func() {
		cancel(errs.E(errs.Precondition, "registry %s sends nothing, or next to nothing, any more", e.repo.RegistryStr()).WithHint("repeat the import: it goes on where this one ended"))
	})
	defer idle.Stop()
	req, err := http.NewRequestWithContext(rctx, http.MethodGet, e.base+"/blobs/"+p.d.Digest.String(), nil)
	if err != nil {
		return err
	}
	if p.n > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", p.n, p.d.Size-1))
	}
	res, err := e.client.Do(req)
	if err != nil {
		return e.explain(rctx, err)
	}
	defer res.Body.Close()
	switch {
	case res.StatusCode == http.StatusPartialContent && p.n > 0:
		if !strings.HasPrefix(res.Header.Get("Content-Range"), "bytes "+strconv.FormatInt(p.n, 10)+"-") {
			if err := p.restart(); err != nil {
				return err
			}
			return errs.E(errs.Precondition, "registry %s sent another part of a blob than was asked for", e.repo.RegistryStr())
		}
	case res.StatusCode == http.StatusOK: // it knows no ranges
		if err := p.restart(); err != nil {
			return err
		}
	case res.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		if err := p.restart(); err != nil {
			return err
		}
		return errs.E(errs.Precondition, "registry %s cannot go on with a blob", e.repo.RegistryStr())
	default:
		return e.status(res.StatusCode)
	}
	buf := make([]byte, 256<<10)
	fresh := 0
	for p.n < p.d.Size {
		n, err := res.Body.Read(buf[:min(int64(len(buf)), p.d.Size-p.n)])
		if n > 0 {
			if fresh += n; fresh >= slowest {
				fresh = 0
				idle.Reset(stall)
			}
			if _, werr := p.file.Write(buf[:n]); werr != nil {
				return werr
			}
			p.sum.Write(buf[:n])
			p.n += int64(n)
			p.f.advance(int64(n))
		}
		if err != nil && p.n < p.d.Size {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return e.explain(rctx, err)
		}
	}
	return nil
}
