package scenario

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// churn is work for a node, everything at once and in random order.
type churn struct {
	t       *testing.T
	n       *node
	keepers []string // sandboxes that live all the time
	serial  atomic.Int64
}

// round does so many of each: sandboxes that are created and stopped, commands that exit at once, pauses with a resume, and
// snapshots with a restore, a fork and the end of both.
func (c *churn) round(creations, commands, pauses, snapshots int) {
	c.t.Helper()
	var all []func(context.Context, string) error
	for what, n := range map[*func(context.Context, string) error]int{ptr(c.life): creations, ptr(c.command): commands, ptr(c.pause): pauses, ptr(c.snapshot): snapshots} {
		for range n {
			all = append(all, *what)
		}
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	work := make(chan func(context.Context, string) error)
	var wg sync.WaitGroup
	var failed atomic.Int64
	for range 8 {
		wg.Go(func() {
			for do := range work {
				call, end := context.WithTimeout(ctx, slowly(2*time.Minute))
				err := do(call, c.keepers[rand.Intn(len(c.keepers))])
				end()
				if err != nil && ctx.Err() == nil {
					c.t.Error(explain(err))
					if failed.Add(1) >= 10 {
						cancel()
					}
				}
			}
		})
	}
	for _, do := range all {
		if ctx.Err() != nil {
			break
		}
		work <- do
	}
	close(work)
	wg.Wait()
}

func ptr[T any](v T) *T { return &v }

func (c *churn) create(ctx context.Context, image string) (string, error) {
	res, err := c.n.sandboxes.Create(ctx, connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{Image: image, Backend: c.n.backend}}))
	if err != nil {
		return "", fmt.Errorf("create: %w", err)
	}
	return res.Msg.GetSandbox().GetId(), nil
}

// remove stops sandboxes and has their records go.
func (c *churn) remove(ctx context.Context, ids ...string) error {
	res, err := c.n.sandboxes.Stop(ctx, connect.NewRequest(&harenav1.StopRequest{Selector: &harenav1.Selector{Ids: ids}, Remove: true}))
	if err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	return failures("stop", res.Msg.GetOutcomes())
}

func failures(what string, outcomes []*harenav1.Outcome) error {
	var all []error
	for _, o := range outcomes {
		if o.GetError() != nil {
			all = append(all, fmt.Errorf("%s %s: %s %s", what, o.GetSandboxId(), o.GetError().GetKind(), o.GetErrorMessage()))
		}
	}
	return errors.Join(all...)
}

// prints runs a script that has to succeed with this output.
func (c *churn) prints(ctx context.Context, id, script, want string) error {
	out, err := c.n.try(ctx, id, &harenav1.Command{Shell: script})
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	if out.GetExitCode() != 0 || string(out.stdout) != want {
		return fmt.Errorf("%s: exit %d, %q, %q; want %q", script, out.GetExitCode(), out.stdout, out.stderr, want)
	}
	return nil
}

func (c *churn) life(ctx context.Context, _ string) error {
	id, err := c.create(ctx, "bb:1")
	if err != nil {
		return err
	}
	return c.remove(ctx, id)
}

func (c *churn) command(ctx context.Context, keeper string) error {
	n := c.serial.Add(1)
	return c.prints(ctx, keeper, fmt.Sprintf("echo %d", n), fmt.Sprintln(n))
}

func (c *churn) pause(ctx context.Context, keeper string) error {
	sel := &harenav1.Selector{Ids: []string{keeper}}
	paused, err := c.n.sandboxes.Pause(ctx, connect.NewRequest(&harenav1.PauseRequest{Selector: sel}))
	if err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	resumed, err := c.n.sandboxes.Resume(ctx, connect.NewRequest(&harenav1.ResumeRequest{Selector: sel}))
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	return errors.Join(failures("pause", paused.Msg.GetOutcomes()), failures("resume", resumed.Msg.GetOutcomes()))
}

func (c *churn) snapshot(ctx context.Context, keeper string) error {
	n := strconv.FormatInt(c.serial.Add(1), 10)
	file, name := "/f"+n, "churn-"+n+":1"
	if err := c.prints(ctx, keeper, "echo "+n+" >"+file+"; echo $?", "0\n"); err != nil {
		return err
	}
	if err := c.snap(ctx, keeper, name); err != nil {
		return err
	}
	restored, err := c.create(ctx, name)
	if err != nil {
		return err
	}
	res, err := c.n.sandboxes.Fork(ctx, connect.NewRequest(&harenav1.ForkRequest{Id: keeper, Count: 2}))
	if err != nil {
		return errors.Join(fmt.Errorf("fork: %w", err), c.remove(ctx, restored))
	}
	ids := []string{restored}
	for _, s := range res.Msg.GetSandboxes() {
		ids = append(ids, s.GetId())
	}
	for _, id := range ids {
		err = errors.Join(err, c.prints(ctx, id, "cat "+file, n+"\n"))
	}
	err = errors.Join(err, c.remove(ctx, ids...), c.prints(ctx, keeper, "rm "+file, ""))
	if _, rerr := c.n.layers.Remove(ctx, connect.NewRequest(&harenav1.RemoveLayerRequest{Name: name})); rerr != nil {
		err = errors.Join(err, fmt.Errorf("remove layer: %w", rerr))
	}
	return err
}

func (c *churn) snap(ctx context.Context, id, name string) error {
	stream, err := c.n.sandboxes.Snapshot(ctx, connect.NewRequest(&harenav1.SnapshotRequest{Selector: &harenav1.Selector{Ids: []string{id}}, Name: name}))
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	defer stream.Close()
	phase := ""
	for stream.Receive() {
		if m := stream.Msg(); m.GetPhase() != "" {
			phase = m.GetPhase() + " " + m.GetErrorMessage()
		}
	}
	if err := stream.Err(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	if phase != "done " {
		return fmt.Errorf("snapshot of %s: %s", id, phase)
	}
	return nil
}

// TestChurn has thousands of sandboxes, commands, pauses, snapshots and forks come and go, all at once. In the end the node takes
// of its machine what it took in the beginning: processes, descriptors, mounts, cgroups, files; and memory does not grow with work.
func TestChurn(t *testing.T) {
	o := secondNode(t)
	o.must(t, "layer", "import", "--name", "bb:1", "dir:"+busyboxTree(t))
	n := &node{url: o.url, token: o.token, backend: the.backend}
	n.connect()
	c := &churn{t: t, n: n}
	ctx := within(t, time.Hour)
	id, err := c.create(ctx, "bb:1") // what the first sandbox of a node makes stays
	if err == nil {
		err = c.remove(ctx, id)
	}
	if err != nil {
		t.Fatal(explain(err))
	}
	o.must(t, "layer", "gc")
	idle := o.settled(t, 5*time.Second, nil)
	for range 3 {
		id, err := c.create(ctx, "bb:1")
		if err != nil {
			t.Fatal(explain(err))
		}
		c.keepers = append(c.keepers, id)
	}
	creations, commands, pauses, snapshots := count(500, 10_000), count(1000, 10_000), count(50, 1000), count(10, 200)
	c.round(creations/4, commands/4, pauses/4, snapshots/4)
	warm := o.settled(t, 3*time.Second, nil)
	c.round(creations-creations/4, commands-commands/4, pauses-pauses/4, snapshots-snapshots/4)
	worked := o.settled(t, 10*time.Second, func(f footprint) []string { return f.memoryOver(warm) })
	for _, over := range worked.memoryOver(warm) {
		t.Error("after the work: " + over)
	}
	if err := c.remove(ctx, c.keepers...); err != nil {
		t.Error(explain(err))
	}
	o.must(t, "layer", "gc")
	end := o.settled(t, 15*time.Second, func(f footprint) []string { return f.countsOver(idle) })
	for _, over := range end.countsOver(idle) {
		t.Error("in the end: " + over)
	}
	t.Logf("%d creations, %d commands, %d pauses, %d snapshots with a restore and two forks\nidle:   %v\nwarm:   %v\nworked: %v\nend:    %v",
		creations, commands, pauses, snapshots, idle, warm, worked, end)
	if out := o.must(t, "doctor"); !strings.Contains(out, "nothing failed, nothing leaked") {
		t.Error(out)
	}
}
