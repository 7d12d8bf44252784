package scenario

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// Many sandboxes live side by side: each keeps what is its own, commands in all
// of them at once work, and stopping the lot by a label leaves nothing.
func TestManySandboxes(t *testing.T) {
	n := count(24, 500)
	const workers = 8
	boxes := make([]*box, n)
	each := func(what string, f func(i int) error) {
		t.Helper()
		next, failed := make(chan int), make(chan error, n)
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for i := range next {
					if err := f(i); err != nil {
						failed <- fmt.Errorf("%s, sandbox %d: %w", what, i, err)
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wg.Wait()
		close(failed)
		for err := range failed {
			t.Fatal(explain(err))
		}
	}
	job := &harenav1.Selector{Labels: map[string]string{"test": "density"}}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		_, _ = the.sandboxes.Stop(ctx, connect.NewRequest(&harenav1.StopRequest{Selector: job}))
	})
	each("create", func(i int) error {
		res, err := the.sandboxes.Create(within(t, 5*time.Minute), connect.NewRequest(&harenav1.CreateRequest{Spec: &harenav1.SandboxSpec{
			Image: the.image, Backend: the.backend, Labels: job.GetLabels(),
			Process: &harenav1.ProcessDefaults{Env: map[string]string{"ME": strconv.Itoa(i)}},
			Limits:  &harenav1.Limits{Memory: 64 << 20, Cpu: 1},
		}}))
		if err == nil {
			boxes[i] = &box{t, res.Msg.GetSandbox().GetId()}
		}
		return err
	})
	script := func(s, want string) func(i int) error {
		return func(i int) error {
			out, err := boxes[i].try(within(t, 5*time.Minute), &harenav1.Command{Shell: s})
			if err == nil && want != "" && string(out.stdout) != want {
				err = fmt.Errorf("printed %q, want %q (%v)", out.stdout, want, out.Result)
			}
			return err
		}
	}
	each("write", script(`echo "$ME" >/me; (sleep 1000 >/dev/null 2>&1 &) ; echo done`, "done\n"))
	each("read back", func(i int) error { return script("cat /me", fmt.Sprintln(i))(i) })
	list, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{Labels: job.GetLabels()}))
	if err != nil {
		t.Fatal(explain(err))
	}
	running := 0
	for _, s := range list.Msg.GetSandboxes() {
		if s.GetState() == "running" {
			running++
		}
	}
	if running != n {
		t.Errorf("%d of %d run", running, n)
	}
	if _, err := the.sandboxes.Stop(within(t, 5*time.Minute), connect.NewRequest(&harenav1.StopRequest{Selector: job})); err != nil {
		t.Fatal(explain(err))
	}
	doctor(t)
}
