package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/harena-dev/harena/internal/blobd"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// blobdCommand is not for people: `harena up --store` starts it.
func blobdCommand() *cobra.Command {
	var c blobd.Config
	var settings string
	cmd := &cobra.Command{
		Use: "blobd", Short: "Serve data blobs of a remote store to the kernel (started by harena up)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return shown(runBlobd(cmd.Context(), c, settings))
		},
	}
	flags := cmd.PersistentFlags()
	flags.StringVar(&c.Dir, "data", defaultData, "`DIR`ectory of all that the node keeps")
	flags.DurationVar(&c.Patience, "patience", blobd.DefaultPatience, "how long readers wait for a daemon")
	cmd.Flags().StringVar(&c.Store, "store", "", "`URL` of the store")
	cmd.Flags().Int64Var(&c.CacheBytes, "cache-bytes", blobd.DefaultCacheBytes, "bound of DIR/cache/data")
	cmd.Flags().DurationVar(&c.ReadTime, "read-time", blobd.DefaultReadTime, "how long a read waits for the store")
	cmd.Flags().StringVar(&settings, "settings", "", "what the daemon tells who asks for its settings")
	cmd.AddCommand(&cobra.Command{
		Use: "hold", Short: "Keep the connection to the kernel for the next blobd", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return shown(blobd.Hold(cmd.Context(), c))
		},
	})
	return cmd
}

// storeCredentials is where credentials of the store may lie, below the data directory.
const storeCredentials = "store.json"

func runBlobd(ctx context.Context, c blobd.Config, settings string) error {
	if err := needRoot("blobd"); err != nil {
		return err
	}
	// Attempts are repeated by the cache, which knows who waits, and tells of outages.
	retry := blob.RetryPolicy{Attempts: 1}
	// What it serves was found in the store.
	store, err := blob.Open(ctx, c.Store, blob.Options{CredentialsFile: filepath.Join(c.Dir, storeCredentials), Retry: &retry, Known: true})
	if err != nil {
		return err
	}
	return blobd.Run(ctx, blobd.Serve{
		Config: c, Version: buildID(), Settings: settings, Store: store,
		Holder: []string{"/proc/self/exe", "blobd", "hold", "--data", c.Dir, "--patience", c.Patience.String()},
		Log:    slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
}

// buildID tells this program's file from any other, so that an upgrade replaces what runs of the old one.
func buildID() string {
	fi, err := os.Stat("/proc/self/exe")
	if err != nil {
		return version
	}
	return fmt.Sprintf("%s %d %s", version, fi.Size(), fi.ModTime().UTC().Format(time.RFC3339Nano))
}

// blobdLaunch says how a node starts its blobd.
func blobdLaunch(c blobd.Config, cgroup string, log *slog.Logger, event func(blobd.Event)) (blobd.Launch, error) {
	self, err := os.Executable()
	if err != nil {
		return blobd.Launch{}, errs.E(errs.Precondition, "cannot tell where this program is: %w", err)
	}
	l := blobd.Launch{Config: c.WithDefaults(), Cgroup: cgroup, Version: buildID(), Log: log, Event: event}
	l.Command = []string{
		self, "blobd", "--data", c.Dir, "--store", c.Store, "--patience", l.Patience.String(), "--read-time", l.ReadTime.String(),
		"--cache-bytes", strconv.FormatInt(l.CacheBytes, 10), "--settings", l.Settings(),
	}
	return l, nil
}
