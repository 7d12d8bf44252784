// Package relay passes HTTP calls on so that an answer that comes before the request was read ends both at once.
package relay

import (
	"io"
	"net/http"
	"net/http/httputil"
	"sync/atomic"
	"time"
)

// Serve is p.ServeHTTP for calls whose answer may come early, such as a refused upload. By itself a ReverseProxy then waits
// with the end of the answer until the caller has sent more of its request, which a caller that waits for the end of the answer
// never does: its transport closes the answer's body, which waits for a read of the request's body that nobody interrupts.
// p must have no ModifyResponse.
func Serve(p *httputil.ReverseProxy, w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody {
		p.ServeHTTP(w, r)
		return
	}
	in := &request{ReadCloser: r.Body, major: r.ProtoMajor, writer: w}
	early := *p
	early.ModifyResponse = func(res *http.Response) error {
		if res.StatusCode != http.StatusSwitchingProtocols {
			res.Body = &answer{res.Body, in}
		}
		return nil
	}
	r = r.WithContext(r.Context())
	r.Body = in
	early.ServeHTTP(w, r)
}

// request is the body of a call that comes in.
type request struct {
	io.ReadCloser
	major  int
	writer http.ResponseWriter
	ended  atomic.Bool
}

// Read implements io.Reader.
func (b *request) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.ended.Store(true)
	}
	return n, err
}

// abandon makes a Read that waits return.
func (b *request) abandon() {
	switch {
	case b.ended.Load():
	case b.major >= 2:
		_ = b.Close()
	default:
		// Close would wait for the Read. The connection is of no further use: what is still on its way belongs to this request.
		_ = http.NewResponseController(b.writer).SetReadDeadline(time.Unix(1, 0))
	}
}

// answer is the body of the answer that goes back.
type answer struct {
	io.ReadCloser
	in *request
}

// Close implements io.Closer.
func (b *answer) Close() error {
	b.in.abandon()
	return b.ReadCloser.Close()
}
