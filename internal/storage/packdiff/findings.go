package packdiff

import "fmt"

// Kinds of findings.
const (
	FindSecret   = "secret"
	FindGit      = "git"
	FindHuge     = "huge"
	FindMany     = "many"
	FindWritable = "world-writable"
	FindSetuid   = "setuid"
	FindOwner    = "owner"
	FindFuture   = "future"
	FindUnread   = "unscanned"
)

// maxFindings bounds the findings of one kind that are told one by one.
const maxFindings = 100

// Finding is what would hurt others or give something away.
type Finding struct {
	Kind, Path, Message string
}

// String is the finding in one line.
func (f Finding) String() string {
	if f.Path == "" {
		return f.Kind + ": " + f.Message
	}
	return f.Kind + ": " + Quote(f.Path) + ": " + f.Message
}

// Findings collects findings.
type Findings struct {
	list  []Finding
	count map[string]int
}

func (f *Findings) add(kind, path, format string, args ...any) {
	if f.count == nil {
		f.count = map[string]int{}
	}
	if f.count[kind]++; f.count[kind] <= maxFindings {
		f.list = append(f.list, Finding{kind, path, fmt.Sprintf(format, args...)})
	}
}

// All returns the findings in the order of the walk; of each kind at most 100, and then how many more there are.
func (f *Findings) All() []Finding {
	out := f.list
	for _, kind := range []string{FindSecret, FindGit, FindHuge, FindMany, FindWritable, FindSetuid, FindOwner, FindFuture, FindUnread} {
		if n := f.count[kind] - maxFindings; n > 0 {
			out = append(out, Finding{kind, "", fmt.Sprintf("%d more paths", n)})
		}
	}
	return out
}
