package files

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// watched is a watch that runs.
type watched struct {
	t      *testing.T
	mu     sync.Mutex
	events []string
	end    chan error
	stop   func()
}

func (b *box) watch(path string, recursive bool) *watched {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.ctx())
	w := &watched{t: b.t.(*testing.T), end: make(chan error, 1), stop: cancel}
	b.t.Cleanup(cancel)
	ready := make(chan struct{})
	go func() {
		sub, err := b.svc.subject(ctx, boxID, "", path, nil)
		if err == nil {
			err = b.svc.watch(ctx, sub, recursive, func(e *harenav1.WatchFilesResponse) error {
				if e.GetKind() == watchReady {
					close(ready)
					return nil
				}
				text := e.GetKind() + " " + e.GetPath()
				if e.GetFrom() != "" {
					text += " < " + e.GetFrom()
				}
				w.mu.Lock()
				defer w.mu.Unlock()
				w.events = append(w.events, text)
				return nil
			})
		}
		w.end <- err
	}()
	select {
	case <-ready:
	case err := <-w.end:
		b.t.Fatalf("watch %s: %v", path, err)
	}
	return w
}

func (w *watched) all() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.events, "\n")
}

// sees waits for an event.
func (w *watched) sees(event string) {
	w.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if strings.Contains("\n"+w.all()+"\n", "\n"+event+"\n") {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("never seen: %s; seen:\n%s", event, w.all())
		}
	}
}

func TestWatch(t *testing.T) {
	b := newBox(t)
	b.mkdir("/d", 0, 0o755)
	b.mkdir("/d/old", 0, 0o755)
	b.mkdir("/elsewhere", 0, 0o755)
	b.symlink("/elsewhere", "/d/link")
	w := b.watch("/d", true)
	b.file("/d/f", 0, 0o644, "x")
	w.sees("created /d/f")
	w.sees("modified /d/f")
	b.file("/d/old/g", 0, 0o644, "x")
	w.sees("created /d/old/g")
	must(t, os.Rename(b.host("/d/f"), b.host("/d/old/h")))
	w.sees("moved /d/old/h < /d/f")
	must(t, os.Chmod(b.host("/d/old/h"), 0o600))
	w.sees("attributes /d/old/h")
	must(t, os.Remove(b.host("/d/old/h")))
	w.sees("removed /d/old/h")
	// A tree that is made at once, and one that is moved with what is in it.
	must(t, os.MkdirAll(b.host("/d/a/b/c"), 0o755))
	w.sees("created /d/a/b/c")
	must(t, os.Rename(b.host("/d/a"), b.host("/d/z")))
	w.sees("moved /d/z < /d/a")
	must(t, os.WriteFile(b.host("/d/z/b/c/deep"), nil, 0o644))
	w.sees("created /d/z/b/c/deep")
	must(t, os.Rename(b.host("/d/z"), b.host("/elsewhere/z")))
	w.sees("removed /d/z")
	must(t, os.WriteFile(b.host("/elsewhere/z/b/c/outside"), nil, 0o644))
	must(t, os.Rename(b.host("/elsewhere/z"), b.host("/d/back")))
	w.sees("created /d/back")
	w.sees("created /d/back/b/c/outside")
	if strings.Contains(w.all(), "elsewhere") {
		t.Errorf("it followed a link: %s", w.all())
	}
	must(t, os.RemoveAll(b.host("/d")))
	w.sees("removed /d")
	if err := <-w.end; err != nil {
		t.Errorf("the end: %v", err)
	}
}

func TestWatchWithoutRecursion(t *testing.T) {
	b := newBox(t)
	b.mkdir("/d", 0, 0o755)
	b.mkdir("/d/sub", 0, 0o755)
	b.file("/d/f", 0, 0o644, "x")
	dir, file := b.watch("/d", false), b.watch("/d/f", true)
	must(t, os.WriteFile(b.host("/d/sub/x"), nil, 0o644))
	must(t, os.WriteFile(b.host("/d/other"), nil, 0o644))
	must(t, os.WriteFile(b.host("/d/f"), []byte("changed"), 0o644))
	dir.sees("modified /d/f")
	file.sees("modified /d/f")
	if got := dir.all() + file.all(); strings.Contains(got, "sub/x") || strings.Contains(file.all(), "other") {
		t.Errorf("seen:\n%s", got)
	}
	dir.stop()
	if err := <-dir.end; !errors.Is(err, context.Canceled) {
		t.Errorf("the end: %v", err)
	}
}

// A client that does not read, and more events than the kernel queues: it is told that some were lost, and what comes later is seen.
func TestWatchOverflow(t *testing.T) {
	b := newBox(t)
	b.mkdir("/d", 0, 0o755)
	ctx, cancel := context.WithCancel(b.ctx())
	defer cancel()
	sub, err := b.svc.subject(ctx, boxID, "", "/d", nil)
	must(t, err)
	ready, read := make(chan struct{}), make(chan struct{})
	seen := make(chan string, 1<<20)
	go func() {
		_ = b.svc.watch(ctx, sub, true, func(e *harenav1.WatchFilesResponse) error {
			if e.GetKind() == watchReady {
				close(ready)
				<-read
			}
			seen <- e.GetKind() + " " + e.GetPath()
			return nil
		})
	}()
	<-ready
	for i := range 60000 {
		name := filepath.Join(b.host("/d"), fmt.Sprint("name-that-takes-some-room-in-the-queue-of-events-", i%50))
		must(t, os.Mkdir(name, 0o755))
		must(t, os.Remove(name))
	}
	must(t, os.Mkdir(b.host("/d/late"), 0o755))
	close(read)
	deadline := time.After(30 * time.Second)
	lost := false
	for made := false; ; {
		select {
		case e := <-seen:
			lost = lost || strings.HasPrefix(e, watchOverflow)
			if lost && !made {
				made = true
				time.Sleep(300 * time.Millisecond)
				must(t, os.WriteFile(b.host("/d/late/file"), nil, 0o644))
			}
			if e == "created /d/late/file" {
				return
			}
		case <-deadline:
			t.Fatalf("not seen; overflow %v", lost)
		}
	}
}

// Names that change all the time must neither lead the watch outside nor end it.
func TestWatchOfAHostileTree(t *testing.T) {
	b := newBox(t)
	b.mkdir("/d", 0, 0o755)
	b.mkdir("/outside", 0, 0o755)
	w := b.watch("/d", true)
	stop := time.Now().Add(time.Second)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; time.Now().Before(stop); n++ {
				name := b.host(fmt.Sprintf("/d/%d", (i+n)%3))
				_ = os.Mkdir(name, 0o755)
				_ = os.Rename(name, b.host(fmt.Sprintf("/d/%d/x", (i+n+1)%3)))
				_ = os.Symlink(b.host("/outside"), name)
				_ = os.RemoveAll(name)
			}
		})
	}
	wg.Wait()
	must(t, os.WriteFile(b.host("/outside/secret"), nil, 0o644))
	must(t, os.WriteFile(b.host("/d/end"), nil, 0o644))
	w.sees("created /d/end")
	if strings.Contains(w.all(), "secret") {
		t.Error("it saw what is outside")
	}
}
