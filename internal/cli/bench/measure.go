package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// Options say what to measure and how much of it. Zero values are each measure's defaults.
type Options struct {
	N           int
	Concurrency int
	// Image is a base layer with a shell; empty: a layer of busybox that is made when it is missing.
	Image string
	// Size is the content of the image that the measure of layers makes, in bytes.
	Size int64
	// Progress gets a line now and then; nil: none.
	Progress io.Writer
}

// measures are the benchmarks by name.
var measures = map[string]func(context.Context, *runner) ([]Result, error){
	"create":   create,
	"exec":     execute,
	"burst":    burst,
	"density":  density,
	"pause":    pause,
	"layer":    layers,
	"snapshot": snapshot,
	"fork":     forks,
}

// Names lists the measures.
func Names() []string {
	return []string{"create", "exec", "burst", "density", "pause", "layer", "snapshot", "fork"}
}

type runner struct {
	client *harena.Client
	o      Options
}

// Run measures what is named on the node behind client, which has to be this machine for the floor to mean anything.
func Run(ctx context.Context, client *harena.Client, name string, o Options) (*Report, error) {
	measure, ok := measures[name]
	if !ok {
		return nil, fmt.Errorf("no benchmark %q: use one of %s", name, strings.Join(Names(), ", "))
	}
	r := &runner{client: client, o: o}
	if name != "layer" { // which has nodes and images of its own
		if err := r.needImage(ctx); err != nil {
			return nil, err
		}
		// The first sandbox pays for mounts that all later ones share; it is not a sample.
		if err := r.once(ctx); err != nil {
			return nil, err
		}
	}
	results, err := measure(ctx, r)
	if err != nil {
		return nil, err
	}
	return &Report{Machine: machine(), Results: results}, nil
}

func (r *runner) n(fallback int) int {
	if r.o.N > 0 {
		return r.o.N
	}
	return fallback
}

func (r *runner) progress(format string, args ...any) {
	if r.o.Progress != nil {
		fmt.Fprintf(r.o.Progress, format+"\n", args...)
	}
}

func (r *runner) sandbox(ctx context.Context) (*harena.Sandbox, error) {
	return r.client.CreateSandbox(ctx, r.spec())
}

func (r *runner) spec() harena.Spec {
	return harena.Spec{Image: r.o.Image, Labels: map[string]string{"bench": "yes"}, Memory: 256 << 20}
}

func (r *runner) once(ctx context.Context) error {
	sb, err := r.sandbox(ctx)
	if err != nil {
		return err
	}
	_, err = sb.Run(ctx, harena.Cmd{Argv: []string{"echo", "ready"}})
	return errors.Join(err, sb.Remove(ctx))
}

// firstOutput creates a sandbox and runs echo in it; it returns when the word arrived.
func (r *runner) firstOutput(ctx context.Context) (created, output time.Duration, sb *harena.Sandbox, err error) {
	start := time.Now()
	sb, err = r.sandbox(ctx)
	if err != nil {
		return 0, 0, nil, err
	}
	created = time.Since(start)
	first := &firstWrite{}
	res, err := sb.Run(ctx, harena.Cmd{Argv: []string{"echo", "ready"}, Stdout: first})
	if err == nil && (res.ExitCode != 0 || first.at.IsZero()) {
		err = fmt.Errorf("echo in a new sandbox: exit %d %s", res.ExitCode, res.Message)
	}
	return created, first.at.Sub(start), sb, err
}

type firstWrite struct{ at time.Time }

func (f *firstWrite) Write(b []byte) (int, error) {
	if f.at.IsZero() {
		f.at = time.Now()
	}
	return len(b), nil
}

// create measures create → first output, one at a time, and stop.
func create(ctx context.Context, r *runner) ([]Result, error) {
	n := r.n(200)
	var made, first, stopped []time.Duration
	steps := laps{}
	for i := range n {
		c, o, sb, err := r.firstOutput(ctx)
		if err != nil {
			return nil, err
		}
		steps.add(sb)
		start := time.Now()
		if err := sb.Remove(ctx); err != nil {
			return nil, err
		}
		made, first, stopped = append(made, c), append(first, o), append(stopped, time.Since(start))
		if (i+1)%50 == 0 {
			r.progress("create %d of %d", i+1, n)
		}
	}
	floor, err := floorCreate(ctx, min(n, 100))
	if err != nil {
		return nil, err
	}
	others, notes, err := measurePeers(ctx, min(n, 20))
	if err != nil {
		return nil, err
	}
	output := summarise("create_to_first_output", first, 0)
	output.Floor, output.Peers, output.Note = median(floor), others, strings.Join(notes, "; ")
	output.Steps = map[string]float64{"create": median(made)}
	only := summarise("create", made, 0)
	only.Floor, only.Steps = output.Floor, steps.medians()
	sizes, err := bySize(ctx, r, min(n, 50))
	if err != nil {
		return nil, err
	}
	return append([]Result{output, only, summarise("stop", stopped, 0)}, sizes...), nil
}

// execute measures the round trip of a short command in a live sandbox.
func execute(ctx context.Context, r *runner) ([]Result, error) {
	n := r.n(500)
	sb, err := r.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Remove(context.WithoutCancel(ctx)) }()
	var samples []time.Duration
	for i := range n + 5 {
		start := time.Now()
		res, err := sb.Run(ctx, harena.Cmd{Argv: []string{"true"}})
		if err != nil || res.ExitCode != 0 {
			return nil, fmt.Errorf("exec %d: exit %v: %w", i, res, err)
		}
		if i >= 5 { // the first ones warm connections up
			samples = append(samples, time.Since(start))
		}
	}
	floor, err := floorExec(ctx, min(n, 200))
	if err != nil {
		return nil, err
	}
	out := summarise("exec", samples, 0)
	out.Floor = median(floor)
	return []Result{out}, nil
}

// burst creates many at once, each up to its first output, and stops them all.
func burst(ctx context.Context, r *runner) ([]Result, error) {
	n, workers := r.n(300), r.o.Concurrency
	if workers <= 0 {
		workers = 16
	}
	var (
		mu      sync.Mutex
		created []time.Duration
		first   []time.Duration
		steps   = laps{}
		all     []*harena.Sandbox
		failed  error
		wg      sync.WaitGroup
	)
	jobs := make(chan int)
	start := time.Now()
	for range workers {
		wg.Go(func() {
			for range jobs {
				c, o, sb, err := r.firstOutput(ctx)
				mu.Lock()
				if sb != nil {
					all = append(all, sb)
				}
				if err != nil {
					failed = errors.Join(failed, err)
				} else {
					created, first = append(created, c), append(first, o)
					steps.add(sb)
				}
				mu.Unlock()
			}
		})
	}
	for i := range n {
		jobs <- i
	}
	close(jobs)
	wg.Wait()
	wall := time.Since(start)
	stopStart := time.Now()
	stopped, err := removeAll(ctx, all, workers)
	if err := errors.Join(failed, err); err != nil {
		return nil, err
	}
	output := summarise(fmt.Sprintf("burst_of_%d_at_%d", n, workers), first, wall)
	output.Steps = steps.medians()
	output.Steps["create"] = median(created)
	return []Result{output, summarise("burst_stop", stopped, time.Since(stopStart))}, nil
}

// removeAll stops sandboxes, several at a time; all are tried.
func removeAll(ctx context.Context, all []*harena.Sandbox, workers int) ([]time.Duration, error) {
	ctx = context.WithoutCancel(ctx)
	var (
		mu      sync.Mutex
		samples []time.Duration
		failed  error
		wg      sync.WaitGroup
	)
	jobs := make(chan *harena.Sandbox)
	for range workers {
		wg.Go(func() {
			for sb := range jobs {
				start := time.Now()
				err := sb.Remove(ctx)
				mu.Lock()
				failed = errors.Join(failed, err)
				samples = append(samples, time.Since(start))
				mu.Unlock()
			}
		})
	}
	for _, sb := range all {
		jobs <- sb
	}
	close(jobs)
	wg.Wait()
	return samples, failed
}
