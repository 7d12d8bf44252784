package exec

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// BenchmarkRoundTrip is one command through the service, over its socket;
// BenchmarkBareSpawn is the floor below it: fork, exec and wait.
func BenchmarkRoundTrip(b *testing.B) {
	r := newRig(b, nil)
	cmd := &harenav1.Command{Argv: []string{"/bin/true"}}
	r.run(cmd)
	b.ResetTimer()
	for b.Loop() {
		r.run(cmd)
	}
}

func BenchmarkBareSpawn(b *testing.B) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		b.Fatal(err)
	}
	defer null.Close()
	attr := &syscall.ProcAttr{Files: []uintptr{null.Fd(), null.Fd(), null.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true}}
	for b.Loop() {
		pid, err := syscall.ForkExec("/bin/true", []string{"true"}, attr)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
			b.Fatal(err)
		}
	}
}

const benchBytes = 256 << 20

// drain reads a stream and counts its bytes.
func drain(b *testing.B, st *connect.ServerStreamForClient[harenav1.RunResponse]) int {
	b.Helper()
	defer st.Close()
	n := 0
	for st.Receive() {
		n += len(st.Msg().GetOutput().GetStdout())
	}
	if err := st.Err(); err != nil {
		b.Fatal(err)
	}
	return n
}

// BenchmarkStream is output to a client over the socket, past the record.
func BenchmarkStream(b *testing.B) {
	r := newRig(b, nil)
	b.SetBytes(benchBytes)
	for b.Loop() {
		st, err := r.client.Run(context.Background(), connect.NewRequest(&harenav1.RunRequest{
			Command: shell("head -c %d /dev/zero", benchBytes),
		}))
		if err != nil {
			b.Fatal(err)
		}
		if n := drain(b, st); n != benchBytes {
			b.Fatalf("%d bytes", n)
		}
	}
}

// BenchmarkStreamInProcess leaves HTTP/2 out: the service alone.
func BenchmarkStreamInProcess(b *testing.B) {
	r := newRig(b, nil)
	b.SetBytes(benchBytes)
	for b.Loop() {
		c, reader, _, err := r.s.begin(context.Background(), shell("head -c %d /dev/zero", benchBytes), "", true)
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		err = reader.serve(context.Background(), c.startedMessage(false), func(o *harenav1.Output) error {
			n += len(o.GetStdout())
			return nil
		})
		if err != nil || n != benchBytes {
			b.Fatal(fmt.Errorf("%d bytes: %w", n, err))
		}
	}
}
