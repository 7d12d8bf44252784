package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
)

func TestProfileIsKeptWhileItIsValid(t *testing.T) {
	dir := t.TempDir()
	open := func(url string) clientProfile {
		t.Helper()
		store, p, err := openTokens(dir, url)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Verify(p.Token); err != nil || p.URL != url {
			t.Errorf("%+v: %v", p.URL, err)
		}
		fi, err := os.Stat(filepath.Join(dir, "client.json"))
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("client.json: %v, %v", fi, err)
		}
		return p
	}
	first := open("http://127.0.0.1:1")
	if again := open("http://127.0.0.1:1"); again != first {
		t.Error("a second start made another token")
	}
	if moved := open("http://127.0.0.1:2"); moved.Token != first.Token {
		t.Error("another address made another token")
	}
	if err := os.WriteFile(filepath.Join(dir, "client.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if mended := open("http://127.0.0.1:2"); mended.Token == first.Token || mended.Token == "" {
		t.Error("a damaged profile was not replaced")
	}
	if err := os.WriteFile(filepath.Join(dir, "tokens.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := openTokens(dir, "x"); !errs.Is(err, errs.Precondition) {
		t.Errorf("damaged tokens: %v", err)
	}
}

func TestInProcessConnects(t *testing.T) {
	l := newInProcess()
	var accepted net.Conn
	done := make(chan error, 1)
	go func() {
		var err error
		accepted, err = l.Accept()
		if err == nil {
			_, err = io.Copy(accepted, accepted)
			_ = accepted.Close()
		}
		done <- err
	}()
	c, err := l.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sent := bytes.Repeat([]byte("0123456789"), 100_000)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(*net.UnixConn).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d bytes of %d, %v", len(got), len(sent), err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	_ = c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Dial(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("nobody accepts: %v", err)
	}
	_ = l.Close()
	_ = l.Close()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if _, err := l.Dial(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

func TestUpRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to get past the first check")
	}
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	guest := filepath.Join(t.TempDir(), "harena-guest")
	if err := os.WriteFile(guest, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	good := upFlags{data: filepath.Join(t.TempDir(), "data"), listen: "127.0.0.1:0", logLevel: "info", guest: guest}
	for name, c := range map[string]struct {
		change func(*upFlags)
		kind   errs.Kind
		text   string
	}{
		"size":    {func(f *upFlags) { f.dataSize = 5 << 20 }, errs.Invalid, "--data-size"},
		"level":   {func(f *upFlags) { f.logLevel = "loud" }, errs.Invalid, "loud"},
		"busy":    {func(f *upFlags) { f.listen = busy.Addr().String() }, errs.Precondition, "is in use"},
		"nowhere": {func(f *upFlags) { f.listen = "192.0.2.1:1" }, errs.Invalid, "not one of this machine"},
		"nothing": {func(f *upFlags) { f.listen = "x" }, errs.Invalid, "cannot listen"},
		"guest":   {func(*upFlags) {}, errs.Precondition, "not an executable"},
		"missing": {func(f *upFlags) { f.guest = "/none" }, errs.Precondition, "is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			f := good
			c.change(&f)
			err := up(t.Context(), f, io.Discard, io.Discard)
			if !errs.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || shown(err).Error() == err.Error() {
				t.Errorf("%v (shown as %v)", err, shown(err))
			}
			if _, err := os.Stat(f.data); err == nil {
				t.Error("the data directory was made all the same")
			}
		})
	}
	if err := down(t.Context(), filepath.Join(t.TempDir(), "none"), guest, io.Discard, io.Discard); !errs.Is(err, errs.NotFound) {
		t.Errorf("down of nothing: %v", err)
	}
}

func TestClientAddress(t *testing.T) {
	for a, want := range map[string]string{"127.0.0.1:7070": "127.0.0.1:7070", "0.0.0.0:1": "127.0.0.1:1", "[::]:1": "127.0.0.1:1", "[::1]:1": "[::1]:1", "192.0.2.7:1": "192.0.2.7:1"} {
		addr, err := net.ResolveTCPAddr("tcp", a)
		if err != nil {
			t.Fatal(err)
		}
		if got := clientAddress(addr); got != want {
			t.Errorf("%s: %s, want %s", a, got, want)
		}
	}
}
