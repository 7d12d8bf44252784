package files

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func (b *box) do(req *http.Request) (*http.Response, string) {
	b.t.Helper()
	resp, err := http.DefaultClient.Do(req)
	must(b.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(b.t, err)
	return resp, string(body)
}

func TestHTTPGet(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "0123456789")
	b.file("empty", 0, 0o644, "")
	url := b.http().URL + "/v1/sandboxes/" + boxID + "/files?path=/"
	for _, c := range []struct {
		method, name, rang string
		status             int
		body, contentRange string
	}{
		{"GET", "f", "", 200, "0123456789", ""},
		{"HEAD", "f", "", 200, "", ""},
		{"GET", "f", "bytes=2-4", 206, "234", "bytes 2-4/10"},
		{"GET", "f", "bytes=7-", 206, "789", "bytes 7-9/10"},
		{"GET", "f", "bytes=-3", 206, "789", "bytes 7-9/10"},
		{"GET", "f", "bytes=0-0", 206, "0", "bytes 0-0/10"},
		{"GET", "f", "bytes=5-500", 206, "56789", "bytes 5-9/10"},
		{"GET", "f", "bytes=-500", 206, "0123456789", "bytes 0-9/10"},
		{"HEAD", "f", "bytes=2-4", 206, "", "bytes 2-4/10"},
		{"GET", "f", "bytes=10-", 416, "json", "bytes */10"},
		{"GET", "f", "bytes=5-2", 416, "json", ""},
		{"GET", "f", "lines=1-2", 416, "json", ""},
		{"GET", "empty", "", 200, "", ""},
		{"GET", "missing", "", 404, "json", ""},
		{"GET", "etc", "", 400, "json", ""},
	} {
		req := b.request(c.method, url+c.name, nil, nil)
		if c.rang != "" {
			req.Header.Set("Range", c.rang)
		}
		resp, body := b.do(req)
		where := fmt.Sprintf("%s %s %q", c.method, c.name, c.rang)
		if resp.StatusCode != c.status || resp.Header.Get("Content-Range") != c.contentRange {
			t.Errorf("%s: %s, range %q", where, resp.Status, resp.Header.Get("Content-Range"))
		}
		if c.body == "json" {
			wantJSONError(t, where, resp, body)
			continue
		}
		if body != c.body {
			t.Errorf("%s: body %q", where, body)
		}
		if resp.Header.Get("Accept-Ranges") != "bytes" || resp.Header.Get("Etag") == "" || resp.Header.Get("Last-Modified") == "" || resp.Header.Get("Content-Type") != "application/octet-stream" {
			t.Errorf("%s: headers %v", where, resp.Header)
		}
		if c.method == "HEAD" && resp.ContentLength <= 0 {
			t.Errorf("%s: length %d", where, resp.ContentLength)
		}
	}
	if b.starter.starts != 1 {
		t.Errorf("%d workers were started", b.starter.starts)
	}
	// Several ranges, and conditions.
	req := b.request("GET", url+"f", nil, nil)
	req.Header.Set("Range", "bytes=0-1,8-9")
	resp, body := b.do(req)
	if resp.StatusCode != http.StatusPartialContent || !strings.Contains(body, "01") || !strings.Contains(body, "89") || strings.Contains(body, "5") && strings.Contains(body, "012") {
		t.Errorf("two ranges: %s %q", resp.Status, body)
	}
	resp, _ = b.do(b.request("HEAD", url+"f", nil, nil))
	tag := resp.Header.Get("Etag")
	req = b.request("GET", url+"f", http.Header{"If-None-Match": {tag}}, nil)
	if resp, _ = b.do(req); resp.StatusCode != http.StatusNotModified {
		t.Errorf("unchanged: %s", resp.Status)
	}
	b.file("f", 0, 0o644, "changed789")
	req = b.request("GET", url+"f", http.Header{"If-Range": {tag}, "Range": {"bytes=1-2"}}, nil)
	if resp, body = b.do(req); resp.StatusCode != http.StatusOK || body != "changed789" {
		t.Errorf("changed: %s %q", resp.Status, body)
	}
	req = b.request("GET", url+"f", http.Header{"If-Match": {tag}}, nil)
	if resp, body = b.do(req); resp.StatusCode != http.StatusPreconditionFailed {
		t.Errorf("changed: %s %q", resp.Status, body)
	}
	wantJSONError(t, "If-Match", resp, body)
}

func wantJSONError(t *testing.T, where string, resp *http.Response, body string) {
	t.Helper()
	var e struct {
		Code, Message string
		Details       []struct{ Type string }
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Code == "" || e.Message == "" || len(e.Details) != 1 || e.Details[0].Type != "harena.v1.ErrorDetail" {
		t.Errorf("%s: %v: body %q", where, err, body)
	}
	if resp.Header.Get("Content-Type") != "application/json" {
		t.Errorf("%s: content type %q", where, resp.Header.Get("Content-Type"))
	}
}

func TestHTTPPut(t *testing.T) {
	b := newBox(t)
	base := b.http().URL + "/v1/sandboxes/" + boxID + "/files?user=user&path="
	name := "d/we ird\n\xff%&=+"
	resp, body := b.do(b.request("PUT", base+url.QueryEscape(name)+"&mode=0600", nil, "hello"))
	if resp.StatusCode != http.StatusOK || !strings.Contains(body, `"mode":384`) && !strings.Contains(body, `"mode": 384`) {
		t.Errorf("put: %s %s", resp.Status, body)
	}
	if got := b.content("home/user/" + name); got != "hello" {
		t.Errorf("content %q", got)
	}
	if resp, body = b.do(b.request("GET", base+url.QueryEscape(name), nil, nil)); body != "hello" {
		t.Errorf("get: %s %q", resp.Status, body)
	}
	for query, status := range map[string]int{
		"x&mode=9":    400,
		"x&mode=-1":   400,
		"":            400,
		"/etc/passwd": 403,
		"/etc/":       400,
		"a%00b":       400,
	} {
		resp, body := b.do(b.request("PUT", base+query, nil, "x"))
		if resp.StatusCode != status {
			t.Errorf("%q: %s", query, resp.Status)
		}
		wantJSONError(t, query, resp, body)
	}
	for _, c := range []struct {
		method, path string
		status       int
	}{{"POST", "files?path=/x", 405}, {"DELETE", "tar?path=/x", 405}, {"HEAD", "tar?path=/x", 405}} {
		resp, _ := b.do(b.request(c.method, b.http().URL+"/v1/sandboxes/"+boxID+"/"+c.path, nil, nil))
		if resp.StatusCode != c.status || resp.Header.Get("Allow") == "" {
			t.Errorf("%s %s: %s", c.method, c.path, resp.Status)
		}
	}
	resp, body = b.do(b.request("GET", b.http().URL+"/v1/sandboxes/other/files?path=/x", nil, nil))
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("another sandbox: %s %s", resp.Status, body)
	}
	b.noTemps()
}

func TestAbortedUploadLeavesTheOldFile(t *testing.T) {
	for name, mount := range map[string][]func(string){
		"without a name":  nil,
		"with temp names": {func(string) {}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			b.file("f", 0, 0o644, "old")
			if mount != nil {
				b.makeNamedTemps()
			}
			addr := strings.TrimPrefix(b.http().URL, "http://")
			conn, err := net.Dial("tcp", addr)
			must(t, err)
			fmt.Fprintf(conn, "PUT /v1/sandboxes/%s/files?path=/f HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n", boxID)
			_, err = conn.Write(make([]byte, 4<<20))
			must(t, err)
			waitFor(t, func() bool { return len(b.svc.transfers) == 1 })
			conn.Close()
			waitFor(t, func() bool { return len(b.svc.transfers) == 0 })
			b.noTemps()
			if b.content("f") != "old" {
				t.Error("the old file was touched")
			}
			// A chunked one that ends without its last chunk.
			conn, err = net.Dial("tcp", addr)
			must(t, err)
			fmt.Fprintf(conn, "PUT /v1/sandboxes/%s/files?path=/f HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nnew\r\n", boxID)
			must(t, conn.(*net.TCPConn).CloseWrite())
			if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil && resp.StatusCode == http.StatusOK {
				t.Error("half an upload was accepted")
			}
			conn.Close()
			if b.content("f") != "old" {
				t.Error("the old file was touched")
			}
			waitFor(t, func() bool { return len(b.svc.transfers) == 0 })
			b.noTemps()
		})
	}
}

// makeNamedTemps puts the root on a file system without O_TMPFILE.
func (b *box) makeNamedTemps() {
	b.t.Helper()
	// ramfs has none.
	dir := b.root
	must(b.t, unix.Mount("ramfs", dir, "ramfs", 0, "mode=755"))
	b.t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	must(b.t, os.Chown(dir, idBase, idBase))
	b.starter.root.Close()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(b.t, err)
	b.starter.root = os.NewFile(uintptr(fd), dir)
	b.file("f", 0, 0o644, "old")
}

// TestLargeStream sends 512 MiB there and back, and 2 GiB of a hole back, and
// watches the memory of both processes.
func TestLargeStream(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	b := newBox(t, mountTmpfs(t, "mode=755,size=1g"))
	size := int64(512 << 20)
	base := b.http().URL + "/v1/sandboxes/" + boxID + "/files?path="
	want := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	body := io.TeeReader(io.LimitReader(&pattern{}, size), want)
	req := b.request("PUT", base+"/big", nil, body)
	req.ContentLength = size
	resp, text := b.do(req)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s", resp.Status, text)
	}
	resp, err := http.DefaultClient.Do(b.request("GET", base+"/big", nil, nil))
	must(t, err)
	got := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	n, err := io.Copy(got, resp.Body)
	must(t, err)
	resp.Body.Close()
	if n != size || resp.ContentLength != size || got.Sum32() != want.Sum32() {
		t.Errorf("%d bytes came back, or others", n)
	}
	size = 2 << 30
	must(t, os.Truncate(b.host("big"), 0))
	must(t, os.Truncate(b.host("big"), size))
	resp, err = http.DefaultClient.Do(b.request("GET", base+"/big", nil, nil))
	must(t, err)
	n, err = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	if n != size || err != nil {
		t.Errorf("%d bytes of the hole, %v", n, err)
	}
	// 2.5 GiB went through; the race detector alone makes a test process several times as large as the program.
	for _, pid := range []int{os.Getpid(), b.starter.last().Pid} {
		if peak := peakRSS(t, pid); peak > 256<<20 {
			t.Errorf("process %d used %d MiB", pid, peak>>20)
		}
	}
}

// pattern is content that differs from frame to frame.
type pattern struct{ n byte }

func (p *pattern) Read(b []byte) (int, error) {
	for i := 0; i < len(b); i += 64 {
		p.n++
		b[i] = p.n
	}
	return len(b), nil
}

func peakRSS(t *testing.T, pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		var kb int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kb); n == 1 {
			return kb << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

func TestFileThatShrinksEndsTheDownload(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "")
	must(t, os.Truncate(b.host("f"), 64<<20))
	resp, err := http.DefaultClient.Do(b.request("GET", b.http().URL+"/v1/sandboxes/"+boxID+"/files?path=/f", nil, nil))
	must(t, err)
	defer resp.Body.Close()
	_, err = io.ReadFull(resp.Body, make([]byte, 1<<20))
	must(t, err)
	must(t, os.Truncate(b.host("f"), 1<<20))
	if n, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Errorf("the client took %d bytes for all", n)
	}
}

func TestClientThatLeavesFreesTheWorker(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "")
	must(t, os.Truncate(b.host("f"), 1<<30))
	for _, what := range []string{"files", "tar"} {
		resp, err := http.DefaultClient.Do(b.request("GET", b.http().URL+"/v1/sandboxes/"+boxID+"/"+what+"?path=/f", nil, nil))
		must(t, err)
		io.ReadFull(resp.Body, make([]byte, 1<<20))
		resp.Body.Close()
		waitFor(t, func() bool { return len(b.svc.transfers) == 0 })
	}
	time.Sleep(10 * time.Millisecond)
	if _, err := b.read("", "/etc/../f"); err == nil {
		t.Error("a read of 1 GiB succeeded")
	}
}
