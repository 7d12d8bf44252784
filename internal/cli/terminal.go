package cli

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// rawTerminal puts the terminal of standard input into raw mode and returns how
// to put it back. Without a terminal nothing happens.
func (a *app) rawTerminal() func() {
	f, ok := terminal(a.Stdin)
	if !ok {
		return func() {}
	}
	old, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return func() {}
	}
	return func() { _ = term.Restore(int(f.Fd()), old) }
}

// terminalSize returns the size of the terminal that output goes to; zeros, for the defaults, without one.
func (a *app) terminalSize() (cols, rows uint32) {
	for _, s := range []any{a.Stdout, a.Stdin} {
		if f, ok := terminal(s); ok {
			if w, h, err := term.GetSize(int(f.Fd())); err == nil && w > 0 && h > 0 && w < 1<<16 && h < 1<<16 {
				return uint32(w), uint32(h)
			}
		}
	}
	return 0, 0
}

// followSize passes changes of the terminal's size on until ctx ends.
func (a *app) followSize(ctx context.Context, c *harena.Command) {
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGWINCH)
	defer signal.Stop(changes)
	last, lastRows := a.terminalSize()
	for {
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
		if cols, rows := a.terminalSize(); cols != 0 && (cols != last || rows != lastRows) {
			last, lastRows = cols, rows
			_ = c.Resize(ctx, cols, rows)
		}
	}
}
