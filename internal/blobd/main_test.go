package blobd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// The test binary is daemon and holder, too.
const roleVar = "HARENA_TEST_BLOBD"

// Files in a data directory that make daemons end: at once, or when they have asked for the connection.
const (
	refuse = "refuse"
	crash  = "crash"
)

func TestMain(m *testing.M) {
	role := os.Getenv(roleVar)
	switch role {
	case "":
		root, err := os.MkdirTemp("/var/tmp", "blobd-test-*")
		if err != nil {
			panic(err)
		}
		done := watch(root)
		code := m.Run()
		done()
		os.Exit(code)
	case watchRole:
		_, _ = io.Copy(io.Discard, os.Stdin) // until the tests have ended, however that is
		sweep(os.Args[1])
		os.Exit(0)
	case runRole:
		runToBeKilled(os.Args[1], os.Args[2])
	}
	var c Config
	if err := json.Unmarshal([]byte(os.Args[2]), &c); err != nil {
		panic(err)
	}
	var err error
	switch os.Args[1] {
	case "hold":
		err = Hold(context.Background(), c)
	case "node": // starts a daemon and keeps it running until it is killed
		if _, err = Start(context.Background(), (&node{}).launchOf(c, role)); err == nil {
			fmt.Println("started")
			select {}
		}
	default:
		if _, err := os.Stat(filepath.Join(c.Dir, refuse)); err == nil {
			os.Exit(1)
		}
		if _, err := os.Stat(filepath.Join(c.Dir, crash)); err == nil {
			(&holding{config: c}).take()
			os.Exit(1)
		}
		var store blob.Store = &remoteStore{url: c.Store}
		if strings.HasPrefix(c.Store, "file:") {
			if store, err = blob.Open(context.Background(), c.Store, blob.Options{Known: true, Retry: &blob.RetryPolicy{}}); err != nil {
				panic(err)
			}
		}
		err = Run(context.Background(), Serve{
			Config: c, Version: role, Settings: Launch{Config: c}.Settings(), Store: store,
			Holder: []string{"/proc/self/exe", "hold", os.Args[2]}, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// remoteStore is a store behind HTTP whose server is in the test, with latency, rate and faults of its choice.
type remoteStore struct {
	blob.Store
	url string
}

func (r *remoteStore) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url+"/"+name+"?off="+strconv.FormatInt(off, 10)+"&n="+strconv.FormatInt(n, 10), nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, errs.E(errs.Internal, "get %s: %w", name, err)
	}
	if res.StatusCode != http.StatusOK {
		res.Body.Close()
		if res.StatusCode == http.StatusNotFound {
			return nil, errs.E(errs.NotFound, "no object %s", name)
		}
		return nil, errs.E(errs.Internal, "get %s: %s", name, res.Status)
	}
	return res.Body, nil
}

func (r *remoteStore) Put(ctx context.Context, name string, body io.Reader) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, r.url+"/"+name, body)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	res.Body.Close()
	return nil
}

// remote serves a memory store.
type remote struct {
	*httptest.Server
	store   *blob.Memory
	latency time.Duration
	rate    int64 // bytes a second, over all connections; 0: any
	broken  atomic.Bool
	cut     atomic.Bool // bodies end in the middle
	moved   atomic.Int64

	mu    sync.Mutex
	ready time.Time
	spoil func(name string, off int64, p []byte)
}

func newRemote(t testing.TB, latency time.Duration, rate int64) *remote {
	r := &remote{store: blob.NewMemory(), latency: latency, rate: rate}
	r.Server = httptest.NewServer(http.HandlerFunc(r.serve))
	t.Cleanup(r.Close)
	return r
}

// spoilWith has f change what is sent, from now on.
func (r *remote) spoilWith(f func(name string, off int64, p []byte)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spoil = f
}

func (r *remote) serve(w http.ResponseWriter, req *http.Request) {
	name := strings.TrimPrefix(req.URL.Path, "/")
	time.Sleep(r.latency)
	if r.broken.Load() {
		http.Error(w, "out", http.StatusServiceUnavailable)
		return
	}
	if req.Method == http.MethodPut {
		_ = r.store.Put(req.Context(), name, req.Body)
		return
	}
	off, _ := strconv.ParseInt(req.URL.Query().Get("off"), 10, 64)
	n, _ := strconv.ParseInt(req.URL.Query().Get("n"), 10, 64)
	body, err := r.store.Get(req.Context(), name, off, n)
	if err != nil {
		http.NotFound(w, req)
		return
	}
	defer body.Close()
	buf := make([]byte, 64<<10)
	for at := off; ; {
		k, err := io.ReadFull(body, buf)
		if k > 0 {
			if r.broken.Load() || r.cut.Load() && at > off {
				panic(http.ErrAbortHandler)
			}
			r.pace(k)
			r.mu.Lock()
			if r.spoil != nil {
				r.spoil(name, at, buf[:k])
			}
			r.mu.Unlock()
			r.moved.Add(int64(k))
			at += int64(k)
			if _, err := w.Write(buf[:k]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (r *remote) pace(n int) {
	if r.rate == 0 {
		return
	}
	r.mu.Lock()
	now := time.Now()
	if r.ready.Before(now.Add(-2 * time.Millisecond)) {
		r.ready = now
	}
	r.ready = r.ready.Add(time.Duration(int64(n) * int64(time.Second) / r.rate))
	wait := time.Until(r.ready)
	r.mu.Unlock()
	time.Sleep(wait)
}

// content makes bytes that compress to about half.
func content(n int, seed uint64) []byte {
	b := make([]byte, n)
	rnd := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	for i := 0; i < n; i += 512 {
		_, _ = rnd.Read(b[i:min(i+256, n)])
	}
	return b
}

func (r *remote) put(t testing.TB, raw []byte) Object {
	t.Helper()
	sum := sha256.Sum256(raw)
	o := Object{Digest: hex.EncodeToString(sum[:]), Size: int64(len(raw))}
	if _, err := blob.PutCompressed(t.Context(), r.store, "blobs/"+o.Digest[:2]+"/"+o.Digest, bytes.NewReader(raw), blob.CompressOptions{}); err != nil {
		t.Fatal(err)
	}
	return o
}

// node is a data directory with a daemon.
type node struct {
	t      testing.TB
	launch Launch
	client *Client

	mu     sync.Mutex
	events []Event
}

func startNode(t testing.TB, r *remote, change func(*Config)) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts file systems")
	}
	dir := t.TempDir()
	n := &node{t: t}
	c := Config{Dir: dir, Store: r.URL, Patience: 20 * time.Second, ReadTime: 20 * time.Second}
	if change != nil {
		change(&c)
	}
	n.launch = n.launchOf(c, "1")
	n.start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := n.client.Shutdown(ctx); err != nil {
			t.Error("shutdown:", err)
		}
		if t.Failed() {
			b, _ := os.ReadFile(n.launch.logFile())
			t.Logf("log of blobd:\n%s", b[max(0, len(b)-8000):])
		}
		n.checkClean()
	})
	return n
}

func (n *node) launchOf(c Config, version string) Launch {
	c = c.WithDefaults()
	b, _ := json.Marshal(c)
	return Launch{
		Config: c, Version: version, Command: []string{"/usr/bin/env", roleVar + "=" + version, os.Args[0], "serve", string(b)},
		Log: slog.New(slog.DiscardHandler), Event: func(e Event) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.events = append(n.events, e)
		},
	}
}

func (n *node) start() {
	n.t.Helper()
	var err error
	if n.client, err = Start(context.Background(), n.launch); err != nil {
		b, _ := os.ReadFile(n.launch.logFile())
		n.t.Fatalf("start: %v\n%s", err, b)
	}
}

// checkClean fails when something is mounted or runs still.
func (n *node) checkClean() {
	b, _ := os.ReadFile("/proc/self/mountinfo")
	if strings.Contains(string(b), n.launch.Dir+"/") {
		n.t.Errorf("still mounted below %s", n.launch.Dir)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		if b, _ := os.ReadFile(p); bytes.Contains(b, []byte(n.launch.Dir)) {
			n.t.Errorf("still running: %s %q", p, b)
		}
	}
}

func (n *node) attach(layer string, blobs ...Object) []Path {
	n.t.Helper()
	paths, err := n.client.Attach(n.t.Context(), layer, blobs)
	if err != nil {
		n.t.Fatal("attach:", err)
	}
	return paths
}

func (n *node) status() Status {
	n.t.Helper()
	s, err := n.client.Status(context.Background())
	if err != nil {
		n.t.Fatal("status:", err)
	}
	return s
}

// event waits for one of a kind.
func (n *node) event(kind string) Event {
	n.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		n.mu.Lock()
		for _, e := range n.events {
			if e.Kind == kind {
				n.mu.Unlock()
				return e
			}
		}
		seen := fmt.Sprint(n.events)
		n.mu.Unlock()
		if time.Now().After(end) {
			n.t.Fatalf("no event %s among %s", kind, seen)
		}
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not after 30 s: %s", what)
		}
	}
}

// image is a file system with known files over a blob in the store.
type image struct {
	meta  string
	blob  Object
	files map[string][32]byte
	bytes int64
}

func newImage(t testing.TB, r *remote, files int, size int) image {
	t.Helper()
	dir := t.TempDir()
	img := image{meta: filepath.Join(dir, "meta"), files: map[string][32]byte{}}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range files {
		b := content(size, uint64(i))
		name := fmt.Sprintf("f%03d", i)
		img.files[name] = sha256.Sum256(b)
		img.bytes += int64(len(b))
		if err := os.WriteFile(filepath.Join(tree, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	meta, err := os.Create(img.meta)
	if err != nil {
		t.Fatal(err)
	}
	defer meta.Close()
	data, err := os.Create(filepath.Join(dir, "blob"))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	if _, err := erofs.FromDir(t.Context(), tree, meta, data, erofs.Options{}); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(data.Name())
	if err != nil {
		t.Fatal(err)
	}
	img.blob = r.put(t, raw)
	if err := os.RemoveAll(tree); err != nil {
		t.Fatal(err)
	}
	return img
}

// mount mounts an image over a blob's path.
func (img image) mount(t testing.TB, path string, options ...string) string {
	t.Helper()
	dir := t.TempDir()
	opts := strings.Join(append([]string{"device=" + path}, options...), ",")
	if err := unix.Mount(img.meta, dir, "erofs", unix.MS_RDONLY, opts); err != nil {
		t.Fatalf("mount erofs %s: %v", opts, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error("unmount:", err)
		}
	})
	return dir
}

// readAll reads every file and fails when one is wrong.
func (img image) readAll(dir string) error {
	for name, want := range img.files {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if sha256.Sum256(b) != want {
			return fmt.Errorf("%s: wrong content", name)
		}
	}
	return nil
}
