package harena

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// ImportOptions says what to make a layer from.
type ImportOptions struct {
	Name string // name[:tag]; the tag defaults to latest
	Kind string // base (default), workspace, toolkit, vm-image
	// dir:PATH and tar:PATH (plain or gzip; "-" is standard input) are read here and
	// sent to the server, and so are images: oci:PATH[:REF], an OCI image layout
	// (directory or tar), and docker-archive:PATH[:TAG], what docker save writes.
	// debootstrap:SUITE[:PKG,PKG] and registry://REF are fetched by the server.
	Source string
	// Collapse is how many bytes of files consecutive layers of an image may have to be merged into one; 0 means 3 GB.
	Collapse int64
	// Against says which layers' content is referred to instead of stored again: names or digests, separated by commas;
	// "none" for none. Empty: what the name points at now.
	Against string
	// Progress is told how far it is; may be nil. Calls come one at a time.
	Progress func(ImportProgress)
}

// ImportProgress is one report of an import.
type ImportProgress struct {
	Phase       string // reading, fetching, building, storing, done
	Message     string
	Done, Total int64 // bytes; Total is 0 when unknown
	// Existed says, with the phase done, that the layer was there already.
	Existed bool
}

// ImportLayer makes a layer. The second result lists what was left out.
func (c *Client) ImportLayer(ctx context.Context, o ImportOptions) (*harenav1.Layer, []string, error) {
	if o.Progress == nil {
		o.Progress = func(ImportProgress) {}
	}
	scheme, path, _ := strings.Cut(o.Source, ":")
	switch scheme {
	case "dir":
		return c.importDir(ctx, o, path, nil)
	case "tar":
		return c.importTar(ctx, o, path, nil)
	case "debootstrap", "registry":
		return c.importRemote(ctx, o)
	case "oci", "docker-archive":
		return c.importImage(ctx, o, scheme, path)
	}
	return nil, nil, &Error{Kind: KindInvalid, Message: "the source " + o.Source + " has none of the known forms", Hint: "use dir:PATH, tar:PATH, oci:PATH, docker-archive:PATH, registry://REF or debootstrap:SUITE[:PKG,PKG]"}
}

// importImage sends an image. PATH[:REF] is split where the longest part is a path that exists.
func (c *Client) importImage(ctx context.Context, o ImportOptions, format, rest string) (*harenav1.Layer, []string, error) {
	path, ref := rest, ""
	for path != "-" {
		if _, err := os.Stat(path); err == nil {
			break
		}
		i := strings.LastIndexByte(path, ':')
		if i < 0 {
			return nil, nil, &Error{Kind: KindInvalid, Message: "cannot import " + o.Source + ": there is no such file", Hint: "name an image that exists on this machine: " + format + ":PATH"}
		}
		path, ref = path[:i], rest[i+1:]
	}
	more := url.Values{"format": {format}}
	if ref != "" {
		more.Set("ref", ref)
	}
	if o.Collapse != 0 {
		more.Set("collapse", strconv.FormatInt(o.Collapse, 10))
	}
	if fi, err := os.Stat(path); err != nil || !fi.IsDir() {
		return c.importTar(ctx, o, path, more)
	}
	if format != "oci" {
		return nil, nil, &Error{Kind: KindInvalid, Message: "cannot import " + o.Source + ": it is a directory", Hint: "use oci: for an image layout, dir: for a root file system"}
	}
	return c.importDir(ctx, o, path, more)
}

func (c *Client) importDir(ctx context.Context, o ImportOptions, dir string, more url.Values) (*harenav1.Layer, []string, error) {
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		return nil, nil, &Error{Kind: KindInvalid, Message: "cannot import " + o.Source + ": there is no such directory", Hint: "name a directory that exists on this machine"}
	}
	var warnings []string
	pr, pw := io.Pipe()
	written := make(chan error, 1)
	go func() {
		w := bufio.NewWriterSize(pw, 256<<10)
		err := WriteTree(ctx, w, dir, TreeOptions{
			Warn:     func(m string) { warnings = append(warnings, m) },
			Progress: func(n int64) { o.Progress(ImportProgress{Phase: "reading", Done: n}) },
		})
		if err == nil {
			err = w.Flush()
		}
		pw.CloseWithError(err) // nil becomes io.EOF
		written <- err
	}()
	layer, left, err := c.sendLayer(ctx, o, pr, more)
	_ = pr.Close() // the writer stops if the server did not read to the end
	if werr := <-written; err == nil && werr != nil {
		err = werr
	}
	return layer, append(warnings, left...), err
}

func (c *Client) importTar(ctx context.Context, o ImportOptions, path string, more url.Values) (*harenav1.Layer, []string, error) {
	f := os.Stdin
	if path != "-" {
		var err error
		if f, err = os.Open(path); err != nil {
			return nil, nil, &Error{Kind: KindInvalid, Message: "cannot import " + o.Source + ": " + err.Error(), cause: err}
		}
		defer func() { _ = f.Close() }()
	}
	total := int64(0)
	if fi, err := f.Stat(); err == nil && fi.Mode().IsRegular() {
		total = fi.Size()
	}
	counted := &countingReader{r: f, each: func(n int64) { o.Progress(ImportProgress{Phase: "reading", Done: n, Total: total}) }}
	r := bufio.NewReaderSize(counted, 256<<10)
	magic, _ := r.Peek(6)
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(r)
		if err != nil {
			return nil, nil, &Error{Kind: KindInvalid, Message: "cannot import " + o.Source + ": " + err.Error(), cause: err}
		}
		return c.sendLayer(ctx, o, z, more)
	case bytes.HasPrefix(magic, []byte("\xfd7zXZ")), bytes.HasPrefix(magic, []byte("BZh")), bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return nil, nil, &Error{Kind: KindUnsupported, Message: "cannot import " + o.Source + ": it is compressed with something else than gzip", Hint: "decompress it into a pipe and import tar:-"}
	}
	return c.sendLayer(ctx, o, r, more)
}

// sendLayer sends a tar stream, with more parameters.
func (c *Client) sendLayer(ctx context.Context, o ImportOptions, r io.Reader, more url.Values) (*harenav1.Layer, []string, error) {
	q := url.Values{"name": {o.Name}, "request_id": {newID()}}
	for k, v := range map[string]string{"kind": o.Kind, "project": c.project, "against": o.Against} {
		if v != "" {
			q.Set(k, v)
		}
	}
	for k, v := range more {
		q[k] = v
	}
	res, err := c.plain(ctx, http.MethodPost, "/v1/layers?"+q.Encode(), http.Header{"Accept": {"application/json"}}, r)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return nil, nil, c.failure(ctx, err)
	}
	answer := &harenav1.ImportResponse{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, answer); err != nil {
		return nil, nil, &Error{Kind: KindInternal, Message: "the server's answer to the import is not valid: " + err.Error(), cause: err}
	}
	o.Progress(imported(answer))
	return answer.GetLayer(), answer.GetWarnings(), nil
}

// importRemote lets the server fetch the source.
func (c *Client) importRemote(ctx context.Context, o ImportOptions) (*harenav1.Layer, []string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.layer.Import(ctx, connect.NewRequest(&harenav1.ImportRequest{
		RequestId: newID(), Project: c.project, Name: o.Name, Kind: o.Kind, Source: o.Source, Collapse: o.Collapse, Against: o.Against,
	}))
	if err != nil {
		return nil, nil, c.failure(ctx, err)
	}
	var layer *harenav1.Layer
	var warnings []string
	for stream.Receive() {
		m := stream.Msg()
		warnings = append(warnings, m.GetWarnings()...)
		if m.GetLayer() != nil {
			layer = m.GetLayer()
		}
		o.Progress(imported(m))
	}
	if err := stream.Err(); err != nil {
		return nil, warnings, c.failure(ctx, err)
	}
	if layer == nil {
		return nil, warnings, &Error{Kind: KindInternal, Message: "the server ended the import without a layer"}
	}
	return layer, warnings, nil
}

func imported(m *harenav1.ImportResponse) ImportProgress {
	return ImportProgress{Phase: m.GetPhase(), Message: m.GetMessage(), Done: m.GetDoneBytes(), Total: m.GetTotalBytes(), Existed: m.GetExisted()}
}

type countingReader struct {
	r    io.Reader
	n    int64
	each func(int64)
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	c.each(c.n)
	return n, err
}

// Layers lists layers, of one kind or of all.
func (c *Client) Layers(ctx context.Context, kind string) ([]*harenav1.Layer, error) {
	return pages(func(page *harenav1.Page) ([]*harenav1.Layer, string, error) {
		res, err := c.layer.List(ctx, connect.NewRequest(&harenav1.ListLayersRequest{Project: c.project, Kind: kind, Page: page}))
		if err != nil {
			return nil, "", err
		}
		return res.Msg.GetLayers(), res.Msg.GetNextPageToken(), nil
	})
}

// Layer returns the layer with a name[:tag] or digest.
func (c *Client) Layer(ctx context.Context, name string) (*harenav1.Layer, error) {
	res, err := c.layer.Get(ctx, connect.NewRequest(&harenav1.GetLayerRequest{Project: c.project, Name: name}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetLayer(), nil
}

// TagLayer points name at the layer that source names.
func (c *Client) TagLayer(ctx context.Context, source, name string) (*harenav1.Layer, error) {
	res, err := c.layer.Tag(ctx, connect.NewRequest(&harenav1.TagRequest{Project: c.project, Source: source, Name: name}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetLayer(), nil
}

// RemoveLayer removes a name and returns the digest that it pointed at.
func (c *Client) RemoveLayer(ctx context.Context, name string) (string, error) {
	res, err := c.layer.Remove(ctx, connect.NewRequest(&harenav1.RemoveLayerRequest{Project: c.project, Name: name}))
	if err != nil {
		return "", err
	}
	return res.Msg.GetDigest(), nil
}

// VerifyLayer reads a layer back, checks every digest and returns what is wrong. Progress may be nil.
func (c *Client) VerifyLayer(ctx context.Context, name string, progress func(done, total int64)) ([]string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.layer.Verify(ctx, connect.NewRequest(&harenav1.VerifyLayerRequest{Project: c.project, Name: name}))
	if err != nil {
		return nil, c.failure(ctx, err)
	}
	var problems []string
	done := false
	for stream.Receive() {
		m := stream.Msg()
		problems = append(problems, m.GetProblems()...)
		done = done || m.GetDone()
		if progress != nil {
			progress(m.GetDoneBytes(), m.GetTotalBytes())
		}
	}
	if err := stream.Err(); err != nil {
		return problems, c.failure(ctx, err)
	}
	if !done {
		return problems, &Error{Kind: KindInternal, Message: "the server ended the verification before it was done"}
	}
	return problems, nil
}
