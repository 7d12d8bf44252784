package bench

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// pauseBytes is the memory of the process that is paused.
const pauseBytes = 512 << 20

// hog holds pauseBytes in memory, half of it random and half text, says so, and at a signal reads all of it once: tail keeps
// what it reads until its input ends.
const hog = `b=$(command -v busybox) || b=
{ $b head -c %[1]d /dev/urandom; $b yes "a line of text that compresses" | $b head -c %[1]d; echo ready >&2
  while [ ! -e /tmp/read-back ]; do $b sleep 0.02; done; } | $b tail -c %[2]d >/dev/null`

// pause measures what pausing a process of 512 MiB gives back and takes, and how soon the sandbox answers again.
func pause(ctx context.Context, r *runner) ([]Result, error) {
	n := r.n(5)
	var m pauseSamples
	for i := range n {
		if err := r.pauseOnce(ctx, &m); err != nil {
			return nil, err
		}
		r.progress("pause %d of %d", i+1, n)
	}
	note := m.note
	if note == "" {
		note = "node: what was given back less what zram took to hold it"
	}
	exec := summarise("exec_while_running", m.exec, 0)
	first := summarise("resume_to_first_output", m.first, 0)
	first.Note = "echo in the paused sandbox, up to its output; exec_while_running is the same before the pause"
	return []Result{
		summarise("pause", m.pause, 0), summarise("pause_freeze", m.freeze, 0), first, exec,
		summarise("resume_and_read_all_back", m.back, 0),
		percent("memory_returned", m.returned, "of the sandbox's memory"),
		percent("node_gain_net", m.net, note),
	}, nil
}

type pauseSamples struct {
	pause, freeze, first, exec, back []time.Duration
	returned, net                    []float64
	note                             string
}

func percent(name string, samples []float64, note string) Result {
	sort.Float64s(samples)
	return Result{Name: name, Unit: "%", N: len(samples), P50: quantile(samples, 0.5), P90: quantile(samples, 0.9), P99: quantile(samples, 0.99), Note: note}
}

func (r *runner) pauseOnce(ctx context.Context, m *pauseSamples) (err error) {
	spec := r.spec()
	spec.Memory = 2 * pauseBytes
	sb, err := r.client.CreateSandbox(ctx, spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Remove(context.WithoutCancel(ctx))) }()
	ready := &wordWriter{seen: make(chan struct{})}
	ended := make(chan error, 1)
	go func() {
		res, err := sb.Run(ctx, harena.Cmd{Shell: fmt.Sprintf(hog, pauseBytes/2, pauseBytes), Stderr: ready})
		if err == nil && res.ExitCode != 0 {
			err = fmt.Errorf("the process ended with %d %s", res.ExitCode, res.Message)
		}
		ended <- err
	}()
	select {
	case <-ready.seen:
	case err := <-ended:
		return fmt.Errorf("the process that holds memory ended early: %w", err)
	}
	running, err := echo(ctx, sb)
	if err != nil {
		return err
	}
	start := time.Now()
	report, err := sb.Pause(ctx)
	if err != nil {
		return err
	}
	took := time.Since(start)
	if report.GetMemoryBefore() < pauseBytes {
		return fmt.Errorf("the sandbox had %d bytes of memory, not %d", report.GetMemoryBefore(), pauseBytes)
	}
	first, err := echo(ctx, sb)
	if err != nil {
		return err
	}
	if _, err := sb.Pause(ctx); err != nil {
		return err
	}
	start = time.Now()
	if _, err := sb.Run(ctx, harena.Cmd{Argv: []string{"sh", "-c", ": > /tmp/read-back"}}); err != nil {
		return err
	}
	// The command was attached all the time.
	if err := <-ended; err != nil {
		return err
	}
	m.back = append(m.back, time.Since(start))
	m.pause, m.freeze = append(m.pause, took), append(m.freeze, report.GetFreezeTook().AsDuration())
	m.first, m.exec = append(m.first, first), append(m.exec, running)
	m.add(report)
	return nil
}

func (m *pauseSamples) add(p *harenav1.PauseReport) {
	before := float64(p.GetMemoryBefore())
	gone := float64(p.GetMemoryBefore() - p.GetMemoryAfter())
	m.returned = append(m.returned, 100*gone/before)
	m.net = append(m.net, 100*(gone-float64(p.GetZramGrew()))/before)
	if p.GetNote() != "" {
		m.note = p.GetNote()
	}
}

// echo returns how long a word takes.
func echo(ctx context.Context, sb *harena.Sandbox) (time.Duration, error) {
	out := &firstWrite{}
	start := time.Now()
	res, err := sb.Run(ctx, harena.Cmd{Argv: []string{"echo", "ready"}, Stdout: out})
	if err == nil && (res.ExitCode != 0 || out.at.IsZero()) {
		err = fmt.Errorf("echo: exit %d %s", res.ExitCode, res.Message)
	}
	return out.at.Sub(start), err
}

// wordWriter closes seen at the first byte.
type wordWriter struct {
	seen chan struct{}
	done bool
}

func (w *wordWriter) Write(b []byte) (int, error) {
	if !w.done {
		w.done = true
		close(w.seen)
	}
	return len(b), nil
}
