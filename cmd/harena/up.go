package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/harena-dev/harena/internal/cli"
	"github.com/harena-dev/harena/internal/control/server"
	"github.com/harena-dev/harena/internal/edge/lifecycle/datadir"
	"github.com/harena-dev/harena/internal/edge/swap"
	"github.com/harena-dev/harena/internal/errs"
)

const (
	defaultData   = "/var/lib/harena"
	defaultListen = "127.0.0.1:7070"
	// lockWait: a server that was told to end, or died, lets go within this time.
	lockWait = 10 * time.Second
	// drainTime is what calls get to end by themselves; streams are resumed by their clients.
	drainTime    = time.Second
	shutdownTime = 20 * time.Second
)

type upFlags struct {
	data, store, listen, guest, logLevel string
	dataSize, zram, swap, storeCache     cli.Size
	want                                 swap.Want // what of zram and swap was given
}

func upCommand() *cobra.Command {
	var f upFlags
	cmd := &cobra.Command{
		Use: "up", Short: "Run a node: all servers in one process",
		Long: "Run a node: all servers in one process. It is ready when it prints a line that begins with \"ready\", and writes\nwhat clients need to DIR/client.json. SIGTERM ends it and leaves sandboxes running; `harena down` ends all.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("zram") {
				f.want.Zram = (*int64)(&f.zram)
			}
			if cmd.Flags().Changed("swap") {
				f.want.File = (*int64)(&f.swap)
			}
			return shown(up(cmd.Context(), f, cmd.OutOrStdout(), cmd.ErrOrStderr()))
		},
	}
	dataFlag(cmd, &f.data)
	cmd.Flags().Var(&f.dataSize, "data-size", "keep the data on a volume of `SIZE` bytes (as 50g), reserved at once, with quotas and cheap copies; remembered, can grow")
	cmd.Flag("data-size").DefValue = ""
	cmd.Flags().Var(&f.zram, "zram", "put memory of paused sandboxes into up to `SIZE` bytes of compressed memory; remembered, 0 for none")
	cmd.Flag("zram").DefValue = ""
	cmd.Flags().Var(&f.swap, "swap", "put memory of paused sandboxes into a file of `SIZE` bytes in DIR, after --zram; remembered, 0 for none")
	cmd.Flag("swap").DefValue = ""
	cmd.Flags().StringVar(&f.store, "store", "", "`URL` of a store of layers that nodes share: file:///DIR[?direct=1] or s3://BUCKET[/PREFIX][?endpoint=…&region=…]")
	cmd.Flags().Var(&f.storeCache, "store-cache", "at most this many bytes of data from the store are kept on this node (default 32g)")
	cmd.Flag("store-cache").DefValue = ""
	cmd.Flags().StringVar(&f.listen, "listen", defaultListen, "`ADDR`ess to serve on")
	cmd.Flags().StringVar(&f.guest, "guest", "", "`PATH` of harena-guest (default beside this program)")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func dataFlag(cmd *cobra.Command, data *string) {
	cmd.Flags().StringVar(data, "data", defaultData, "`DIR`ectory of all that the node keeps")
}

// needRoot says early, and once, what else many steps would say.
func needRoot(what string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return errs.E(errs.Precondition, "harena %s needs root: it mounts file systems and makes namespaces and cgroups", what).
		WithHint("run it with sudo; clients need no root")
}

func up(ctx context.Context, f upFlags, stdout, stderr io.Writer) (err error) {
	if err := datadir.ValidSize(int64(f.dataSize)); err != nil {
		return err
	}
	if err := needRoot("up"); err != nil {
		return err
	}
	log, err := logger(f.logLevel, stderr)
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(signals)

	// Before anything is touched: a second server is told about the port or the lock, whatever it meets first.
	listener, err := listen(ctx, f.listen)
	if err != nil {
		return err
	}
	defer func() { _ = listener.Close() }()
	fmt.Fprintf(stdout, "opening %s\n", f.data)
	n, err := openNode(ctx, nodeConfig{data: f.data, store: storeConfig{f.store, int64(f.storeCache)}, dataSize: int64(f.dataSize), guest: f.guest, swap: f.want, lockWait: lockWait, log: log})
	if err != nil {
		return datadir.Fault("start", f.data, err)
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
		defer cancel()
		err = errors.Join(err, n.close(end))
	}()
	url := "http://" + clientAddress(listener.Addr())
	store, profile, err := openTokens(n.dir.Path(), url)
	if err != nil {
		return datadir.Fault("write the client's profile", f.data, err)
	}
	inside := newInProcess()
	edgeHTTP := server.NewHTTPServer(n.handler, log)
	transport := server.NewEdgeTransport(inside.Dial)
	api := server.New(server.Config{
		Edges: server.NewStatic(server.NewEdge(n.edge.ID(), "http://edge", transport)), Tokens: store,
		Log: log.With("part", "apiserver"), Version: version,
	})
	apiHTTP := server.NewHTTPServer(api.Handler(), log)
	failed := make(chan error, 2)
	go func() { failed <- edgeHTTP.Serve(inside) }()
	go func() { failed <- apiHTTP.Serve(listener) }()
	defer endServers(context.WithoutCancel(ctx), apiHTTP, edgeHTTP)

	announce(stdout, stderr, f, n, profile, listener.Addr())
	select {
	case s := <-signals:
		fmt.Fprintf(stdout, "%v: ending; sandboxes go on, `harena up` finds them again\n", s)
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	go func() { // who cannot wait
		<-signals
		os.Exit(exitForced)
	}()
	return nil
}

const exitForced = 125

// endServers lets calls that are about to end do so, and cuts the others off.
func endServers(ctx context.Context, servers ...*http.Server) {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	for _, s := range servers {
		if s.Shutdown(ctx) != nil {
			_ = s.Close()
		}
	}
}

func logger(level string, w io.Writer) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, errs.E(errs.Invalid, "log level %q is not known", level).WithHint("use debug, info, warn or error")
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: l})), nil
}

// portWait is what a server that was told to end, or was killed, may still hold its port.
const portWait = 3 * time.Second

func listen(ctx context.Context, address string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	for end := time.Now().Add(portWait); errors.Is(err, syscall.EADDRINUSE) && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(50 * time.Millisecond)
		l, err = lc.Listen(ctx, "tcp", address)
	}
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, errs.E(errs.Precondition, "the address %s is in use", address).
			WithHint("another harena may run already (`harena fleet ls` asks it); else choose another --listen")
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, errs.E(errs.Invalid, "the address %s is not one of this machine", address).WithHint("choose another --listen")
	}
	return nil, errs.E(errs.Invalid, "cannot listen on %s: %w", address, err).WithHint("--listen looks like %s", defaultListen)
}

// clientAddress is where clients on this machine find a listener.
func clientAddress(a net.Addr) string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil || !ap.Addr().IsUnspecified() {
		return a.String()
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), ap.Port()).String()
}

func announce(stdout, stderr io.Writer, f upFlags, n *node, p clientProfile, addr net.Addr) {
	if ap, err := netip.ParseAddrPort(addr.String()); err == nil && !ap.Addr().IsLoopback() {
		fmt.Fprintf(stderr, "harena: warning: %s is reachable from the network without TLS: tokens and data can be read on the way (put a TLS proxy before it, or listen on a loopback address)\n", addr)
	}
	where := filepath.Join(n.dir.Path(), "client.json")
	if sameFile(f.data, defaultData) {
		path, err := writeDefaultProfile(p)
		if err != nil {
			fmt.Fprintf(stderr, "harena: warning: the default profile was not written: %v (use --profile %s)\n", err, where)
		} else {
			where = path
		}
	}
	fmt.Fprintf(stdout, "ready %s (edge %s, profile %s)\n", p.URL, n.edge.ID(), where)
}

func sameFile(a, b string) bool {
	x, err := filepath.Abs(a)
	return err == nil && x == b
}
