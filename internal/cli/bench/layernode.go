package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// A store of the bench's own: versitygw, a small S3 server whose buckets are directories.
type remote struct {
	dir  string // of buckets
	addr string
	cmd  *exec.Cmd
}

const (
	remoteKey    = "bench"
	remoteSecret = "harena-bench-secret"
)

func startRemote(ctx context.Context, dir string) (*remote, error) {
	program, ok := installed("versitygw")
	if !ok {
		return nil, errors.New("this measure needs an S3 server: versitygw is not on PATH (make bench builds it: scripts/tools-dir versitygw)")
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	cmd := exec.Command(program, "--quiet", "--keep-alive", "--port", addr, "posix", dir)
	cmd.Env = []string{"ROOT_ACCESS_KEY=" + remoteKey, "ROOT_SECRET_KEY=" + remoteSecret}
	cmd.SysProcAttr = ownGroup()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	r := &remote{dir, addr, cmd}
	for range 100 {
		if c, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
			c.Close()
			return r, nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			r.stop()
			return nil, ctx.Err()
		}
	}
	r.stop()
	return nil, fmt.Errorf("versitygw does not listen at %s", addr)
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

func (r *remote) stop() {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
}

// ownGroup keeps a terminal's interrupt from servers: they are ended in order.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// bucket makes a bucket and returns the URL under which addr, the server's or a link's to it, has it.
func (r *remote) bucket(name, addr string) (string, error) {
	if err := os.MkdirAll(filepath.Join(r.dir, name), 0o755); err != nil {
		return "", err
	}
	return fmt.Sprintf("s3://%s?endpoint=http://%s", name, addr), nil
}

// metas lists the metadata images of a bucket's layers.
func (r *remote) metas(bucket string) (map[string]bool, error) {
	metas := map[string]bool{}
	err := filepath.WalkDir(filepath.Join(r.dir, bucket, "manifests"), func(path string, e os.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return filepath.SkipDir // nothing was imported yet
		}
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var m struct {
			Meta struct{ Digest string }
		}
		if err := json.Unmarshal(b, &m); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		metas[strings.TrimPrefix(m.Meta.Digest, "sha256:")] = true
		return nil
	})
	return metas, err
}

// objects lists the files of a bucket's data blobs.
func (r *remote) objects(bucket string) (files []string, bytes int64, err error) {
	err = filepath.WalkDir(filepath.Join(r.dir, bucket, "blobs"), func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			files, bytes = append(files, path), bytes+info.Size()
		}
		return err
	})
	return files, bytes, err
}

// benchNode is a node of the bench's own.
type benchNode struct {
	data   string
	cmd    *exec.Cmd
	log    *os.File
	client *harena.Client
}

// harenaProgram is the harena to start nodes of: this one.
func harenaProgram() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	if name := filepath.Base(self); name == "harena" {
		return self, nil
	}
	return exec.LookPath("harena")
}

// startNode starts a node on a directory, with a store unless that is empty.
func startNode(ctx context.Context, data, store string) (_ *benchNode, err error) {
	program, err := harenaProgram()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, err
	}
	args := []string{"up", "--data", data, "--listen", "127.0.0.1:0"}
	if store != "" {
		args = append(args, "--store", store)
	}
	n := &benchNode{data: data, cmd: exec.Command(program, args...)}
	n.cmd.SysProcAttr = ownGroup()
	n.cmd.Env = append(os.Environ(), "AWS_ACCESS_KEY_ID="+remoteKey, "AWS_SECRET_ACCESS_KEY="+remoteSecret, "AWS_SESSION_TOKEN=")
	out, err := n.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if n.log, err = os.Create(data + ".log"); err != nil {
		return nil, err
	}
	n.cmd.Stderr = n.log
	if err := n.cmd.Start(); err != nil {
		n.log.Close()
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.stop(context.WithoutCancel(ctx)))
		}
	}()
	ready := make(chan error, 1)
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "ready") {
				ready <- nil
				_, _ = io.Copy(io.Discard, out)
				return
			}
		}
		text, _ := os.ReadFile(n.log.Name())
		ready <- fmt.Errorf("a node did not start: %s", lastLine(string(text)))
	}()
	select {
	case err := <-ready:
		if err != nil {
			return nil, err
		}
	case <-time.After(time.Minute):
		return nil, errors.New("a node was not ready after a minute")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	// Not FromEnv: the environment may name another node.
	profile, err := os.ReadFile(filepath.Join(data, "client.json"))
	if err != nil {
		return nil, err
	}
	var p struct{ URL, Token string }
	if err = json.Unmarshal(profile, &p); err != nil {
		return nil, err
	}
	n.client, err = harena.New(harena.WithURL(p.URL), harena.WithToken(p.Token))
	return n, err
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// object finds the file of one of the named objects among the node's own.
func (n *benchNode) object(names map[string]bool) (path string, err error) {
	err = filepath.WalkDir(filepath.Join(n.data, "layers"), func(p string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && names[e.Name()] {
			path = p
		}
		return err
	})
	if err == nil && path == "" {
		err = fmt.Errorf("none of %d objects is below %s", len(names), n.data)
	}
	return path, err
}

// stop ends the node, its sandboxes and its daemons, and removes its data.
func (n *benchNode) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if n.client != nil {
		n.client.Close()
	}
	out, err := exec.CommandContext(ctx, n.cmd.Path, "down", "--data", n.data).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("harena down --data %s: %w: %s", n.data, err, lastLine(string(out)))
		_ = n.cmd.Process.Kill()
	}
	_ = n.cmd.Wait()
	n.log.Close()
	if err == nil {
		err = os.RemoveAll(n.data)
	}
	return err
}
