package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// diffBytes is what a sandbox changes before it is captured.
const diffBytes = 10 << 20

// changed makes a sandbox that has changed 10 MB, half of it in one file and half in 500.
func (r *runner) changed(ctx context.Context) (*harena.Sandbox, error) {
	sb, err := r.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	script := `B=; [ -x /bin/busybox ] && B=/bin/busybox; $B mkdir -p /work && cd /work && i=0 && while [ $i -lt 500 ]; do $B head -c 10240 /dev/urandom > f$i; i=$((i+1)); done; $B head -c 5242880 /dev/urandom > big`
	res, err := sb.Run(ctx, harena.Cmd{Shell: script})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("change files: exit %d: %s", res.ExitCode, res.Stderr)
	}
	if err != nil {
		return nil, errors.Join(err, sb.Remove(context.WithoutCancel(ctx)))
	}
	return sb, nil
}

// timings are the steps that an operation told.
func (l laps) told(all []*harenav1.Timing) {
	for _, t := range all {
		l[t.GetStep()] = append(l[t.GetStep()], time.Duration(t.GetMicros())*time.Microsecond)
	}
}

// snapshot measures a snapshot of 10 MB of changes, one more after a line was added, and a start from the end of a chain of 50.
func snapshot(ctx context.Context, r *runner) ([]Result, error) {
	n := r.n(20)
	var whole, frozen, again []time.Duration
	var stored, storedAgain int64
	steps := laps{}
	for i := range n {
		name := fmt.Sprintf("harena-bench-snapshot:%d", i)
		sb, err := r.changed(ctx)
		if err != nil {
			return nil, err
		}
		err = func() error {
			defer func() { _ = sb.Remove(context.WithoutCancel(ctx)) }()
			start := time.Now()
			s, err := sb.Snapshot(ctx, harena.SnapshotOptions{Name: name})
			if err != nil {
				return err
			}
			whole, frozen, stored = append(whole, time.Since(start)), append(frozen, s.Frozen), s.StoredBytes
			steps.told(s.Timings)
			if _, err := sb.Run(ctx, harena.Cmd{Shell: "echo line >> /work/f1"}); err != nil {
				return err
			}
			start = time.Now()
			if s, err = sb.Snapshot(ctx, harena.SnapshotOptions{Name: name}); err != nil {
				return err
			}
			again, storedAgain = append(again, time.Since(start)), s.StoredBytes
			return nil
		}()
		if err != nil {
			return nil, err
		}
		if _, err := r.client.RemoveLayer(ctx, name); err != nil {
			return nil, err
		}
	}
	first := summarise("snapshot_10MB", whole, 0)
	first.Steps = steps.medians()
	first.Note = fmt.Sprintf("%d bytes stored of %d changed", stored, diffBytes)
	var notes []string
	first.Peers, notes = dockerCommits(ctx, min(n, 5))
	first.Note = strings.Join(append([]string{first.Note}, notes...), "; ")
	second := summarise("snapshot_after_one_line", again, 0)
	second.Note = fmt.Sprintf("%d bytes stored", storedAgain)
	chain, err := r.chain(ctx)
	if err != nil {
		return nil, err
	}
	return append([]Result{first, summarise("frozen_10MB", frozen, 0), second}, chain...), nil
}

// chain takes snapshots of sandboxes that were each made from the one before, and compares starts from its first and its last.
func (r *runner) chain(ctx context.Context) ([]Result, error) {
	const length = 50
	image := r.o.Image
	name := func(i int) string { return fmt.Sprintf("harena-bench-chain:%d", i) }
	for i := range length {
		sb, err := r.client.CreateSandbox(ctx, harena.Spec{Image: image})
		if err != nil {
			return nil, err
		}
		_, err = sb.Run(ctx, harena.Cmd{Shell: fmt.Sprintf("B=; [ -x /bin/busybox ] && B=/bin/busybox; $B head -c 10240 /dev/urandom > /root/link%d", i)})
		if err == nil {
			_, err = sb.Snapshot(ctx, harena.SnapshotOptions{Name: name(i)})
		}
		if err = errors.Join(err, sb.Remove(context.WithoutCancel(ctx))); err != nil {
			return nil, err
		}
		image = name(i)
	}
	var out []Result
	for _, i := range []int{0, length - 1} {
		var samples []time.Duration
		for k := range 21 {
			start := time.Now()
			sb, err := r.client.CreateSandbox(ctx, harena.Spec{Image: name(i)})
			if err != nil {
				return nil, err
			}
			took := time.Since(start)
			if err := sb.Remove(ctx); err != nil {
				return nil, err
			}
			if k > 0 { // the first one mounts
				samples = append(samples, took)
			}
		}
		out = append(out, summarise(fmt.Sprintf("create_from_chain_of_%d", i+1), samples, 0))
	}
	for i := range length {
		if _, err := r.client.RemoveLayer(ctx, name(i)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// forks measures a fork of a sandbox with 10 MB of changes into 1 and into 100.
func forks(ctx context.Context, r *runner) ([]Result, error) {
	sb, err := r.changed(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Remove(context.WithoutCancel(ctx)) }()
	var out []Result
	for _, size := range []int{1, r.n(100)} {
		var whole, frozen []time.Duration
		steps := laps{}
		for range 5 {
			start := time.Now()
			f, err := sb.Fork(ctx, harena.ForkOptions{Count: size})
			if err != nil {
				return nil, err
			}
			whole, frozen = append(whole, time.Since(start)), append(frozen, f.Frozen)
			steps.told(f.Timings)
			if _, err := removeAll(ctx, f.Sandboxes, 8); err != nil {
				return nil, err
			}
		}
		x := summarise(fmt.Sprintf("fork_%d", size), whole, 0)
		x.Steps = steps.medians()
		out = append(out, x, summarise(fmt.Sprintf("fork_%d_frozen", size), frozen, 0))
	}
	var notes []string
	out[0].Peers, notes = dockerCommits(ctx, 5)
	out[0].Note = strings.Join(notes, "; ")
	return out, nil
}

// dockerCommits is the same job with Docker, where a daemon answers: commit of a container with 10 MB of changes, then run.
func dockerCommits(ctx context.Context, n int) (map[string]float64, []string) {
	docker, ok := installed("docker")
	if !ok {
		return nil, nil
	}
	probe, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if exec.CommandContext(probe, docker, "version", "--format", "{{.Server.Version}}").Run() != nil {
		return nil, nil // only the client is installed
	}
	dir, err := os.MkdirTemp("", "harena-bench-")
	if err != nil {
		return nil, []string{err.Error()}
	}
	defer os.RemoveAll(dir)
	if _, err := crunPeer(ctx, dir); err != nil { // makes the root file system
		return nil, []string{firstLine(err.Error())}
	}
	if p, err := dockerPeer(ctx, dir); err != nil || p == nil {
		return nil, []string{"docker is there but takes no image"}
	}
	run := func(args ...string) (string, error) {
		b, err := exec.CommandContext(ctx, docker, args...).Output()
		return strings.TrimSpace(string(b)), err
	}
	id, err := run("run", "-d", "--network=none", "harena-bench:latest", "/bin/busybox", "sh", "-c", "/bin/busybox head -c 10485760 /dev/urandom > /big; /bin/busybox sleep 600")
	if err != nil {
		return nil, []string{"docker run: " + firstLine(err.Error())}
	}
	defer func() { _, _ = run("rm", "-f", id) }()
	time.Sleep(time.Second) // it writes
	var commits, both []time.Duration
	for range n {
		start := time.Now()
		if _, err := run("commit", id, "harena-bench-commit:latest"); err != nil {
			return nil, []string{"docker commit: " + firstLine(err.Error())}
		}
		commits = append(commits, time.Since(start))
		if _, err := run("run", "--rm", "--network=none", "harena-bench-commit:latest", "/bin/busybox", "echo", "ready"); err != nil {
			return nil, []string{"docker run: " + firstLine(err.Error())}
		}
		both = append(both, time.Since(start))
	}
	_, _ = run("rmi", "-f", "harena-bench-commit:latest")
	return map[string]float64{"docker commit": median(commits), "docker commit+run": median(both)}, nil
}
