package memory

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/internal/edge/backend"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Node is what would be the kernel: it holds sandboxes and outlives the Backend objects that use it, as processes and
// cgroups outlive a server. With a directory it outlives this process too.
type Node struct {
	dir string // "" keeps everything in memory

	mu        sync.Mutex
	sandboxes map[sandbox.ID]*entry
	handler   func(sandbox.ID) http.Handler
	status    func(sandbox.ID, *guestv1.StatusResponse)
	listener  *pipeListener
	server    *http.Server
}

type entry struct {
	complete bool
	exited   chan struct{}
	dead     bool
	files    bool
	frozen   bool
	held     bool
	usage    backend.Usage
	conns    map[net.Conn]bool
	reason   string
}

type connKey struct{}

// NewNode makes a node. With a dir its state is kept in files there, one a sandbox, and found again. handler serves the
// supervisor of a sandbox; nil serves GuestService only.
func NewNode(dir string, handler func(sandbox.ID) http.Handler) (*Node, error) {
	n := &Node{dir: dir, sandboxes: map[sandbox.ID]*entry{}, handler: handler, listener: newPipeListener()}
	if dir != "" {
		names, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("open the node's state: %w", err)
		}
		for _, f := range names {
			content, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				return nil, fmt.Errorf("read the node's state: %w", err)
			}
			e := newEntry()
			e.complete = strings.HasPrefix(string(content), "live")
			e.files = strings.Contains(string(content), "files")
			e.frozen = strings.HasSuffix(string(content), "frozen")
			n.sandboxes[sandbox.ID(f.Name())] = e
		}
	}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	n.server = &http.Server{
		Handler:     http.HandlerFunc(n.serve),
		Protocols:   protocols,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	go func() { _ = n.server.Serve(n.listener) }()
	return n, nil
}

// Close ends the node with all its sandboxes. Files stay.
func (n *Node) Close() error { return n.server.Close() }

// Kill makes a sandbox end by itself; reason is what its supervisor says from then on, "" kills the supervisor too.
func (n *Node) Kill(id sandbox.ID, reason string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[id]
	if e == nil || e.dead {
		return
	}
	e.dead, e.reason = true, reason
	if reason == "" {
		e.drop()
	}
	close(e.exited)
}

// SetUsage sets the counters of a sandbox.
func (n *Node) SetUsage(id sandbox.ID, u backend.Usage) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.sandboxes[id]; e != nil {
		e.usage = u
	}
}

// Held reports whether the clocks of a sandbox's commands rest.
func (n *Node) Held(id sandbox.ID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[id]
	return e != nil && e.held
}

// Frozen reports whether a sandbox is frozen.
func (n *Node) Frozen(id sandbox.ID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[id]
	return e != nil && e.frozen
}

// Len returns the number of sandboxes of which anything is left.
func (n *Node) Len() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.sandboxes)
}

func newEntry() *entry {
	return &entry{exited: make(chan struct{}), conns: map[net.Conn]bool{}}
}

// content is what is kept of it in a file.
func (e *entry) content() string {
	s := "live"
	if e.files {
		s += " files"
	}
	if e.frozen {
		s += " frozen"
	}
	return s
}

func (e *entry) drop() {
	for c := range e.conns {
		_ = c.Close()
	}
	clear(e.conns)
}

func (n *Node) persist(id sandbox.ID, content string) error {
	if n.dir == "" {
		return nil
	}
	return os.WriteFile(filepath.Join(n.dir, string(id)), []byte(content), 0o600)
}

func (n *Node) forget(id sandbox.ID) error {
	if n.dir == "" {
		return nil
	}
	if err := os.Remove(filepath.Join(n.dir, string(id))); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (n *Node) serve(w http.ResponseWriter, r *http.Request) {
	c, _ := r.Context().Value(connKey{}).(*pipeConn)
	if c == nil {
		http.Error(w, "no sandbox", http.StatusInternalServerError)
		return
	}
	mux := http.NewServeMux()
	mux.Handle(n.guestHandler(c.id))
	if n.handler != nil {
		mux.Handle("/", n.handler(c.id))
	}
	mux.ServeHTTP(w, r)
}

func (n *Node) dial(id sandbox.ID) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[id]
	if e == nil || !e.complete || (e.dead && e.reason == "") {
		return nil, unix.ECONNREFUSED
	}
	client, server, err := pair()
	if err != nil {
		return nil, err
	}
	e.conns[server] = true
	if !n.listener.offer(&pipeConn{Conn: server, id: id}) {
		return nil, unix.ECONNREFUSED
	}
	return client, nil
}

// pair makes two connected UNIX sockets: net.Pipe has no buffer, which hides what back-pressure does.
func pair() (net.Conn, net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		conns[i], err = net.FileConn(f)
		_ = f.Close()
		if err != nil {
			return nil, nil, err
		}
	}
	return conns[0], conns[1], nil
}

type pipeConn struct {
	net.Conn
	id sandbox.ID
}

type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn, 1024), done: make(chan struct{})}
}

func (l *pipeListener) offer(c net.Conn) bool {
	select {
	case <-l.done:
		return false
	case l.conns <- c:
		return true
	}
}

// Accept implements net.Listener.
func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	case c := <-l.conns:
		return c, nil
	}
}

// Close implements net.Listener.
func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr implements net.Listener.
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }
