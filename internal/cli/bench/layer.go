package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/harena-dev/harena/sdk/go/harena"
)

const (
	// The link between nodes and their store.
	linkDelay = 5 * time.Millisecond
	linkRate  = 100e6

	layerImage = "bench-layer:1"
	imageSize  = 1500 << 20 // of the image, unless told
	layerSize  = 256 << 20  // of the file that is read in sequence
)

// layerBench is what the parts of the measure share. It uses nodes of its own, not the client's: a cold
// start needs a node that has nothing.
type layerBench struct {
	*runner
	scratch string
	remote  *remote
	links   []*link
	tar, gz string // the image
	results []Result
}

// layers measures how environments get to a node: a store that is 5 ms away and gives 100 MB/s.
func layers(ctx context.Context, r *runner) (_ []Result, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("this measure starts nodes, which takes root")
	}
	scratch, err := os.MkdirTemp("/var/tmp", "harena-bench-layer-")
	if err != nil {
		return nil, err
	}
	b := &layerBench{runner: r, scratch: scratch}
	defer func() {
		for _, k := range b.links {
			k.close()
		}
		if b.remote != nil {
			b.remote.stop()
		}
		err = errors.Join(err, removeScratch(scratch))
	}()
	if b.remote, err = startRemote(ctx, filepath.Join(scratch, "store")); err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context) error{b.makeImage, b.touch, b.coldAndWarm, b.local, b.eager, b.pull, b.sequential, b.burst, b.workspaces} {
		if err := part(ctx); err != nil {
			return nil, err
		}
	}
	return b.results, nil
}

// removeScratch removes all that was written, also after a failure, unless a node that could not be stopped has something mounted there.
func removeScratch(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	if strings.Contains(string(mounts), " "+dir+"/") {
		return fmt.Errorf("a node has mounts below %s still: end it with harena down --data, then remove the directory", dir)
	}
	return os.RemoveAll(dir)
}

func (b *layerBench) imageSize() int64 {
	if b.o.Size > 0 {
		return b.o.Size
	}
	return imageSize
}

func (b *layerBench) link(target string) (*link, error) {
	k, err := newLink(target, linkDelay, linkRate)
	if err == nil {
		b.links = append(b.links, k)
	}
	return k, err
}

func (b *layerBench) path(name string) string { return filepath.Join(b.scratch, name) }

// with runs f with a node that has nothing yet, whose store is on a link.
func (b *layerBench) with(ctx context.Context, bucket string, f func(*benchNode, *link) error) error {
	k, err := b.link(b.remote.addr)
	if err != nil {
		return err
	}
	url, err := b.remote.bucket(bucket, k.addr())
	if err != nil {
		return err
	}
	metas, err := b.remote.metas(bucket)
	if err != nil {
		return err
	}
	k.kind = func(head []byte) string { return storeKind(head, metas) }
	n, err := startNode(ctx, b.path("node"), url)
	if err != nil {
		return err
	}
	k.moved()
	return errors.Join(f(n, k), n.stop(ctx))
}

// fill runs f with a node that writes to a bucket, without a link in between.
func (b *layerBench) fill(ctx context.Context, bucket string, f func(*benchNode) error) error {
	url, err := b.remote.bucket(bucket, b.remote.addr)
	if err != nil {
		return err
	}
	n, err := startNode(ctx, b.path("filler"), url)
	if err != nil {
		return err
	}
	return errors.Join(f(n), n.stop(ctx))
}

// makeImage makes the image and puts it into the store.
func (b *layerBench) makeImage(ctx context.Context) error {
	b.tar, b.gz = b.path("image.tar"), b.path("image.tar.gz")
	b.progress("layer: an image of this machine's programs")
	if err := writeTree(ctx, b.tar, b.imageSize()); err != nil {
		return err
	}
	if err := gzipFile(ctx, b.tar, b.gz); err != nil {
		return err
	}
	return b.fill(ctx, "image", func(n *benchNode) error {
		b.progress("layer: import")
		start := time.Now()
		_, _, err := n.client.ImportLayer(ctx, harena.ImportOptions{Name: layerImage, Source: "tar:" + b.tar})
		if err != nil {
			return err
		}
		b.add(summarise("layer_import", []time.Duration{time.Since(start)}, 0))
		_, stored, err := b.remote.objects("image")
		if err != nil {
			return err
		}
		b.add(amount("layer_stored", "MB", float64(stored)/1e6))
		return nil
	})
}

// jobs are what is run in containers of the image; what each prints is not looked at.
func jobs() map[string]string {
	return map[string]string{
		"echo":   "echo ready",
		"python": "python3 -c 'import json, re, subprocess, urllib.request; print(1)'",
		"cc":     "echo 'int main(void) { return 0; }' > /tmp/a.c && gcc -O2 -o /tmp/a /tmp/a.c && /tmp/a && echo built",
	}
}

// touch counts the pages that each job touches when nothing is read ahead.
func (b *layerBench) touch(ctx context.Context) error {
	for range 5 {
		ok := false
		err := b.fill(ctx, "image", func(n *benchNode) error {
			before, err := erofsDevices()
			if err != nil {
				return err
			}
			tree, err := n.mounted(ctx, layerImage)
			if err != nil {
				return err
			}
			if ok, err = stopReadAhead(before); err != nil || !ok {
				return err
			}
			metas, err := b.remote.metas("image")
			if err != nil {
				return err
			}
			meta, err := n.object(metas)
			if err != nil {
				return err
			}
			return b.touchPages(ctx, n, pages{tree}, pages{meta})
		})
		if err != nil || ok {
			return err
		}
	}
	return errors.New("other layers are mounted all the time: run this measure on a machine that is idle")
}

func (b *layerBench) touchPages(ctx context.Context, n *benchNode, data, meta pages) error {
	for _, job := range []string{"echo", "python", "cc"} {
		// Inodes and names as well: what the kernel still knows it does not read again.
		if err := errors.Join(data.drop(), os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0), meta.drop()); err != nil {
			return err
		}
		sb, err := n.client.CreateSandbox(ctx, harena.Spec{Image: layerImage})
		if err != nil {
			return err
		}
		res, err := sb.Run(ctx, harena.Cmd{Shell: jobs()[job]})
		if err := errors.Join(err, sb.Remove(ctx)); err != nil {
			return err
		}
		if res.ExitCode != 0 {
			b.progress("layer: %s does not work in the image: %s", job, firstLine(string(res.Stderr)))
			continue
		}
		metaTouched, err := meta.touched() // first: looking for files touches it
		if err != nil {
			return err
		}
		dataTouched, err := data.touched()
		if err != nil {
			return err
		}
		r := amount("layer_touched_by_"+job, "kB", float64(dataTouched+metaTouched)/1e3)
		r.Steps = map[string]float64{"data": float64(dataTouched) / 1e3, "metadata images": float64(metaTouched) / 1e3}
		b.add(r)
	}
	return nil
}

func (b *layerBench) add(r Result) {
	b.results = append(b.results, r)
	line := fmt.Sprintf("%s: %.2f %s", strings.TrimPrefix(r.Name, "layer_"), r.P50, r.Unit)
	for peer, p50 := range r.Peers {
		line += fmt.Sprintf(", %s %.2f", peer, p50)
	}
	b.progress("layer: %s", line) // at once: the whole takes minutes
}

// amount is a result of things that are not times.
func amount(name, unit string, values ...float64) Result {
	samples := make([]time.Duration, len(values))
	for i, v := range values {
		samples[i] = time.Duration(v * float64(time.Millisecond))
	}
	r := summarise(name, samples, 0)
	r.Unit = unit
	return r
}

// runJob creates a sandbox, runs a job in it and returns when the first of its output came.
func runJob(ctx context.Context, c *harena.Client, spec harena.Spec, shell string) (time.Duration, *harena.Sandbox, error) {
	start := time.Now()
	sb, err := c.CreateSandbox(ctx, spec)
	if err != nil {
		return 0, nil, err
	}
	first := &firstWrite{}
	res, err := sb.Run(ctx, harena.Cmd{Shell: shell, Stdout: first})
	if err == nil && (res.ExitCode != 0 || first.at.IsZero()) {
		err = fmt.Errorf("%q in a new sandbox: exit %d %s %s", shell, res.ExitCode, res.Message, firstLine(string(res.Stderr)))
	}
	if err != nil {
		return 0, nil, errors.Join(err, sb.Remove(context.WithoutCancel(ctx)))
	}
	return first.at.Sub(start), sb, nil
}

// coldAndWarm starts the first and the second container of an image on nodes that have nothing of it.
func (b *layerBench) coldAndWarm(ctx context.Context) error {
	for _, job := range []string{"echo", "python", "cc"} {
		if !b.has("layer_touched_by_" + job) {
			continue
		}
		var cold, warm []time.Duration
		var coldMoved, warmMoved []traffic
		for range b.n(3) {
			err := b.with(ctx, "image", func(n *benchNode, k *link) error {
				spec := harena.Spec{Image: layerImage}
				took, sb, err := runJob(ctx, n.client, spec, jobs()[job])
				if err != nil {
					return err
				}
				// What comes in the background is of the first.
				if err := errors.Join(sb.Remove(ctx), k.quiet(ctx)); err != nil {
					return err
				}
				cold, coldMoved = append(cold, took), append(coldMoved, k.moved())
				if took, sb, err = runJob(ctx, n.client, spec, jobs()[job]); err != nil {
					return err
				}
				err = errors.Join(sb.Remove(ctx), k.quiet(ctx))
				warm, warmMoved = append(warm, took), append(warmMoved, k.moved())
				return err
			})
			if err != nil {
				return err
			}
			b.progress("layer: cold %s", job)
		}
		b.add(summarise("layer_cold_"+job, cold, 0))
		moved := movedBytes("layer_cold_"+job+"_moved", coldMoved...)
		b.add(moved)
		touched, _ := b.result("layer_touched_by_" + job)
		b.add(amount("layer_cold_"+job+"_moved_by_touched", "×", moved.P50/touched.P50))
		b.add(amount("layer_cold_"+job+"_data_by_touched", "×", moved.Steps["data"]/touched.Steps["data"]))
		b.add(summarise("layer_warm_"+job, warm, 0))
		b.add(movedBytes("layer_warm_"+job+"_moved", warmMoved...))
	}
	return nil
}

// movedBytes is a result of what went over a link, with each kind of it as a step.
func movedBytes(name string, all ...traffic) Result {
	var total, requests []float64
	kinds := map[string][]float64{}
	for _, t := range all {
		total, requests = append(total, float64(t.bytes)/1e3), append(requests, float64(t.requests))
		for kind := range t.kinds {
			kinds[kind] = nil
		}
	}
	for _, t := range all {
		for kind := range kinds {
			kinds[kind] = append(kinds[kind], float64(t.kinds[kind])/1e3)
		}
	}
	r := amount(name, "kB", total...)
	r.Steps = map[string]float64{}
	for kind, samples := range kinds {
		r.Steps[kind] = amount("", "", samples...).P50
	}
	r.Note = fmt.Sprintf("%.0f requests", amount("", "", requests...).P50)
	return r
}

func (b *layerBench) has(name string) bool {
	_, ok := b.result(name)
	return ok
}

func (b *layerBench) result(name string) (Result, bool) {
	for _, r := range b.results {
		if r.Name == name {
			return r, true
		}
	}
	return Result{}, false
}

// serveFiles serves a directory over HTTP behind a link.
func (b *layerBench) serveFiles(dir string) (base string, k *link, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, nil, err
	}
	s := &http.Server{Handler: http.FileServer(http.Dir(dir)), ReadHeaderTimeout: time.Minute}
	go func() { _ = s.Serve(l) }()
	if k, err = b.link(l.Addr().String()); err != nil {
		s.Close()
		return "", nil, nil, err
	}
	return "http://" + k.addr() + "/", k, func() { s.Close() }, nil
}

func fetch(ctx context.Context, url string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	// What is served is compressed already, and nothing is kept open beyond the bench.
	t := &http.Transport{DisableCompression: true, DisableKeepAlives: true}
	res, err := t.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		res.Body.Close()
		return nil, fmt.Errorf("GET %s: %s", url, res.Status)
	}
	return res.Body, nil
}

// eager copies all objects of the image over the same link and unpacks them, and adds the start of a container that has all.
func (b *layerBench) eager(ctx context.Context) error {
	files, _, err := b.remote.objects("image")
	if err != nil {
		return err
	}
	base, k, stop, err := b.serveFiles(b.remote.dir)
	if err != nil {
		return err
	}
	defer stop()
	warm, _ := b.result("layer_warm_echo")
	var samples []time.Duration
	var moved []float64
	for range b.n(3) {
		k.moved()
		start := time.Now()
		for _, file := range files {
			if err := copyObject(ctx, base+strings.TrimPrefix(file, b.remote.dir+"/"), b.path("copy")); err != nil {
				return err
			}
		}
		samples = append(samples, time.Since(start)+time.Duration(warm.P50*float64(time.Millisecond)))
		moved = append(moved, float64(k.moved().bytes)/1e3)
	}
	b.add(summarise("layer_eager_copy_echo", samples, 0))
	b.add(amount("layer_eager_copy_moved", "kB", moved...))
	return os.Remove(b.path("copy"))
}

func copyObject(ctx context.Context, url, to string) error {
	body, err := fetch(ctx, url)
	if err != nil {
		return err
	}
	defer body.Close()
	z, err := zstd.NewReader(body)
	if err != nil {
		return err
	}
	defer z.Close()
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, z)
	return errors.Join(err, f.Close())
}

// pull does what pulling and running the image takes at the least: its tar.gz over the same link, unpacked as it comes, and a command.
func (b *layerBench) pull(ctx context.Context) error {
	base, _, stop, err := b.serveFiles(b.scratch)
	if err != nil {
		return err
	}
	defer stop()
	root := b.path("unpacked")
	var samples []time.Duration
	for range b.n(3) {
		if err := os.Mkdir(root, 0o755); err != nil {
			return err
		}
		start := time.Now()
		body, err := fetch(ctx, base+filepath.Base(b.gz))
		if err != nil {
			return err
		}
		tar := exec.CommandContext(ctx, "tar", "-xzp", "-C", root)
		tar.Stdin = body
		out, err := tar.CombinedOutput()
		body.Close()
		if err != nil {
			return fmt.Errorf("tar: %w: %s", err, lastLine(string(out)))
		}
		if err := wantReady(exec.CommandContext(ctx, "chroot", root, "/bin/sh", "-c", jobs()["echo"])); err != nil {
			return err
		}
		samples = append(samples, time.Since(start))
		if err := os.RemoveAll(root); err != nil {
			return err
		}
		b.progress("layer: pull and unpack")
	}
	r := summarise("layer_pull_unpack_echo", samples, 0)
	r.Note = "tar.gz over the same link, unpacked while it comes, chroot: less than docker pull and run do"
	for i := range b.results {
		if b.results[i].Name == "layer_cold_echo" {
			b.results[i].Peers = map[string]float64{"pull+unpack": r.P50}
		}
	}
	b.add(r)
	return b.dockerPull(ctx)
}

// sequential reads a large file of a layer that the node has nothing of.
func (b *layerBench) sequential(ctx context.Context) error {
	const name = "bench-sequential:1"
	file := b.path("random.tar")
	if err := randomTar(file, "big", layerSize); err != nil {
		return err
	}
	err := b.fill(ctx, "image", func(n *benchNode) error {
		_, _, err := n.client.ImportLayer(ctx, harena.ImportOptions{Name: name, Kind: "toolkit", Source: "tar:" + file})
		return err
	})
	if err != nil {
		return err
	}
	var speed []float64
	for range b.n(3) {
		err := b.with(ctx, "image", func(n *benchNode, _ *link) error {
			_, sb, err := runJob(ctx, n.client, harena.Spec{Image: layerImage, Toolkits: []string{name}}, "echo ready")
			if err != nil {
				return err
			}
			start := time.Now()
			res, err := sb.Run(ctx, harena.Cmd{Shell: "cat /big | wc -c"})
			if err == nil && strings.TrimSpace(string(res.Stdout)) != fmt.Sprint(layerSize) {
				err = fmt.Errorf("reading %d bytes: %s", layerSize, res)
			}
			speed = append(speed, layerSize/1e6/time.Since(start).Seconds())
			return errors.Join(err, sb.Remove(ctx))
		})
		if err != nil {
			return err
		}
	}
	r := amount("layer_sequential_cold_read", "MB/s", speed...)
	r.Floor = linkRate / 1e6
	b.add(r)
	return nil
}
