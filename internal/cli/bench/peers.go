package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// peer is another way to do what is measured: one container from create to the
// end of a command that prints a word.
type peer struct {
	name string
	run  func(ctx context.Context, i int) error
}

// peers returns those that work on this machine, and what releases them. A
// program that is installed but fails its first run is left out and named in notes.
func peers(ctx context.Context) (found []peer, notes []string, release func()) {
	dir, err := os.MkdirTemp("", "harena-bench-")
	if err != nil {
		return nil, []string{err.Error()}, func() {}
	}
	release = func() { _ = os.RemoveAll(dir) }
	for _, try := range []func(context.Context, string) (*peer, error){crunPeer, dockerPeer} {
		p, err := try(ctx, dir)
		if err == nil && p != nil {
			err = p.run(ctx, -1)
		}
		switch {
		case err != nil && p != nil:
			notes = append(notes, p.name+" is installed but does not run here: "+firstLine(err.Error()))
		case err != nil:
			notes = append(notes, firstLine(err.Error()))
		case p != nil:
			found = append(found, *p)
		}
	}
	return found, notes, release
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}

func installed(program string) (string, bool) {
	path, err := exec.LookPath(program)
	return path, err == nil
}

// crunPeer runs an OCI bundle with the namespaces, ID maps and capabilities of
// an ordinary unprivileged container.
func crunPeer(_ context.Context, dir string) (*peer, error) {
	crun, ok := installed("crun")
	if !ok {
		return nil, nil
	}
	argv, err := staticTrue()
	if err != nil {
		return nil, err
	}
	root := filepath.Join(dir, "rootfs")
	for _, d := range []string{"bin", "proc", "dev", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return nil, err
		}
	}
	busybox, err := os.ReadFile(argv[0])
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), busybox, 0o755); err != nil {
		return nil, err
	}
	type m = map[string]any
	config, err := json.Marshal(m{
		"ociVersion": "1.0.2",
		"root":       m{"path": root},
		"process": m{"args": []string{"/bin/busybox", "echo", "ready"}, "cwd": "/", "user": m{"uid": 0, "gid": 0},
			"capabilities": m{"bounding": []string{"CAP_KILL"}, "effective": []string{"CAP_KILL"}, "permitted": []string{"CAP_KILL"}}},
		"mounts": []m{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}},
		},
		"linux": m{
			"namespaces":  []m{{"type": "user"}, {"type": "pid"}, {"type": "mount"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "cgroup"}},
			"uidMappings": []m{{"containerID": 0, "hostID": 1 << 30, "size": 1 << 16}},
			"gidMappings": []m{{"containerID": 0, "hostID": 1 << 30, "size": 1 << 16}},
		},
	})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644); err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, err
	}
	return &peer{name: "crun", run: func(ctx context.Context, i int) error {
		cmd := exec.CommandContext(ctx, crun, "run", "--bundle", dir, fmt.Sprintf("harena-bench-%d-%d", os.Getpid(), i))
		return withoutHybridCgroups(func() error { return wantReady(cmd) })
	}}, nil
}

// withoutHybridCgroups calls f on a thread whose mount namespace has no cgroup2
// beside v1 controllers: crun 1.8 refuses nodes that have both.
func withoutHybridCgroups(f func() error) error {
	const unified = "/sys/fs/cgroup/unified"
	if _, err := os.Stat(unified); err != nil {
		return f()
	}
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread, and with it the namespace, ends with this goroutine.
		runtime.LockOSThread()
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("unshare: %w", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return fmt.Errorf("make mounts private: %w", err)
			}
			if err := unix.Unmount(unified, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", unified, err)
			}
			return f()
		}()
	}()
	return <-done
}

// dockerPeer runs busybox from an image it makes; without a daemon there is no peer.
func dockerPeer(ctx context.Context, dir string) (*peer, error) {
	docker, ok := installed("docker")
	if !ok {
		return nil, nil
	}
	probe, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if exec.CommandContext(probe, docker, "version", "--format", "{{.Server.Version}}").Run() != nil {
		return nil, nil // only the client is installed
	}
	tar := exec.CommandContext(ctx, "tar", "-C", filepath.Join(dir, "rootfs"), "-c", ".")
	load := exec.CommandContext(ctx, docker, "import", "-", "harena-bench:latest")
	pipe, err := tar.StdoutPipe()
	if err != nil {
		return nil, err
	}
	load.Stdin = pipe
	if err := tar.Start(); err != nil {
		return nil, err
	}
	loadErr := load.Run()
	if err := tar.Wait(); err != nil {
		return nil, err
	}
	if loadErr != nil {
		return nil, fmt.Errorf("docker import: %w", loadErr)
	}
	return &peer{name: "docker", run: func(ctx context.Context, _ int) error {
		return wantReady(exec.CommandContext(ctx, docker, "run", "--rm", "--network=none", "harena-bench:latest", "/bin/busybox", "echo", "ready"))
	}}, nil
}

func wantReady(cmd *exec.Cmd) error {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, firstLine(stderr.String()))
	}
	if strings.TrimSpace(string(out)) != "ready" {
		return fmt.Errorf("%s printed %q", filepath.Base(cmd.Path), out)
	}
	return nil
}

// measurePeers times n runs of each peer, one at a time.
func measurePeers(ctx context.Context, n int) (map[string]float64, []string, error) {
	found, notes, release := peers(ctx)
	defer release()
	out := map[string]float64{}
	for _, p := range found {
		var samples []time.Duration
		for i := range n {
			start := time.Now()
			if err := p.run(ctx, i); err != nil {
				return nil, notes, err
			}
			samples = append(samples, time.Since(start))
		}
		out[p.name] = median(samples)
	}
	return out, notes, nil
}
