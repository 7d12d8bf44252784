package cli

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// A log as people see it; what the sandbox chose drives no terminal.
func TestLogLines(t *testing.T) {
	local := time.Local
	time.Local = time.UTC
	defer func() { time.Local = local }()
	var out bytes.Buffer
	a := &app{Options: Options{Stdout: &out, Stderr: &out}}
	at := timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	for i, e := range []*harenav1.LogEntry{
		{Event: &harenav1.LogEntry_Header{Header: &harenav1.LogHeader{Version: 1, SandboxId: "x", Spec: &harenav1.SandboxSpec{Image: "debian:12"}}}},
		{Event: &harenav1.LogEntry_Start{Start: &harenav1.LogStart{CommandId: "c1", Command: &harenav1.Command{Shell: "echo \x1b]0;x\a\u202eexe.txt", Session: "s"}}}},
		{Event: &harenav1.LogEntry_Start{Start: &harenav1.LogStart{CommandId: "c2", Command: &harenav1.Command{Argv: []string{"a b", "", "it's\n", "c"}}}}},
		{Event: &harenav1.LogEntry_Input{Input: &harenav1.LogInput{CommandId: "c2", Data: &harenav1.LogBytes{Size: 4}}}},
		{Event: &harenav1.LogEntry_Signal{Signal: &harenav1.LogSignal{CommandId: "c2", Signal: "SIGTERM"}}},
		{Event: &harenav1.LogEntry_End{End: &harenav1.LogEnd{CommandId: "c2", Result: &harenav1.Result{ExitCode: 143, Signal: "SIGTERM", TimedOut: true, Stdout: &harenav1.StreamRecord{Total: 7}}}}},
		{Event: &harenav1.LogEntry_End{End: &harenav1.LogEnd{CommandId: "c1", Lost: "the sandbox ended"}}},
		{Event: &harenav1.LogEntry_File{File: &harenav1.LogFile{Operation: "write", Path: []byte("/tmp/\x9b1mx\xff"), Content: &harenav1.LogBytes{Size: 9}, Unknown: true}}},
		{Event: &harenav1.LogEntry_File{File: &harenav1.LogFile{Operation: "move", Path: []byte("/a"), To: []byte("/b")}}},
		{Event: &harenav1.LogEntry_Session{Session: &harenav1.LogSession{Name: "s", Event: "ended", Reason: "its shell exited with status 0"}}},
		{Event: &harenav1.LogEntry_Stop{Stop: &harenav1.LogStop{Reason: "its limit of 1 bytes is reached"}}},
	} {
		e.Number, e.Time = int64(i), at
		if err := a.logLine(e); err != nil {
			t.Fatal(err)
		}
	}
	a.replayLine(harena.Step{What: "echo \x1b[2J"})
	a.replayLine(harena.Step{What: "cat", Skipped: "its content was not kept in the log"})
	a.replayLine(harena.Step{What: "date", Differences: []harena.Difference{{What: "exit code", Was: "0", Now: "1"}, {What: "error", Was: "done", Now: "\x1b]0;x"}}})
	const want = `     0  03:04:05  sandbox x of debian:12
     1  03:04:05  c1: [s] echo \x1b]0;x\x07\u202eexe.txt
     2  03:04:05  c2: 'a b' '' 'it'\''s ' c
     3  03:04:05  c2: input of 4 bytes
     4  03:04:05  c2: SIGTERM sent
     5  03:04:05  c2: exit 143, SIGTERM, timed out, stdout 7 bytes, stderr 0 bytes
     6  03:04:05  c1: lost: the sandbox ended
     7  03:04:05  write /tmp/\x9b1mx\xff (9 bytes), outcome unknown
     8  03:04:05  move /a to /b
     9  03:04:05  session s ended: its shell exited with status 0
    10  03:04:05  the log ends here: its limit of 1 bytes is reached
same      echo \x1b[2J
skipped   cat: its content was not kept in the log
DIVERGED  date
          exit code: was 0, is 1
          error: was done, is \x1b]0;x
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}
