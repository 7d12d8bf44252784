package files

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func BenchmarkReadSmall(b *testing.B) {
	x := newBox(b)
	x.file("f", 0, 0o644, "hello")
	for b.Loop() {
		if _, err := x.svc.ReadSmall(context.Background(), "/f", 1<<20); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkWriteSmall(b *testing.B) {
	x := newBox(b)
	for b.Loop() {
		_, err := x.svc.Write(context.Background(), connect.NewRequest(&harenav1.WriteRequest{SandboxId: boxID, Path: "/f", Content: []byte("hello")}))
		if err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkReadCold(b *testing.B) {
	x := newBox(b)
	x.file("f", 0, 0o644, "hello")
	for b.Loop() {
		if _, err := x.svc.ReadSmall(context.Background(), "/f", 1<<20); err != nil {
			b.Fatal(err)
		}
		pr := x.svc.pool.idle[0]
		pr.expire.Stop()
		x.svc.pool.forget(pr)
		x.svc.pool.end(pr)
	}
}

const streamSize = 256 << 20

// served is the service behind HTTP/2 over a UNIX socket, as the edge uses it.
func served(b *testing.B, x *box) *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	srv := &http.Server{
		Handler: x.svc.HTTP(), Protocols: &p,
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 512 << 10, MaxReceiveBufferPerConnection: 4 << 20},
	}
	sock := filepath.Join(filepath.Dir(x.root), "sock")
	l, err := net.Listen("unix", sock)
	must(b, err)
	go srv.Serve(l)
	b.Cleanup(func() { srv.Close() })
	tr := &http.Transport{Protocols: &p, HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 1 << 20}, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", sock)
	}}
	b.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func benchmarkStream(b *testing.B, client func(*box) (*http.Client, string)) {
	x := newBox(b)
	x.file("f", 0, 0o644, "")
	c, base := client(x)
	url := base + "/v1/sandboxes/" + boxID + "/files?path="
	b.Run("put", func(b *testing.B) {
		b.SetBytes(streamSize)
		for b.Loop() {
			req := x.request("PUT", url+"/f", nil, io.LimitReader(&pattern{}, streamSize))
			resp, err := c.Do(req)
			must(b, err)
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				b.Fatal(resp.Status)
			}
		}
	})
	must(b, os.Truncate(x.host("f"), streamSize))
	b.Run("get", func(b *testing.B) {
		b.SetBytes(streamSize)
		for b.Loop() {
			resp, err := c.Do(x.request("GET", url+"/f", nil, nil))
			must(b, err)
			if n, err := io.Copy(io.Discard, resp.Body); n != streamSize || err != nil {
				b.Fatal(n, err)
			}
			resp.Body.Close()
		}
	})
}

func BenchmarkStreamHTTP2(b *testing.B) {
	benchmarkStream(b, func(x *box) (*http.Client, string) { return served(b, x), "http://sandbox" })
}

func BenchmarkStreamHTTP1(b *testing.B) {
	benchmarkStream(b, func(x *box) (*http.Client, string) { return http.DefaultClient, x.http().URL })
}

// BenchmarkStream is without HTTP: the pipes and the worker alone.
func BenchmarkStream(b *testing.B) {
	x := newBox(b)
	b.Run("put", func(b *testing.B) {
		b.SetBytes(streamSize)
		for b.Loop() {
			if _, err := x.svc.put(x.ctx(), x.svc.upload(), subject{path: "/f"}, 0, io.LimitReader(&pattern{}, streamSize)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("get", func(b *testing.B) {
		b.SetBytes(streamSize)
		for b.Loop() {
			c, info, _, err := x.svc.openRead(x.ctx(), x.svc.download(), subject{path: "/f"})
			must(b, err)
			c.pr.widen()
			f := &content{c: c, size: info.Size}
			if n, err := io.Copy(io.Discard, f); n != streamSize || err != nil {
				b.Fatal(n, err)
			}
			f.close()
			c.release()
		}
	})
}
