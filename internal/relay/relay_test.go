package relay

import (
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"
	"time"
)

func protocols(h2 bool) *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	return p
}

func listen(t *testing.T, h http.Handler) *url.URL {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// TestEarlyAnswer: a refusal reaches a caller that has not sent all of its request and sends no more until it has the answer.
func TestEarlyAnswer(t *testing.T) {
	behind := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		if r.URL.Path == "/whole" {
			_, _ = io.Copy(w, r.Body)
			return
		}
		_, _ = io.ReadFull(r.Body, make([]byte, 10))
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, "refused")
	}))
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.SetURL(behind) },
		Transport:     &http.Transport{Protocols: protocols(true)},
		FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}
	front := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		Serve(proxy, w, r)
	}))
	for name, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			client := &http.Client{Transport: &http.Transport{Protocols: protocols(h2)}}
			defer client.CloseIdleConnections()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			for range 3 {
				body, send := io.Pipe()
				go func() { _, _ = send.Write(make([]byte, 100)) }()
				req, err := http.NewRequestWithContext(ctx, http.MethodPut, front.String()+"/early", body)
				if err != nil {
					t.Fatal(err)
				}
				res, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(res.Body)
				_ = res.Body.Close()
				_ = send.Close()
				if err != nil || res.StatusCode != http.StatusBadRequest || string(got) != "refused" {
					t.Fatalf("%s: %q, %v", res.Status, got, err)
				}
				// The next call is not disturbed.
				body, send = io.Pipe()
				go func() {
					_, _ = send.Write([]byte("hello"))
					_ = send.Close()
				}()
				if req, err = http.NewRequestWithContext(ctx, http.MethodPut, front.String()+"/whole", body); err != nil {
					t.Fatal(err)
				}
				if res, err = client.Do(req); err != nil {
					t.Fatal(err)
				}
				got, err = io.ReadAll(res.Body)
				_ = res.Body.Close()
				if err != nil || string(got) != "hello" {
					t.Fatalf("whole: %s %q, %v", res.Status, got, err)
				}
			}
		})
	}
}
