package bench

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// link is a network of its own between a client on this machine and a server on it: every
// request takes delay longer, and all answers together get rate bytes a second.
type link struct {
	listener net.Listener
	target   string
	delay    time.Duration
	rate     float64

	// kind sorts requests by their first lines; nil: all are of one kind.
	kind func(head []byte) string
	all  atomic.Int64 // bytes of answers since the beginning

	mu   sync.Mutex
	seen traffic
	next time.Time // when what was sent so far has passed

	conns sync.WaitGroup
	open  sync.Map // net.Conn → nil
}

// traffic is what a server answered.
type traffic struct {
	bytes, requests int64            // a request is a turn from answering to asking
	kinds           map[string]int64 // bytes, by kind of the request
}

func newLink(target string, delay time.Duration, rate float64) (*link, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	k := &link{listener: l, target: target, delay: delay, rate: rate}
	k.conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			k.conns.Go(func() { k.serve(c) })
		}
	})
	return k, nil
}

func (k *link) addr() string { return k.listener.Addr().String() }

// close ends the link and all its connections.
func (k *link) close() {
	k.listener.Close()
	k.open.Range(func(c, _ any) bool {
		c.(net.Conn).Close()
		return true
	})
	k.conns.Wait()
}

// moved is what came from the server since the last call.
func (k *link) moved() traffic {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.seen
	k.seen = traffic{}
	return t
}

func (k *link) count(n int64, kind string) {
	k.all.Add(n)
	k.mu.Lock()
	defer k.mu.Unlock()
	if n == 0 {
		k.seen.requests++
	}
	if k.seen.kinds == nil {
		k.seen.kinds = map[string]int64{}
	}
	k.seen.bytes += n
	k.seen.kinds[kind] += n
}

// quiet waits until nothing has come for a while; what a node fetches in the background comes in one go.
func (k *link) quiet(ctx context.Context) error {
	const still, poll = time.Second, 50 * time.Millisecond
	deadline := time.Now().Add(time.Minute)
	last, since := k.all.Load(), time.Now()
	for time.Since(since) < still && time.Now().Before(deadline) {
		select {
		case <-time.After(poll):
		case <-ctx.Done():
			return ctx.Err()
		}
		if now := k.all.Load(); now != last {
			last, since = now, time.Now()
		}
	}
	return nil
}

// storeKind says what a request to an S3 server is for: metas names the metadata images; the index of an object is asked for
// from its end.
func storeKind(head []byte, metas map[string]bool) string {
	line, fields, _ := bytes.Cut(head, []byte("\r\n"))
	if !bytes.Contains(line, []byte("/blobs/")) {
		return "names and profiles"
	}
	_, span, ranged := bytes.Cut(bytes.ToLower(fields), []byte("range: bytes="))
	switch {
	case !bytes.HasPrefix(line, []byte("GET ")):
		return "names and profiles"
	case ranged && bytes.HasPrefix(span, []byte("-")):
		return "indexes"
	case metas[objectName(line)]:
		return "metadata images"
	default:
		return "data"
	}
}

// objectName is the last part of a request's path.
func objectName(line []byte) string {
	_, path, _ := bytes.Cut(line, []byte(" "))
	path, _, _ = bytes.Cut(path, []byte(" "))
	path, _, _ = bytes.Cut(path, []byte("?"))
	return string(path[bytes.LastIndexByte(path, '/')+1:])
}

func (k *link) serve(client net.Conn) {
	defer client.Close()
	k.open.Store(client, nil)
	defer k.open.Delete(client)
	server, err := net.Dial("tcp", k.target)
	if err != nil {
		return
	}
	defer server.Close()
	var asking atomic.Bool
	var kind atomic.Value // of what was asked last
	kind.Store("")
	var done sync.WaitGroup
	done.Go(func() {
		k.forward(server, client, &asking, &kind)
		_ = server.(*net.TCPConn).CloseWrite() // the client is gone, or has said all
	})
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if n > 0 {
			asking.Store(false)
			k.count(int64(n), kind.Load().(string))
			k.pass(n)
			if _, err := client.Write(buf[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	client.Close()
	server.Close()
	done.Wait()
}

// forward sends what the client says, each piece delay after it came.
func (k *link) forward(server io.Writer, client io.Reader, asking *atomic.Bool, kind *atomic.Value) {
	type piece struct {
		b  []byte
		at time.Time
	}
	pieces := make(chan piece, 1024)
	var sender sync.WaitGroup
	sender.Go(func() {
		failed := false
		for p := range pieces {
			if failed {
				continue
			}
			time.Sleep(time.Until(p.at))
			_, err := server.Write(p.b)
			failed = err != nil
		}
	})
	for {
		b := make([]byte, 32<<10)
		n, err := client.Read(b)
		if n > 0 {
			if asking.CompareAndSwap(false, true) {
				if k.kind != nil {
					kind.Store(k.kind(b[:n]))
				}
				k.count(0, kind.Load().(string))
			}
			pieces <- piece{b[:n], time.Now().Add(k.delay)}
		}
		if err != nil {
			break
		}
	}
	close(pieces)
	sender.Wait()
}

// pass waits for as long as n bytes take on the link.
func (k *link) pass(n int) {
	k.mu.Lock()
	now := time.Now()
	// Sleeps end late; what was lost so within 20 ms is made up for.
	if earliest := now.Add(-20 * time.Millisecond); k.next.Before(earliest) {
		k.next = earliest
	}
	k.next = k.next.Add(time.Duration(float64(n) / k.rate * float64(time.Second)))
	wait := k.next.Sub(now)
	k.mu.Unlock()
	if wait > 0 {
		time.Sleep(wait)
	}
}
