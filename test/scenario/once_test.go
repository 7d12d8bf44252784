package scenario

import (
	"context"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

const onceSteps = 50

// TestTrainer is the trainer of the tests below, in a process of its own that is killed.
func TestTrainer(t *testing.T) {
	id := os.Getenv("HARENA_TEST_TRAINER")
	if id == "" {
		t.Skip("it is started by TestExactlyOnce")
	}
	c, err := harena.New(harena.WithURL(os.Getenv("HARENA_URL")), harena.WithToken(os.Getenv("HARENA_TOKEN")))
	if err != nil {
		t.Fatal(err)
	}
	if err := train(context.Background(), c.Sandbox(id)); err != nil {
		t.Fatal(err)
	}
}

// train does 50 commands with side effects in one session, and a file each ten. It knows nothing of earlier attempts.
func train(ctx context.Context, sb *harena.Sandbox) error {
	for i := range onceSteps {
		op := fmt.Sprint("step-", i)
		res, err := sb.Run(ctx, harena.Cmd{
			Session: "s", OpID: op,
			Shell: fmt.Sprintf("n=$((n+1)); echo %d >> /tmp/steps; sleep 0.0%d; echo step %d count $n", i, rand.New(rand.NewSource(int64(i))).Intn(4), i),
		})
		if err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if want := fmt.Sprintf("step %d count %d\n", i, i+1); string(res.Stdout) != want {
			return fmt.Errorf("step %d: got %q, want %q", i, res.Stdout, want)
		}
		if i%10 == 9 {
			if err := sb.WriteFile(ctx, fmt.Sprint("/tmp/file-", i), []byte(op), harena.WithOpID("file-"+op)); err != nil {
				return fmt.Errorf("file %d: %w", i, err)
			}
		}
	}
	return nil
}

// onceDone checks that every step was done once, and in order.
func onceDone(t *testing.T, b *box) {
	t.Helper()
	var want strings.Builder
	for i := range onceSteps {
		fmt.Fprintln(&want, i)
	}
	same(t, "the steps", b.read("/tmp/steps"), []byte(want.String()))
	out := b.run(&harenav1.Command{Shell: "echo $n", Session: "s"})
	same(t, "the counter", out.stdout, []byte(fmt.Sprintln(onceSteps)))
}

func TestExactlyOnceTrainerKilled(t *testing.T) {
	kills := count(10, 200)
	for killed, round := 0, 0; killed < kills; round++ {
		b := create(t)
		for done := false; !done; {
			cmd := exec.Command(os.Args[0], "-test.run=^TestTrainer$", "-test.count=1")
			cmd.Env = append(os.Environ(), "HARENA_TEST_TRAINER="+b.id, "HARENA_URL="+the.url, "HARENA_TOKEN="+the.token)
			out := &strings.Builder{}
			cmd.Stdout, cmd.Stderr = out, out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			end := make(chan error, 1)
			go func() { end <- cmd.Wait() }()
			select {
			case err := <-end:
				if err != nil {
					t.Fatalf("the trainer failed: %v: %s", err, out)
				}
				done = true
			case <-time.After(time.Duration(20+rand.Intn(600)) * time.Millisecond):
				if killed < kills {
					_ = cmd.Process.Kill()
					killed++
				}
				if err := <-end; err == nil {
					done = true
				}
			}
		}
		onceDone(t, b)
		if err := stop(within(t, time.Minute), b.id); err != nil {
			t.Fatal(explain(err))
		}
	}
}

func TestExactlyOnceServerKilled(t *testing.T) {
	own := needOwn(t)
	kills := count(3, 200)
	for killed := 0; killed < kills; {
		b := create(t)
		c, err := harena.New(harena.WithURL(the.url), harena.WithToken(the.token), harena.WithPatience(2*time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		end := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		go func() { end <- train(ctx, c.Sandbox(b.id)) }()
		for done := false; !done; {
			select {
			case err := <-end:
				if err != nil {
					t.Fatal(err)
				}
				done = true
			case <-time.After(time.Duration(50+rand.Intn(500)) * time.Millisecond):
				if killed == kills {
					continue
				}
				killed++
				own.kill()
				if err := own.start(); err != nil {
					t.Fatal(err)
				}
			}
		}
		cancel()
		c.Close()
		onceDone(t, b)
		if err := stop(within(t, time.Minute), b.id); err != nil {
			t.Fatal(explain(err))
		}
	}
	doctor(t)
}

// What a failed sandbox still knows of its operations.
func TestOperationsOfAFailedSandbox(t *testing.T) {
	needOwn(t)
	b := create(t)
	done := &harenav1.Command{Shell: "echo out; exit 3", OpId: "done"}
	b.run(done)
	half := &harenav1.Command{Shell: "echo begun; sleep 100", OpId: "half"}
	b.start(half)
	killSupervisor(t, b)
	out := b.run(done)
	if string(out.stdout) != "out\n" || out.GetExitCode() != 3 || !out.started.GetAttached() {
		t.Errorf("%q, %v", out.stdout, out.Result)
	}
	if _, err := b.try(within(t, time.Minute), half); kind(err) != "precondition" || !strings.Contains(err.Error(), "indeterminate") {
		t.Errorf("an operation that was cut off: %v", err)
	}
	other := &harenav1.Command{Shell: "true", OpId: "done"}
	if _, err := b.try(within(t, time.Minute), other); kind(err) != "exists" {
		t.Errorf("another request: %v", err)
	}
	c, err := harena.New(harena.WithURL(the.url), harena.WithToken(the.token))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	starts := 0
	err = c.Sandbox(b.id).Log(within(t, time.Minute), harena.LogOptions{}, func(e *harenav1.LogEntry) error {
		if e.GetStart() != nil {
			starts++
		}
		return nil
	})
	if err != nil || starts != 2 {
		t.Errorf("the log: %d starts, %v", starts, err)
	}
}

func TestReplay(t *testing.T) {
	b := create(t)
	b.write("/tmp/in", []byte(strings.Repeat("content ", 10000)))
	b.run(&harenav1.Command{Shell: "cd /tmp; export A=1; wc -c < in", Session: "s"})
	b.run(&harenav1.Command{Shell: "pwd; echo $A; exit_code() { return 4; }; exit_code", Session: "s"})
	b.run(&harenav1.Command{Argv: []string{"cat"}, Stdin: []byte("given")})
	c, err := harena.New(harena.WithURL(the.url), harena.WithToken(the.token))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	play := func() (same, diverged int) {
		log, err := harena.NewLogFile()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = log.Close() }()
		if err := c.Sandbox(b.id).Log(within(t, time.Minute), harena.LogOptions{}, log.Add); err != nil {
			t.Fatal(err)
		}
		to := create(t)
		err = c.Sandbox(to.id).Replay(within(t, time.Minute), log, func(s harena.Step) error {
			if len(s.Differences) > 0 || s.Skipped != "" {
				diverged++
			} else {
				same++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return same, diverged
	}
	if n, d := play(); n != 5 || d != 0 { // a file, a session, three commands
		t.Errorf("%d steps the same, %d not", n, d)
	}
	b.must("cat /proc/sys/kernel/random/uuid")
	if n, d := play(); n != 5 || d != 1 {
		t.Errorf("%d steps the same, %d not", n, d)
	}
}
