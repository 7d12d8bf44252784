package files

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/users"
)

const (
	boxID   = "testedge234567abcdef"
	idBase  = 1 << 20 // first host ID of the test's sandboxes
	userUID = 1000
)

// TestMain runs the test binary as a worker when the starter below asks for it.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "files" {
		os.Exit(WorkerMain(os.Stdin, os.Stdout, os.NewFile(3, "root")))
	}
	code := m.Run()
	if guestDir != "" {
		os.RemoveAll(guestDir)
	}
	os.Exit(code)
}

// starter starts real workers: another process, in a user namespace with its own
// range of IDs and a mount namespace of its own.
type starter struct {
	root *os.File
	mu   sync.Mutex
	all  []*os.Process
	// starts counts.
	starts int
}

func (s *starter) StartFileWorker(_ context.Context, uid, gid uint32, groups []uint32, req, resp *os.File) (*os.Process, error) {
	cmd := exec.Command("/proc/self/exe", "files")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = req, resp, os.Stderr
	cmd.ExtraFiles = []*os.File{s.root}
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: idBase, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings:                mapping,
		GidMappings:                mapping,
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{Uid: uid, Gid: gid, Groups: groups},
		Pdeathsig:                  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, cmd.Process)
	s.starts++
	return cmd.Process, nil
}

func (s *starter) last() *os.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[len(s.all)-1]
}

// people is a fixed Resolver.
type people struct{}

func (people) Resolve(_ context.Context, user string) (users.User, error) {
	switch user {
	case "", "root":
		return users.User{Name: "root", Home: "/root"}, nil
	case "user":
		return users.User{Name: "user", UID: userUID, GID: userUID, Groups: []uint32{44}, Home: "/home/user"}, nil
	}
	return users.User{}, errs.E(errs.Invalid, "no such user")
}

// box is a sandbox's root directory and the service for it.
type box struct {
	t       testing.TB
	root    string
	svc     *Service
	starter *starter
}

// newBox makes a root directory with what a sandbox has; mount, if given, mounts
// something on it first.
func newBox(t testing.TB, mount ...func(root string)) *box {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make user namespaces with ranges of IDs")
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-files-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	root := filepath.Join(dir, "root")
	must(t, os.Mkdir(root, 0o755))
	for _, m := range mount {
		m(root)
	}
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Chown(root, idBase, idBase))
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	b := &box{t: t, root: root, starter: &starter{root: os.NewFile(uintptr(fd), root)}}
	b.mkdir("root", 0, 0o700)
	b.mkdir("etc", 0, 0o755)
	b.mkdir("home", 0, 0o755)
	b.mkdir("home/user", userUID, 0o755)
	b.mkdir("tmp", 0, 0o1777)
	b.svc = New(Config{SandboxID: boxID, Starter: b.starter, Users: people{}})
	t.Cleanup(func() {
		b.svc.Close()
		b.starter.root.Close()
		b.waitGone()
	})
	return b
}

// waitGone waits until no worker is left.
func (b *box) waitGone() {
	deadline := time.Now().Add(20 * time.Second)
	for {
		b.svc.pool.mu.Lock()
		left := b.svc.pool.dying + len(b.svc.pool.busy) + len(b.svc.pool.idle)
		b.svc.pool.mu.Unlock()
		if left == 0 {
			return
		}
		if time.Now().After(deadline) {
			b.t.Errorf("%d workers are left", left)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (b *box) host(path string) string { return filepath.Join(b.root, path) }

func (b *box) mkdir(path string, uid int, mode uint32) {
	b.t.Helper()
	must(b.t, os.Mkdir(b.host(path), 0o700))
	must(b.t, os.Chown(b.host(path), idBase+uid, idBase+uid))
	must(b.t, unix.Chmod(b.host(path), mode))
}

func (b *box) file(path string, uid int, mode uint32, content string) {
	b.t.Helper()
	must(b.t, os.WriteFile(b.host(path), []byte(content), 0o600))
	must(b.t, os.Chown(b.host(path), idBase+uid, idBase+uid))
	must(b.t, unix.Chmod(b.host(path), mode))
}

func (b *box) symlink(target, path string) {
	b.t.Helper()
	must(b.t, os.Symlink(target, b.host(path)))
	must(b.t, os.Lchown(b.host(path), idBase, idBase))
}

func (b *box) content(path string) string {
	b.t.Helper()
	c, err := os.ReadFile(b.host(path))
	must(b.t, err)
	return string(c)
}

// noTemps fails when an incomplete file is left anywhere.
func (b *box) noTemps() {
	b.t.Helper()
	must(b.t, filepath.Walk(b.root, func(path string, _ os.FileInfo, err error) error {
		if strings.Contains(path, tempPrefix) {
			b.t.Errorf("left behind: %s", path)
		}
		return err
	}))
}

func (b *box) read(user, path string) (string, error) {
	resp, err := b.svc.Read(b.ctx(), connect.NewRequest(&harenav1.ReadRequest{SandboxId: boxID, User: user, PathBytes: []byte(path)}))
	if err != nil {
		return "", errs.FromConnect(err)
	}
	return string(resp.Msg.Content), nil
}

func (b *box) write(user, path, content string, mode uint32) (*harenav1.FileInfo, error) {
	resp, err := b.svc.Write(b.ctx(), connect.NewRequest(&harenav1.WriteRequest{SandboxId: boxID, User: user, PathBytes: []byte(path), Content: []byte(content), Mode: mode}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return resp.Msg.Info, nil
}

func (b *box) stat(user, path string, follow bool) (*harenav1.FileInfo, error) {
	resp, err := b.svc.Stat(b.ctx(), connect.NewRequest(&harenav1.StatRequest{SandboxId: boxID, User: user, PathBytes: []byte(path), Follow: follow}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return resp.Msg.Info, nil
}

func (b *box) list(user, path string, depth, limit int32) (*harenav1.ListFilesResponse, error) {
	resp, err := b.svc.List(b.ctx(), connect.NewRequest(&harenav1.ListFilesRequest{SandboxId: boxID, User: user, PathBytes: []byte(path), Depth: depth, Limit: limit}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return resp.Msg, nil
}

func (b *box) move(user, from, to string, noReplace bool) (*harenav1.FileInfo, error) {
	resp, err := b.svc.Move(b.ctx(), connect.NewRequest(&harenav1.MoveRequest{SandboxId: boxID, User: user, FromBytes: []byte(from), ToBytes: []byte(to), NoReplace: noReplace}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return resp.Msg.Info, nil
}

func (b *box) remove(user, path string, recursive, missingOK bool) error {
	_, err := b.svc.Remove(b.ctx(), connect.NewRequest(&harenav1.RemoveRequest{SandboxId: boxID, User: user, PathBytes: []byte(path), Recursive: recursive, MissingOk: missingOK}))
	return errs.FromConnect(err)
}

func (b *box) makeDir(user, path string, mode uint32, parents bool) (*harenav1.FileInfo, error) {
	resp, err := b.svc.MakeDir(b.ctx(), connect.NewRequest(&harenav1.MakeDirRequest{SandboxId: boxID, User: user, PathBytes: []byte(path), Mode: mode, Parents: parents}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return resp.Msg.Info, nil
}

func (b *box) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

// http serves the service's plain HTTP.
func (b *box) http() *httptest.Server {
	srv := httptest.NewUnstartedServer(b.svc.HTTP())
	srv.Config.ErrorLog = nil
	srv.Start()
	b.t.Cleanup(srv.Close)
	return srv
}

func (b *box) request(method, url string, header http.Header, body any) *http.Request {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.ctx(), method, url, asReader(body))
	must(b.t, err)
	for k, v := range header {
		req.Header[k] = v
	}
	return req
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t testing.TB, err error, kind errs.Kind, text string) {
	t.Helper()
	if errs.KindOf(err) != kind || err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v of kind %q, want %q with %q in it", err, errs.KindOf(err), kind, text)
	}
}

func mountTmpfs(t testing.TB, options string) func(string) {
	return func(root string) {
		t.Helper()
		must(t, unix.Mount("tmpfs", root, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, options))
		t.Cleanup(func() { unix.Unmount(root, unix.MNT_DETACH) })
	}
}
