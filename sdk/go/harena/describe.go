package harena

import (
	"fmt"
	"strings"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// describeCommand is a command in one line, for people.
func describeCommand(c *harenav1.Command) string {
	line := c.GetShell()
	if line == "" {
		words := append([]string(nil), c.GetArgv()...)
		for _, a := range c.GetArgvBytes() {
			words = append(words, string(a))
		}
		for i, w := range words {
			if w == "" || strings.ContainsAny(w, " \t\n'\"\\$`;&|<>()*?[]{}~#!") {
				words[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
			}
		}
		line = strings.Join(words, " ")
	}
	if c.GetSession() != "" {
		line = "[" + c.GetSession() + "] " + line
	}
	return line
}

// DescribeFile is a file operation of a log in one line, for people.
func DescribeFile(f *harenav1.LogFile) string {
	s := f.GetOperation() + " " + string(f.GetPath())
	switch f.GetOperation() {
	case "move":
		s += " to " + string(f.GetTo())
	case "write", "unpack":
		s += fmt.Sprintf(" (%d bytes)", f.GetContent().GetSize())
	}
	if f.GetUnknown() {
		s += ", outcome unknown"
	}
	return s
}

// DescribeEntry is an entry of a log in one line, for people.
func DescribeEntry(e *harenav1.LogEntry) string {
	switch ev := e.GetEvent().(type) {
	case *harenav1.LogEntry_Header:
		return fmt.Sprintf("sandbox %s of %s", ev.Header.GetSandboxId(), ev.Header.GetSpec().GetImage())
	case *harenav1.LogEntry_Start:
		return fmt.Sprintf("%s: %s", ev.Start.GetCommandId(), describeCommand(ev.Start.GetCommand()))
	case *harenav1.LogEntry_Input:
		return fmt.Sprintf("%s: input of %d bytes", ev.Input.GetCommandId(), ev.Input.GetData().GetSize())
	case *harenav1.LogEntry_Signal:
		return fmt.Sprintf("%s: %s sent", ev.Signal.GetCommandId(), ev.Signal.GetSignal())
	case *harenav1.LogEntry_End:
		if ev.End.GetLost() != "" {
			return fmt.Sprintf("%s: lost: %s", ev.End.GetCommandId(), ev.End.GetLost())
		}
		r := ev.End.GetResult()
		s := fmt.Sprintf("%s: exit %d", ev.End.GetCommandId(), r.GetExitCode())
		if r.GetSignal() != "" {
			s += ", " + r.GetSignal()
		}
		if r.GetTimedOut() {
			s += ", timed out"
		}
		return s + fmt.Sprintf(", stdout %d bytes, stderr %d bytes", r.GetStdout().GetTotal(), r.GetStderr().GetTotal())
	case *harenav1.LogEntry_File:
		return DescribeFile(ev.File)
	case *harenav1.LogEntry_Session:
		s := "session " + ev.Session.GetName() + " " + ev.Session.GetEvent()
		if ev.Session.GetReason() != "" {
			s += ": " + ev.Session.GetReason()
		}
		return s
	case *harenav1.LogEntry_Stop:
		return "the log ends here: " + ev.Stop.GetReason()
	}
	return ""
}
