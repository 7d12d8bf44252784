// Package scenario is the conformance suite of a Harena installation: it speaks
// the public API only, so that the same scenarios run on one node, on a cluster,
// and on every stateful backend.
//
// Without settings it starts a node of its own from bin/. Against a running one:
//
//	HARENA_URL, HARENA_TOKEN    where it is
//	HARENA_TEST_BACKEND         container (default), microvm, vm
//	HARENA_TEST_IMAGE           a base layer with Debian's essential packages, python3 and sudo
//	HARENA_TEST_DATA            directory of the suite's own node, kept for the next run
//	HARENA_SOAK                 1: the full counts of make soak; 0.1: a tenth of them
//	HARENA_TEST_SLOW            how many times slower than usual the machine is, such as 15 for an emulated one: longer deadlines
package scenario

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
)

// node is what the scenarios run against.
type node struct {
	url, token     string
	backend, image string
	// own is nil when the node was there before.
	own *ownNode

	http      *http.Client
	sandboxes harenav1connect.SandboxServiceClient
	exec      harenav1connect.ExecServiceClient
	files     harenav1connect.FileServiceClient
	layers    harenav1connect.LayerServiceClient
	events    harenav1connect.EventServiceClient
	fleet     harenav1connect.FleetServiceClient
}

// the is set once, by TestMain.
var the *node

func TestMain(m *testing.M) {
	if root := os.Getenv(treeListRoot); root != "" {
		if err := listTree(root, nil, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "list:", err)
			os.Exit(1)
		}
		return
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "scenario:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	the = &node{url: os.Getenv("HARENA_URL"), token: os.Getenv("HARENA_TOKEN"),
		backend: env("HARENA_TEST_BACKEND", "container"), image: env("HARENA_TEST_IMAGE", "debian:12")}
	if the.url == "" {
		own, err := startOwn()
		if err != nil {
			return 1, err
		}
		the.own = own
		the.url, the.token = own.url, own.token
		defer func() {
			if derr := own.remove(); derr != nil && err == nil {
				code, err = 1, derr
			}
		}()
	}
	the.connect()
	if the.own != nil {
		if err := the.importBase(); err != nil {
			return 1, err
		}
	}
	return m.Run(), nil
}

func env(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}

// count is how often something is tried: ordinarily, or with HARENA_SOAK that share of full.
func count(ordinary, full int) int {
	share, _ := strconv.ParseFloat(os.Getenv("HARENA_SOAK"), 64)
	return max(ordinary, int(share*float64(full)))
}

// slowly is a deadline on a machine that may be slow.
func slowly(d time.Duration) time.Duration {
	times, _ := strconv.Atoi(os.Getenv("HARENA_TEST_SLOW"))
	return d * time.Duration(max(1, times))
}

func (n *node) connect() {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	n.http = &http.Client{Transport: bearer{n.token, &http.Transport{Protocols: protocols}}}
	n.sandboxes = harenav1connect.NewSandboxServiceClient(n.http, n.url)
	n.exec = harenav1connect.NewExecServiceClient(n.http, n.url)
	n.files = harenav1connect.NewFileServiceClient(n.http, n.url)
	n.layers = harenav1connect.NewLayerServiceClient(n.http, n.url)
	n.events = harenav1connect.NewEventServiceClient(n.http, n.url)
	n.fleet = harenav1connect.NewFleetServiceClient(n.http, n.url)
}

type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

// importBase makes the image of the scenarios from real packages, by the line with which the README begins.
func (n *node) importBase() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if _, err := n.layers.Get(ctx, connect.NewRequest(&harenav1.GetLayerRequest{Name: n.image})); err == nil {
		return nil
	}
	blocks, err := readmeBlocks()
	if err != nil {
		return err
	}
	line, _, _ := strings.Cut(blocks["cli"], "\n")
	if !strings.HasPrefix(line, "harena layer import --name "+n.image+" ") {
		return fmt.Errorf("README.md does not begin with the import of %s but with %q", n.image, line)
	}
	fmt.Println("scenario:", line)
	if out, err := n.shell(ctx, line); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

// shell runs a script as a user of the CLI would, with the node's address and token in its environment.
func (n *node) shell(ctx context.Context, script string) (string, error) {
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
	cmd.Env = append(os.Environ(), "HARENA_URL="+n.url, "HARENA_TOKEN="+n.token, "PATH="+filepath.Dir(program("harena"))+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// readmeBlocks returns the README's shell blocks that are marked <!-- test: NAME -->.
func readmeBlocks() (map[string]string, error) {
	text, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		return nil, err
	}
	blocks := map[string]string{}
	for _, part := range strings.Split(string(text), "<!-- test: ")[1:] {
		name, rest, _ := strings.Cut(part, " -->\n```sh\n")
		block, _, ok := strings.Cut(rest, "```")
		if !ok {
			return nil, fmt.Errorf("README.md: the block %q is not closed", name)
		}
		blocks[name] = block
	}
	return blocks, nil
}

// ownNode is a `harena up` of this suite.
type ownNode struct {
	dir, url, token string
	flags           []string // of harena up, beside where
	cmd             *exec.Cmd
	exited          chan struct{}
	log             *os.File
	// watchdog waits for alive to be closed.
	watchdog *exec.Cmd
	alive    *os.File
}

func program(name string) string {
	path, _ := filepath.Abs(filepath.Join("..", "..", "bin", name))
	return path
}

func startOwn() (*ownNode, error) {
	if os.Getuid() != 0 {
		return nil, fmt.Errorf("run the scenarios as root: sandboxes need it")
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-scenario-")
	if err != nil {
		return nil, err
	}
	// Packages that an earlier run fetched are used again.
	if cache := os.Getenv("HARENA_TEST_DATA"); cache != "" {
		_ = os.Remove(dir)
		dir = cache
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	o := &ownNode{dir: dir}
	if err := o.watch(); err != nil {
		return nil, err
	}
	return o, o.start()
}

// watch ends the node when this process ends without having done so: interrupted, timed out, killed.
func (o *ownNode) watch() error {
	o.watchdog = exec.Command("sh", "-c", `read -r _ || exec "$0" down --data "$1" >/dev/null 2>&1`, program("harena"), o.dir)
	o.watchdog.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	o.watchdog.Stdin = r
	if err := o.watchdog.Start(); err != nil {
		w.Close()
		return err
	}
	o.alive = w
	return nil
}

// start starts, or starts again, the server on the node's directory.
func (o *ownNode) start() error {
	listen := "127.0.0.1:0"
	if o.url != "" {
		listen = strings.TrimPrefix(o.url, "http://")
	} else {
		l, err := net.Listen("tcp", listen)
		if err != nil {
			return err
		}
		listen = l.Addr().String()
		l.Close()
	}
	log, err := os.OpenFile(o.dir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	o.log = log
	o.cmd = exec.Command(program("harena"), append([]string{"up", "--data", o.dir, "--listen", listen}, o.flags...)...)
	o.cmd.Stderr = log
	// A process group of its own: what a terminal's Ctrl-C would reach is tested separately.
	o.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := o.cmd.Start(); err != nil {
		return fmt.Errorf("start %s (make build first): %w", o.cmd.Path, err)
	}
	ready := make(chan bool, 1)
	o.exited = make(chan struct{})
	go func() {
		s := bufio.NewScanner(out)
		for s.Scan() {
			fmt.Fprintln(log, s.Text())
			if strings.HasPrefix(s.Text(), "ready") {
				ready <- true
			}
		}
		_ = o.cmd.Wait()
		close(o.exited)
	}()
	select {
	case <-ready:
	case <-o.exited:
		return fmt.Errorf("harena up ended: %s", o.logTail())
	case <-time.After(slowly(time.Minute)):
		return fmt.Errorf("harena up was not ready in time: %s", o.logTail())
	}
	profile, err := os.ReadFile(filepath.Join(o.dir, "client.json"))
	if err != nil {
		return err
	}
	var p struct{ URL, Token string }
	if err := json.Unmarshal(profile, &p); err != nil {
		return err
	}
	o.url, o.token = p.URL, p.Token
	if the.own == o {
		the.connect() // a connection that was being made to the server that was killed would fail a call to this one
	}
	return nil
}

func (o *ownNode) logTail() string {
	b, _ := os.ReadFile(o.dir + ".log")
	if len(b) > 4000 {
		b = b[len(b)-4000:]
	}
	return string(b)
}

// kill ends the server as a power cut of the process would.
func (o *ownNode) kill() {
	_ = o.cmd.Process.Kill()
	<-o.exited
	o.log.Close()
}

// remove stops everything and fails when something is left.
func (o *ownNode) remove() error {
	out, err := exec.Command(program("harena"), "down", "--data", o.dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("harena down: %w: %s", err, out)
	}
	_, _ = o.alive.WriteString("\n")
	_ = o.watchdog.Wait()
	select {
	case <-o.exited:
	case <-time.After(slowly(30 * time.Second)):
		return fmt.Errorf("the server still runs long after harena down")
	}
	o.log.Close()
	if err := o.leftovers(); err != nil {
		return err
	}
	if os.Getenv("HARENA_TEST_DATA") != "" {
		return nil
	}
	_ = os.Remove(o.dir + ".log")
	return os.RemoveAll(o.dir)
}

// leftovers looks at the node itself, not at what Harena says of it.
func (o *ownNode) leftovers() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var left []string
	for line := range bytes.Lines(mounts) {
		if bytes.Contains(line, []byte(o.dir)) {
			left = append(left, "mount "+string(line))
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, p := range procs {
		if exe, err := os.Readlink(p); err == nil && strings.HasPrefix(exe, o.dir) {
			left = append(left, "process "+p+" "+exe)
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("left after harena down: %s", strings.Join(left, "; "))
	}
	return nil
}

// needOwn skips scenarios that kill or inspect the node itself.
func needOwn(t *testing.T) *ownNode {
	t.Helper()
	if the.own == nil {
		t.Skip("this scenario kills or inspects the node; it needs a node of the suite's own (unset HARENA_URL)")
	}
	return the.own
}
