package bench

import (
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

	down, requests atomic.Int64 // bytes of answers; turns from answering to asking

	mu   sync.Mutex
	next time.Time // when what was sent so far has passed

	conns sync.WaitGroup
	open  sync.Map // net.Conn → nil
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

// moved is how many bytes came from the server since the last call, and in answer to how many requests.
func (k *link) moved() (bytes, requests int64) { return k.down.Swap(0), k.requests.Swap(0) }

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
	var done sync.WaitGroup
	done.Go(func() {
		k.forward(server, client, &asking)
		_ = server.(*net.TCPConn).CloseWrite() // the client is gone, or has said all
	})
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if n > 0 {
			asking.Store(false)
			k.down.Add(int64(n))
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
func (k *link) forward(server io.Writer, client io.Reader, asking *atomic.Bool) {
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
				k.requests.Add(1)
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
