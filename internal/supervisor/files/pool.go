package files

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// idleFor is how long a worker is kept without work.
	idleFor = 10 * time.Second
	// maxIdle bounds the workers that are kept.
	maxIdle = 4
	// maxDying bounds the workers that were killed and have not died: the kernel
	// lets a process wait for a FUSE server inside even then.
	maxDying = 32
	// startWithin bounds the start of a worker.
	startWithin = 30 * time.Second
)

// Starter starts file workers. The worker gets req as descriptor 0, resp as 1
// and an O_PATH descriptor of the sandbox's root as 3, and runs [WorkerMain] in
// the sandbox's user and mount namespaces with the IDs given, which are those
// inside. The caller keeps and closes its copies of req and resp.
type Starter interface {
	StartFileWorker(ctx context.Context, uid, gid uint32, groups []uint32, req, resp *os.File) (*os.Process, error)
}

// identity is whom a worker runs as.
type identity struct {
	uid, gid uint32
	groups   []uint32
}

func (id identity) key() string {
	b := binary.BigEndian.AppendUint32(nil, id.uid)
	b = binary.BigEndian.AppendUint32(b, id.gid)
	for _, g := range id.groups {
		b = binary.BigEndian.AppendUint32(b, g)
	}
	return string(b)
}

// process is a worker as the service holds it.
type process struct {
	os        *os.Process
	req, resp *os.File // the service's ends
	key       string
	wide      bool // the pipes have been widened
	// expire ends it when it has been idle for long.
	expire *time.Timer
}

// pool starts workers, keeps those that are idle for a while, and ends them. An
// empty pool costs nothing: no goroutine and no timer.
type pool struct {
	starter Starter
	keep    time.Duration // how long an idle worker is kept

	mu     sync.Mutex
	idle   []*process // used last at the end
	busy   map[*process]struct{}
	dying  int
	closed bool
}

// take returns a worker for an identity, which the caller gives back or ends.
func (p *pool) take(ctx context.Context, id identity) (*process, error) {
	key := id.key()
	for {
		pr, err := p.reuse(key)
		if err != nil {
			return nil, err
		}
		if pr == nil {
			return p.start(ctx, id, key)
		}
		if pr.quiet() {
			return pr, nil
		}
		p.end(pr)
	}
}

// reuse takes an idle worker; nil when there is none.
func (p *pool) reuse(key string) (*process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errs.E(errs.Precondition, "the sandbox is being stopped")
	}
	for i := len(p.idle) - 1; i >= 0; i-- {
		if pr := p.idle[i]; pr.key == key {
			p.idle = append(p.idle[:i], p.idle[i+1:]...)
			pr.expire.Stop()
			p.busy[pr] = struct{}{}
			return pr, nil
		}
	}
	if p.dying >= maxDying {
		return nil, errs.E(errs.Precondition, "%d earlier file operations hang in the sandbox and cannot be ended", p.dying).
			WithHint("end what serves file systems (FUSE) inside, or stop the sandbox")
	}
	return nil, nil
}

func (p *pool) start(ctx context.Context, id identity, key string) (*process, error) {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	workerReq, req, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	defer workerReq.Close()
	resp, workerResp, err := os.Pipe()
	if err != nil {
		req.Close()
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	defer workerResp.Close()
	osp, err := p.starter.StartFileWorker(ctx, id.uid, id.gid, id.groups, workerReq, workerResp)
	if err != nil {
		req.Close()
		resp.Close()
		return nil, fmt.Errorf("start file worker: %w", err)
	}
	pr := &process{os: osp, req: req, resp: resp, key: key}
	p.mu.Lock()
	closed := p.closed
	p.busy[pr] = struct{}{}
	p.mu.Unlock()
	if closed {
		p.end(pr)
		return nil, errs.E(errs.Precondition, "the sandbox is being stopped")
	}
	return pr, nil
}

// quiet reports whether a worker is there and has said nothing that was not read.
func (pr *process) quiet() bool {
	conn, err := pr.resp.SyscallConn()
	if err != nil {
		return false
	}
	silent := false
	err = conn.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		silent = err == nil && n == 0
	})
	return err == nil && silent
}

// give puts a worker back that waits for its next request.
func (p *pool) give(pr *process) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		p.end(pr)
		return
	}
	delete(p.busy, pr)
	p.idle = append(p.idle, pr)
	var oldest *process
	if len(p.idle) > maxIdle {
		oldest = p.idle[0]
		p.idle = append(p.idle[:0], p.idle[1:]...)
		oldest.expire.Stop()
	}
	pr.expire = time.AfterFunc(p.keep, func() {
		if p.forget(pr) {
			p.end(pr)
		}
	})
	p.mu.Unlock()
	if oldest != nil {
		p.end(oldest)
	}
}

// forget takes a worker off the idle ones; false when somebody else has.
func (p *pool) forget(pr *process) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.idle {
		if other == pr {
			p.idle = append(p.idle[:i], p.idle[i+1:]...)
			return true
		}
	}
	return false
}

// end kills a worker, busy or not, and does not wait for its death.
func (p *pool) end(pr *process) {
	p.mu.Lock()
	delete(p.busy, pr)
	p.dying++
	p.mu.Unlock()
	// An error means that it is dead already.
	_ = pr.os.Kill()
	pr.req.Close()
	pr.resp.Close()
	go func() {
		// How it ended does not matter; that it is no child of ours is no harm either.
		_, _ = pr.os.Wait()
		p.mu.Lock()
		p.dying--
		p.mu.Unlock()
	}()
}

// close ends all workers, and those of operations that run.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	idle := p.idle
	p.idle = nil
	busy := make([]*process, 0, len(p.busy))
	for pr := range p.busy {
		busy = append(busy, pr)
	}
	p.mu.Unlock()
	for _, pr := range idle {
		pr.expire.Stop()
		p.end(pr)
	}
	for _, pr := range busy {
		// Its operation notices and ends it.
		_ = pr.os.Kill()
	}
}

// transferPipe is the size of a pipe that carries content: two frames, so that
// one side fills it while the other empties it.
const transferPipe = 512 << 10

// widen gives the pipes room for transfers. What the node does not allow (see
// /proc/sys/fs/pipe-max-size) only makes them slower.
func (pr *process) widen() {
	if pr.wide {
		return
	}
	pr.wide = true
	for _, end := range []*os.File{pr.req, pr.resp} {
		if conn, err := end.SyscallConn(); err == nil {
			_ = conn.Control(func(fd uintptr) {
				_, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, transferPipe)
			})
		}
	}
}
