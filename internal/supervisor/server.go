package supervisor

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/guest/v1/guestv1connect"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

const (
	// MaxMessage bounds one request message: 16 MiB of a file's content and its frame.
	MaxMessage = 17 << 20
	// maxGrace bounds what Shutdown waits before it kills.
	maxGrace = 10 * time.Minute
)

// uncompressed: a supervisor and the edge share a machine; compression would cost time and memory, and a stream that
// compresses well would escape the windows that hold it back.
var uncompressed = connect.WithCompression("gzip", nil, nil)

// HandlerOptions are for the handlers of Services.
func HandlerOptions() connect.HandlerOption {
	return connect.WithHandlerOptions(connect.WithReadMaxBytes(MaxMessage), uncompressed)
}

// listen makes the server and its socket, in the working directory.
func (s *supervisor) listen() error {
	mux := http.NewServeMux()
	for prefix, make := range s.services.Handlers {
		mux.Handle(prefix, onDemand(make))
	}
	mux.Handle("/"+guestv1connect.GuestServiceName+"/", onDemand(func() http.Handler {
		_, h := guestv1connect.NewGuestServiceHandler(s, connect.WithReadMaxBytes(64<<10), uncompressed)
		return h
	}))

	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	s.server = &http.Server{
		Handler:   s.activity.track(mux),
		Protocols: protocols,
		ErrorLog:  slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
		// Only the edge can connect; these bound what a fault of it can hold.
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          1000,
			MaxReceiveBufferPerStream:     512 << 10,
			MaxReceiveBufferPerConnection: 4 << 20,
		},
	}
	if err := os.Remove(claim.Socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	l, err := listenUnix(claim.Socket)
	if err != nil {
		return fmt.Errorf("listen on the sandbox's socket: %w", err)
	}
	s.listener = l
	return nil
}

// listenUnix is net.Listen without its look at the limit of the backlog, which costs a buffer of 64 KiB.
func listenUnix(name string) (net.Listener, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close() //nolint:errcheck // FileListener duplicates it
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	// The kernel lowers it to net.core.somaxconn.
	if err := unix.Listen(fd, 4096); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(true)
	return l, nil
}

// onDemand makes the handler at the first call.
func onDemand(make func() http.Handler) http.Handler {
	get := sync.OnceValue(make)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { get().ServeHTTP(w, r) })
}

// Status implements guestv1connect.GuestServiceHandler.
func (s *supervisor) Status(context.Context, *connect.Request[guestv1.StatusRequest]) (*connect.Response[guestv1.StatusResponse], error) {
	r := &guestv1.StatusResponse{
		SandboxId:         s.launch.GetSandboxId(),
		Version:           s.version,
		Alive:             true,
		LastActivityNanos: s.activity.lastUse().UnixNano(),
	}
	commands, streams := s.services.Running()
	r.RunningCommands, r.AttachedStreams = int32(commands), int32(streams)
	select {
	case <-s.sandbox.Done():
		r.Alive, r.Reason = false, s.sandbox.Reason()
	default:
	}
	return connect.NewResponse(r), nil
}

// Hold implements guestv1connect.GuestServiceHandler.
func (s *supervisor) Hold(_ context.Context, r *connect.Request[guestv1.HoldRequest]) (*connect.Response[guestv1.HoldResponse], error) {
	if s.services.Hold != nil {
		s.services.Hold(r.Msg.GetHeld())
	}
	return connect.NewResponse(&guestv1.HoldResponse{}), nil
}

// Shutdown implements guestv1connect.GuestServiceHandler.
func (s *supervisor) Shutdown(ctx context.Context, r *connect.Request[guestv1.ShutdownRequest]) (*connect.Response[guestv1.ShutdownResponse], error) {
	grace := time.Duration(r.Msg.GetGraceMillis()) * time.Millisecond
	if grace < 0 || grace > maxGrace {
		return nil, errs.ToConnect(errs.OverLimit(errs.Invalid, "grace of a shutdown", maxGrace, grace))
	}
	work := cgroup.Dir(s.launch.GetCgroups().GetTracking())
	if grace > 0 {
		wctx, cancel := context.WithTimeout(ctx, grace)
		defer cancel()
		if err := terminate(wctx, work); err != nil {
			s.log.Info("the workload is killed", "grace", grace, "error", err)
		}
	}
	// First, so that the end of PID 1 is not taken for the sandbox's own doing.
	s.stopping.Store(true)
	if err := work.Kill(); err != nil {
		return nil, errs.ToConnect(fmt.Errorf("kill the workload: %w", err))
	}
	s.stopOnce.Do(func() { close(s.stopped) })
	return connect.NewResponse(&guestv1.ShutdownResponse{}), nil
}

// terminate asks every process of every command to end, and waits for it. PID
// 1 is left out: it ignores the signal and ends last.
func terminate(ctx context.Context, work cgroup.Dir) error {
	commands, err := commandGroups(work)
	if err != nil {
		return err
	}
	for _, d := range commands {
		if err := d.Signal(unix.SIGTERM); err != nil {
			return err
		}
	}
	for _, d := range commands {
		if err := d.WaitEmpty(ctx); err != nil {
			return err
		}
	}
	return nil
}

// initGroup is the child of the tracking group that holds PID 1 alone.
const initGroup = "init"

func commandGroups(work cgroup.Dir) ([]cgroup.Dir, error) {
	names, err := work.Children()
	var out []cgroup.Dir
	for _, n := range names {
		if n != initGroup {
			out = append(out, work+cgroup.Dir("/"+n))
		}
	}
	return out, err
}
