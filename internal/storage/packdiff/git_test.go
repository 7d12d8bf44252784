package packdiff

import (
	"strings"
	"testing"
)

func TestOwnWay(t *testing.T) {
	id := func(c string) string { return strings.Repeat(c, 40) }
	line := func(from, to, message string) string {
		return id(from) + " " + id(to) + " A B <a@b> 1700000000 +0000\t" + message + "\n"
	}
	for _, c := range []struct {
		name, log, mine string
	}{
		{"a clone", line("0", "a", "clone: from https://x"), "0a"},
		{"commits upon it", line("0", "a", "clone: from x") + line("a", "b", "commit: one") + line("b", "c", "pull: Fast-forward"), "0abc"},
		{"an amended commit", line("0", "a", "commit (initial): x") + line("a", "b", "commit (amend): x") + line("b", "c", "commit: y"), "bc"},
		{"a reset", line("a", "b", "commit: secret") + line("b", "a", "reset: moving to HEAD~1"), "a"},
		{"not HEAD's", line("a", "b", "commit: x") + line("b", "d", "commit: y"), "d"},
		{"nothing", "\n\t\n", "a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			head := c.mine[len(c.mine)-1:]
			if c.name == "not HEAD's" {
				head = "e"
				c.mine = "e"
			}
			got := ownWay([]byte(c.log), id(head))
			if len(got) != len(c.mine) {
				t.Errorf("%d commits, want %q", len(got), c.mine)
			}
			for _, m := range strings.Split(c.mine, "") {
				if !got[id(m)] {
					t.Errorf("%s is missing", m)
				}
			}
		})
	}
}
