// Package supervisor is one sandbox's keeper, outside the sandbox: it starts
// the sandbox when an edge claims it, serves calls into it on a UNIX socket,
// and ends with it. It outlives the edge that started it.
//
// A supervisor that dies in any way takes the sandbox with it: the zygote
// sees its control socket close and kills the workload.
package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/claim"
)

// Config composes a supervisor.
type Config struct {
	Version string
	// Channel is the claim channel; see package claim.
	Channel *os.File
	// Prepare does all of a start that needs no knowledge of the sandbox.
	Prepare func() (Prepared, error)
}

// Prepared can start one sandbox.
type Prepared interface {
	// Launch starts it. On error nothing of it is left but Close.
	Launch(ctx context.Context, l *guestv1.Launch) (Sandbox, error)
	// Close releases what was prepared.
	Close() error
}

// Sandbox is a sandbox that runs.
type Sandbox interface {
	// Services makes what is served beside GuestService.
	Services(e Env) (Services, error)
	InitPid() int
	ZygotePid() int
	// Timings are the steps of the start.
	Timings() []*harenav1.Timing
	// Done is closed when the sandbox has ended by itself.
	Done() <-chan struct{}
	// Reason says why it ended, once Done is closed.
	Reason() string
	// Close kills every process of the sandbox and releases it.
	Close() error
}

// Env is what services are made with. The working directory is the sandbox's own on the node.
type Env struct {
	Launch *guestv1.Launch
	Log    *slog.Logger
	// Activity notes that something of use to somebody happened.
	Activity func()
}

// Services are the calls into one sandbox.
type Services struct {
	// Handlers by path prefix, as http.ServeMux takes it. Each is made at its first call: a service's handlers cost a
	// millisecond and 100 KiB, and many sandboxes never have a use for one.
	Handlers map[string]func() http.Handler
	// Running counts running commands and the streams attached to them.
	Running func() (commands, streams int)
	// Hold stops the clocks of time-outs, and lets them go on.
	Hold func(on bool)
	// Close ends what the services keep running outside the sandbox.
	Close func() error
}

// maxLog bounds the supervisor's log.
const maxLog = 1 << 20

// Run serves one claim and returns when the sandbox has ended, or when the
// channel closed before a claim (nil).
func Run(c Config) error {
	prepared, err := c.Prepare()
	if err != nil {
		return errors.Join(err, claim.Write(c.Channel, &guestv1.LaunchResult{Error: text(err)}))
	}
	if err := claim.Write(c.Channel, &guestv1.LaunchResult{}); err != nil {
		return errors.Join(err, prepared.Close())
	}
	if err := warm(func() bool { return readable(c.Channel) }); err != nil {
		return errors.Join(err, prepared.Close())
	}
	var l guestv1.Launch
	if err := claim.Read(c.Channel, &l); err != nil {
		cerr := prepared.Close()
		if errors.Is(err, io.EOF) {
			return cerr
		}
		return errors.Join(err, cerr)
	}
	s, err := start(c, prepared, &l)
	if err != nil {
		return errors.Join(err, claim.Write(c.Channel, &guestv1.LaunchResult{Error: text(err)}))
	}
	return s.serve()
}

// text is what the edge is told. It is trusted, so causes are not hidden, and
// the kind survives in front.
func text(err error) string { return string(errs.KindOf(err)) + ": " + err.Error() }

// supervisor serves a sandbox that runs.
type supervisor struct {
	launch   *guestv1.Launch
	sandbox  Sandbox
	services Services
	version  string
	log      *slog.Logger
	listener net.Listener
	server   *http.Server
	activity *activity
	// stopping is set by Shutdown before it kills; stopped is closed after.
	stopping atomic.Bool
	stopped  chan struct{}
	stopOnce sync.Once
}

// start launches and answers. The channel's end cancels it.
func start(c Config, prepared Prepared, l *guestv1.Launch) (_ *supervisor, err error) {
	began := time.Now()
	// The working directory is how an edge finds this process among others,
	// and makes the socket's path short (sun_path has 108 bytes).
	if err := os.Chdir(l.GetDir()); err != nil {
		return nil, errors.Join(fmt.Errorf("enter the sandbox's directory: %w", err), prepared.Close())
	}
	logger, err := openLog()
	if err != nil {
		return nil, errors.Join(err, prepared.Close())
	}

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var answered atomic.Bool
	go func() {
		// The edge sends nothing more: this returns when it closes, or when
		// we do after the answer.
		n, rerr := c.Channel.Read(make([]byte, 1))
		if !answered.Load() {
			logger.Info("the edge gave up", "read", n, "error", rerr)
			cancel()
		}
	}()

	entered := time.Now()
	sb, err := prepared.Launch(ctx, l)
	if err != nil {
		return nil, errors.Join(err, prepared.Close())
	}
	s := &supervisor{launch: l, sandbox: sb, version: c.Version, log: logger, activity: newActivity(), stopped: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	launched := time.Now()
	if s.services, err = sb.Services(Env{Launch: l, Log: logger, Activity: s.activity.touch}); err != nil {
		return nil, fmt.Errorf("set up services: %w", err)
	}
	s.activity.watch(s.services.Running)
	if err := s.listen(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	answered.Store(true)
	err = claim.Write(c.Channel, &guestv1.LaunchResult{
		InitPid:   int64(sb.InitPid()),
		ZygotePid: int64(sb.ZygotePid()),
		Timings: append(sb.Timings(),
			&harenav1.Timing{Step: "supervisor.enter", Micros: entered.Sub(began).Microseconds()},
			&harenav1.Timing{Step: "supervisor.launch", Micros: launched.Sub(entered).Microseconds()},
			&harenav1.Timing{Step: "supervisor.services", Micros: time.Since(launched).Microseconds()}),
	})
	if err != nil {
		return nil, fmt.Errorf("answer the edge: %w", err)
	}
	return s, c.Channel.Close()
}

// openLog opens the log in the working directory; panics go there too.
func openLog() (*slog.Logger, error) {
	f, err := os.OpenFile(claim.Log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the supervisor's log: %w", err)
	}
	for _, fd := range []int{1, 2} {
		if err := unix.Dup3(int(f.Fd()), fd, 0); err != nil {
			return nil, fmt.Errorf("redirect output to the supervisor's log: %w", err)
		}
	}
	return slog.New(slog.NewTextHandler(&bounded{w: f, left: maxLog}, nil)), nil
}

// bounded drops what is written past a number of bytes. slog's handlers serialise their calls.
type bounded struct {
	w    io.Writer
	left int
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left < len(p) {
		if b.left > 0 {
			b.left = 0
			_, err := io.WriteString(b.w, "log is full, the rest is dropped\n")
			return len(p), err
		}
		return len(p), nil
	}
	b.left -= len(p)
	return b.w.Write(p)
}

// serve answers calls until the sandbox ends.
func (s *supervisor) serve() error {
	failed := make(chan error, 1)
	go func() { failed <- s.server.Serve(s.listener) }()

	exit := claim.Exit{Reason: "shutdown"}
	var err error
	select {
	case <-s.stopped:
	case <-s.sandbox.Done():
		if !s.stopping.Load() {
			exit = claim.Exit{Reason: "ended", Detail: s.sandbox.Reason()}
		}
	case err = <-failed:
		exit = claim.Exit{Reason: "ended", Detail: "the supervisor's server failed: " + err.Error()}
	}
	exit.Time = time.Now().UTC().Format(time.RFC3339Nano)
	s.log.Info("the sandbox ends", "reason", exit.Reason, "detail", exit.Detail)
	err = errors.Join(err, writeExit(exit))
	return errors.Join(err, s.release())
}

// release ends calls that still run and everything in the sandbox.
func (s *supervisor) release() error {
	err := s.sandbox.Close()
	if s.server != nil {
		// Calls end by themselves now that the sandbox is gone; their answers get out.
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if serr := s.server.Shutdown(ctx); serr != nil {
			err = errors.Join(err, s.server.Close())
		}
	}
	if s.services.Close != nil {
		err = errors.Join(err, s.services.Close())
	}
	return err
}

func writeExit(e claim.Exit) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := os.WriteFile(claim.ExitFile+".new", b, 0o600); err != nil {
		return fmt.Errorf("write why the sandbox ended: %w", err)
	}
	return os.Rename(claim.ExitFile+".new", claim.ExitFile)
}

// Channel is the inherited claim channel. No other descriptor that the edge
// may have inherited itself gets any further either.
func Channel() (*os.File, error) {
	if err := unix.CloseRange(claim.FD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("mark inherited descriptors: %w", err)
	}
	if typ, err := unix.GetsockoptInt(claim.FD, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || typ != unix.SOCK_STREAM {
		return nil, errs.E(errs.Invalid, "descriptor %d is not a claim channel", claim.FD).
			WithHint("harena-guest is started by harena, not by hand")
	}
	// Non-blocking, so that waiting for a claim holds no thread.
	if err := unix.SetNonblock(claim.FD, true); err != nil {
		return nil, err
	}
	return os.NewFile(claim.FD, "claim"), nil
}
