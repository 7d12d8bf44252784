package scenario

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// fork makes forks that are stopped at the end of the test.
func (b *box) fork(req *harenav1.ForkRequest) []*box {
	b.t.Helper()
	req.Id = b.id
	res, err := the.sandboxes.Fork(within(b.t, 2*time.Minute), connect.NewRequest(req))
	if err != nil {
		b.t.Fatal(explain(err))
	}
	var out []*box
	for _, s := range res.Msg.GetSandboxes() {
		f := &box{b.t, s.GetId()}
		b.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), slowly(time.Minute))
			defer cancel()
			if err := stop(ctx, f.id); err != nil {
				b.t.Errorf("stop: %v", explain(err))
			}
		})
		out = append(out, f)
	}
	return out
}

func TestForksShareFilesAndNoIdentity(t *testing.T) {
	b := create(t, func(s *harenav1.SandboxSpec) {
		s.Job, s.Labels["kind"], s.Hostname = "parents", "parent", "parent-host"
		s.Process = &harenav1.ProcessDefaults{Env: map[string]string{"FROM": "parent"}}
		s.Limits = &harenav1.Limits{Memory: 512 << 20, Pids: 100}
	})
	b.must("echo shared > /srv/file; echo temporary > /tmp/t; echo memory > /dev/shm/m; [ -e /etc/machine-id ] || echo 0123456789abcdef0123456789abcdef > /etc/machine-id; mkdir -p /var/lib/systemd; echo seed > /var/lib/systemd/random-seed")
	b.start(&harenav1.Command{Shell: "sleep 1000"})
	forks := b.fork(&harenav1.ForkRequest{Count: 3, Labels: map[string]string{"kind": "fork"}})
	own := []string{"hostname", "cat /etc/machine-id", "sha256sum < /var/lib/systemd/random-seed", "grep 127.0.1.1 /etc/hosts"}
	seen := map[string]bool{}
	for _, what := range own {
		seen[b.must(what)] = true
	}
	for _, f := range forks {
		if got := f.must("cat /srv/file /tmp/t; echo $FROM; ls /dev/shm | wc -l; ps ax | grep -c '[s]leep 1000'; true"); got != "shared\ntemporary\nparent\n0\n0" {
			t.Errorf("%q", got)
		}
		for _, what := range own {
			got := f.must(what)
			if seen[got] {
				t.Errorf("%s: two sandboxes have %q", what, got)
			}
			seen[got] = true
		}
		if got, node := f.must("cat /proc/sys/kernel/random/boot_id"), b.must("cat /proc/sys/kernel/random/boot_id"); got != node {
			t.Errorf("boot IDs %q and %q: the documentation says that they are the node's", got, node)
		}
		s := f.get()
		if s.GetOrigin() != b.id || s.GetJob() != "parents" || s.GetLabels()["kind"] != "fork" || s.GetLabels()["suite"] != "scenario" || s.GetSpec().GetLimits().GetPids() != 100 {
			t.Errorf("%v", s)
		}
	}
	forks[0].must("echo mine > /srv/file")
	for _, x := range []*box{b, forks[1], forks[2]} {
		if got := x.must("cat /srv/file"); got != "shared" {
			t.Errorf("a write reached another sandbox: %q", got)
		}
	}
	// A fork of a fork, which outlives both and a collection.
	again := forks[0].fork(&harenav1.ForkRequest{Count: 1})[0]
	for _, x := range append(forks, b) {
		if err := stop(within(t, time.Minute), x.id); err != nil {
			t.Fatal(explain(err))
		}
	}
	if _, err := the.layers.CollectGarbage(within(t, time.Minute), connect.NewRequest(&harenav1.CollectGarbageRequest{})); err != nil {
		t.Fatal(explain(err))
	}
	if got := again.must("cat /srv/file /tmp/t"); got != "mine\ntemporary" {
		t.Errorf("%q", got)
	}
}

func TestForkRequests(t *testing.T) {
	b := create(t)
	req := &harenav1.ForkRequest{Count: 2, RequestId: "scn-fork-" + b.id}
	first, second := b.fork(req), b.fork(req)
	if len(first) != 2 || len(second) != 2 || first[0].id != second[0].id || first[1].id != second[1].id {
		t.Errorf("a repeated request made others: %v %v", first, second)
	}
	for _, bad := range []*harenav1.ForkRequest{{Id: b.id}, {Id: b.id, Count: 1001}, {Id: "x", Count: 1}} {
		if _, err := the.sandboxes.Fork(within(t, time.Minute), connect.NewRequest(bad)); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
	if own := the.own; own != nil {
		own.kill()
		if err := own.start(); err != nil {
			t.Fatal(err)
		}
		if third := b.fork(req); third[0].id != first[0].id {
			t.Error("after a restart the request made others")
		}
	}
}
