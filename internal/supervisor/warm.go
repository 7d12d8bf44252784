package supervisor

import (
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// warm uses what a start and a first command will use, as long as nobody waits for it: the protobuf runtime builds its
// tables for a message type at its first use, which takes milliseconds in all. In a burst there is no time to gain.
func warm(wanted func() bool) error {
	messages := []proto.Message{
		&guestv1.Launch{Process: &harenav1.ProcessDefaults{Env: map[string]string{"a": "b"}}, Cgroups: &guestv1.Cgroups{V1: []string{"a"}}, Lowers: []string{"a"}},
		&guestv1.LaunchResult{Timings: []*harenav1.Timing{{Step: "a"}}},
		&harenav1.RunRequest{Command: &harenav1.Command{Argv: []string{"a"}, Env: map[string]string{"a": "b"}}},
		&harenav1.RunResponse{Output: &harenav1.Output{Event: &harenav1.Output_Started{Started: &harenav1.Started{CommandId: "a"}}}},
		&harenav1.RunResponse{Output: &harenav1.Output{Event: &harenav1.Output_Stdout{Stdout: []byte("a")}}},
		&harenav1.RunResponse{Output: &harenav1.Output{Event: &harenav1.Output_Result{Result: &harenav1.Result{Stdout: &harenav1.StreamRecord{Total: 1}}}}},
	}
	for _, m := range messages {
		if wanted() {
			return nil
		}
		b, err := proto.Marshal(m)
		if err != nil {
			return err
		}
		if err := proto.Unmarshal(b, m.ProtoReflect().New().Interface()); err != nil {
			return err
		}
	}
	return nil
}

// readable reports whether a read would return at once.
func readable(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return true
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	})
	return err != nil || n != 0
}
