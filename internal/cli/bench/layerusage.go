package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// usage is what the whole machine has used, so it means something only where nothing else runs.
type usage struct {
	cpu     float64 // ms of all processors
	written float64 // kB to its disks
}

func readUsage() (usage, error) {
	unix.Sync() // what was written counts for whom wrote it
	var u usage
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	// cpu user nice system idle iowait irq softirq steal, in ticks of 10 ms.
	fields := strings.Fields(string(stat[:bytes.IndexByte(stat, '\n')]))
	for i, f := range fields[1:] {
		ticks, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return u, fmt.Errorf("/proc/stat: %w", err)
		}
		if i != 3 && i != 4 && i < 7 {
			u.cpu += ticks * 10
		}
	}
	disks, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return u, err
	}
	lines := bufio.NewScanner(bytes.NewReader(disks))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 {
			continue
		}
		// Partitions and loops are counted with the disk that they are on.
		if _, err := os.Stat("/sys/block/" + f[2] + "/device"); err != nil {
			continue
		}
		sectors, err := strconv.ParseFloat(f[9], 64)
		if err != nil {
			return u, fmt.Errorf("/proc/diskstats: %w", err)
		}
		u.written += sectors * 512 / 1e3
	}
	return u, lines.Err()
}

// dockerPull measures docker where its daemon runs: the image from a registry of the bench's own behind the same link.
func (b *layerBench) dockerPull(ctx context.Context) error {
	docker, ok := installed("docker")
	if !ok {
		return nil
	}
	probe, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if exec.CommandContext(probe, docker, "version", "--format", "{{.Server.Version}}").Run() != nil {
		return nil // only the client is installed
	}
	registry, stop, err := serveRegistry(b.gz)
	if err != nil {
		return err
	}
	defer stop()
	k, err := b.link(registry)
	if err != nil {
		return err
	}
	image := k.addr() + "/bench:1"
	var samples []time.Duration
	for range b.n(3) {
		start := time.Now()
		if out, err := exec.CommandContext(ctx, docker, "pull", image).CombinedOutput(); err != nil {
			return fmt.Errorf("docker pull: %w: %s", err, lastLine(string(out)))
		}
		runErr := wantReady(exec.CommandContext(ctx, docker, "run", "--rm", "--network=none", image, "/bin/sh", "-c", jobs()["echo"]))
		samples = append(samples, time.Since(start))
		if out, err := exec.CommandContext(context.WithoutCancel(ctx), docker, "rmi", image).CombinedOutput(); err != nil {
			return errors.Join(runErr, fmt.Errorf("docker rmi: %w: %s", err, lastLine(string(out))))
		}
		if runErr != nil {
			return runErr
		}
		b.progress("layer: docker pull and run")
	}
	r := summarise("layer_docker_pull_run_echo", samples, 0)
	for i := range b.results {
		if b.results[i].Name == "layer_cold_echo" {
			b.results[i].Peers["docker"] = r.P50
		}
	}
	b.add(r)
	return nil
}
